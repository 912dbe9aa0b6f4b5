"""Values stacked along a new axis, and how they broadcast against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..ir.facts import numel
from ..ir.program import ATEN, Value
from ..rewrite.emit import Emitter


@dataclass(frozen=True)
class Stacked:
    """`value` has the members along `axis`; without an axis it is one value that all members share."""

    value: Value
    axis: int | None

    @property
    def member_rank(self) -> int:
        return self.value.rank - (self.axis is not None)

    @property
    def member_shape(self) -> list[Any]:
        return [s for d, s in enumerate(self.value.shape) if d != self.axis]

    def in_front(self, op: Emitter) -> Value:
        """The value with the members' axis first."""
        return move_axis(op, self.value, self.axis or 0, 0)


def move_axis(op: Emitter, value: Value, source: int, to: int) -> Value:
    if source == to:
        return value
    dims = [d for d in range(value.rank) if d != source]
    return op.permute(value, [*dims[:to], source, *dims[to:]])


def stack(op: Emitter, nodes: Sequence[Node]) -> Stacked:
    if op.program.dialect == ATEN:  # where AOTAutograd has decomposed `stack`
        return Stacked(op.cat([op.unsqueeze(node, 0) for node in nodes], dim=0), 0)
    return Stacked(op.stack(list(nodes), dim=0), 0)


def join(op: Emitter, nodes: Sequence[Node]) -> Value:
    """The weights concatenated along dim 0, for one operation."""
    return op.cat(list(nodes), dim=0)


def broadcast(op: Emitter, operand: Stacked, rank: int, axis: int) -> Value:
    """The operand in a shape that broadcasts against stacked members of this rank, with the members' axis at `axis`."""
    dims_behind = rank - axis
    if operand.axis is None:
        value, own_rank = operand.value, operand.value.rank
        return op.unsqueeze(value, own_rank - dims_behind) if own_rank > dims_behind else value
    value = operand.in_front(op)
    missing = rank - operand.member_rank
    if missing:
        count, *shape = value.shape
        value = op.reshape(value, [count, *[1] * missing, *shape])
    return move_axis(op, value, 0, axis)


def flat_rows(op: Emitter, operand: Stacked) -> tuple[Value, list[Any]]:
    """The operand as (members, rows, columns), and the sizes of the dims that were flattened into rows."""
    value = operand.in_front(op)
    count, *lead, columns = value.shape
    if len(lead) == 1:
        return value, lead
    return op.reshape(value, [count, numel(lead), columns]), lead
