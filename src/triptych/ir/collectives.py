"""Reading functional collectives: `torch.ops._c10d_functional.all_reduce(x, "sum", group)` and its like.

Such an operator starts the communication and returns at once; `wait_tensor` returns the same tensor when the data has
arrived. Nothing else may read the result before that, and the operand may be read until then. Everything that asks
which node is a collective, of which process group, with how many ranks and which reduction, asks this module.

Only groups that are given by name are read: the name is the same on all ranks. Collectives of other kinds (broadcast,
all-to-all, those of the autograd namespace, and those that write their operand) are not read. For passes they are
operations that no node may be moved across.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .effects import SYMMETRIC_MEMORY
from .facts import is_static, numel, tensor_fact

NAMESPACE = "_c10d_functional"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
KINDS = {
    "all_reduce": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
}
"""What each operator does, by its name; every one has a form for several tensors, `<name>_coalesced`."""
COALESCED = "_coalesced"


@dataclass(frozen=True)
class Collective:
    """One collective of a graph, over one tensor or, coalesced, over several."""

    node: Node
    kind: str
    operands: tuple[Node, ...]
    group: str
    """The name of the process group."""
    ranks: int | None
    """How many ranks the group has; the call of an all-reduce does not say it."""
    reduction: str
    """`sum`, `avg`, `max` and so on; empty for an all-gather, which reduces nothing."""
    is_coalesced: bool = False

    @property
    def results(self) -> tuple[Node, ...]:
        """The nodes of its results: the node itself, or the `getitem` nodes of a coalesced collective."""
        if not self.is_coalesced:
            return (self.node,)
        return tuple(sorted(u for u in self.node.users if u.target is operator.getitem))

    @property
    def waits(self) -> tuple[Node, ...]:
        return tuple(user for result in self.results for user in result.users if is_wait(user))

    @property
    def wait(self) -> Node | None:
        """The wait of a collective over one tensor, if the result has no other user."""
        users = list(self.node.users)
        return users[0] if not self.is_coalesced and len(users) == 1 and is_wait(users[0]) else None

    def like(self) -> tuple[Any, ...]:
        """A key that is equal for collectives that can be combined into one over more data."""
        tensor = tensor_fact(self.operands[0])
        dtype, device = (tensor.dtype, tensor.device) if tensor is not None else (None, None)
        return (self.kind, self.group, self.ranks, self.reduction, dtype, device)

    def signature(self) -> str:
        """The collective as text that is the same on every rank which runs the same one."""
        return f"{self.kind}({_tensors(self.operands)}) {self.reduction} over {self.group}".replace("  ", " ")


def collective(node: Node) -> Collective | None:
    """The collective that a node starts, if it is one we read."""
    target = node.target
    if not isinstance(target, _private.OpOverload) or not target.name().startswith(f"{NAMESPACE}::"):
        return None
    name = target.name().partition("::")[2].partition(".")[0]
    kind = KINDS.get(name.removesuffix(COALESCED))
    names = [a.name for a in target._schema.arguments]
    arguments = {**dict(zip(names, node.args)), **node.kwargs}
    operands = arguments.get("inputs", [arguments.get("input")])
    group = arguments.get("group_name")
    if kind is None or not isinstance(group, str) or not all(isinstance(o, Node) for o in operands):
        return None
    ranks, reduction = arguments.get("group_size"), str(arguments.get("reduce_op", ""))
    return Collective(node, kind, tuple(operands), group, ranks, reduction, name.endswith(COALESCED))


def collectives(graph: torch.fx.Graph) -> Iterator[Collective]:
    """The collectives of a graph, in its order."""
    return (communication for node in graph.nodes if (communication := collective(node)) is not None)


def communications(graph: torch.fx.Graph) -> Iterator[tuple[str, str]]:
    """Every communication of a graph, in order, as its process group and a text that is the same on every rank: all
    ranks must run the same ones in the same order. Operators of symmetric memory, which compute and communicate, are
    included."""
    for node in graph.nodes:
        if (communication := collective(node)) is not None:
            yield communication.group, communication.signature()
        elif is_fused(node):
            names = [argument.name for argument in node.target._schema.arguments]
            group = {**dict(zip(names, node.args)), **node.kwargs}.get("group_name")
            if isinstance(group, str):
                operator_name = node.target._schema.name.partition("::")[2]
                yield group, f"{operator_name}({_tensors(node.all_input_nodes)}) over {group}"


def is_fused(node: Node) -> bool:
    """Does a node call an operator that computes while it communicates?"""
    return isinstance(node.target, _private.OpOverload) and node.target.namespace == SYMMETRIC_MEMORY


def _tensors(operands: Iterable[Node]) -> str:
    facts = [tensor_fact(operand) for operand in operands]
    return ", ".join("?" if t is None else f"{str(t.dtype)[6:]}{list(t.shape)}" for t in facts)


def is_wait(node: Node) -> bool:
    return isinstance(node.target, _private.OpOverload) and node.target.name() == f"{NAMESPACE}::wait_tensor"


def awaited(wait: Node) -> Collective | None:
    """The collective that a wait waits for."""
    result: Any = wait.args[0] if wait.args else None
    if isinstance(result, Node) and result.target is operator.getitem:
        result = result.args[0]
    return collective(result) if isinstance(result, Node) else None


def bytes_moved(tensor: torch.Tensor | None) -> int | None:
    """How many bytes a tensor has; None where sizes are symbolic, because they may differ between ranks."""
    if tensor is None or not is_static(tensor.shape):
        return None
    return int(numel(tensor.shape)) * tensor.element_size()


def operator_of(kind: str, coalesced: bool = False) -> Any:
    """The operator to call for a kind of collective."""
    name = next(name for name, its_kind in KINDS.items() if its_kind == kind)
    return getattr(getattr(torch.ops, NAMESPACE), name + (COALESCED if coalesced else "")).default


def wait_operator() -> Any:
    return getattr(torch.ops, NAMESPACE).wait_tensor.default
