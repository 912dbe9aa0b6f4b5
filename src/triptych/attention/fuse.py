"""Attention written by hand becomes scaled_dot_product_attention: the rule itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.program import Program
from ..rewrite.examples import declines, fires
from ..rewrite.refusal import NotConcerned, Refused
from ..rewrite.rule import FirstOf, Match
from .cost import require_quicker
from .draft import Sheet
from .emit import emit
from .paths import obstacle_above, ways_from_products
from .plan import AttentionPlan, plan
from .read import Surroundings, read, reshaped_product
from .read_probabilities import way_down
from .rule import AttentionRule, may_draw_otherwise
from .sharing import Shared

QKV = ["f32[2, 4, 6, 8]"] * 3
TWO = ["f32[6, 8]"] * 3
ABC = ["f32[2, 6, 8]"] * 3
HALF = ["bf16[2, 4, 6, 8]"] * 3
T: dict[str, Any] = {"dialects": ["torch"]}

_Result = TypeVar("_Result")


def _beside_a_sink(q: Any, k: Any, v: Any, sink: Any) -> Any:
    return torch.cat([q @ k.mT, sink], -1).softmax(-1)[..., :-1] @ v


class Way:
    """One of the products that a softmax is computed from, read as an attention, or the reason why it cannot be."""

    def __init__(self, program: Program, around: Surroundings, path: Sequence[Node]) -> None:
        self.reading = _attempt(read, program, around, path)
        self._plan: AttentionPlan | Refused | None = None

    def plan(self, sheet: Sheet, lowest_score: float) -> AttentionPlan:
        """The plan of the attention, made on first use; raises Refused where there is none."""
        if self._plan is None:
            self._plan = _attempt(self._planned, sheet, lowest_score)
        return _unless_refused(self._plan)

    def _planned(self, sheet: Sheet, lowest_score: float) -> AttentionPlan:
        attention = _unless_refused(self.reading)
        planned = plan(sheet, attention, may_draw_otherwise(sheet.origin), lowest_score)
        inside, result, needed = set(attention.covered), attention.result, planned.leaves
        for node in attention.covered:
            if node is not result and (node in needed or any(u not in inside for u in node.users)):
                raise Refused("{at} is used outside the attention", at=node)
        return planned


def _attempt(phase: Callable[..., _Result], *args: Any) -> _Result | Refused:
    try:
        return phase(*args)
    except Refused as refused:
        return refused


def _unless_refused(outcome: _Result | Refused) -> _Result:
    if isinstance(outcome, Refused):
        raise outcome
    return outcome


@dataclass(frozen=True)
class AttentionByHand(AttentionRule):
    """softmax(scale * Q K^T + bias) V -> scaled_dot_product_attention(Q, K, V, bias), up to rounding"""

    lowest_score: float = -1e8
    """Scores that are not masked are assumed to be above this number."""

    takes_random = True

    @classmethod
    def rule_name(cls) -> str:
        return "fuse_attention"  # as its pass: this is the rewrite that users count

    def sites(self, program: Program) -> Iterator[Match]:
        """The attentions of a graph share equal expressions in their plans, and equal nodes in the graph."""
        shared: dict[Any, Node] = {}
        sheet = Sheet(program)
        for match in super().sites(program):
            match.emitter = functools.partial(Shared, earlier=shared)
            match.bindings["sheet"] = sheet
            yield match

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        form = self.softmax(program, node)
        if form is None:
            return
        paths_down = list(ways_from_products(program, form.scores))
        try:
            after, last = way_down(program, node)
        except NotConcerned:
            return
        except Refused as refused:
            if paths_down:
                yield Match.at(program, node, problem=refused.refusal)
            return
        if not paths_down:
            if obstacle := obstacle_above(program, form.scores):
                yield Match.at(program, node, problem=obstacle)
            return
        around = Surroundings(node, form, after, last, reshaped_product(program, last, [node, *after][-1]))
        ways = [Way(program, around, path) for path in paths_down]
        yield Match.at(program, around.result, about=node, ways=ways)

    def check(self, m, ways, sheet):
        """Requires a way whose attention can be planned and is not slower; later ways are planned when needed."""
        refusals = []
        for way in ways:
            try:
                require_quicker(m, way.plan(sheet, self.lowest_score))
                return
            except Refused as refused:
                refusals.append(refused)
        raise refusals[0]

    def rewrite(self, op, m, ways, sheet):
        return FirstOf(*(functools.partial(self._fused, op, m, way, sheet) for way in ways), first_reason=True)

    def _fused(self, op: Any, m: Match, way: Way, sheet: Sheet) -> FirstOf:
        """The attention, with the strides of its kernel or with those of eager."""
        planned = way.plan(sheet, self.lowest_score)
        m.nodes = tuple(planned.attention.covered)
        strides = (False, True)
        return FirstOf(*(functools.partial(emit, op, planned, same) for same in strides), first_reason=True)

    examples = [
        fires(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v, *QKV, **T),
        fires(lambda q, k, v: F.softmax((q * 0.3) @ k.transpose(2, 3), dim=-1) @ v, *QKV, **T),
        fires(lambda q, k, v: torch.bmm(torch.baddbmm(q.sum(2, True), q, k.mT, alpha=0.3).softmax(2), v), *ABC, **T),
        fires(lambda q, k, v: torch.einsum("ij,jd->id", torch.einsum("id,jd->ij", q, k).softmax(1), v), *TWO, **T),
        fires(lambda q, k, v: F.softmax(q @ k.mT * 0.3, -1, dtype=torch.float32).to(q.dtype) @ v, *HALF, **T),
        fires(lambda q, k, v, m: F.softmax(q @ k.mT * 0.3 + m, -1) @ v, *QKV, "f32[2, 1, 6, 6]", **T),
        fires(lambda q, k, v, m: (q @ k.mT).masked_fill(m, -math.inf).softmax(-1) @ v, *QKV, "bool[2, 1, 6, 6]", **T),
        fires(lambda q, k, v, m: torch.where(m, q @ k.mT, -1e9).softmax(-1) @ v, *QKV, "bool[2, 1, 1, 6]", **T),
        fires(lambda q, k, v: (q @ k.mT).masked_fill(torch.ones(6, 6).tril() == 0, -1e9).softmax(-1) @ v, *QKV, **T),
        fires(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1), 0.1) @ v, *QKV, **T, same_values=False),
        fires(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v, *QKV, **T, dynamic=True),
        declines(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1), 0.1) @ v, *QKV, **T, same_values=False,
                 options={"fallback_random": True}, because="other numbers than eager"),
        fires(lambda q, k, v, m: (q @ k.mT * m.float() + (m.float() - 1) * 1e9).softmax(-1) @ v,
              *QKV, "bool[6, 6]", **T),
        fires(_beside_a_sink, *QKV, "f32[2, 4, 6, 1]", **T),
        fires(_beside_a_sink, *HALF, "bf16[2, 4, 6, 1]", **T, dynamic=True),
        declines(lambda q, k, v, m: (q @ k.mT * m - 1e9 * (1 - m)).softmax(-1) @ v, *QKV, "f32[6, 6]", **T,
                 because="varies"),
        declines(lambda q, k, v: F.softmax(q @ k.mT, -2) @ v, *QKV, **T, because="not over the keys"),
        declines(lambda q, k, v: F.softmax(q @ k.mT, -1).mT @ v, *QKV, **T, because="not summed over the keys"),
        declines(lambda q, k, v: (lambda p: (p @ v, p))(F.softmax(q @ k.mT, -1)), *QKV, **T, because="used 2 times"),
        declines(lambda q, k, v: F.softmax(torch.tanh(q @ k.mT / 5) * 5, -1) @ v, *QKV, **T, because="tanh"),
        declines(lambda q, k, v: torch.sigmoid(q @ k.mT) @ v, *QKV, **T),
        fires(lambda q, k, v, m: (q @ k.mT).masked_fill(m, -1e4).softmax(-1) @ v, *QKV, "bool[2, 1, 1, 6]", **T),
        fires(lambda q, k, v, m: (q @ k.mT).masked_fill(m, -1e4).softmax(-1) @ v, *QKV, "bool[6, 6]", **T),
        fires(lambda q, k, v, m: (q @ k.mT).masked_fill(m, -1e4).softmax(-1) @ v, *QKV, "bool[6, 6]", **T,
              settings={"lowest_score": -4e3}),
        declines(lambda q, k, v, m: (q @ k.mT + 1).masked_fill(m, -1e4).softmax(-1) @ v, *QKV, "bool[6, 6]", **T,
                 because="may count beside others"),
        declines(lambda q, k, v, m: (lambda s: (s * 2 - s).softmax(-1) @ v)((q @ k.mT).masked_fill(m, -math.inf)),
                 *QKV, "bool[6, 6]", **T, because="used outside"),
        declines(lambda q, k, v, m: (q @ k.mT).masked_fill(m, -10).softmax(-1) @ v, *QKV, "bool[6, 6]", **T,
                 because="may count beside others"),
        declines(lambda q, k, v, m: (q @ k.mT * m).softmax(-1) @ v, *QKV, "f32[6, 6]", **T, because="varies"),
        declines(lambda q, k, v: (q @ k.mT * 0.0).softmax(-1) @ v, *QKV, **T, because="multiplied by 0.0"),
        declines(lambda q, k, v: F.softmax(q @ k.mT, -1) @ v, *["f32[2, 0, 8]"] * 3, **T, because="no keys"),
        declines(lambda q, k, v: (lambda s: (q.zero_(), s.softmax(-1) @ v))(q @ k.mT), *QKV, **T, because="writes"),
    ]  # fmt: skip
