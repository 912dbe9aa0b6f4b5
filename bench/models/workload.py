"""What a builder of this folder returns, and the table of all of them by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

INFERENCE, TRAINING = "inference", "training"


class Unavailable(Exception):
    """The model cannot be built here; the message says why."""


@dataclass(frozen=True)
class Workload:
    """A model, the arguments of one call, and how its result becomes a loss."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: nn.Module | None
    """Of the output; its labels are buffers. None: the model is for inference only."""
    output: Callable[[Any], Tensor] = lambda result: result
    """The tensor of the model's result that counts: the logits of a Hugging Face model."""
    channels_last: bool = False

    def to(self, device: str, dtype: torch.dtype) -> Workload:
        """A copy on the device, floating-point weights and inputs in the given type."""

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)
            return leaf.to(memory_format=torch.channels_last) if self.channels_last and leaf.ndim == 4 else leaf

        model = cast(copy.deepcopy(self.model).to(device), dtype)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        loss = copy.deepcopy(self.loss).to(device) if self.loss is not None else None
        return replace(self, model=model, inputs=pytree.tree_map(moved, self.inputs), loss=loss)

    def program(self, mode: str) -> nn.Module:
        """What is compiled: the model, in training together with its loss."""
        self.model.train(mode == TRAINING)
        return Program(self.model, self.output, self.loss if mode == TRAINING else None)


class Program(nn.Module):
    """A model that returns one tensor: its output or its loss."""

    def __init__(self, model: nn.Module, output: Callable[[Any], Tensor], loss: nn.Module | None) -> None:
        super().__init__()
        self.model, self.output, self.loss = model, output, loss

    def forward(self, **inputs: Any) -> Tensor:
        result = self.output(self.model(**inputs))
        return result if self.loss is None else self.loss(result)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Weights in another type; rotary frequencies stay in float32, as they do when such a model is loaded."""
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in frequencies.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    return model


Builder = Callable[[bool], Workload]
"""Builds a workload on the CPU in float32; the argument asks for the small size, which a CPU can run."""

MODELS: dict[str, Builder] = {}


def workload(builder: Builder) -> Builder:
    """Decorator: enter a builder under its name, with dashes."""
    MODELS[builder.__name__.strip("_").replace("_", "-")] = builder
    return builder


def build(name: str, small: bool) -> Workload:
    """The workload of that name with the same weights and inputs every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name](small)


class Classes(nn.Module):
    """Cross entropy against fixed random classes; one loss for a row, whatever the leading dimensions."""

    def __init__(self, *shape: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("labels", torch.randint(classes, shape).flatten())

    def forward(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2).float(), self.labels)


class Clicks(nn.Module):
    """Binary cross entropy against fixed random clicks."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("labels", torch.randint(2, shape))

    def forward(self, logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), self.labels.float())


class MeanSquare(nn.Module):
    def forward(self, result: Tensor) -> Tensor:
        return result.float().square().mean()
