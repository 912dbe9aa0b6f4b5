"""How a call is written in its graph: what the emitter would put there, without putting it there."""

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
    """The four things that make a node call what it calls."""

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
        """Written alike: a list is not a tuple, and keywords stand in the same order."""
        return _alike((self.args, self.kwargs), (other.args, other.kwargs))


def canonical_spelling(program: Program, node: Node, call: Call) -> Spelling | None:
    """The one way in which the emitter writes this call; None for what it has no name for, and for calls that
    could not be read to the end for want of facts."""
    known = op_parameters(call.op)
    if not known or not call.args.keys() <= known.keys():
        return None
    speller = _Speller(program, node)
    getattr(speller, call.op)(**call.args)
    return speller.spelling


class _Speller(Emitter):
    """An emitter that notes the node it would make."""

    def __init__(self, program: Program, node: Node) -> None:
        super().__init__(program, node, rule="")
        self.spelling: Spelling | None = None

    def node(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        if target == "size":
            raise Refused("a size would have to be computed first")
        if self.spelling is not None:
            raise Refused("takes more than one operation to write")
        self.spelling = Spelling(kind, target, args, kwargs)
        return Value(self.program, self.anchor)

    def aten(self, name: str, bound: dict[str, Any]) -> Value:
        """No function of torch has the name: whatever the node calls is as good."""
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
