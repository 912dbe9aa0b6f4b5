"""`canonicalize_aten_ir_passes`: one spelling for ATen calls that mean the same.

Calls are respelled in place: nothing about their values changes, so none is computed, and a node that is as
it should be costs a look-up. The forms of quantization are in `quantization_form.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.facts import is_static, known_equal, storage, tensor_fact
from ..ir.schema import signature
from ..passes.base import Pass, PassRun
from ..testing import declines, fires
from .quantization_form import QUANTIZED, quantization_form, quantize_by_numbers

aten = torch.ops.aten


@dataclass
class Spelled:
    """A call about to be written another way."""

    node: Node
    target: Any
    args: list[Any]
    kwargs: dict[str, Any]


Step = Callable[[PassRun, Spelled], bool]
"""Changes the spelling in hand and says whether it did."""

# ---- numbers: one overload ----

TAKES_NUMBERS = {
    aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor, aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor, aten.div.Scalar_mode: aten.div.Tensor_mode,
}  # fmt: skip
"""AOTAutograd writes a number into the `.Tensor` overload, so that `x * 2` and `x * y` are one operation."""


def scalar_overload(run: PassRun, call: Spelled) -> bool:
    """mul.Scalar(x, 2) -> mul.Tensor(x, 2)"""
    call.target = TAKES_NUMBERS[call.target]
    if len(call.args) > 2:  # alpha goes by keyword there
        call.kwargs["alpha"] = call.args.pop()
    return True


# ---- operands: one order ----

COMMUTATIVE = frozenset(
    (
        aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.logical_and.default,
        aten.logical_or.default, aten.logical_xor.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor, aten.maximum.default, aten.minimum.default,
    )  # fmt: skip
)


def operand_order(run: PassRun, call: Spelled) -> bool:
    """add(2, x) -> add(x, 2); add(later, earlier) -> add(earlier, later)"""
    if len(call.args) != 2 or call.kwargs:
        return False
    left, right = call.args
    first, second = tensor_fact(left), tensor_fact(right)
    if second is None or right is left:
        return False
    if first is not None and not (right < left and _order_does_not_show(call, first, second)):
        return False
    call.args.reverse()
    return True


def _order_does_not_show(call: Spelled, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Where the operands lie differently in memory, the result lies as the first; and which zero is the larger of
    0.0 and -0.0 depends on the order too, as does the rounding of a single number of another dtype."""
    rounds = left.dtype.is_floating_point or right.dtype.is_floating_point
    if rounds and call.target in (aten.maximum.default, aten.minimum.default):
        return False
    if left.dim() == 0 or right.dim() == 0:
        # a number on the CPU keeps its own precision as the second operand, and is rounded first as the first
        return left.dtype == right.dtype
    if known_equal(left.stride(), right.stride()) and known_equal(left.shape, right.shape):
        return True
    # dims of one element have strides of their own, by which convolutions go
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


def negative_dims(run: PassRun, call: Spelled) -> bool:
    """sum(x, -1) -> sum(x, 1)"""
    changed = False
    for name, position in _dim_parameters(call.target):
        held: Any = call.kwargs if position is None or position >= len(call.args) else call.args
        key: Any = name if held is call.kwargs else position
        value = held[key] if held is call.args else held.get(key)
        front = _from_front(call, value)
        if front is not value:
            held[key] = front
            changed = True
    return changed


def _from_front(call: Spelled, value: Any) -> Any:
    if isinstance(value, int):
        if value >= 0 or (rank := _rank(call)) is None:
            return value
        return value + rank
    if not isinstance(value, (list, tuple)) or not any(isinstance(d, int) and d < 0 for d in value):
        return value
    rank = _rank(call)
    return value if rank is None else [d + rank if isinstance(d, int) and d < 0 else d for d in value]


def _rank(call: Spelled) -> int | None:
    operand = call.args[0] if call.args else None
    operands = operand if isinstance(operand, (list, tuple)) else [operand]
    ranks = [known.dim() for o in operands if (known := tensor_fact(o)) is not None]
    if not ranks or len(ranks) != len(operands):
        return None
    # `cat` takes an empty tensor of one dim beside tensors of any: the largest rank counts
    return max(max(ranks) + (call.target in ONE_MORE_DIM), 1)


# ---- views: one name ----


def transpose_as_permute(run: PassRun, call: Spelled) -> bool:
    """t(x), transpose(x, 0, 1) -> permute(x, [1, 0])"""
    known = tensor_fact(call.args[0]) if call.args else None
    if known is None or call.kwargs:
        return False
    dims = list(range(known.dim()))
    if call.target is aten.t.default:
        dims.reverse()
    elif dims:
        _, first, second = call.args
        dims[first], dims[second] = dims[second], dims[first]
    call.target, call.args = aten.permute.default, [call.args[0], dims]
    return True


def squeeze_one_dim(run: PassRun, call: Spelled) -> bool:
    """squeeze(x, 1) -> squeeze(x, [1])"""
    if len(call.args) != 2 or not isinstance(call.args[1], int):
        return False
    call.target, call.args = aten.squeeze.dims, [call.args[0], [call.args[1]]]
    return True


