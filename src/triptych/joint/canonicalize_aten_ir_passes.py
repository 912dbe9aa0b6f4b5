"""`canonicalize_aten_ir_passes`: one spelling for ATen calls that mean the same.

Calls are respelled in place: nothing about their values changes, so none is computed, and each rule looks only at
calls of the overloads it respells. The forms of quantization are in `quantization_form.py`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from .. import _private
from ..ir.facts import is_static, known_equal, storage, tensor_fact
from ..ir.program import Program
from ..ir.schema import signature
from ..rewrite.edits import SetArguments
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .quantization_form import QuantizationForm, QuantizeByNumbers

aten = torch.ops.aten

ATEN: dict[str, Any] = {"dialects": ("aten",)}


class _Spelling(Rule, ABC):
    """Another way to write calls of some overloads."""

    overloads: ClassVar[Sequence[Any]] = ()

    def sites(self, program: Program) -> Iterator[Match]:
        for overload in self.overloads:
            for node in program.graph.find_nodes(op="call_function", target=overload):
                if (spelled := self.respelled(program, node)) is not None:
                    yield Match.at(program, node, spelled=spelled)

    @abstractmethod
    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        """The call as it should be written; None if it is written so already, or cannot be."""

    def rewrite(self, op, spelled):
        return spelled


# ---- numbers: one overload ----

TAKES_NUMBERS: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor, aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor, aten.div.Scalar_mode: aten.div.Tensor_mode,
}  # fmt: skip
"""AOTAutograd writes a number into the `.Tensor` overload, so that `x * 2` and `x * y` are one operation."""


class ScalarOverload(_Spelling):
    """mul.Scalar(x, 2) -> mul.Tensor(x, 2)"""

    overloads = tuple(TAKES_NUMBERS)

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        args, kwargs = node.args, dict(node.kwargs)
        if len(args) > 2:  # the overload for tensors takes alpha by keyword
            kwargs["alpha"] = args[2]
        return SetArguments(node, args[:2], kwargs, TAKES_NUMBERS[node.target])

    examples = [
        fires(lambda x: aten.mul.Scalar(x, 2), "f32[4, 8]", **ATEN),
        fires(lambda x: aten.add.Scalar(x, 2, 3), "f32[4, 8]", **ATEN),
        declines(lambda x: x * 2, "f32[4, 8]"),
    ]


# ---- operands: one order ----


class OperandOrder(_Spelling):
    """add(2, x) -> add(x, 2); add(later, earlier) -> add(earlier, later)"""

    overloads = (
        aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.logical_and.default,
        aten.logical_or.default, aten.logical_xor.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor, aten.maximum.default, aten.minimum.default,
    )  # fmt: skip

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        if len(node.args) != 2 or node.kwargs:
            return None
        left: Any = node.args[0]
        right: Any = node.args[1]
        first, second = tensor_fact(left), tensor_fact(right)
        if second is None or right is left:
            return None
        if first is not None and not (right < left and _order_does_not_show(node.target, first, second)):
            return None
        return SetArguments(node, (right, left))

    examples = [
        fires(lambda x, y: y + x, "f32[4, 8]", "f32[4, 8]", **ATEN),
        fires(lambda x, y: y * x, "f32[4, 8]", "f32[]", **ATEN),
        fires(lambda x, y: y + x, "f32[8]", "f32[4, 8]", **ATEN),
        fires(lambda x, y: torch.maximum(y, x), "i64[4, 8]", "i64[4, 8]", **ATEN),
        declines(lambda x, y: torch.add(y, x, alpha=2), "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x, y: y.t() + x, "f32[4, 4]", "f32[4, 4]", dialects=("torch",)),
        declines(lambda x, y: y.permute(1, 0) + x, "f32[4, 4]", "f32[4, 4]"),  # the sum has the layout of y
        declines(lambda x, y: torch.maximum(y, x), torch.tensor([0.0]), torch.tensor([-0.0])),
        declines(lambda x, y: torch.maximum(y, x), torch.tensor([-0.0]), torch.tensor([0])),
        declines(lambda s, x: x * s, "f32[]", "f16[4, 8]"),
        declines(lambda x, y: y - x, "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x, y: x + y, "f32[4, 8]", "f32[4, 8]"),
    ]


def _order_does_not_show(target: Any, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Is the result the same in both orders? Where the operands have different strides, the result has the layout of
    the first. The order also decides which of 0.0 and -0.0 is the larger one, and how a zero-dim tensor of another
    dtype is rounded."""
    rounds = left.dtype.is_floating_point or right.dtype.is_floating_point
    if rounds and target in (aten.maximum.default, aten.minimum.default):
        return False
    if left.dim() == 0 or right.dim() == 0:
        # on the CPU a zero-dim tensor keeps its precision as the second operand, and is rounded as the first one
        return left.dtype == right.dtype
    if known_equal(left.stride(), right.stride()) and known_equal(left.shape, right.shape):
        return True
    # dims of size one may have any stride, and convolutions choose their memory format by it
    plain = is_static(left.shape) and is_static(right.shape) and 1 not in left.shape and 1 not in right.shape
    return plain and left.is_contiguous() and right.is_contiguous()


