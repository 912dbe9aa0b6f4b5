"""What operations make of patterns: one function for each kind of operation, from the operands' elements to the
result's. None where nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .affine import ALWAYS, Affine, Clause, Condition, at_least_zero, both, condition, constant, either, index, opposite
from .calls import Call
from .elements import Elements, Leaf, boolean, cast, combinations, fits, leaf_of, pieces, same_leaf, scalar, uniform
from .facts import known, number, numel, tensor_fact
from .places import seen_through, tensor_entries
from .ranges import Interval, always, of_dtype, representable
from .shape_only import EXACT, SAME_VALUE

if TYPE_CHECKING:
    from .values import Knowledge

Transfer = Callable[["Knowledge", Node, Call, torch.Tensor], "Elements | None"]

TRANSFER: dict[str, Transfer] = {}


def of(*ops: str) -> Callable[[Transfer], Transfer]:
    def register(transfer: Transfer) -> Transfer:
        for op in ops:
            TRANSFER[op] = transfer
        return transfer

    return register


# ---- constructors ----


@of("arange", "prims.iota")
def _arange(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    start, step = number(call.args.get("start", 0)), number(call.args.get("step", 1))
    if _is_real(found.dtype) or isinstance(start, (float, torch.SymFloat)) or isinstance(step, (float, torch.SymFloat)):
        return None
    leaf = Affine(start, (step,))
    return uniform(leaf) if fits(leaf, found.dtype, found.shape) else None


FILLED = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}


@of(*FILLED, "fill", "new_zeros", "new_ones", "tensor")
def _filled(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    if call.op == "tensor":
        given = next(iter(call.args.get("operands", ())), None)
    elif call.op in ("new_zeros", "new_ones"):
        given = int(call.op == "new_ones")
    else:
        given = call.args.get(FILLED.get(call.op, "value"))
    return _of_number(know, given, found)


def _of_number(know: Knowledge, given: Any, found: torch.Tensor) -> Elements | None:
    """A tensor filled with a number, a symbol, or a value that is one number."""
    if isinstance(given, Node) and tensor_fact(given) is not None:
        held = know.elements(given)
        if held is None or not held.is_uniform or held.only is None:
            return None
        leaf = cast(Affine(held.only.start, ()) if isinstance(held.only, Affine) else held.only, found.dtype, ())
        return None if leaf is None else uniform(_with_rank(leaf, found.dim()))
    given = number(given)
    if isinstance(given, torch.SymInt):
        return None if found.dtype != torch.int64 else uniform(constant(given, found.dim()))
    if not isinstance(given, (bool, int, float)):
        return None
    try:
        return uniform(leaf_of(torch.full((), given, dtype=found.dtype, device="cpu"), found.dim()))
    except RuntimeError:  # the number does not fit: left for run time to raise
        return None


def _with_rank(leaf: Leaf, rank: int) -> Leaf:
    return constant(leaf.start, rank) if isinstance(leaf, Affine) else leaf


@of("eye")
def _eye(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    offset = index(0, 2) - index(1, 2)
    return _ones_where(condition([(offset, offset.times(-1))], found.shape), found)


def _ones_where(where: Condition, found: torch.Tensor) -> Elements | None:
    one, zero = (leaf_of(torch.full((), n, dtype=found.dtype), found.dim()) for n in (1, 0))
    return pieces([(where, one), (opposite(where, found.shape), zero)], found.shape)


# ---- views and copies ----


@of(*(SAME_VALUE - {"as_strided"}), "tensor_getitem", "identity")  # `as_strided` may read beyond its operand
def _view(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    source = call.args.get("self")
    held, own = know.elements(source), tensor_fact(source)
    if held is None or own is None:
        return None
    see = seen_through(call, own.shape, found.shape)
    if see is not None and (seen := held.through(see, found.shape)) is not None:
        return seen
    if call.op == "tensor_getitem" and see is None:
        entries = call.args["index"]
        return _indexed(know, held, own, entries if isinstance(entries, tuple) else (entries,), found)
    if held.is_uniform and held.only is not None:
        return uniform(_with_rank(held.only, found.dim()))
    return None


@of("index")
def _index(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    held, own = know.elements(call.args.get("self")), tensor_fact(call.args.get("self"))
    if held is None or own is None:
        return None
    return _indexed(know, held, own, [slice(None) if i is None else i for i in call.args["indices"]], found)


def _indexed(know: Knowledge, held: Elements, own: torch.Tensor, entries: Any, found: torch.Tensor) -> Elements | None:
    """Picked by tensors of integers, all of which are known to be in range: what is out of range must raise."""
    given = tensor_entries(entries, own.dim())
    if given is None:
        return None
    tensors, first = given
    facts = [tensor_fact(t) for t in tensors]
    if any(f is None or f.dtype not in (torch.int64, torch.int32) for f in facts):
        return None
    width = max(f.dim() for f in facts if f is not None)
    rank = found.dim()
    if rank != own.dim() - len(tensors) + width:
        return None
    own_shape = list(found.shape[first : first + width])
    places: list[Affine | None] = [index(d, rank) for d in range(first)]
    for offset, (tensor, fact) in enumerate(zip(tensors, facts)):
        size = own.shape[first + offset]
        low, high = know.bounds(tensor)
        if isinstance(high, float) or not (known(low >= 0) and known(high < size)):
            return None
        chosen = know.elements(tensor)
        seen = chosen.broadcast(fact.shape, own_shape) if chosen is not None and fact is not None else None
        leaf = seen.only if seen is not None else None
        if isinstance(leaf, Affine):
            leaf = Affine(leaf.start, ((0,) * first + leaf.steps + (0,) * rank)[:rank])
        places.append(leaf if isinstance(leaf, Affine) else None)
    places += [index(d + width - len(tensors), rank) for d in range(first + len(tensors), own.dim())]
    return held.through(lambda pattern: pattern.through(places, rank), found.shape)


@of("getitem")
def _piece(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    whole = call.args["self"]
    made, at = know.program.call(whole) if isinstance(whole, Node) else None, call.args["index"]
    if made is None or made.op not in ("split", "unbind") or type(at) is not int or know.unsafe(whole):
        return None
    source, dim = made.args.get("self"), made.args.get("dim", 0)
    held, own = know.elements(source), tensor_fact(source)
    if held is None or own is None:
        return None
    rank = found.dim()
    if made.op == "unbind":
        places: list[Affine | None] = [index(d - (d > dim), rank) for d in range(own.dim())]
        places[dim] = constant(at if at >= 0 else own.shape[dim] + at, rank)
    else:
        sizes = made.args["sizes"]
        places = [index(d, rank) for d in range(rank)]
        places[dim] = index(dim, rank).plus(sum(sizes[: at % len(sizes)]))
    return held.through(lambda pattern: pattern.through(places, rank), found.shape)


@of("cat")
def _cat(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    operands = call.args.get("tensors")
    if not isinstance(operands, (list, tuple)):
        return None
    parts = [(know.elements(o), tensor_fact(o)) for o in operands]
    return _joined(parts, call.args.get("dim", 0), found.shape, found.dtype)


def _joined(parts: Any, dim: int, shape: Any, dtype: torch.dtype) -> Elements | None:
    rank = len(shape)
    made: list[tuple[Condition, Leaf]] = []
    before: Any = 0
    for held, own in parts:
        if held is None or own is None or own.dim() != rank:
            return None
        size = own.shape[dim]
        inside = condition(
            [(index(dim, rank).plus(-before), index(dim, rank).times(-1).plus(before + size - 1))], shape
        )
        places = [index(d, rank).plus(-before) if d == dim else index(d, rank) for d in range(rank)]
        seen = held.through(lambda pattern, places=places: pattern.through(places, rank), shape)
        if seen is None:
            return None
        for where, leaf in seen.pieces:
            same = cast(leaf, dtype, shape)
            if same is None:
                return None
            made.append((both(where, inside, shape), same))
        before = before + size
    return pieces(made, shape)


# ---- casts and choices ----


@of("to")
def _to(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    held = know.elements(call.args.get("self"))
    if held is None:
        return None
    if found.dtype == torch.bool and any(isinstance(leaf, Affine) for _, leaf in held.pieces):
        return _compared("ne", held, uniform(constant(0, found.dim())), found)
    return _cast_all(held.pieces, found)


def _cast_all(made: Any, found: torch.Tensor) -> Elements | None:
    parts = [(where, cast(leaf, found.dtype, found.shape)) for where, leaf in made]
    return None if any(leaf is None for _, leaf in parts) else pieces(parts, found.shape)  # type: ignore[arg-type]


@of("where", "masked_fill")
def _where(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    names = ("condition", "self", "other") if call.op == "where" else ("mask", "value", "self")
    mask, yes, no = (_operand(know, call.args.get(name), found) for name in names)
    mask_fact = tensor_fact(call.args.get(names[0]))
    if mask_fact is None or mask_fact.dtype != torch.bool:
        return None
    if mask is None:
        if yes is None or no is None:
            return None
        first, second = (None if e.only is None else cast(e.only, found.dtype, found.shape) for e in (yes, no))
        return uniform(first) if first is not None and second is not None and same_leaf(first, second) else None
    keep = mask.truth(found.shape)
    drop = opposite(keep, found.shape)
    if (yes is None and not keep.never) or (no is None and not drop.never):
        return None
    made = [(both(keep, where, found.shape), leaf) for where, leaf in (yes.pieces if yes else ())]
    made += [(both(drop, where, found.shape), leaf) for where, leaf in (no.pieces if no else ())]
    return _cast_all([(where, leaf) for where, leaf in made if not where.never], found)


@of("tril", "triu")
def _triangle(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    held = know.elements(call.args.get("self"))
    diagonal = number(call.args.get("diagonal", 0))
    if held is None or found.dim() < 2:
        return None
    rank = found.dim()
    above = (index(rank - 1, rank) - index(rank - 2, rank)).plus(-diagonal)
    keep = at_least_zero(above if call.op == "triu" else above.times(-1), found.shape)
    zero = leaf_of(torch.zeros((), dtype=found.dtype), rank)
    kept = [(both(keep, where, found.shape), leaf) for where, leaf in held.pieces]
    return pieces([*kept, (opposite(keep, found.shape), zero)], found.shape)


# ---- logic and comparisons ----


@of("logical_and", "bitwise_and", "logical_or", "bitwise_or", "logical_not", "bitwise_not")
def _logic(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    tensors = [call.args.get(n) for n in ("self", "other") if n in call.args]
    booleans = all((f := tensor_fact(t)) is not None and f.dtype == torch.bool for t in tensors)
    if not booleans:
        return _pointwise(know, node, call, found)
    held = [_operand(know, t, found) for t in tensors]
    truths = [None if h is None else h.truth(found.shape) for h in held]
    if call.op.endswith("not"):
        return None if truths[0] is None else boolean(opposite(truths[0], found.shape), found.shape)
    is_and = call.op.endswith("and")
    decided = [t for t in truths if t is not None and (t.never if is_and else t.always)]
    if decided:
        return boolean(decided[0], found.shape)
    left, right = truths
    if left is None or right is None:
        return None
    return boolean((both if is_and else either)(left, right, found.shape), found.shape)


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@of(*COMPARISONS)
def _comparison(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    left, right = (_operand(know, call.args.get(n), found) for n in ("self", "other"))
    if left is None or right is None or found.dtype != torch.bool:
        return None
    if _hold_each_other(call, left, right, found) and (made := _compared(call.op, left, right, found)) is not None:
        return made
    return _pointwise(know, node, call, found)


def _hold_each_other(call: Call, left: Elements, right: Elements, found: torch.Tensor) -> bool:
    """Integers are compared in one dtype: it must hold what it is given (-1 is 255 beside a uint8)."""
    dtype = common_dtype(call.args.get("self"), call.args.get("other"))
    if dtype is None or dtype.is_floating_point:
        return False
    leaves = [leaf for held in (left, right) for _, leaf in held.pieces]
    return dtype == torch.bool or all(fits(leaf, dtype, found.shape) for leaf in leaves if isinstance(leaf, Affine))


def common_dtype(left: Any, right: Any) -> torch.dtype | None:
    """What torch computes in, given two operands."""
    given: list[Any] = []
    for value in (left, right):
        fact = tensor_fact(value)
        value = number(value)
        if fact is not None:
            given.append(torch.empty([1] * fact.dim(), dtype=fact.dtype))
        elif isinstance(value, torch.SymInt):
            given.append(1)
        elif isinstance(value, (bool, int, float)):
            given.append(value)
        else:
            return None
    return torch.result_type(*given) if any(isinstance(g, torch.Tensor) for g in given) else None


def by_range(know: Knowledge, call: Call, found: torch.Tensor) -> Elements | None:
    """A comparison that holds for all numbers in two intervals, or for none."""
    sides: list[Any] = [call.args.get(n) for n in ("self", "other")]
    dtype = common_dtype(*sides)
    if dtype is None or found.dtype != torch.bool:
        return None
    held = []
    for side in sides:
        fact = tensor_fact(side)
        if fact is not None:
            about = know.interval(side)
            if fact.dtype != dtype and (dtype.is_floating_point or not about.within(*_limits(dtype))):
                return None
            held.append(about)
            continue
        value = number(side)
        if isinstance(value, torch.SymInt) or value != value or not representable(value, dtype):
            return None
        held.append(Interval(value, value))
    answer = always(call.op, held[0], held[1])
    return None if answer is None else uniform(torch.tensor(answer))


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    widest = of_dtype(dtype)
    return widest.low, widest.high


def _compared(op: str, left: Elements, right: Elements, found: torch.Tensor) -> Elements | None:
    """Comparisons of integers; None where a float takes part."""
    shape, rank = found.shape, found.dim()
    made = opposite(ALWAYS, shape)
    for where, leaves in combinations((left, right), shape):
        a, b = (_as_integer(leaf, rank) for leaf in leaves)
        if a is None or b is None:
            return None
        made = either(made, both(where, _holds(op, a, b, shape), shape), shape)
    return boolean(made, shape)


def _as_integer(leaf: Leaf, rank: int) -> Affine | None:
    if isinstance(leaf, Affine):
        return leaf
    return constant(int(leaf.item()), rank) if leaf.dtype == torch.bool else None


def _holds(op: str, a: Affine, b: Affine, shape: Any) -> Condition:
    up, down = b - a, a - b
    clauses: dict[str, list[Clause]] = {
        "lt": [(up.plus(-1),)],
        "le": [(up,)],
        "gt": [(down.plus(-1),)],
        "ge": [(down,)],
        "eq": [(up, down)],
        "ne": [(up.plus(-1),), (down.plus(-1),)],
    }
    return condition(clauses[op], shape)


# ---- arithmetic ----


def _operand(know: Knowledge, value: Any, found: torch.Tensor) -> Elements | None:
    """What is known of an operand, stretched to the result's shape; a number is itself."""
    fact = tensor_fact(value)
    if fact is not None:
        held = know.elements(value)
        return None if held is None else held.broadcast(fact.shape, found.shape)
    value = number(value)
    if isinstance(value, (bool, float)):
        return uniform(torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.float64))
    return uniform(constant(value, found.dim())) if isinstance(value, (int, torch.SymInt)) else None


