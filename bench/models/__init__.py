"""The models of the suite: each from random weights, without dropout, small for a CPU and real for a GPU."""

from . import hugging_face, recommenders, vision, written_by_hand  # noqa: F401  (they enter their builders)
from .workload import INFERENCE, MODELS, TRAINING, Unavailable, Workload, build

__all__ = ["INFERENCE", "MODELS", "TRAINING", "Unavailable", "Workload", "build"]
