"""What is known about the elements of a tensor: all true, zero, the lower triangle, every row keeps one, or all of
them. Asked lazily, each node once; everything answered is proved, for every size the program was compiled for."""

from __future__ import annotations

import math
import weakref

import torch
from torch.fx import Node

from .facts import known_equal, tensor_fact
from .program import Program
from .shape_only import ShapeOnly, distinct

_KNOWLEDGE: weakref.WeakKeyDictionary[Program, Knowledge] = weakref.WeakKeyDictionary()


def knowledge(program: Program) -> Knowledge:
    """What is known of a program's values; kept with the program, since rewrites keep values."""
    found = _KNOWLEDGE.get(program)
    if found is None:
        found = _KNOWLEDGE[program] = Knowledge(program)
    return found


class Knowledge:
    """Answers about the values of one program; False or None where nothing is proved."""

    def __init__(self, program: Program) -> None:
        self.program = weakref.proxy(program)
        self._shape_only = ShapeOnly(self.program)

    def evaluate(self, node: Node) -> torch.Tensor | None:
        """All elements, on the CPU, of a tensor that depends on static sizes alone and is not too large."""
        return self._shape_only.value(node)

    def is_all_true(self, node: Node) -> bool:
        """A boolean that is true everywhere."""
        value = self.evaluate(node)
        return value is not None and value.dtype == torch.bool and bool(distinct(value).all())

    def is_all_false(self, node: Node) -> bool:
        """A boolean that is false everywhere."""
        value = self.evaluate(node)
        return value is not None and value.dtype == torch.bool and not bool(distinct(value).any())

    def is_zero(self, node: Node) -> bool:
        """A number that is 0 (0.0 or -0.0) everywhere."""
        value = self.evaluate(node)
        return value is not None and value.dtype != torch.bool and bool((distinct(value) == 0).all())

    def is_causal(self, node: Node) -> bool:
        """A boolean of shape (..., n, n) that is true exactly where the last index is at most the one before it."""
        value = self._square(node)
        return value is not None and value.dtype == torch.bool and bool((value == _lower(value)).all())

    def is_causal_bias(self, node: Node) -> bool:
        """A float of shape (..., n, n) that is 0 where the last index is at most the one before it, else -inf."""
        value = self._square(node)
        if value is None or not value.dtype.is_floating_point:
            return False
        wanted = torch.zeros_like(value).masked_fill(~_lower(value), -math.inf)
        return bool((value == wanted).all())

    def every_row_keeps_one(self, node: Node) -> bool:
        """A boolean of shape (..., rows, keys) with at least one key true in each row."""
        value = self.evaluate(node)
        if value is None or value.dtype != torch.bool or value.dim() == 0:
            return False
        return bool(distinct(value).any(-1).all()) and value.shape[-1] > 0

    def _square(self, node: Node) -> torch.Tensor | None:
        found = tensor_fact(node)
        if found is None or found.dim() < 2 or not known_equal(found.shape[-1], found.shape[-2]):
            return None
        value = self.evaluate(node)
        return None if value is None else value[tuple(slice(0, 1) if s == 0 else slice(None) for s in _lead(value))]


def _lead(value: torch.Tensor) -> tuple[int, ...]:
    """Strides of all but the last two dims."""
    return value.stride()[:-2]


def _lower(value: torch.Tensor) -> torch.Tensor:
    return torch.ones(value.shape[-2:], dtype=torch.bool).tril()
