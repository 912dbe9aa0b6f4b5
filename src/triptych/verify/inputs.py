"""Inputs to run a graph on: the user's tensors where they are available, else random ones with the same facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _private
from ..ir.facts import fact

Given = Callable[[Node], "torch.Tensor | None"]


class Unsampled(Exception):
    """There are no inputs to run this graph on; the message says why."""


def placeholders(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def samples(graph: Graph, example_inputs: Sequence[Any], given: Given, cautious: bool = False) -> list[Any]:
    """One value for each input. `cautious`: floats are positive and integers 0 or 1, so that few operations fail."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for i, node in enumerate(placeholders(graph)):
        example = example_inputs[i] if i < len(example_inputs) else None
        tensor = next((t for t in (given(node), example) if _is_real(t)), None)
        if tensor is not None:
            drawn.append(copy_of(tensor))
            continue
        value = fact(node) if fact(node) is not None else example
        if value is None:
            raise Unsampled(f"nothing is known of the input {node.name}")
        drawn.append(_random_value(value, node, generator, cautious))
    return drawn


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and the same `requires_grad`."""
    if not _private.is_ordinary(tensor) or not _is_real(tensor):
        raise Unsampled(f"a tensor of type {type(tensor).__name__}, layout {tensor.layout}")
    with torch.no_grad():
        copied = _laid_out(tensor.shape, tensor.stride(), tensor.dtype, tensor.device).copy_(tensor)
    return copied.requires_grad_(tensor.requires_grad)


def hint(size: Any) -> int:
    """A size as the number it had when the program was captured."""
    if isinstance(size, torch.SymInt):
        if not size.node.has_hint():
            raise Unsampled(f"the size {size} depends on data")
        return int(size.node.hint)
    return int(size)


def _is_real(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and not isinstance(value, _private.FakeTensor) and value.device.type != "meta"
    )


def _random_value(value: Any, node: Node, generator: torch.Generator, cautious: bool) -> Any:
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        raise Unsampled(f"the input {node.name} is a number that depends on data")
    if not isinstance(value, torch.Tensor):
        return value
    if not _private.is_ordinary(value):
        raise Unsampled(f"the input {node.name} is of type {type(value).__name__}, layout {value.layout}")
    shape, stride = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    tensor = _laid_out(shape, stride, value.dtype, value.device)
    with torch.no_grad():
        tensor.copy_(_drawn(shape, value, generator, cautious))
    return tensor.requires_grad_(value.requires_grad)


def _drawn(shape: list[int], like: torch.Tensor, generator: torch.Generator, cautious: bool) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if like.dtype.is_floating_point or like.dtype.is_complex:
        if cautious:
            return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if like.device.type != "cpu":
        return torch.zeros(shape)  # on a GPU an index out of range ends the process, not just the run
    return torch.randint(0, 2 if cautious else 5, shape, generator=generator)


def _laid_out(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if any(s == 0 and n > 1 for s, n in zip(stride, shape)):  # an expanded tensor cannot be written to
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
