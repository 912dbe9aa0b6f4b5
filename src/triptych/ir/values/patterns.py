"""Transfer functions for constructors, views, copies, casts and `where`: from the known elements of the operands to
those of the result. They return None where nothing is known; `result` is the fact of the node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..calls import Call
from ..facts import known, number, tensor_fact
from .affine import Affine, Condition, at_least_zero, both, condition, constant, index, opposite
from .elements import Elements, cast, fits, leaf_of, pieces, same_leaf, uniform
from .places import seen_through, tensor_entries
from .shape_only import SAME_ELEMENTS
from .transfer import cast_all, compared, is_real, joined, of, operand, with_rank

if TYPE_CHECKING:
    from .knowledge import Knowledge

# ---- constructors ----


@of("arange", "prims.iota", from_numbers=True)
def _arange(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    start, step = number(call.args.get("start", 0)), number(call.args.get("step", 1))
    if is_real(result.dtype) or isinstance(start, (float, torch.SymFloat)) or isinstance(step, (float, torch.SymFloat)):
        return None
    leaf = Affine(start, (step,))
    return uniform(leaf) if fits(leaf, result.dtype, result.shape) else None


FILLED = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}


@of(*FILLED, "fill", "new_zeros", "new_ones", "tensor", from_numbers=True)
def _filled(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    if call.op == "tensor":
        fill = next(iter(call.args.get("operands", ())), None)
    elif call.op in ("new_zeros", "new_ones"):
        fill = int(call.op == "new_ones")
    else:
        fill = call.args.get(FILLED.get(call.op, "value"))
    return _of_number(know, fill, result)


def _of_number(know: Knowledge, fill: Any, result: torch.Tensor) -> Elements | None:
    """A tensor filled with a number, a symbolic size, or a tensor whose elements are all one number."""
    if isinstance(fill, Node) and tensor_fact(fill) is not None:
        elements = know.elements(fill)
        if elements is None or not elements.is_uniform or elements.only is None:
            return None
        only = elements.only
        leaf = cast(Affine(only.start, ()) if isinstance(only, Affine) else only, result.dtype, ())
        return None if leaf is None else uniform(with_rank(leaf, result.dim()))
    fill = number(fill)
    if isinstance(fill, torch.SymInt):
        return None if result.dtype != torch.int64 else uniform(constant(fill, result.dim()))
    if not isinstance(fill, (bool, int, float)):
        return None
    try:
        return uniform(leaf_of(torch.full((), fill, dtype=result.dtype, device="cpu"), result.dim()))
    except RuntimeError:  # the number does not fit: left for run time to raise
        return None


@of("eye", from_numbers=True)
def _eye(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    offset = index(0, 2) - index(1, 2)
    return _ones_where(condition([(offset, offset.times(-1))], result.shape), result)


def _ones_where(where: Condition, result: torch.Tensor) -> Elements | None:
    one, zero = (leaf_of(torch.full((), n, dtype=result.dtype), result.dim()) for n in (1, 0))
    return pieces([(where, one), (opposite(where, result.shape), zero)], result.shape)


# ---- views and copies ----


@of(*SAME_ELEMENTS, "tensor_getitem", "identity")
def _view(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    source = call.args.get("self")
    elements, own = know.elements(source), tensor_fact(source)
    if elements is None or own is None:
        return None
    see = seen_through(call, own.shape, result.shape)
    if see is not None and (seen := elements.through(see, result.shape)) is not None:
        return seen
    if call.op == "tensor_getitem" and see is None:
        entries = call.args["index"]
        return _indexed(know, elements, own, entries if isinstance(entries, tuple) else (entries,), result)
    if elements.is_uniform and elements.only is not None:
        return uniform(with_rank(elements.only, result.dim()))
    return None


@of("index")
def _index(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    elements, own = know.elements(call.args.get("self")), tensor_fact(call.args.get("self"))
    if elements is None or own is None:
        return None
    return _indexed(know, elements, own, [slice(None) if i is None else i for i in call.args["indices"]], result)


def _indexed(
    know: Knowledge, elements: Elements, own: torch.Tensor, entries: Any, result: torch.Tensor
) -> Elements | None:
    """Advanced indexing by integer tensors that are known to be in range (out of range must raise at run time)."""
    adjacent = tensor_entries(entries, own.dim())
    if adjacent is None:
        return None
    tensors, first = adjacent
    facts = [tensor_fact(t) for t in tensors]
    if any(f is None or f.dtype not in (torch.int64, torch.int32) for f in facts):
        return None
    width = max(f.dim() for f in facts if f is not None)
    rank = result.dim()
    if rank != own.dim() - len(tensors) + width:
        return None
    own_shape = list(result.shape[first : first + width])
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
    return elements.through(lambda pattern: pattern.through(places, rank), result.shape)


@of("getitem")
def _piece(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    whole = call.args["self"]
    split, at = know.program.call(whole) if isinstance(whole, Node) else None, call.args["index"]
    if split is None or split.op not in ("split", "unbind") or type(at) is not int or know.unsafe(whole):
        return None
    source, dim = split.args.get("self"), split.args.get("dim", 0)
    elements, own = know.elements(source), tensor_fact(source)
    if elements is None or own is None:
        return None
    rank = result.dim()
    if split.op == "unbind":
        places: list[Affine | None] = [index(d - (d > dim), rank) for d in range(own.dim())]
        places[dim] = constant(at if at >= 0 else own.shape[dim] + at, rank)
    else:
        sizes = split.args["sizes"]
        places = [index(d, rank) for d in range(rank)]
        places[dim] = index(dim, rank).plus(sum(sizes[: at % len(sizes)]))
    return elements.through(lambda pattern: pattern.through(places, rank), result.shape)


@of("cat")
def _cat(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    operands = call.args.get("tensors")
    if not isinstance(operands, (list, tuple)):
        return None
    parts = [(know.elements(o), tensor_fact(o)) for o in operands]
    return joined(parts, call.args.get("dim", 0), result.shape, result.dtype)


# ---- casts and choices ----


@of("to")
def _to(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    elements = know.elements(call.args.get("self"))
    if elements is None:
        return None
    if result.dtype == torch.bool and any(isinstance(leaf, Affine) for _, leaf in elements.pieces):
        return compared("ne", elements, uniform(constant(0, result.dim())), result)
    return cast_all(elements.pieces, result)


@of("where", "masked_fill", from_numbers=True)
def _where(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    names = ("condition", "self", "other") if call.op == "where" else ("mask", "value", "self")
    mask, yes, no = (operand(know, call.args.get(name), result) for name in names)
    mask_fact = tensor_fact(call.args.get(names[0]))
    if mask_fact is None or mask_fact.dtype != torch.bool:
        return None
    if mask is None:
        if yes is None or no is None:
            return None
        first, second = (None if e.only is None else cast(e.only, result.dtype, result.shape) for e in (yes, no))
        return uniform(first) if first is not None and second is not None and same_leaf(first, second) else None
    keep = mask.truth(result.shape)
    drop = opposite(keep, result.shape)
    if (yes is None and not keep.never) or (no is None and not drop.never):
        return None
    parts = [(both(keep, where, result.shape), leaf) for where, leaf in (yes.pieces if yes else ())]
    parts += [(both(drop, where, result.shape), leaf) for where, leaf in (no.pieces if no else ())]
    return cast_all([(where, leaf) for where, leaf in parts if not where.never], result)


@of("tril", "triu")
def _triangle(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
    elements = know.elements(call.args.get("self"))
    diagonal = number(call.args.get("diagonal", 0))
    if elements is None or result.dim() < 2:
        return None
    rank = result.dim()
    above = (index(rank - 1, rank) - index(rank - 2, rank)).plus(-diagonal)
    keep = at_least_zero(above if call.op == "triu" else above.times(-1), result.shape)
    zero = leaf_of(torch.zeros((), dtype=result.dtype), rank)
    parts = [(both(keep, where, result.shape), leaf) for where, leaf in elements.pieces]
    return pieces([*parts, (opposite(keep, result.shape), zero)], result.shape)
