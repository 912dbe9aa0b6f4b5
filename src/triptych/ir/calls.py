"""Reading a node: which operation it is, whatever its spelling, with every argument under its name.

`torch.sum(x, axis=-1)`, `x.sum(-1)` and `aten.sum.dim_IntList(x, [1])` all read as `sum(self=x, dim=[1])`.
Arguments equal to their default are left out, and dims are counted from the front where the rank is known.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .canonical import CANONICAL
from .facts import fact, fixed_number, settled, tensor_fact
from .modules import module_call
from .operations import OPERATIONS, operation
from .schema import (
    REQUIRED,
    Signature,
    fixed_parameters,
    list_parameters,
    overloads,
    parameters,
    same_constant,
    signature,
)

log = logging.getLogger("triptych")


@dataclass(slots=True)
class Call:
    """An operation by name and its arguments by parameter; arguments equal to their default are left out.

    Nobody changes one. It is not declared frozen, because a frozen object takes four times as long to create, and one
    is created for every node.
    """

    op: str
    args: dict[str, Any]
    mutates: bool = False

    def get(self, param: str) -> Any:
        """The argument, or its default if it was left out."""
        if param in self.args:
            return self.args[param]
        default = op_parameters(self.op).get(param)
        return None if default is REQUIRED else default


OPERATORS: dict[Any, str] = {
    **{row.operator: name for name, row in OPERATIONS.items() if row.operator is not None},
    **{row.in_place_operator: f"{name}_" for name, row in OPERATIONS.items() if row.in_place_operator is not None},
    builtins.pow: "pow",
    builtins.abs: "abs",
}

SPECIAL_METHODS = {function.__name__.strip("_"): name for function, name in OPERATORS.items()}
"""`x.__mod__(y)` calls what `x % y` does, and `x.__iadd__(y)` what `x += y` does."""

REFLECTED = {
    f"r{row.operator.__name__.strip('_')}": name for name, row in OPERATIONS.items() if row.operator is not None
}
"""`1 - x` as a method of x, `x.__rsub__(1)`: the operands are swapped."""

PYTHON_RENAMES = {"training": "train", "split_size_or_sections": "split_size", "tensor": "self"}
"""Parameters of functions written in Python that the schema calls by another name."""


def read(node: Node) -> Call | None:
    """The call a node makes; None for placeholders, attributes, outputs and calls that are not understood.

    It never raises, because graphs are also read outside of passes, where no one would catch the error. A symbol that
    tracing has specialised is read as its number. A call whose dim (or another argument that the schema wants as a
    plain number) is still a node counts as not understood.
    """
    try:
        return _read(node, *_settled_arguments(node))
    except Exception as error:
        log.warning("%s could not be read (%s: %s)", node.format_node(), type(error).__name__, error)
        return None


def _read(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    if node.op == "call_function":
        target = node.target
        if isinstance(target, _private.OpOverloadPacket):
            if not of_a_library(target):
                return _bind(node, target.__name__, args, kwargs)
            target = overload_called(node)
        if isinstance(target, _private.OpOverload):
            sig = signature(target)
            bound = sig.bind(args, kwargs, check=False)
            if bound is None:
                return None
            if _is_canonical(sig):
                return Call(sig.name, bound, sig.mutates)
            return _canonical(node, sig.name, bound, sig.mutates)
        if target in OPERATORS:
            return _operator(node, OPERATORS[target], args, kwargs)
        if isinstance(target, _private.HigherOrderOperator):
            return Call(f"higher_order.{target}", {"operands": args, **kwargs}, mutates=False)
        return _function(node, target, args, kwargs)
    if node.op == "call_method":
        return _method(node, str(node.target), args, kwargs)
    if node.op == "call_module" and (called := module_call(node)) is not None:
        return Call(*called)
    return None


def _settled_arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, where nodes whose symbols tracing has specialised are replaced by their numbers."""
    for operand in node.all_input_nodes:
        if tensor_fact(operand) is None and settled(operand) is not operand:
            return torch.fx.map_arg((node.args, node.kwargs), settled)
    return node.args, node.kwargs


def of_a_library(target: Any) -> bool:
    """`torch.ops.mine.relu`: an operator that is not ATen's, whatever its name."""
    return isinstance(target, _private.OpOverloadPacket) and not target._qualified_op_name.startswith("aten::")


def overload_called(node: Node) -> Any:
    """The overload that a call of a library's operator takes; None if none fits."""
    packet: Any = node.target
    named = (getattr(packet, name) for name in packet.overloads())
    return next((o for o in named if signature(o).bind(node.args, node.kwargs) is not None), None)


