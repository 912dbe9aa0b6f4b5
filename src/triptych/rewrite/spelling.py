"""How a call is written in its graph. The canonical spelling is what the emitter would insert; nothing is inserted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..ir.calls import Call, op_parameters
from ..ir.program import Program, Value
from .emit import Emitter
from .refusal import Refused


@dataclass(frozen=True)
class Spelling:
    """The four fields of a node that define its call."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(node: Node) -> Spelling:
        return Spelling(node.op, node.target, node.args, node.kwargs)

    def same_function(self, other: Spelling) -> bool:
        return (self.kind, self.target) == (other.kind, other.target)

    def same_arguments(self, other: Spelling) -> bool:
        """Are the arguments written identically? A list differs from a tuple, and the order of keywords counts."""
        return _alike((self.args, self.kwargs), (other.args, other.kwargs))


def canonical_spelling(program: Program, node: Node, call: Call) -> Spelling | None:
    """The way in which the emitter writes this call; None for operations that it has no name for, and for calls that
    were not read completely because facts are missing."""
    known = op_parameters(call.op)
    if not known or not call.args.keys() <= known.keys():
        return None
    speller = _Speller(program, node)
    getattr(speller, call.op)(**call.args)
    return speller.spelling


class _Speller(Emitter):
    """An emitter that records the node it would create."""

    def __init__(self, program: Program, node: Node) -> None:
        super().__init__(program, node, rule="")
        self.spelling: Spelling | None = None

    def node(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None
    ) -> Value:
        if target == "size":
            raise Refused("a size would have to be computed first")
        if self.spelling is not None:
            raise Refused("takes more than one operation to write")
        self.spelling = Spelling(kind, target, args, kwargs)
        return Value(self.program, self.anchor)

    def aten(self, name: str, bound: dict[str, Any]) -> Value:
        """torch has no function of that name: the node keeps the spelling that it has."""
        return Value(self.program, self.anchor)


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        same_kind = isinstance(left, list) == isinstance(right, list)
        if not same_kind or len(left) != len(right):
            return False
        return all(_alike(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(_alike(left[k], right[k]) for k in left)
    if isinstance(left, Node) or isinstance(right, Node):
        return left is right
    return type(left) is type(right) and bool(left == right)