# ---- dims: counted from the front ----

DIMS = ("dim", "dims", "dim0", "dim1", "dim2")
ONE_MORE_DIM = frozenset((aten.unsqueeze.default, aten.stack.default))


@functools.cache
def _dim_parameters(overload: Any) -> tuple[tuple[str, int | None], ...]:
    """Parameters that count dims of the first operand, each with its position or None for keywords."""
    sig = signature(overload)
    if not sig.params or sig.params[0].name not in ("self", "input", "tensors"):
        return ()
    return tuple(
        (p.name, None if p.keyword_only else i)
        for i, p in enumerate(sig.params)
        if p.name in DIMS and p.kind in ("int", "ints")
    )


def from_front(node: Node, value: Any) -> Any:
    """A dim, or a list of them, counted from the front; the same object if it is so already or the rank is unknown."""
    if isinstance(value, int):
        if value >= 0 or (rank := _rank(node)) is None:
            return value
        return value + rank
    if not isinstance(value, (list, tuple)) or not any(isinstance(d, int) and d < 0 for d in value):
        return value
    rank = _rank(node)
    return value if rank is None else [d + rank if isinstance(d, int) and d < 0 else d for d in value]


def _rank(node: Node) -> int | None:
    operand = node.args[0] if node.args else None
    operands = operand if isinstance(operand, (list, tuple)) else [operand]
    ranks = [known.dim() for o in operands if (known := tensor_fact(o)) is not None]
    if not ranks or len(ranks) != len(operands):
        return None
    # `cat` takes an empty tensor of one dim beside tensors of any: the largest rank counts
    return max(max(ranks) + (node.target in ONE_MORE_DIM), 1)


