"""What is known about a value: shape, dtype, device, stride, storage; numbers may be symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from .. import _private
from .refusal import Refusal


def fact(node: Node) -> Any:
    """The fake value of a node, or None where nothing is known."""
    meta = node.meta
    if "val" in meta:
        return meta["val"]
    return meta.get("example_value")


def tensor_fact(node: Any) -> torch.Tensor | None:
    if not isinstance(node, Node):
        return None
    meta = node.meta
    value = meta["val"] if "val" in meta else meta.get("example_value")  # as `fact`, which is called too often
    return value if isinstance(value, torch.Tensor) else None


def tensor_of(node: Any) -> torch.Tensor:
    """The fact of a node that is known to be a tensor."""
    tensor = tensor_fact(node)
    assert tensor is not None, f"{node} is no tensor"
    return tensor


POLICY = "recompute"
"""Meta key by which the partitioner is told whether to save a node for the backward or to recompute it."""


def is_tangent(node: Node) -> bool:
    """A gradient that comes into a joint graph: what is computed from it belongs to the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def set_fact(node: Node, value: Any, key: str) -> None:
    node.meta[key] = value


def update_fact(node: Node, value: Any, key: str) -> None:
    """Replace a fact by one that was recomputed with gradients off; a value that required a gradient still does."""
    old = fact(node)
    for was, now in zip(*([v] if isinstance(v, torch.Tensor) else v or () for v in (old, value))):
        if isinstance(was, torch.Tensor) and was.requires_grad and now.is_leaf:
            now.requires_grad_()
    set_fact(node, value, key)


def known(condition: Any) -> bool:
    """True only if the condition holds for every size the program was compiled for; adds no guard."""
    if isinstance(condition, bool):
        return condition
    return statically_known_true(condition)


def known_equal(left: Any, right: Any) -> bool:
    """Two numbers or sequences of numbers that are provably equal."""
    if type(left) is int and type(right) is int:
        return left == right
    if isinstance(left, (list, tuple, torch.Size)):
        if not isinstance(right, (list, tuple, torch.Size)) or len(left) != len(right):
            return False
        for a, b in zip(left, right):
            if type(a) is int and type(b) is int:
                if a != b:
                    return False
            elif not known_equal(a, b):
                return False
        return True
    left, right = number(left), number(right)
    if left is None or right is None:
        return left is right
    return known(left == right)


def number(value: Any) -> Any:
    """The number or symbol of a size; of a node that computes a size, its fact."""
    return fact(value) if isinstance(value, Node) else value


def settled(value: Any) -> Any:
    """The constant to which tracing has specialised a symbol (with a guard); anything else is returned unchanged."""
    symbol = fact(value) if isinstance(value, Node) else value
    if isinstance(symbol, torch.Tensor):  # most often
        return value
    constant = None
    if isinstance(symbol, torch.SymInt):
        constant = symbol.node.maybe_as_int()
    elif isinstance(symbol, torch.SymFloat):
        constant = symbol.node.maybe_as_float()
    elif isinstance(symbol, torch.SymBool):
        constant = symbol.node.maybe_as_bool()
    return value if constant is None else constant


def fixed_number(value: Any) -> Any:
    """Like `settled`, but also where guards fix an expression and not its symbols: `d % 3` is 1 after a guard on it."""
    if isinstance(value, (list, tuple)):
        return [fixed_number(v) for v in value]
    value = settled(value)
    symbol = number(value)
    if isinstance(symbol, torch.SymBool):
        return True if known(symbol) else False if known(torch.sym_not(symbol)) else value
    if isinstance(symbol, (torch.SymInt, torch.SymFloat)) and symbol.node.has_hint():
        hint = symbol.node.hint
        return hint if known(symbol == hint) else value
    return value


def is_static(sizes: Iterable[Any]) -> bool:
    return all(isinstance(s, int) for s in sizes)


def numel(shape: Sequence[Any]) -> Any:
    total: Any = 1
    for size in shape:
        total = total * size
    return total


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Is the tensor provably contiguous? Adds no guard, and does not fail on sizes that depend on data."""
    if is_static(tensor.shape):
        return tensor.is_contiguous()
    return known_equal(tensor.stride(), [numel(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())])


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Do both have their elements at the same offsets? Strides of size-1 dims do not count, unless a convolution would
    choose its memory format by them. Values computed from the two may still have different strides: see `same_strides`.
    """
    if left.layout != right.layout or left.layout != torch.strided:
        return left.layout == right.layout
    exact = True
    for size, a, b in zip(left.shape, left.stride(), right.stride()):
        if not known_equal(a, b):
            if not known(size == 1):
                return False
            exact = False
    if exact or left.dim() not in (4, 5):
        return True
    return is_static(left.shape) and _private.memory_format_of(left) == _private.memory_format_of(right)


