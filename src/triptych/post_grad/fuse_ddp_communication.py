"""`fuse_ddp_communication`: joins all-reduces of gradients into buckets, as DistributedDataParallel does in eager.

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
from ..communication.placement import Order
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
"""Search budget: how many users of a reduced value to examine before assuming that the graph computes with it."""


def _two_gradients(x: Any, dy: Any) -> Any:
    weight = wait(all_reduce(dy.t() @ x / 2))
    bias = wait(all_reduce(dy.sum(0) / 2))
    return weight, bias


def _returned_as_they_are(first: Any, second: Any) -> Any:
    return wait(all_reduce(first)), wait(all_reduce(second))


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
    """None if the value only leaves the graph, as a gradient does; otherwise a node that computes more with it.

    Views, copies and pointwise operations may stand between the value and the output. If there are more than MOST_USERS
    of them, the search ends and the last node it visited is returned.
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


class WaitForGradientsAtEnd(Rule):
    """wait(all_reduce(g)); f(x) -> all_reduce(g); f(x); wait(...), at the end of the graph

    All waits move in one step, together with the operations on their results; all of these keep their order.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        reduced = [c for c in collectives(program.graph) if c.kind == ALL_REDUCE and not c.is_coalesced]
        waits = [c.wait for c in reduced if c.wait is not None and _is_gradient(program, c) is None]
        if not waits:
            return
        order = Order(program)
        *others, output = order.nodes
        behind = {*waits, *order.dependents(waits)}
        late = [node for node in others if node in behind]
        if others[-len(late) :] != late:
            yield Match.at(program, waits[0], late=late, output=output)

    def rewrite(self, op, m):
        return Together([Move(node, m.bindings["output"]) for node in m.bindings["late"]])

    examples = [
        fires(_one_gradient, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(lambda x, dy: wait(all_reduce(dy.t() @ x)) / 2, "f32[4, 8]", "f32[4, 2]", **ATEN),
        declines(lambda x, dy: wait(all_reduce(dy)).t() @ x, "f32[4, 8]", "f32[4, 2]", **ATEN),
    ]


@dataclass(frozen=True)
class FuseGradientAllReduces(JoinCollectives):
    """all_reduce(g), all_reduce(h), ... -> all_reduce(cat(g, h, ...)), up to the order of sums over ranks

    Gradients are joined in the order of the graph, up to a number of bytes, where process group, reduction, dtype and
    device are the same. A bucket starts as soon as its last gradient is computed, and is waited for at the end.
    Operations that scale a gradient before or after the reduction stay as they are.

    With more than two ranks the sum over ranks of an element may be taken in another order, as it is in buckets of
    DistributedDataParallel.
    """

    exact = False
    kind = ALL_REDUCE
    at_end = True
    up_to_limit = True

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
        declines(_returned_as_they_are, "f32[2048, 1024]", "f32[2048, 1024]", because="would cost", **ATEN),
        declines(_two_gradients, "f32[4, 8]", "f32[4, 2]", dynamic=True, because="sizes are symbolic", **ATEN),
    ]


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
        return (
            WaitForGradientsAtEnd(),  # first: a bucket is then joined where nothing has to move any more
            FuseGradientAllReduces(self.megabytes, self.by),
        )
