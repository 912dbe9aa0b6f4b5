"""The ways to run a model that the suite compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import triptych


@dataclass(frozen=True)
class Variant:
    name: str
    summary: str
    compile: Callable[[nn.Module], Callable[..., Any]]
    inference_only: bool = False
    graphs: bool = False
    """Uses CUDA graphs, so it needs a GPU."""
    gpu_only: bool = False
    """Differs from others on a GPU only."""

    @property
    def compiler(self) -> str:
        return self.name.partition("-")[0]

    def applies(self, device: str, mode: str) -> bool:
        needs_gpu = self.graphs or self.gpu_only
        return (device == "cuda" or not needs_gpu) and (mode == "inference" or not self.inference_only)


def by_inductor(**how: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, dynamic=False, **how)


def by_triptych(**how: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, backend=triptych.compile_fx, dynamic=False, **how)


GRAPHS = "reduce-overhead"
EAGER, INDUCTOR, TRIPTYCH = "eager", "inductor", "triptych"

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(EAGER, "not compiled", lambda model: model),
        Variant(INDUCTOR, "torch.compile's default", by_inductor()),
        Variant("inductor-graphs", "Inductor with CUDA graphs", by_inductor(mode=GRAPHS), graphs=True),
        Variant(
            "inductor-freezing", "Inductor with `freezing`", by_inductor(options={"freezing": True}),
            inference_only=True,
        ),
        Variant(TRIPTYCH, "Triptych's default", by_triptych()),
        Variant(
            "triptych-called", "Triptych, nothing replayed", by_triptych(options={"cuda_graphs": "off"}), gpu_only=True
        ),
        Variant("triptych-graphs", "Triptych with CUDA graphs", by_triptych(mode=GRAPHS), graphs=True),
        Variant(
            "triptych-freeze", "Triptych with `freeze`", by_triptych(options={"freeze": True}), inference_only=True
        ),
    )
}  # fmt: skip
"""The variants, in the order in which they are compiled and timed."""

PAIRS = {
    "default": (TRIPTYCH, INDUCTOR),
    "CUDA graphs": ("triptych-graphs", "inductor-graphs"),
    "nothing replayed": ("triptych-called", INDUCTOR),
    "frozen": ("triptych-freeze", "inductor-freezing"),
    "frozen, against Inductor's default": ("triptych-freeze", INDUCTOR),
}
"""What the summary compares: ours, and Inductor's counterpart."""
