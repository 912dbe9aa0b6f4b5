"""`remove_fsdp2_unsharded_param_graph_input_usage`: reads gathered parameters without a copy into an input.

A graph of FSDP2 has the unsharded parameter as an input without memory. Before the parameter is used, the graph gives
it memory and copies the result of the all-gather into it; afterwards it takes the memory away:

    resize_storage_bytes_(p, full); fsdp.copy_(p, gathered); y = f(p); resize_storage_bytes_(p, 0)

The copy and the second buffer are unnecessary if all uses of the parameter are between the two resizes. Releases
of torch that trace the hooks of `fully_shard` write such graphs; torch 2.13 does not trace them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..communication.example_group import all_gather, wait
from ..ir.facts import difference, fact, tensor_fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import Edit, Erase, ReadInstead, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
LAYER = ("f32[3, 8]", "f32[8, 8]", "f32[4, 8]")
RESIZE, COPY = "inductor::resize_storage_bytes_", "fsdp::copy_"


def _resize(parameter: Any, size: int) -> None:
    torch.ops.inductor.resize_storage_bytes_(parameter, size)


def _fill(parameter: Any, shard: Any) -> None:
    """Allocates the memory of an FSDP2 parameter, and copies the all-gathered shards of all ranks into it."""
    import torch.distributed.fsdp  # noqa: F401  # has the operator

    _resize(parameter, parameter.numel() * parameter.element_size())
    torch.ops.fsdp.copy_(parameter, wait(all_gather(shard)))


def _layer(x: Any, parameter: Any, shard: Any) -> Any:
    _fill(parameter, shard)
    y = x @ parameter.t()
    _resize(parameter, 0)
    return y.relu()


def _gathered_twice(x: Any, parameter: Any, shard: Any) -> Any:
    y = _layer(x, parameter, shard)
    return _layer(y, parameter, shard * 2)


def _used_while_free(x: Any, parameter: Any, shard: Any) -> Any:
    view = parameter.t()
    _fill(parameter, shard)
    y = x @ view
    _resize(parameter, 0)
    return y


def _freed_elsewhere(x: Any, parameter: Any, shard: Any) -> Any:
    _fill(parameter, shard)
    return x @ parameter.t()


def _view_of_the_first(x: Any, parameter: Any, shard: Any) -> Any:
    _fill(parameter, shard)
    view = parameter.t()
    y = x @ view
    _resize(parameter, 0)
    _fill(parameter, shard * 2)
    z = y @ view
    _resize(parameter, 0)
    return z


def _other_dtype(x: Any, parameter: Any, shard: Any) -> Any:
    _fill(parameter, shard.to(torch.bfloat16))
    y = x @ parameter.t()
    _resize(parameter, 0)
    return y


def _other_layout(x: Any, parameter: Any, shard: Any) -> Any:
    import torch.distributed.fsdp  # noqa: F401

    _resize(parameter, parameter.numel() * parameter.element_size())
    torch.ops.fsdp.copy_(parameter, wait(all_gather(shard)).t())
    y = x @ parameter.t()
    _resize(parameter, 0)
    return y


@dataclass
class Phase:
    """One interval of the graph in which the parameter has memory."""

    resize: Node
    copy: Node | None = None
    uses: list[Node] = field(default_factory=list)
    """Nodes that read the parameter itself."""
    last: Node | None = None
    """The last node that reads it, or a view of it."""
    free: Node | None = None

    @property
    def source(self) -> Node:
        assert self.copy is not None
        return self.copy.args[1]  # type: ignore[return-value]


def phases(program: Program, parameter: Node) -> list[Phase] | Refusal:
    """The intervals in which an input has memory, or the reason why it is not just filled, read and freed."""
    aliasing = program.aliasing
    spans: list[Phase] = []
    current: Phase | None = None
    born: dict[Node, Phase | None] = {parameter: None}
    """The parameter and its views, with the phase in which each view was taken."""
    waiting = set(parameter.users)
    while waiting:
        user = min(waiting)
        waiting.discard(user)
        name = _operator(user)
        if name == RESIZE and user.args[0] is parameter:
            if current is None and _is_full(parameter, user.args[1]):
                current = Phase(user)
                spans.append(current)
            elif current is not None and current.copy is not None and user.args[1] == 0:
                current.free, current = user, None
            else:
                return Refusal("{at} resizes the parameter neither to its full size nor to 0", at=user)
        elif name == COPY and user.args[0] is parameter and current is not None and current.copy is None:
            current.copy = user
        elif current is None or current.copy is None:
            return Refusal("{at} uses the parameter while the graph has not given it memory", at=user)
        elif user.op == "output" or any(operand in born for operand in aliasing.effects(user).writes):
            return Refusal("{at} writes or returns the parameter", at=user)
        elif any(born.get(operand, current) not in (None, current) for operand in user.all_input_nodes):
            return Refusal("{at} uses a view of the parameter taken before it was filled again", at=user)
        else:
            current.last = user
            if parameter in user.all_input_nodes:
                current.uses.append(user)
            if any(operand in born for operand in aliasing.effects(user).aliases):
                born[user] = current
                waiting.update(user.users)
    if current is not None:
        return Refusal("{at} gives the parameter memory that is not freed in this graph", at=current.resize)
    return spans


def _operator(node: Node) -> str:
    return node.target.name() if isinstance(node.target, _private.OpOverload) else ""


def _is_full(parameter: Node, size: Any) -> bool:
    tensor = tensor_fact(parameter)
    return tensor is not None and type(size) is int and size == tensor.numel() * tensor.element_size() and size > 0


class ReadGatheredParameter(Rule):
    """resize_(p, full); copy_(p, g); f(p); resize_(p, 0) -> f(g); resize_(p, 0)

    The last resize stays: the caller expects the parameter to have no memory after the graph.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for parameter in list(program.graph.find_nodes(op="placeholder")):
            copies = [user for user in parameter.users if _operator(user) == COPY and user.args[0] is parameter]
            if copies and any(_operator(user) == RESIZE for user in parameter.users):
                spans = phases(program, parameter)
                problem = spans if isinstance(spans, Refusal) else self._problem(program, parameter, spans)
                yield Match.at(program, min(copies), problem=problem, parameter=parameter, phases=spans)

    def _problem(self, program: Program, parameter: Node, spans: list[Phase]) -> Refusal | None:
        aliasing = program.aliasing
        for other in program.graph.find_nodes(op="placeholder"):
            if other is not parameter and aliasing.same(other, parameter):
                return Refusal("{at} shares memory with the parameter", at=other)
        for phase in spans:
            if problem := difference(fact(parameter), fact(phase.source)):
                return problem.blaming(phase.source)
            assert phase.copy is not None
            if phase.last is not None and (
                writer := aliasing.written_between([phase.source], phase.copy, phase.last)
            ):
                return Refusal("{at} writes the copied tensor while the parameter is in use", at=writer)
        return None

    def rewrite(self, op, m):
        parameter, spans = m.bindings["parameter"], m.bindings["phases"]
        edits: list[Edit] = [ReadInstead(parameter, phase.source, tuple(phase.uses)) for phase in spans if phase.uses]
        spent = [node for phase in spans for node in (phase.resize, phase.copy, phase.free)]
        return Together([*edits, Erase([node for node in spent if node is not spans[-1].free])])

    examples = [
        fires(_layer, *LAYER, **ATEN),
        fires(_gathered_twice, *LAYER, **ATEN),
        declines(_freed_elsewhere, *LAYER, because="not freed in this graph", **ATEN),
        declines(_used_while_free, *LAYER, because="has not given it memory", **ATEN),
        declines(_view_of_the_first, *LAYER, because="before it was filled again", **ATEN),
        declines(_other_dtype, *LAYER, because="dtype", **ATEN),
        declines(_other_layout, *LAYER, because="stride", **ATEN),
    ]


@dataclass(frozen=True)
class RemoveFsdp2UnshardedParamGraphInputUsage(Pass):
    """In traced graphs of FSDP2, reads gathered parameters from the all-gather, without a copy into an input."""

    name = "remove_fsdp2_unsharded_param_graph_input_usage"

    def rules(self) -> Sequence[Rule]:
        return (ReadGatheredParameter(),)
