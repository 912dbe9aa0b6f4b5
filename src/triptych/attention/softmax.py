"""Softmax written by hand becomes a softmax by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.program import Program
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match
from .rule import AttentionRule
from .softmax_forms import written_softmax

T: dict[str, Any] = {"dialects": ["torch"]}


def _over_sum(x: Any) -> Any:
    return x / x.sum(-1, True)


def _by_logarithm(x: Any) -> Any:
    return torch.exp(x - x.logsumexp(-1, True))


def _detached_sum(q: Any, k: Any, v: Any) -> Any:
    e = torch.exp(q @ k.mT)
    return (e / e.sum(-1, True).detach()) @ v


class SoftmaxByHand(AttentionRule):
    """exp(x - max(x)) / sum(exp(x - max(x))) -> softmax(x), up to rounding; with any of the ways to write it"""

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        form = written_softmax(program, node)
        if form is not None:
            yield Match.at(program, node, covers=form.nodes, form=form, problem=form.problem)

    def rewrite(self, op, form):
        softmax = op.softmax(form.scores if form.sign == 1 else op.neg(form.scores), form.dim)
        return softmax if form.values is None else op.matmul(softmax, form.values)

    examples = [
        fires(lambda x: _over_sum(torch.exp(x - x.amax(-1, True))), "f32[2, 6, 8]", **T),
        fires(lambda x: _over_sum(torch.exp(x - x.max(-1, keepdim=True)[0].detach())), "bf16[2, 6, 8]", **T),
        fires(lambda q, k: _over_sum(torch.exp(q @ k.mT)), "f32[2, 6, 8]", "f32[2, 6, 8]", **T),
        fires(lambda x: (lambda e: e * e.sum(-1, True).reciprocal())(torch.exp(x - x.amax(-1, True))), "f32[6, 8]",
              **T),
        fires(lambda q, k, v: (lambda e: e @ v / e.sum(-1, True))(torch.exp(q @ k.mT)), *["f32[2, 6, 8]"] * 3, **T),
        fires(lambda x: F.log_softmax(x, -1).exp(), "f32[6, 8]", **T),
        fires(lambda x, v: torch.exp(x - x.logsumexp(-1, True)) @ v, "f32[6, 8]", "f32[8, 4]", **T, dynamic=True),
        fires(lambda x, v: _by_logarithm(x.masked_fill(torch.ones(6, 8).triu(1) == 1, -1e9)) @ v,
              "f32[6, 8]", "f32[8, 4]", **T),
        fires(lambda x: F.softmin(x, -1), "f32[6, 8]", **T),
        declines(_detached_sum, *[torch.ones(2, 6, 8, requires_grad=True)] * 3, **T),
        declines(lambda x: _over_sum(torch.exp(x)), "f32[6, 8]", **T),
        declines(lambda x: torch.exp(x - x.logsumexp(-1, True)), "f32[6, 8]", **T),
        declines(lambda x, m, v: _by_logarithm(x.masked_fill(m, -1e9)) @ v, "f32[6, 8]", "bool[6, 8]", "f32[8, 4]", **T,
                 because="its logarithm is lost"),
        declines(lambda x: torch.exp(x - x.amax(0, True)) / torch.exp(x - x.amax(-1, True)), "f32[6, 8]", **T),
    ]  # fmt: skip
