"""`fuse_ddp_communication`: all-reduces of gradients in buckets, as DistributedDataParallel does it outside of a graph.

With `torch._dynamo.config.optimize_ddp = "python_reducer"` and compiled autograd, DistributedDataParallel puts one
all-reduce for each parameter into the backward graph. Each costs a start-up on every rank, whatever its size, and each
is waited for where it was started, so nothing is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..communication.example_group import OTHER, all_reduce, wait
from ..communication.placement import Order, placement
from ..communication.rule import DEFAULT_MEGABYTES, JoinCollectives
from ..ir.collectives import ALL_REDUCE, Collective, collectives
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.traits import is_pointwise, is_view
from ..rewrite.edits import Move, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}

COPIES = frozenset(("clone", "copy", "copy_", "getitem"))

MOST_USERS = 32
"""Search budget: how many nodes are looked at to see that a reduced value only leaves the graph."""


def _two_gradients(x: Any, dy: Any) -> Any:
    weight = wait(all_reduce(dy.t() @ x / 2))
    bias = wait(all_reduce(dy.sum(0) / 2))
    return weight, bias


def _two_dtypes(x: Any, dy: Any) -> Any:
    weight = wait(all_reduce(dy.t() @ x))
    bias = wait(all_reduce(dy.sum(0).to(torch.bfloat16)))
    return weight, bias


def _two_reductions(x: Any, dy: Any) -> Any:
    return wait(all_reduce(dy.t() @ x)), wait(all_reduce(dy.sum(0), "max"))


def _two_groups(x: Any, dy: Any) -> Any:
    return wait(all_reduce(dy.t() @ x)), wait(all_reduce(dy.sum(0), group=OTHER))


def _result_multiplied(x: Any, dy: Any) -> Any:
    whole = wait(all_reduce(dy))
    return whole.t() @ x, wait(all_reduce(x * 2))


def _one_gradient(x: Any, dy: Any) -> Any:
    weight = wait(all_reduce(dy.t() @ x)) / 2
    return weight, dy.relu()


def leaves_only(program: Program, value: Node) -> Node | None:
    """A node that computes more with a value than what is done to a gradient on its way out; None if there is none.

    Views, copies and pointwise operations may stand between the value and the end of the graph.
    """
    work, seen = [value], {value}
    while work:
        for user in work.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            call = program.call(user)
            is_light = call is not None and (is_pointwise(call.op) or is_view(call.op) or call.op in COPIES)
            if not is_light or len(seen) > MOST_USERS:
                return user
            work.append(user)
    return None


def _is_gradient(program: Program, collective: Collective) -> Refusal | None:
    for result in collective.waits:
        if (user := leaves_only(program, result)) is not None:
            return Refusal("{at} computes with the result", at=user)
    return None


@dataclass(frozen=True)
class FuseGradientAllReduces(JoinCollectives):
    """all_reduce(g), all_reduce(h), ... -> all_reduce(cat(g, h, ...)), up to the order of sums over ranks

    Gradients are joined in the order of the graph, up to a number of bytes, where process group, reduction, dtype and
    device are the same. A bucket is started as soon as its last gradient is there, and waited for at the end. What
    scales a gradient before or after it is reduced stays as it is.

    With more than two ranks the sum over ranks of an element may be taken in another order, as it is in buckets of
    DistributedDataParallel.
    """

    exact = False
    kind = ALL_REDUCE
    at_end = True

    def wanted(self, program: Program, collective: Collective) -> Refusal | None:
        return _is_gradient(program, collective)

    examples = [
        fires(_two_gradients, "f32[4, 8]", "f32[4, 2]", **ATEN),
        fires(_two_gradients, "f32[4, 8]", "f32[4, 2]", settings={"by": "coalesced"}, **ATEN),
        declines(_two_dtypes, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(_two_reductions, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(_two_groups, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(_result_multiplied, "f32[4, 8]", "f32[4, 2]", because="computes with the result", **ATEN),
        declines(_two_gradients, "f32[4, 8]", "f32[4, 2]", settings={"megabytes": 1e-6}, **ATEN),
        declines(_two_gradients, "f32[4, 8]", "f32[4, 2]", dynamic=True, because="sizes are symbols", **ATEN),
    ]


class WaitForGradientAtEnd(Rule):
    """wait(all_reduce(g)); f(x) -> all_reduce(g); f(x); wait(...), at the end of the graph

    For a bucket of one: a parameter that is larger than a bucket.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        reduced = [c for c in collectives(program.graph) if c.kind == ALL_REDUCE and c.wait is not None]
        gradients = [c for c in reduced if _is_gradient(program, c) is None]
        if not gradients:
            return
        waits = [wait for c in gradients for wait in c.waits]
        at_end = {*waits, *Order(program).dependents(waits)}
        for found in gradients:
            if all(node in at_end for node in _behind(found.waits[0])):
                continue
            place = placement(program, [found], at_end=True)
            if place is not None:
                yield Match.at(program, found.node, collective=found, place=place)

    def rewrite(self, op, m):
        found, place = m.bindings["collective"], m.bindings["place"]
        late = [found.wait, *place.after_wait]
        return Together([Move(node, place.wait) for node in late])

    examples = [
        fires(_one_gradient, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(lambda x, dy: wait(all_reduce(dy.t() @ x)) / 2, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(lambda x, dy: wait(all_reduce(dy)).t() @ x, "f32[4, 8]", "f32[4, 2]", **ATEN),
    ]


def _behind(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "output":
        yield node


@dataclass(frozen=True)
class FuseDdpCommunication(Pass):
    """Joins the all-reduces of gradients into buckets, starts each as early as it can be, and waits at the end.

    `megabytes` is the size of a bucket. `by` says how gradients are joined: "concatenation" copies them into one
    tensor, "coalesced" hands them to the process group as a list.
    """

    name = "fuse_ddp_communication"

    megabytes: float = DEFAULT_MEGABYTES
    by: str = "concatenation"

    def rules(self) -> Sequence[Rule]:
        return (FuseGradientAllReduces(self.megabytes, self.by), WaitForGradientAtEnd())
