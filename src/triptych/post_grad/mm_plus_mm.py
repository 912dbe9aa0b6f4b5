"""`mm_plus_mm`: computes a sum of two products as one product of concatenated operands."""

from __future__ import annotations

from typing import Any

import torch

from ..cost import Part, Product, Work, read_and_written, size_hint
from ..ir.facts import known_equal, tensor_of
from ..ir.program import Value
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule
from .neighbours import read_by_pointwise

ATEN: dict[str, Any] = {"dialects": ("aten",)}
LONG, WIDE = ("f32[2048, 8]", "f32[8, 2048]"), ("f32[2048, 4]", "f32[4, 2048]")


class MmPlusMm(Rule):
    """mm(a, b) + mm(c, d) -> mm(cat([a, c], 1), cat([b, d], 0)), where it is quicker; up to rounding

    One result is written instead of three, and the sum is rounded once. The operands are copied to concatenate them,
    which pays only if the rows of a and c are short compared with those of the result. Frozen weights are concatenated
    once.
    """

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, c: Tensor, d: Tensor, shape):
        first, second = op.matmul(a, b), op.matmul(c, d)
        return op.add(first, second) | op.add(op.reshape(first, shape), op.reshape(second, shape))

    def check(self, m, a, b, c, d, shape):
        m.applies(m.root.known and all(v.known and v.rank == 2 and v.is_float for v in (a, b, c, d)))
        whole = known_equal(a.shape[0], c.shape[0]) and known_equal(b.shape[1], d.shape[1])
        m.require(whole, "the products have different shapes")
        m.pays(_apart(m, a, b, c, d), _together(m, a, b, c, d))

    def rewrite(self, op, m, a, b, c, d, shape):
        product = op.matmul(_joined(op, a, c, 1), _joined(op, b, d, 0))
        return product if shape is None else op.reshape(product, list(m.bindings["shape"]))

    examples = [
        fires(lambda a, b, c, d: a @ b + c @ d, *LONG, *WIDE, **ATEN),
        fires(lambda a, b, c, d: a @ b + c @ d.t(), *LONG, "f32[2048, 4]", "f32[2048, 4]", **ATEN),
        fires(lambda a, b, c, d: a @ b.t() + c @ d.t(), *["f32[2048, 8]"] * 4, **ATEN),
        fires(lambda a, b, c, d: (a @ b).view(2, 1024, 2048) + (c @ d).view(2, 1024, 2048), *LONG, *WIDE, **ATEN),
        fires(lambda a, b, c, d: a @ b + c @ d, *LONG, "f32[2048, 0]", "f32[0, 2048]", **ATEN),
        fires(lambda a, b, c, d: a @ b + c @ d, *LONG, *WIDE, dynamic=True, **ATEN),
        declines(lambda a, b, c, d: a @ b + c @ d, "f32[16, 512]", "f32[512, 16]", "f32[16, 512]", "f32[512, 16]",
                 because="would cost", **ATEN),
        declines(lambda a, b, c, d: torch.add(a @ b, c @ d, alpha=3), *LONG, *WIDE, **ATEN),
        declines(lambda a, b, c, d: (y := a @ b, y + c @ d), *LONG, *WIDE, because="outside the pattern", **ATEN),
        declines(lambda a, b, c, d: a @ b + c @ d, *LONG, "f32[1, 4]", "f32[4, 2048]", because="different shapes",
                 **ATEN),
        declines(lambda a, b, c, d: a @ b + c @ d, *LONG, "f64[2048, 4]", "f64[4, 2048]", because="different dtypes",
                 **ATEN),
    ]  # fmt: skip


def _apart(m: Match, a: Value, b: Value, c: Value, d: Value) -> Work:
    result, in_reader = tensor_of(m.root.node), read_by_pointwise(m.program, m.root.node, True)
    # a kernel that reads the sum also adds: then one of the two products is more for it to read
    added = read_and_written(result, times=1 if in_reader else 3, launches=0 if in_reader else 1)
    return Work.of(a.device, Product.of(a.tensor, b.tensor), Product.of(c.tensor, d.tensor), added)


def _together(m: Match, a: Value, b: Value, c: Value, d: Value) -> Work:
    rows, columns = size_hint(a.shape[0]), size_hint(b.shape[1])
    inner = sum(size_hint(v.shape[1]) for v in (a, c))
    return Work.of(a.device, Product.sized(rows, columns, inner, a.dtype), _joining(m, a, c), _joining(m, b, d))


def _joining(m: Match, *values: Value) -> list[Part]:
    if m.program.computed_once(*(v.node for v in values)):
        return []
    return [read_and_written(*(v.tensor for v in values if v.tensor is not None), times=2)]


def _joined(op: Emitter, first: Value, second: Value, dim: int) -> Value:
    """The two concatenated along `dim`; for two transposes, the transpose of their concatenated sources."""
    calls = [value.call for value in (first, second)]
    if all(call is not None and call.op == "permute" and list(call.args["dims"]) == [1, 0] for call in calls):
        sources = [call.args["self"] for call in calls if call is not None]
        return op.permute(op.cat(sources, dim=1 - dim), [1, 0])
    return op.cat([first, second], dim=dim)