def same_strides(left: Any, right: Any) -> bool:
    """Equal strides in every dim. Pointwise operations order the dims of their result by the strides of the
    operands, and the strides of size-1 dims count there: only with equal strides are all later values laid out alike.
    """
    if isinstance(left, (list, tuple)):
        return all(same_strides(a, b) for a, b in zip(left, right))
    if not isinstance(left, torch.Tensor) or left.layout != torch.strided or right.layout != torch.strided:
        return True
    return known_equal(left.stride(), right.stride())


def same_bits_read(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Are both, or is neither, a view that lazily conjugates or negates its elements? `view_as_real` and `view(dtype)`
    refuse such views."""
    return left.is_conj() == right.is_conj() and left.is_neg() == right.is_neg()


def interchangeable(left: Any, right: Any) -> bool:
    """Can one tensor replace the other? `difference` says why not; this function is faster and called more often."""
    return (
        isinstance(left, torch.Tensor)
        and isinstance(right, torch.Tensor)
        and left.dim() == right.dim()
        and left.dtype == right.dtype
        and known_equal(left.shape, right.shape)
        and left.device == right.device
        and same_bits_read(left, right)
        and same_layout(left, right)
    )


def difference(old: Any, new: Any, strides: bool = True) -> Refusal | None:
    """Why `new` cannot replace `old`; None if it can."""
    if isinstance(old, (list, tuple)):
        if not isinstance(new, (list, tuple)) or len(old) != len(new):
            return Refusal("the number of results would change")
        return next((d for a, b in zip(old, new) if (d := difference(a, b, strides))), None)
    if not isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor):
            return Refusal("a tensor would replace a number")
        return None if known_equal(old, new) else _would_become("", old, new)
    if not isinstance(new, torch.Tensor):
        return Refusal("a number would replace a tensor")
    if old.dtype != new.dtype:
        return _would_become("dtype ", old.dtype, new.dtype)
    if old.device != new.device:
        return _would_become("device ", old.device, new.device)
    if not known_equal(old.shape, new.shape):
        return _would_become("shape ", old.shape, new.shape)
    if not same_bits_read(old, new):
        return Refusal("only one of the two is a lazily conjugated or negated view")
    if strides and not same_layout(old, new):
        return _would_become("stride ", old.stride(), new.stride())
    return None


def _would_become(what: str, old: Any, new: Any) -> Refusal:
    return Refusal(f"{what}{{wanted}} would become {{found}}", wanted=old, found=new)


def sizes_from_data(value: Any, operands: Any) -> bool:
    """Does a value have sizes or numbers that depend on data, and that none of its operands has? Every computation
    gives them new symbols, which cannot be compared with the old ones."""
    return bool(_unbacked(value) - _unbacked(operands))


def gives_symbols(node: Node) -> bool:
    """Does the node introduce an unbacked symbol for a size or number that depends on data, as `nonzero` and `item`
    do?"""
    return bool(node.meta.get("unbacked_bindings"))


def symbols_would_merge(was: Node, now: Node) -> Refusal | None:
    """Why the users of `was` cannot read `now`, which has the same elements; None if they can.

    `nonzero(x)` and `nonzero(x.clone())` introduce one unbacked symbol each. A fake tensor caches the symbols that
    were computed from it. If both calls read the same operand, they get the same symbol when the graph is traced
    again, while the sizes of other values still use two.
    """
    reader = next(filter(gives_symbols, was.users), None)
    other = next((user for user in now.users if user is not reader and gives_symbols(user)), None) if reader else None
    if reader is None or other is None:
        return None
    sentence = "{at} and {found} each create a symbol for a size, and would read the same value"
    return Refusal(sentence, at=reader, found=other)


def _unbacked(value: Any) -> set[Any]:
    if isinstance(value, (list, tuple)):
        return set().union(*map(_unbacked, value))
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(free_unbacked_symbols(value))
    return set()


def storage(value: Any) -> int | None:
    """An identity of the memory behind a fake tensor, if there is one."""
    return _private.storage_id(value) if isinstance(value, torch.Tensor) else None


def sharing(value: Any, operands: Sequence[Any]) -> list[list[str]]:
    """For each result and each operand: are they the same tensor ("itself"), in the same memory ("shared") or neither
    ("apart")?"""
    results = value if isinstance(value, (list, tuple)) else (value,)
    tensors = [o for operand in operands for o in (operand if isinstance(operand, (list, tuple)) else (operand,))]

    def relation(left: Any, right: Any) -> str:
        if left is right:
            return "itself"
        place = storage(left)
        return "shared" if place is not None and place == storage(right) else "apart"

    return [[relation(m, g) for g in tensors if isinstance(g, torch.Tensor)] for m in results]