class NegativeDims(_Spelling):
    """sum(x, -1) -> sum(x, 1)"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in list(program.graph.nodes):
            if isinstance(node.target, _private.OpOverload) and _dim_parameters(node.target):
                if (spelled := self.respelled(program, node)) is not None:
                    yield Match.at(program, node, spelled=spelled)

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        args, kwargs = list[Any](node.args), dict(node.kwargs)
        changed = False
        for name, position in _dim_parameters(node.target):
            by_position = position is not None and position < len(args)
            arguments: Any = args if by_position else kwargs
            key: Any = position if by_position else name
            value = args[key] if by_position else kwargs.get(key)
            front = from_front(node, value)
            if front is not value:
                arguments[key] = front
                changed = True
        return SetArguments(node, tuple(args), kwargs) if changed else None

    examples = [
        fires(lambda x: x.sum(-1), "f32[4, 8]", **ATEN),
        fires(lambda x: torch.cat([x, x], -1), "f32[4, 8]", **ATEN),
        fires(lambda x, e: torch.cat([e, x], -1), "f32[4, 8]", "f32[0]", **ATEN),
        fires(lambda x: x.unsqueeze(-1), "f32[4, 8]", **ATEN),
        fires(lambda x: x.softmax(-1), "f32[4, 8]", **ATEN),
        declines(lambda x: x.sum(1), "f32[4, 8]"),
    ]


# ---- views: one name ----


class TransposeAsPermute(_Spelling):
    """t(x), transpose(x, 0, 1) -> permute(x, [1, 0])"""

    overloads = (aten.t.default, aten.transpose.int)

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        operand: Any = node.args[0] if node.args else None
        known = tensor_fact(operand)
        if known is None or node.kwargs:
            return None
        dims = list(range(known.dim()))
        if node.target is aten.t.default:
            dims.reverse()
        elif dims:
            first, second = (from_front(node, d) for d in node.args[1:])
            dims[first], dims[second] = dims[second], dims[first]
        return SetArguments(node, (operand, dims), {}, aten.permute.default)

    examples = [
        fires(lambda x: x.t() + 1, "f32[4, 8]", **ATEN),
        fires(lambda x: x.transpose(-1, 0) + 1, "f32[4, 8]", dynamic=True, **ATEN),
        declines(lambda x: x.permute(1, 0) + 1, "f32[4, 8]"),
    ]


class SqueezeOneDim(_Spelling):
    """squeeze(x, 1) -> squeeze(x, [1])"""

    overloads = (aten.squeeze.dim,)

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        if len(node.args) != 2 or not isinstance(node.args[1], int):
            return None
        return SetArguments(node, (node.args[0], [from_front(node, node.args[1])]), node.kwargs, aten.squeeze.dims)

    examples = [
        fires(lambda x: x.squeeze(-1) + 1, "f32[4, 1]", **ATEN),
        declines(lambda x: x.squeeze() + 1, "f32[4, 1]"),
    ]


class UnsafeView(_Spelling):
    """_unsafe_view(x, s) -> view(x, s), where x is neither an input nor an output, and not written"""

    overloads = (aten._unsafe_view.default,)

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        aliasing, operand = program.aliasing, node.args[0] if node.args else None
        if not isinstance(operand, Node) or aliasing.is_input(operand) or aliasing.is_output(operand):
            return None
        if aliasing.written(operand) or aliasing.written(node):
            return None
        return SetArguments(node, node.args, node.kwargs, aten.view.default)

    examples = [
        fires(lambda x: aten._unsafe_view(x.exp(), [32]), "f32[4, 8]", **ATEN),
        declines(lambda x: aten._unsafe_view(x, [32]), "f32[4, 8]"),
    ]


def _as_reshape(graph: Graph) -> None:
    """For examples: a view, or a copy and a view of it, written as the composite that exported graphs have."""
    for view in [n for n in graph.nodes if n.target in (aten.view.default, aten._unsafe_view.default)]:
        view.target = aten.reshape.default
        copy = view.args[0]
        if copy.target is aten.clone.default:
            view.replace_input_with(copy, copy.args[0])
            graph.erase_node(copy)


class ReshapeWithoutCopy(_Spelling):
    """reshape(x, s) -> view(x, s), where it does not copy"""

    overloads = (aten.reshape.default,)

    def respelled(self, program: Program, node: Node) -> SetArguments | None:
        operand: Any = node.args[0] if node.args else None
        place = storage(tensor_fact(operand))
        if place is None or place != storage(tensor_fact(node)):
            return None
        return SetArguments(node, node.args, node.kwargs, aten.view.default)

    examples = [
        fires(lambda x: x.reshape(32) + 1, "f32[4, 8]", prepare=_as_reshape, **ATEN),
        declines(lambda x: x.t().reshape(32) + 1, "f32[4, 8]", prepare=_as_reshape, **ATEN),
    ]


@dataclass(frozen=True)
class CanonicalizeAtenIrPasses(Pass):
    """Spells ATen calls that mean the same in one way: operands in the order of the graph and numbers last, dims
    counted from the front, one overload for numbers, views as `view` and `permute`, quantization by numbers where they
    are known."""

    name = "canonicalize_aten_ir_passes"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: Sequence[Rule] = (
    ScalarOverload(),
    OperandOrder(),  # after ScalarOverload: numbers and tensors are then operands of one overload
    TransposeAsPermute(), SqueezeOneDim(), UnsafeView(), ReshapeWithoutCopy(),
    NegativeDims(),  # after the two that count dims from the front themselves
    QuantizeByNumbers(), QuantizationForm(),
)  # fmt: skip