def _may_be_tensor(value: Any) -> bool:
    return isinstance(value, Node) and (fact(value) is None or tensor_fact(value) is not None)


def _is_number(value: Any) -> bool:
    return not _may_be_tensor(value) and not isinstance(value, torch.Tensor)


def _operator(node: Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    if name in ("getitem", "setitem", "getattr"):
        bound = dict(zip(("self", "index", "value"), args))
        return _canonical(node, name, bound, mutates=name == "setitem")
    if name.endswith("_") and not _may_be_tensor(args[0]):
        name = name[:-1]  # `+=` on a number makes a new number
    if name == "div" and _is_number(args[0]) and not _is_number(args[1]):
        return Call("rdiv", {"self": args[1], "other": args[0]})
    return _bind(node, name, args, kwargs)


def _method(node: Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name in ("rdiv", "rtruediv"):
            return Call("rdiv", {"self": args[0], "other": args[1]})
        if name in REFLECTED and len(args) == 2:
            return _bind(node, REFLECTED[name], tuple(reversed(args)), kwargs)
        name = SPECIAL_METHODS.get(name, name)
        if name in ("getitem", "setitem"):
            return _operator(node, name, args, kwargs)
    order = operation(name).method_order
    if order is not None and len(args) == len(order):
        return _bind(node, name, tuple(args[i] for i in order), kwargs)
    return _bind(node, name, args, kwargs) or _python_method(name, args, kwargs)


def _python_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """A method whose Python signature accepts more than its operator's schema: `x.norm(dim=1)` has a default for p."""
    target = getattr(torch.Tensor, name, None)
    sig = _python_signature(target) if inspect.isfunction(target) else None
    try:
        given = None if sig is None else sig.bind(*args, **kwargs)
    except TypeError:
        return None
    return None if given is None else Call(f"{target.__module__}.{name}", dict(given.arguments), name.endswith("_"))


def is_torch_function(target: Any) -> bool:
    """A function of torch itself, not of a package whose name begins like it."""
    module = getattr(target, "__module__", None) or ""
    if isinstance(target, type(torch.Tensor.add)):
        return True
    return module.partition(".")[0] == "torch" or getattr(torch, getattr(target, "__name__", ""), None) is target


def _function(node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    name = getattr(target, "__name__", "")
    if not name or not is_torch_function(target):
        return None
    if inspect.isfunction(target):
        return _python_function(node, target, name, args, kwargs)
    return _bind(node, name, args, kwargs)


@functools.cache
def _python_signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _python_function(
    node: Node, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """Functions such as `F.relu(x, inplace=True)`, whose Python signature is not the schema's."""
    sig = _python_signature(target)
    if sig is None:
        return _bind(node, name, args, kwargs)
    if any(p.kind is p.VAR_POSITIONAL for p in sig.parameters.values()):
        return _bind(node, name, args, kwargs)
    try:
        given = sig.bind(*args, **kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    if given.arguments.get("out") is not None:
        return Call(f"{name}.out", dict(given.arguments), mutates=True)
    known = parameters(name)
    idle = "dropout" in name and given.arguments.get("training") is False  # writes nothing even if `inplace`
    in_place = bool(given.arguments.get("inplace", False)) and not idle
    mutates = in_place or name.endswith("_")
    bound: dict[str, Any] = {}
    for param, value in given.arguments.items():
        if param in ("_stacklevel", "inplace"):
            continue
        key = param if param in known else PYTHON_RENAMES.get(param, param)
        if key not in known and param == "input" and known:
            key = next(iter(known))
        if key not in known:
            return _canonical(node, f"{target.__module__}.{name}", dict(given.arguments), mutates)
        if not (value is None and known[key] is REQUIRED) and value != known[key]:
            bound[key] = value
    if not known:
        return _canonical(node, f"{target.__module__}.{name}", dict(given.arguments), mutates)
    return _canonical(node, name + "_" * in_place, bound, mutates)


def _bind(node: Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    if "out" in kwargs and kwargs["out"] is not None:
        return Call(f"{name}.out", {"operands": args, **kwargs}, mutates=True)
    in_place = name.endswith("_") and not name.endswith("__")
    candidates = overloads(name)
    if not candidates:
        if name in CANONICAL:  # a spelling torch has only as a method: `x.float()`, `x.T`
            return _canonical(node, name, {"self": args[0] if args else None, "rest": args[1:], **kwargs}, in_place)
        return Call(name, {"operands": args, **kwargs}, mutates=in_place)
    for number_first in (False, True):
        for sig in candidates:
            bound = sig.bind(args, kwargs, check=not number_first)
            if bound is not None:
                return _canonical(node, sig.name, bound, sig.mutates)
    if name in ("size", "stride") and len(args) == 1:  # without a dim; the schemas take one dim
        return Call(name, {"self": args[0], **kwargs})
    return None


@functools.cache
def _is_canonical(sig: Signature) -> bool:
    """Are the arguments of every call of this overload in canonical form once they are bound to its parameters?"""
    adapted = {"dim", "dims"} | fixed_parameters(sig.name) | list_parameters(sig.name)
    return sig.name not in CANONICAL and adapted.isdisjoint(sig.by_name)


def _canonical(node: Node, name: str, args: dict[str, Any], mutates: bool) -> Call | None:
    known = _with_fixed_numbers(name, args)
    if known is None:
        return None
    args = _with_lists_of_sizes(name, known)
    adapt = CANONICAL.get(name)
    if adapt is not None and not mutates:
        adapted = adapt(node, args)
        if adapted is not None:
            name, args = adapted
    return Call(name, _count_dims_from_front(node, name, args), mutates)


def _with_fixed_numbers(name: str, args: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments, with a number wherever the schema wants one and takes no symbol: a dim, `keepdim`, `eps`.

    None if one of these numbers is not known: then the call is not read at all, so rules can rely on a dim being an
    int.
    """
    wanted = fixed_parameters(name)
    if wanted.isdisjoint(args):
        return args
    numbers = {key: fixed_number(args[key]) for key in wanted if _has_node(args.get(key))}
    if not numbers:
        return args
    if any(map(_has_node, numbers.values())):
        return None
    defaults = parameters(name)
    left_out = {key for key, value in numbers.items() if same_constant(value, defaults[key])}
    return {key: numbers.get(key, value) for key, value in args.items() if key not in left_out}


def _with_lists_of_sizes(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with a list of numbers wherever the schema wants one and a single node computes all of them.

    `x.expand(y.size())` reads as `expand(self=x, size=[s0, 3])`, so rules can rely on a list of sizes being a list. A
    node of which nothing is known stays, since it may also be a single number.
    """
    wanted = list_parameters(name)
    if wanted.isdisjoint(args):
        return args
    sizes = {key: fact(args[key]) for key in wanted if isinstance(args.get(key), Node)}
    lists = {key: list(value) for key, value in sizes.items() if isinstance(value, (list, tuple))}
    return {**args, **lists} if lists else args


def _has_node(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, (list, tuple)) and any(map(_has_node, value)))


def _count_dims_from_front(node: Node, name: str, args: dict[str, Any]) -> dict[str, Any]:
    key = "dim" if "dim" in args else "dims" if "dims" in args else None
    if key is None:
        return args
    value = args[key]
    if not isinstance(value, (int, list, tuple)):
        return args
    default = op_parameters(name).get(key)
    counted_from_back = isinstance(default, int) and default < 0
    if not counted_from_back and not _any_negative(value):
        return args
    rank = _rank_of_dims(node, name, args)
    if rank is None:
        return args
    front = value % rank if isinstance(value, int) else [d + rank if d < 0 else d for d in value]
    if counted_from_back and front == default + rank:  # type: ignore[operator]
        return {k: v for k, v in args.items() if k != key}
    return {**args, key: front}


def _any_negative(value: Any) -> bool:
    return any(isinstance(d, int) and d < 0 for d in (value if isinstance(value, (list, tuple)) else (value,)))


def _rank_of_dims(node: Node, name: str, args: dict[str, Any]) -> int | None:
    """The rank that dims refer to. For `cat`, `stack` and `unsqueeze` it is that of the result: they may add a dim,
    and `cat` skips operands that are empty vectors."""
    known = tensor_fact(node if name in ("cat", "stack", "unsqueeze") else args.get("self", args.get("input")))
    return None if known is None else max(known.dim(), 1)


@functools.cache
def op_parameters(name: str) -> dict[str, Any]:
    """Parameters of a canonical operation, in order, with their defaults."""
    own = operation(name).parameters
    return dict(own) if own else parameters(name) or _qualified_parameters(name)


def _qualified_parameters(name: str) -> dict[str, Any]:
    namespace, _, rest = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), rest, None) if rest else None
    if not isinstance(packet, _private.OpOverloadPacket):  # nothing of that name, or a higher-order operator
        return {}
    merged: dict[str, Any] = {}
    for overload_name in packet.overloads():
        for param in signature(getattr(packet, overload_name)).params:
            merged.setdefault(param.name, param.default)
    return merged
