"""Transfer functions for logic, comparisons, arithmetic and reductions: from the known elements of the operands to
those of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..calls import Call
from ..facts import known, number, numel, tensor_fact
from .affine import ALWAYS, Affine, Condition, at_least_zero, both, constant, either, index, opposite
from .elements import Elements, Leaf, boolean, combinations, fits, leaf_of, pieces, scalar, uniform
from .ranges import Interval, always, of_dtype, representable
from .shape_only import EXACT
from .transfer import TRANSFER, as_integer, compared, is_real, joined, of, operand, with_rank

if TYPE_CHECKING:
    from .knowledge import Knowledge

# ---- logic and comparisons ----


@of("logical_and", "bitwise_and", "logical_or", "bitwise_or", "logical_not", "bitwise_not")
def _logic(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    tensors = [call.args.get(n) for n in ("self", "other") if n in call.args]
    booleans = all((f := tensor_fact(t)) is not None and f.dtype == torch.bool for t in tensors)
    if not booleans:
        return _pointwise(know, node, call, result)
    elements = [operand(know, t, result) for t in tensors]
    truths = [None if h is None else h.truth(result.shape) for h in elements]
    if call.op.endswith("not"):
        return None if truths[0] is None else boolean(opposite(truths[0], result.shape), result.shape)
    is_and = call.op.endswith("and")
    decided = [t for t in truths if t is not None and (t.never if is_and else t.always)]
    if decided:
        return boolean(decided[0], result.shape)
    left, right = truths
    if left is None or right is None:
        return None
    return boolean((both if is_and else either)(left, right, result.shape), result.shape)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@of(*COMPARISONS)
def _comparison(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    left, right = (operand(know, call.args.get(n), result) for n in ("self", "other"))
    if left is None or right is None or result.dtype != torch.bool:
        return None
    if _hold_each_other(call, left, right, result) and (truth := compared(call.op, left, right, result)) is not None:
        return truth
    return _pointwise(know, node, call, result)


def _hold_each_other(call: Call, left: Elements, right: Elements, result: torch.Tensor) -> bool:
    """Integers are compared in a common dtype: does it represent all values of both (-1 becomes 255 beside uint8)?"""
    dtype = common_dtype(call.args.get("self"), call.args.get("other"))
    if dtype is None or dtype.is_floating_point:
        return False
    leaves = [leaf for side in (left, right) for _, leaf in side.pieces]
    return dtype == torch.bool or all(fits(leaf, dtype, result.shape) for leaf in leaves if isinstance(leaf, Affine))


def common_dtype(left: Any, right: Any) -> torch.dtype | None:
    """The dtype to which torch promotes two operands."""
    examples: list[Any] = []
    for value in (left, right):
        fact = tensor_fact(value)
        value = number(value)
        if fact is not None:
            examples.append(torch.empty([1] * fact.dim(), dtype=fact.dtype))
        elif isinstance(value, torch.SymInt):
            examples.append(1)
        elif isinstance(value, (bool, int, float)):
            examples.append(value)
        else:
            return None
    return torch.result_type(*examples) if any(isinstance(g, torch.Tensor) for g in examples) else None


def by_range(know: Knowledge, call: Call, result: torch.Tensor) -> Elements | None:
    """A comparison that holds for all numbers in two intervals, or for none."""
    sides: list[Any] = [call.args.get(n) for n in ("self", "other")]
    dtype = common_dtype(*sides)
    if dtype is None or result.dtype != torch.bool:
        return None
    intervals = []
    for side in sides:
        fact = tensor_fact(side)
        if fact is not None:
            about = know.interval(side)
            if fact.dtype != dtype and (dtype.is_floating_point or not about.within(*_limits(dtype))):
                return None
            intervals.append(about)
            continue
        value = number(side)
        if isinstance(value, torch.SymInt) or value != value or not representable(value, dtype):
            return None
        intervals.append(Interval(value, value))
    answer = always(call.op, intervals[0], intervals[1])
    return None if answer is None else uniform(torch.tensor(answer))


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    widest = of_dtype(dtype)
    return widest.low, widest.high


# ---- arithmetic ----


@of("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "clamp", "floor_divide", "remainder", "max", "min")
def _arithmetic(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    if is_real(result.dtype):
        return _pointwise(know, node, call, result)
    operands = {k: operand(know, v, result) for k, v in call.args.items() if k in ("self", "other", "min", "max")}
    unknown = set(call.args) - set(operands) - {"alpha"} or any(v is None for v in operands.values())
    alpha = number(call.args.get("alpha", 1))
    if unknown or not isinstance(alpha, int):
        return None
    result_pieces: list[tuple[Condition, Leaf]] = []
    for where, leaves in combinations([v for v in operands.values() if v is not None], result.shape):
        parts = [as_integer(leaf, result.dim()) for leaf in leaves]
        if any(p is None or not fits(p, result.dtype, result.shape) for p in parts):
            return None
        named = dict(zip(operands, parts))
        for more, leaf in _computed(call.op, named, alpha, result.shape):  # type: ignore[arg-type]
            if leaf is None or not fits(leaf, result.dtype, result.shape):
                return _pointwise(know, node, call, result)
            result_pieces.append((both(where, more, result.shape), leaf))
    return pieces(result_pieces, result.shape)


def _computed(op: str, args: dict[str, Affine], alpha: int, shape: Any) -> list[tuple[Condition, Affine | None]]:
    """Integer arithmetic on affine patterns; split into pieces where the result depends on a sign."""
    a, b = args["self"], args.get("other")
    if b is None:
        if op == "neg":
            return [(ALWAYS, a.times(-1))]
        if op == "abs":
            return _larger(a, a.times(-1), shape)
        if op != "clamp":
            return [(ALWAYS, None)]
        clamped: list[tuple[Condition, Affine | None]] = [(ALWAYS, a)]
        for name, sign in (("min", 1), ("max", -1)):  # the upper bound is applied last, and wins
            if name in args:
                clamped = [
                    (both(where, more, shape), chosen.times(sign) if chosen is not None else None)
                    for where, leaf in clamped
                    for more, chosen in _larger(leaf.times(sign), args[name].times(sign), shape)  # type: ignore[union-attr]
                ]
        return clamped
    if op in ("add", "sub"):
        return [(ALWAYS, a + b.times(alpha if op == "add" else -alpha))]
    if op == "mul":
        if b.constant:
            return [(ALWAYS, a.times(b.start))]
        return [(ALWAYS, b.times(a.start) if a.constant else None)]
    if op in ("maximum", "max"):
        return _larger(a, b, shape)
    if op in ("minimum", "min"):
        first = at_least_zero(b - a, shape)
        return [(first, a), (opposite(first, shape), b)]
    return [(ALWAYS, _divided(op, a, b, shape))]


def _larger(a: Affine, b: Affine, shape: Any) -> list[tuple[Condition, Affine | None]]:
    first = at_least_zero(a - b, shape)
    return [(first, a), (opposite(first, shape), b)]


def _divided(op: str, a: Affine, b: Affine, shape: Any) -> Affine | None:
    """The quotient or the remainder of a division by a positive number, where the quotient is affine."""
    by = b.start if b.constant else None
    if type(by) is not int or by <= 0:
        return None
    low, high = a.least(shape), a.most(shape)
    rank = len(shape)
    if low is not None and known(low >= 0) and known(high < by):
        return constant(0, rank) if op == "floor_divide" else a
    if type(a.start) is int and all(type(s) is int and s % by == 0 for s in a.steps):
        whole = Affine(a.start // by, tuple(s // by for s in a.steps))
        return whole if op == "floor_divide" else constant(a.start % by, rank)
    return None


@of(*(EXACT - {"where", "masked_fill"} - set(TRANSFER)), "pow")
def _pointwise(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    """Runs the operation itself on one element of each piece, so that torch rounds and promotes."""
    if call.op not in EXACT:
        return None
    operands = [n for n in node.all_input_nodes if tensor_fact(n) is not None]
    if len(operands) != len(node.all_input_nodes):
        return None
    elements = [operand(know, n, result) for n in operands]
    if any(h is None for h in elements):
        return None
    result_pieces: list[tuple[Condition, Leaf]] = []
    for where, leaves in combinations([h for h in elements if h is not None], result.shape):
        numbers: dict[Node, torch.Tensor] = {}
        for source, leaf in zip(operands, leaves):
            fact = tensor_fact(source)
            one = scalar(leaf, fact.dtype) if fact is not None else None
            if one is None or fact is None:
                return None
            numbers[source] = one.reshape([1] * fact.dim())
        outcome = _run(node, numbers)
        if outcome is None or outcome.dtype != result.dtype or outcome.numel() != 1:
            return None
        result_pieces.append((where, leaf_of(outcome, result.dim())))
    return pieces(result_pieces, result.shape)


def _run(node: Node, numbers: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: numbers[n].clone())  # it may write in place
    try:
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # a division of integers by zero, say: left for run time to raise
        return None
    return result if isinstance(result, torch.Tensor) else None


# ---- along a dim ----


@of("cumsum")
def _cumsum(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    elements = know.elements(call.args.get("self"))
    if elements is None or not elements.is_uniform or result.dtype == torch.bool:
        return None
    dim, leaf = call.args.get("dim"), elements.only
    if result.dtype.is_floating_point:
        zero = isinstance(leaf, torch.Tensor) and leaf.dtype == result.dtype and bool(leaf == 0)
        return elements if zero and not bool(torch.signbit(leaf)) else None  # type: ignore[arg-type]
    step = as_integer(leaf, result.dim()) if leaf is not None else None
    if step is None or type(dim) is not int or result.dim() == 0:
        return None
    counted = index(dim, result.dim()).plus(1).times(step.start)
    return uniform(counted) if fits(counted, result.dtype, result.shape) else None


@of("diff")
def _diff(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    """The difference of neighbouring elements, for integers."""
    if is_real(result.dtype) or call.args.get("n", 1) != 1:
        return None
    own = tensor_fact(call.args.get("self"))
    if own is None or own.dim() == 0:
        return None
    rank = own.dim()
    dim = call.args.get("dim", rank - 1)
    names = [n for n in ("prepend", "self", "append") if isinstance(call.args.get(n), Node)]
    parts = [(know.elements(call.args[n]), tensor_fact(call.args[n])) for n in names]
    shape = list(own.shape)
    shape[dim] = sum((f.shape[dim] for _, f in parts if f is not None and f.dim() == rank), start=0)
    whole = joined(parts, dim, shape, result.dtype) if len(parts) > 1 else parts[0][0]
    if whole is None:
        return None
    later = whole.through(lambda pattern: pattern.plus(pattern.steps[dim]), result.shape)
    earlier = whole.through(lambda pattern: pattern, result.shape)
    if later is None or earlier is None:
        return None
    result_pieces: list[tuple[Condition, Leaf]] = []
    for where, (a, b) in combinations((later, earlier), result.shape):
        if not isinstance(a, Affine) or not isinstance(b, Affine) or not fits(a - b, result.dtype, result.shape):
            return None
        result_pieces.append((where, a - b))
    return pieces(result_pieces, result.shape)


@of("amax", "amin", "any", "all")
def _reduced(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    operand = call.args.get("self")
    elements, own = know.elements(operand), tensor_fact(operand)
    if elements is None or own is None or not elements.is_uniform or not known(numel(own.shape) > 0):
        return None
    if call.op in ("any", "all"):
        one = elements.number(own.dtype)
        return None if one is None else uniform(leaf_of(one.bool().to(result.dtype), result.dim()))
    return uniform(with_rank(elements.only, result.dim())) if elements.only is not None else None
