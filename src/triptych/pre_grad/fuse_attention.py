"""fuse_attention: attention written by hand becomes scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from ..attention.build import Attention
from ..attention.scores import paths
from ..ir.program import ATEN
from ..passes.base import Pass, PassRun
from ..rewrite.refusal import NotConcerned, Refused
from ..rewrite.rewriter import PlainTerms


@dataclass(frozen=True)
class FuseAttention(Pass):
    """softmax(scale * Q K^T + bias) V -> scaled_dot_product_attention, whatever it is written with: before autograd,
    so that training and inference are one problem and the choice of kernel is still open. Up to rounding."""

    name: ClassVar[str] = "fuse_attention"
    exact: ClassVar[bool] = False

    def run(self, run: PassRun) -> None:
        if run.program.dialect == ATEN:
            return
        for node in list(run.program.graph.nodes):
            call = run.program.call(node)
            if call is not None and call.op == "softmax" and not call.mutates:
                self._fuse(run, node)

    def _fuse(self, run: PassRun, softmax: Node) -> None:
        draws = run.options.codegen == "inductor" and not run.options.fallback_random
        reason = ""
        for path in paths(run.program, softmax):
            try:
                found = Attention(run.program, softmax, path, draws)
                self._replace(run, found)
                run.fired(self.name)
                return
            except NotConcerned:
                continue
            except Refused as refused:
                reason = reason or refused.reason
        if reason:
            run.declined(self.name, softmax, reason)

    def _replace(self, run: PassRun, found: Attention) -> None:
        op = run.rewriter.emitter(found.last, self.name)
        try:
            new = found.build(op)
            inside = {*found.covered}
            for node in found.covered:
                outside = [u for u in node.users if u not in inside and u not in op.made]
                if node is not found.last and outside:
                    raise Refused(f"{node.name} is used outside the attention")
            terms = PlainTerms(takes_random=True, keeps_strides=False)
            run.rewriter.replace(found.last, new, op, found.covered, terms)
        except Exception:
            op.discard()
            raise
