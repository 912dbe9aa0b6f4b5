"""Signatures of ATen operations, and how the arguments of a call are bound to them."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .facts import fact

REQUIRED = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()

NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "self", "a": "self", "x1": "self", "x2": "other"}
"""Parameter names that the Python bindings accept besides those of the schema."""


@dataclass(frozen=True)
class Param:
    """One parameter of a schema: its kind is a coarse type, enough to tell overloads apart."""

    name: str
    kind: str
    optional: bool
    default: Any
    keyword_only: bool
    grows: int
    """The length to which a single number is expanded: 2 for `int[2]`; 0 where a single number is not accepted."""
    written: bool
    fixed: bool
    """The schema takes a number here (`int dim`) and no symbol (`SymInt start`): tracing specialises a symbol that is
    passed."""

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional or self.default is None
        if isinstance(value, Node):
            value = fact(value)
            if value is None:
                return True
        match self.kind:
            case "tensor":
                return isinstance(value, torch.Tensor)
            case "tensors" | "ints" | "list":
                return isinstance(value, (list, tuple, torch.Size)) or (self.grows > 0 and _is_int(value))
            case "int":
                return _is_int(value)
            case "float":
                return isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and value is not True
            case "number":
                return isinstance(value, (numbers.Number, torch.SymInt, torch.SymFloat, torch.SymBool))
            case "bool":
                return isinstance(value, (bool, torch.SymBool))
            case "dtype":
                return isinstance(value, torch.dtype)
            case "device":
                return isinstance(value, (torch.device, str, int))
            case "str":
                return isinstance(value, str)
        return not isinstance(value, (torch.dtype, torch.device, str)) or self.kind == "any"

    def may_be_left_out(self, value: Any) -> bool:
        """Does a call mean the same without this argument?"""
        if value is None and self.optional and self.default is REQUIRED:
            return True
        return same_constant(value, self.default)

    def plain(self, value: Any) -> Any:
        """The value with lists in one form: single numbers expanded to the wanted length, tuples converted to lists."""
        if self.grows and _is_int(value):
            return [value] * self.grows
        if self.kind in ("ints", "tensors") and isinstance(value, (list, tuple)):
            return list(value) * self.grows if self.grows and len(value) == 1 else list(value)
        return value


def _is_int(value: Any) -> bool:
    if isinstance(value, Node):
        return isinstance(fact(value), (int, torch.SymInt, type(None)))
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_element(param: Param, value: Any) -> bool:
    if param.kind == "tensors":
        return isinstance(value, Node) and isinstance(fact(value), torch.Tensor)
    return param.kind == "ints" and _is_int(value)


_KINDS = {
    "Tensor": "tensor", "List[Tensor]": "tensors", "List[Optional[Tensor]]": "list",
    "int": "int", "SymInt": "int", "List[int]": "ints", "List[SymInt]": "ints",
    "float": "float", "number": "number", "Scalar": "number", "bool": "bool", "SymBool": "bool",
    "ScalarType": "dtype", "Device": "device", "str": "str", "List[float]": "list", "List[bool]": "list",
}  # fmt: skip


def _is_fixed(kind: Any) -> bool:
    """Is the type a number, or a list of numbers, that cannot be a symbol? The printed type does not distinguish `int`
    from `SymInt`."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() in ("IntType", "FloatType", "BoolType")


def _param(argument: Any) -> Param:
    kind = str(argument.real_type)
    optional = kind.startswith("Optional[")
    if optional:
        kind = kind[len("Optional[") : -1]
    alias = argument.alias_info
    return Param(
        argument.name,
        _KINDS.get(kind, "any"),
        optional,
        argument.default_value if argument.has_default_value() else REQUIRED,
        argument.kwarg_only,
        (argument.N or 0) if kind.startswith("List") else 0,
        alias is not None and alias.is_write,
        _is_fixed(argument.real_type),
    )