def unsafe_view(run: PassRun, call: Spelled) -> bool:
    """_unsafe_view(x, s) -> view(x, s), where x is an intermediate of which nobody outside hears"""
    aliasing, operand = run.program.aliasing, call.args[0] if call.args else None
    if not isinstance(operand, Node) or aliasing.is_input(operand) or aliasing.is_output(operand):
        return False
    if aliasing.written(operand) or aliasing.written(call.node):
        return False
    call.target = aten.view.default
    return True


def reshape_without_copy(run: PassRun, call: Spelled) -> bool:
    """reshape(x, s) -> view(x, s), where it does not copy"""
    source, result = tensor_fact(call.args[0]) if call.args else None, tensor_fact(call.node)
    place = storage(source)
    if place is None or place != storage(result):
        return False
    call.target = aten.view.default
    return True


STEPS: dict[Any, tuple[Step, ...]] = {
    **{overload: (scalar_overload,) for overload in TAKES_NUMBERS},
    **{overload: (operand_order,) for overload in COMMUTATIVE},
    aten.t.default: (transpose_as_permute,),
    aten.transpose.int: (negative_dims, transpose_as_permute),
    aten.squeeze.dim: (negative_dims, squeeze_one_dim),
    aten._unsafe_view.default: (unsafe_view,),
    aten.reshape.default: (reshape_without_copy,),
}
"""What is looked at, by overload; everything else has its dims counted from the front."""


@dataclass(frozen=True)
class CanonicalizeAtenIrPasses(Pass):
    """Spells ATen calls that mean the same in one way: operands in the order of the graph and numbers last, dims
    counted from the front, one overload for numbers, views as `view` and `permute`, quantization by numbers where they
    are known."""

    name = "canonicalize_aten_ir_passes"

    def run(self, run: PassRun) -> None:
        for node in list(run.program.graph.nodes):
            if node.op != "call_function":
                continue
            if run.spent:
                return
            if isinstance(node.target, _private.OpOverload):
                if node.target.namespace == QUANTIZED:
                    quantize_by_numbers(run, node)
                self._respell(run, node)
            elif node.target is _private.invoke_quant_packed:
                quantization_form(run, node)

    def _respell(self, run: PassRun, node: Node) -> None:
        steps = STEPS.get(node.target)
        if steps is None:
            if not _dim_parameters(node.target):
                return
            steps = (negative_dims,)
        call = Spelled(node, node.target, list(node.args), dict(node.kwargs))
        changes = [step.__name__ for step in steps if step(run, call)]
        if call.target in COMMUTATIVE and operand_order not in steps and operand_order(run, call):
            changes.append(operand_order.__name__)
        if not changes:
            return
        target = call.target if call.target is not node.target else None
        run.rewriter.set_arguments(node, tuple(call.args), call.kwargs, target=target)
        run.fired(changes[-1])

    examples = [
        fires(lambda x: aten.mul.Scalar(x, 2), "f32[4, 8]", dialects=("aten",)),
        fires(lambda x: aten.add.Scalar(x, 2, 3), "f32[4, 8]", dialects=("aten",)),
        fires(lambda x, y: y + x, "f32[4, 8]", "f32[4, 8]", dialects=("aten",)),
        fires(lambda x, y: y * x, "f32[4, 8]", "f32[]", dialects=("aten",)),
        fires(lambda x, y: y + x, "f32[8]", "f32[4, 8]", dialects=("aten",)),
        fires(lambda x, y: torch.maximum(y, x), "i64[4, 8]", "i64[4, 8]", dialects=("aten",)),
        fires(lambda x: x.sum(-1), "f32[4, 8]", dialects=("aten",)),
        fires(lambda x: torch.cat([x, x], -1), "f32[4, 8]", dialects=("aten",)),
        fires(lambda x, e: torch.cat([e, x], -1), "f32[4, 8]", "f32[0]", dialects=("aten",)),
        fires(lambda x: x.unsqueeze(-1), "f32[4, 8]", dialects=("aten",)),
        fires(lambda x: x.softmax(-1), "f32[4, 8]", dialects=("aten",)),
        fires(lambda x: x.t() + 1, "f32[4, 8]", dialects=("aten",)),
        fires(lambda x: x.transpose(-1, 0) + 1, "f32[4, 8]", dialects=("aten",), dynamic=True),
        fires(lambda x: x.squeeze(-1) + 1, "f32[4, 1]", dialects=("aten",)),
        fires(lambda x: aten._unsafe_view(x.exp(), [32]), "f32[4, 8]", dialects=("aten",)),
        declines(lambda x, y: torch.add(y, x, alpha=2), "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x, y: y.t() + x, "f32[4, 4]", "f32[4, 4]", dialects=("torch",)),
        declines(lambda x, y: y.permute(1, 0) + x, "f32[4, 4]", "f32[4, 4]"),  # the sum lies as y does
        declines(lambda x, y: torch.maximum(y, x), torch.tensor([0.0]), torch.tensor([-0.0])),
        declines(lambda x, y: torch.maximum(y, x), torch.tensor([-0.0]), torch.tensor([0])),
        declines(lambda s, x: x * s, "f32[]", "f16[4, 8]"),
        declines(lambda x, y: y - x, "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x, y: x + y, "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x: x.sum(1), "f32[4, 8]"),
        declines(lambda x: aten._unsafe_view(x, [32]), "f32[4, 8]"),
    ]
