"""apply_gumbel_max_trick: draws a sample from a softmax without computing the softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import fact, known_equal, tensor_fact
from ..ir.program import Program
from ..rewrite.edits import Erase, ReplaceAll, Together
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Draw:
    """The nodes of one sample, argmax(softmax(logits) / noise), from last to first."""

    argmax: Node
    quotient: Node
    softmax: Node
    logits: Node
    noise: Node


class GumbelMax(Rule):
    """argmax(softmax(x) / q) -> argmax(x - log(q)), q drawn from the exponential distribution; near ties may differ

    If the noise takes its shape from the softmax, as in `empty_like(softmax(x))`, it takes it from x instead.
    """

    exact = False

    def counts_as(self, name: str) -> bool:
        return name in (self.name, "shape_of_logits")

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of("argmax"):
            call = None if node._erased else program.call(node)
            if call is None or call.op != "argmax":
                continue
            draw = _draw(program, node, call)
            if draw is not None:
                shape_users = _asking_for_the_shape(program, draw.softmax)
                names = (*["shape_of_logits"] * len(shape_users), self.name)
                yield Match.at(
                    program, node, names=names, dim=call.args.get("dim"), draw=draw, shape_users=shape_users
                )

    def check(self, m, draw, dim):
        softmax = m.program.call(draw.softmax)
        other_dim = "the sample is taken along another dim than the softmax"
        m.require(dim == softmax.args["dim"], other_dim, wanted=softmax.args["dim"], found=str(dim))
        _require_replaceable(m.program, draw)

    def rewrite(self, op, m, draw, shape_users):
        softmax_dtype, x = fact(draw.softmax).dtype, m.program.value(draw.logits)
        edits = []
        for user in shape_users:
            beside = op.at(user.node, "shape_of_logits")
            empty = _empty_like(beside, user.node, draw)
            edits.append(Replacement((user.node,), empty, beside, (user.node,)))
        if x.dtype != softmax_dtype:
            x = op.to(x, dtype=softmax_dtype)
        noisy = op.sub(x, op.log(draw.noise))
        sample = op.again(draw.argmax, {draw.quotient: noisy.node})
        edits.append(Replacement((draw.argmax,), sample, op, (draw.argmax, draw.quotient)))
        return Together([ReplaceAll(edits), Erase([draw.softmax])])

    examples = [
        fires(lambda x: _sample(torch.softmax(x, -1)), "f32[4, 50]"),
        fires(lambda x: _sample(x.softmax(dim=1), keepdim=False), "f32[4, 50]"),
        fires(lambda x: _sample(torch.nn.functional.softmax(x / 0.7, -1)), "f64[3, 4, 20]"),
        fires(lambda x: _sample(torch.softmax(x, -1, dtype=torch.float32)), "bf16[4, 50]"),
        fires(lambda x: torch.argmax(x.softmax(0) / torch.empty(8).exponential_(), 0), "f32[8]"),
        fires(lambda x: torch.argmax(x.softmax(-1).div(torch.empty_like(x).exponential_(lambd=2.0)), axis=-1),  # type: ignore[call-arg]
              "f32[4, 8]"),
        fires(lambda x: _sample(torch.softmax(x, -1)), "f32[4, 50]", dynamic=True),
        declines(lambda x: (p := torch.softmax(x, -1), _sample(p)), "f32[4, 50]", because="used elsewhere"),
        declines(lambda x: torch.argmax(x.softmax(1) / torch.empty_like(x).exponential_(), 0), "f32[4, 8]",
                 because="another dim"),
        declines(lambda x: torch.argmax(x.softmax(1) / torch.empty_like(x).exponential_()), "f32[4, 8]",
                 because="another dim"),
        declines(lambda x, q: torch.argmax(x.softmax(1) / q, 1), "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x: _sample(torch.softmax(x, -1)), "bf16[4, 50]", because="rounds too coarsely"),
        declines(lambda x: torch.argmax(x.softmax(1) / torch.empty(1, 8).exponential_(), 1), "f32[4, 8]",
                 because="broadcast"),
        declines(lambda x: _written_logits(x), "f32[4, 8]", because="writes", dialects=["torch"]),
        declines(lambda x: x.softmax(-1).argmax(-1), "f32[4, 8]"),
    ]  # fmt: skip


def _sample(probs: Any, keepdim: bool = True) -> Any:
    """For examples: a sample in the form that is common in sampling loops."""
    q = torch.empty_like(probs).exponential_(1)
    return torch.argmax(probs / q, dim=-1, keepdim=keepdim)


def _written_logits(x: Any) -> Any:
    probs = x.softmax(-1)
    x.add_(1)
    return torch.argmax(probs / torch.empty_like(x).exponential_(), -1)


def _draw(program: Program, argmax: Node, call: Call) -> Draw | None:
    """The sample that an argmax draws; None if the argmax does not sample."""
    quotient = call.args["self"]
    division = program.call(quotient) if isinstance(quotient, Node) else None
    if division is None or division.op != "div" or division.mutates or division.args.keys() != {"self", "other"}:
        return None
    softmax, noise = division.args["self"], division.args["other"]
    source, random = (program.call(n) if isinstance(n, Node) else None for n in (softmax, noise))
    if source is None or random is None or source.op != "softmax" or random.op not in ("exponential", "exponential_"):
        return None
    return Draw(argmax, quotient, softmax, source.args["self"], noise)


def _require_replaceable(program: Program, draw: Draw) -> None:
    probs, noise = tensor_fact(draw.softmax), tensor_fact(draw.noise)
    if probs is None or noise is None or tensor_fact(draw.logits) is None:
        raise Refused("shape and dtype are not known")
    if probs.dtype not in WIDE or noise.dtype != probs.dtype:
        raise Refused("{found} rounds too coarsely for the same sample", at=draw.softmax, found=probs.dtype)
    if not known_equal(probs.shape, noise.shape):
        raise Refused("the noise is broadcast", at=draw.noise, wanted=probs.shape, found=noise.shape)
    _require_unused(draw.quotient, [draw.argmax])
    _require_unused(draw.softmax, [draw.quotient, *_asking_for_the_shape(program, draw.softmax)])
    if writer := program.aliasing.written_between([draw.logits], draw.softmax, draw.argmax):
        raise Refused("{at} writes the logits after the softmax", at=writer)
    if barrier := program.aliasing.barrier_between(draw.softmax, draw.argmax):
        raise Refused("{at} stands between the matched nodes", at=barrier)


def _require_unused(node: Node, expected: list[Node]) -> None:
    if (other := next((user for user in node.users if user not in expected), None)) is not None:
        raise Refused("{at} is used elsewhere, by {found}, and would be computed anyway", at=node, found=other)


def _asking_for_the_shape(program: Program, node: Node) -> list[Node]:
    """Users that call `empty_like` on the node, and so read none of its elements."""
    calls = {user: program.call(user) for user in node.users}
    return [user for user, call in calls.items() if call is not None and call.op == "empty_like"]


def _empty_like(op: Emitter, node: Node, draw: Draw) -> Any:
    dtype = {} if "dtype" in node.kwargs else {"dtype": fact(draw.softmax).dtype}
    if fact(draw.logits).dtype == fact(draw.softmax).dtype:
        dtype = {}
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: draw.logits if n is draw.softmax else n)
    return op.node(node.op, node.target, args, {**kwargs, **dtype})


@dataclass(frozen=True)
class ApplyGumbelMaxTrick(Pass):
    """Samples from logits without a softmax: `argmax(softmax(x) / q)`, with q drawn from the exponential distribution,
    becomes `argmax(x - log(q))` with the same q.

    The sample is the same, except where two elements are nearly tied and rounding decides, and in rows with NaN or
    +inf: there the softmax is all NaN, and eager takes its first element. This is why the pass runs only if added.
    """

    name: ClassVar[str] = "apply_gumbel_max_trick"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (GumbelMax(),)