@of("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "clamp", "floor_divide", "remainder", "max", "min")
def _arithmetic(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    if _is_real(found.dtype):
        return _pointwise(know, node, call, found)
    given = {k: _operand(know, v, found) for k, v in call.args.items() if k in ("self", "other", "min", "max")}
    unknown = set(call.args) - set(given) - {"alpha"} or any(v is None for v in given.values())
    alpha = number(call.args.get("alpha", 1))
    if unknown or not isinstance(alpha, int):
        return None
    made: list[tuple[Condition, Leaf]] = []
    for where, leaves in combinations([v for v in given.values() if v is not None], found.shape):
        parts = [_as_integer(leaf, found.dim()) for leaf in leaves]
        if any(p is None or not fits(p, found.dtype, found.shape) for p in parts):
            return None
        named = dict(zip(given, parts))
        for more, leaf in _computed(call.op, named, alpha, found.shape):  # type: ignore[arg-type]
            if leaf is None or not fits(leaf, found.dtype, found.shape):
                return _pointwise(know, node, call, found)
            made.append((both(where, more, found.shape), leaf))
    return pieces(made, found.shape)


def _computed(op: str, args: dict[str, Affine], alpha: int, shape: Any) -> list[tuple[Condition, Affine | None]]:
    """Integer arithmetic on patterns: where it depends on the sign of something, in pieces."""
    a, b = args["self"], args.get("other")
    if b is None:
        if op == "neg":
            return [(ALWAYS, a.times(-1))]
        if op == "abs":
            return _larger(a, a.times(-1), shape)
        if op != "clamp":
            return [(ALWAYS, None)]
        made: list[tuple[Condition, Affine | None]] = [(ALWAYS, a)]
        for name, sign in (("min", 1), ("max", -1)):  # the upper bound is applied last, and wins
            if name in args:
                made = [
                    (both(where, more, shape), chosen.times(sign) if chosen is not None else None)
                    for where, leaf in made
                    for more, chosen in _larger(leaf.times(sign), args[name].times(sign), shape)  # type: ignore[union-attr]
                ]
        return made
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
    """The quotient or the rest of a division by a positive number, where the quotient is a pattern."""
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
def _pointwise(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    """The operation itself on one element of each piece: rounding and type promotion are torch's."""
    if call.op not in EXACT:
        return None
    operands = [n for n in node.all_input_nodes if tensor_fact(n) is not None]
    if len(operands) != len(node.all_input_nodes):
        return None
    held = [_operand(know, n, found) for n in operands]
    if any(h is None for h in held):
        return None
    made: list[tuple[Condition, Leaf]] = []
    for where, leaves in combinations([h for h in held if h is not None], found.shape):
        numbers: dict[Node, torch.Tensor] = {}
        for operand, leaf in zip(operands, leaves):
            fact = tensor_fact(operand)
            one = scalar(leaf, fact.dtype) if fact is not None else None
            if one is None or fact is None:
                return None
            numbers[operand] = one.reshape([1] * fact.dim())
        result = _run(node, numbers)
        if result is None or result.dtype != found.dtype or result.numel() != 1:
            return None
        made.append((where, leaf_of(result, found.dim())))
    return pieces(made, found.shape)


def _run(node: Node, numbers: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
    try:
        if node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # a division of integers by zero, say: left for run time to raise
        return None
    return result if isinstance(result, torch.Tensor) else None


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype == torch.bool


# ---- along a dim ----


@of("cumsum")
def _cumsum(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    held = know.elements(call.args.get("self"))
    if held is None or not held.is_uniform or found.dtype == torch.bool:
        return None
    dim, leaf = call.args.get("dim"), held.only
    if found.dtype.is_floating_point:
        zero = isinstance(leaf, torch.Tensor) and leaf.dtype == found.dtype and bool(leaf == 0)
        return held if zero and not bool(torch.signbit(leaf)) else None  # type: ignore[arg-type]
    step = _as_integer(leaf, found.dim()) if leaf is not None else None
    if step is None or type(dim) is not int or found.dim() == 0:
        return None
    made = index(dim, found.dim()).plus(1).times(step.start)
    return uniform(made) if fits(made, found.dtype, found.shape) else None


@of("diff")
def _diff(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    """Each element less the one before it, of integers."""
    if _is_real(found.dtype) or call.args.get("n", 1) != 1:
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
    whole = _joined(parts, dim, shape, found.dtype) if len(parts) > 1 else parts[0][0]
    if whole is None:
        return None
    later = whole.through(lambda pattern: pattern.plus(pattern.steps[dim]), found.shape)
    earlier = whole.through(lambda pattern: pattern, found.shape)
    if later is None or earlier is None:
        return None
    made: list[tuple[Condition, Leaf]] = []
    for where, (a, b) in combinations((later, earlier), found.shape):
        if not isinstance(a, Affine) or not isinstance(b, Affine) or not fits(a - b, found.dtype, found.shape):
            return None
        made.append((where, a - b))
    return pieces(made, found.shape)


@of("amax", "amin", "any", "all")
def _reduced(know: Knowledge, node: Node, call: Call, found: torch.Tensor) -> Elements | None:
    operand = call.args.get("self")
    held, own = know.elements(operand), tensor_fact(operand)
    if held is None or own is None or not held.is_uniform or not known(numel(own.shape) > 0):
        return None
    if call.op in ("any", "all"):
        one = held.number(own.dtype)
        return None if one is None else uniform(leaf_of(one.bool().to(found.dtype), found.dim()))
    return uniform(_with_rank(held.only, found.dim())) if held.only is not None else None