class Signature:
    """The parameters of one overload."""

    def __init__(self, overload: _private.OpOverload) -> None:
        schema = overload._schema
        self.overload = overload
        self.name = schema.name.removeprefix("aten::").replace("::", ".")
        self.params = tuple(_param(a) for a in schema.arguments)
        self.by_name = {p.name: p for p in self.params}
        self._positional = [p for p in self.params if not p.keyword_only]
        self._required = [p.name for p in self.params if p.default is REQUIRED]
        self._fewest = max((i + 1 for i, p in enumerate(self.params) if p.default is REQUIRED), default=0)
        """This many arguments by position include all required ones."""
        self.mutates = schema.is_mutable

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], check: bool = True) -> dict[str, Any] | None:
        """Arguments by parameter name, defaults left out; None if the call does not fit."""
        bound: dict[str, Any] = {}
        positional = self._positional
        if not check and not kwargs and self._fewest <= len(args) <= len(positional):
            return self._plain(zip(positional, args))
        if len(args) > len(positional):
            gathered = self._gather_trailing(args, positional)
            if gathered is None:
                return None
            args = gathered
        for param, value in zip(positional, args):
            bound[param.name] = value
        for name, value in kwargs.items():
            key = self._parameter_called(name)
            if key is None or key in bound:
                return None
            bound[key] = value
        if not check:
            return self._without_defaults(bound)
        for param in self.params:
            if param.name not in bound:
                if param.default is REQUIRED:
                    return None
                continue
            value = bound[param.name]
            if not param.accepts(value):
                gathered = self._whole_tail(param, positional, args)
                if gathered is None:
                    return None
                bound[param.name] = gathered
                return bound if len(bound) == len(positional) else None
            bound[param.name] = value = param.plain(value)
            if param.may_be_left_out(value):
                del bound[param.name]
        return bound

    def _without_defaults(self, bound: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments in their plain form, without those that equal a default; None if a required one is missing."""
        for name in self._required:
            if name not in bound:
                return None
        return self._plain((self.by_name[name], value) for name, value in bound.items())

    def _plain(self, arguments: Iterable[tuple[Param, Any]]) -> dict[str, Any]:
        """The arguments in their plain form, without those that equal a default."""
        kept = {}
        for param, value in arguments:
            if isinstance(value, Node) and not param.grows:  # plain already, and equal to no default
                kept[param.name] = value
                continue
            value = param.plain(value)
            is_required = param.default is REQUIRED and value is not None  # then no default has to be compared
            if is_required or not param.may_be_left_out(value):
                kept[param.name] = value
        return kept

    def _parameter_called(self, name: str) -> str | None:
        if name in self.by_name:
            return name
        if name == "input" and "self" in self.by_name:
            return "self"
        alias = NUMPY_NAMES.get(name)
        return alias if alias in self.by_name else None

    def _gather_trailing(self, args: Sequence[Any], positional: list[Param]) -> list[Any] | None:
        """`x.view(2, 3)`, `einsum(how, a, b)`: the trailing arguments form the list that the last parameter wants."""
        fixed = len(positional) - 1
        rest = list(args[fixed:])
        fits = bool(positional) and all(_is_element(positional[-1], v) for v in rest)
        return [*args[:fixed], rest] if fits else None

    def _whole_tail(self, param: Param, positional: list[Param], args: Sequence[Any]) -> list[Any] | None:
        """`x.view(6)`: a single trailing argument forms the list."""
        if param is positional[-1] and len(args) == len(positional) and _is_element(param, args[-1]):
            return [args[-1]]
        return None


def same_constant(value: Any, default: Any) -> bool:
    """Equal as an argument: 1 and 1.0 are, True and 1 are not, nor -0.0 and 0.0."""
    if isinstance(value, Node) or default is REQUIRED:
        return False
    if value is None or default is None:
        return value is default
    if isinstance(value, bool) != isinstance(default, bool):
        return False
    if isinstance(value, (int, float)) and isinstance(default, (int, float)):
        return value == default and str(float(value)) == str(float(default))
    return type(value) is type(default) and bool(value == default)


def argument_key(value: Any) -> Any:
    """A hashable key that is equal for the same arguments; 1, 1.0 and True get three different keys."""
    kind = type(value)
    if kind is Node or kind is torch.dtype or kind is torch.device:
        return value
    if kind is int or kind is bool or kind is str:
        return (kind, value)
    if isinstance(value, (list, tuple)):
        return tuple([argument_key(v) for v in value])
    if isinstance(value, dict):
        return tuple([(k, argument_key(v)) for k, v in value.items()])
    if kind is slice:
        return ("slice", argument_key((value.start, value.stop, value.step)))
    return (kind, repr(value))


@functools.cache
def signature(overload: _private.OpOverload) -> Signature:
    return Signature(overload)


@functools.cache
def overloads(name: str) -> tuple[Signature, ...]:
    """The overloads of an ATen operation that a call can be bound to."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    signatures = []
    for overload_name in packet.overloads():
        overload = getattr(packet, overload_name)
        if not _private.is_dispatched(overload) or "Dimname" in str(overload._schema):
            continue
        sig = signature(overload)
        if not any(p.written and p.keyword_only for p in sig.params):  # `out=` variants are read as such elsewhere
            signatures.append(sig)
    return tuple(signatures)


@functools.cache
def parameters(name: str) -> dict[str, Any]:
    """All parameters of an operation over its overloads, with their defaults."""
    merged: dict[str, Any] = {}
    for sig in sorted(overloads(name), key=lambda s: -len(s.params)):
        for param in sig.params:
            default = None if param.default is REQUIRED and param.optional else param.default
            if merged.get(param.name, REQUIRED) is REQUIRED:
                merged[param.name] = default
    return merged


@functools.cache
def fixed_parameters(name: str) -> frozenset[str]:
    """Parameters of an operation that are numbers in every overload, and never symbols."""
    params = [p for s in overloads(name) for p in s.params]
    return frozenset(p.name for p in params if p.fixed) - {p.name for p in params if not p.fixed}


@functools.cache
def list_parameters(name: str) -> frozenset[str]:
    """Parameters of an operation that take a list of numbers, in some overload."""
    return frozenset(p.name for s in overloads(name) for p in s.params if p.kind == "ints")


@functools.cache
def keyword_only(name: str) -> frozenset[str]:
    """Parameters of an operation that no call may give by position."""
    return frozenset(p.name for s in overloads(name) for p in s.params if p.keyword_only)


@functools.cache
def packet_tags(name: str) -> frozenset[str]:
    return frozenset(str(t).rpartition(".")[2] for s in overloads(name) for t in s.overload.tags)
