"""fuse_attention: attention written by hand becomes scaled_dot_product_attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..attention.around import drop_unread, idle_regions, shapes_of_their_own, without_weights, zero_for_nan
from ..attention.build import Attention, softmax_call
from ..attention.layer import take_layer_apart
from ..attention.off_by_one import softmax_off_by_one
from ..attention.paths import obstacle_above, paths
from ..attention.pointwise import contract_around
from ..attention.probabilities import way_down
from ..attention.renormalised import mask_before_softmax
from ..attention.sharing import Shared
from ..attention.softmax import softmax_by_hand
from ..attention.split_axes import bias_of_split_axes
from ..ir.program import ATEN
from ..passes.base import Pass, PassRun
from ..rewrite.checks import PlainTerms
from ..rewrite.refusal import NotConcerned, Refused
from ..testing.examples import declines, fires

QKV = ["f32[2, 4, 6, 8]"] * 3
TWO = ["f32[6, 8]"] * 3
ABC = ["f32[2, 6, 8]"] * 3
HALF = ["bf16[2, 4, 6, 8]"] * 3
T: dict[str, Any] = {"dialects": ["torch"]}


def _masked_late(q: Any, k: Any, v: Any, mask: Any) -> Any:
    p = (q @ k.mT).softmax(-1) * (mask | ~mask.any(-1, True))
    return (p / p.sum(-1, True)) @ v


def _detached_sum(q: Any, k: Any, v: Any) -> Any:
    e = torch.exp(q @ k.mT)
    return (e / e.sum(-1, True).detach()) @ v


def _beside_a_sink(q: Any, k: Any, v: Any, sink: Any) -> Any:
    return torch.cat([q @ k.mT, sink], -1).softmax(-1)[..., :-1] @ v


@dataclass(frozen=True)
class FuseAttention(Pass):
    """softmax(scale * Q K^T + bias) V -> scaled_dot_product_attention, whatever it is written with: before autograd,
    so that training and inference are one problem and the choice of kernel is still open. Up to rounding.

    Rows of which all keys are masked keep what eager gives them: NaN where -inf was filled in or added, equal weights
    where a finite number was. One thing is not kept: where a finite number that swallows the scores was *added* to
    all keys of a row, eager hands the gradient of that row on to the keys as if nothing were lost; here it does not
    reach them, nor the queries if scores were filled and scaled, or cut off below, besides. And where a result is
    NaN, which of the gradients are NaN may differ if masks of several kinds meet. A softmax written with logsumexp or
    with a bare exp is the one that rounding and overflow would have spoilt.

    A mask fills with -inf, with the lowest number of the dtype, or with another low number. The first two have no
    weight beside any score. The others have, if the scores are as low: `fuse_attention.lowest_score` says how low
    those may be that no mask covers, -1e8 by default, and a fill of twice that or less (-1e9) is a plain mask. A fill
    above it (-1e4) keeps its exact weight: a key that is masked for all queries becomes zero and its fill is added;
    where queries differ in their masks, each key is there twice. With `lowest_score` = -4e3 the latter is a plain
    mask too, which is quicker; with -inf nothing is taken for granted.

    Scores are taken to be finite where a mask is: by a product with zeros and ones, infinity and NaN there would be
    NaN. Nothing divides them by zero or multiplies them by infinity. What NaN in queries or keys gives is up to the
    kernel: that of a CPU may say zero. And what is masked after the softmax and divided by the sum of the rest is
    masked before it: so the rest is not lost where it is too small beside what is masked. A sink beside the scores is
    the bias of one more key, and that and its value are zero. Where NaN is set to zero after the softmax, NaN in
    queries or keys gives zero as in eager, but the gradient of the values is NaN.

    Under autocast a wider bias is rounded as the kernel's operands are, each by its distance from the highest of its
    row: so nothing is lost that has weight.
    """

    name: ClassVar[str] = "fuse_attention"
    exact: ClassVar[bool] = False

    lowest_score: float = -1e8
    """Scores that no mask covers lie above this number: what is filled with twice that, as -1e9, has no weight. A
    model whose scores are known to be small may say -4e3, and -1e4 is a plain mask; -inf takes nothing for granted."""

    def run(self, run: PassRun) -> None:
        if run.program.dialect == ATEN and not run.program.has_composites:
            return  # the choice of kernel is made
        idle_regions(run)
        drop_unread(run)
        for node in list(run.program.graph.nodes):
            take_layer_apart(run, node)
            softmax_by_hand(run, node)
            mask_before_softmax(run, node)
            softmax_off_by_one(run, node)
            zero_for_nan(run, node)
            bias_of_split_axes(run, node)
        earlier: dict[Any, Node] = {}
        for node in list(run.program.graph.nodes):
            if softmax_call(run.program, node) is not None:
                contract_around(run, node)
                self._fuse(run, node, earlier)
            else:
                without_weights(run, self.name, node)

    def _fuse(self, run: PassRun, softmax: Node, earlier: dict[Any, Node]) -> None:
        program = run.program
        draws = run.options.codegen == "inductor" and not run.options.fallback_random
        ways = list(paths(program, softmax))
        try:
            after, last = way_down(program, softmax)
        except NotConcerned:
            return
        except Refused as refused:
            if ways:
                run.declined(self.name, softmax, refused.reason)
            return
        reasons: list[str] = []
        for path in ways:
            shapes_of_their_own(run, path)
            for same_strides in (False, True):
                site = f"{self.name} at {softmax.name}"
                try:
                    found = Attention(program, softmax, path, after, last, draws, self.lowest_score)
                    self._replace(run, found, same_strides, earlier)
                    run.fired(self.name)
                    return
                except Refused as refused:
                    reasons.append(refused.reason)
                    if "stride" not in refused.reason:
                        break
                except Exception as error:
                    if run.strict:
                        raise
                    reasons.append(f"raised {type(error).__name__}: {error}")
                    run.tally.errors.append(f"{site} raised {type(error).__name__}: {error}")
                    break
        if not reasons and (obstacle := obstacle_above(program, softmax)):
            reasons.append(obstacle)
        if reasons:
            run.declined(self.name, softmax, reasons[0])

    def _replace(self, run: PassRun, found: Attention, same_strides: bool, earlier: dict[Any, Node]) -> None:
        op = Shared(run.program, found.last, self.name, earlier)
        try:
            new = found.build(op, same_strides)
            inside = set(found.covered)
            for node in found.covered:
                if node is not found.last and any(u not in inside for u in node.users):
                    raise Refused(f"{node.name} is used outside the attention")
            terms = PlainTerms(takes_random=True, keeps_strides=False)
            run.rewriter.replace(found.last, new, op, found.covered, terms)
            op.keep()
        except Exception:
            op.discard()
            raise

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
        fires(lambda q, k, v: (lambda e: (e / e.sum(-1, True)) @ v)(torch.exp(q @ k.mT)), *QKV, **T),
        declines(_detached_sum, *[torch.ones(2, 6, 8, requires_grad=True)] * 3, **T),
        fires(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1), 0.1) @ v, *QKV, **T, same_values=False),
        fires(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v, *QKV, **T, dynamic=True),
        declines(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1), 0.1) @ v, *QKV, **T, same_values=False,
                 options={"fallback_random": True}, because="other numbers than eager"),
        fires(lambda q, k, v, m: (q @ k.mT * m.float() + (m.float() - 1) * 1e9).softmax(-1) @ v,
              *QKV, "bool[6, 6]", **T),
        fires(_masked_late, *QKV, "bool[6, 6]", **T),
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
              options={"fuse_attention.lowest_score": -4e3}),
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
