"""fuse_attention: attention written by hand becomes scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from ..attention.around import shapes_of_their_own, without_weights
from ..attention.build import Attention, softmax_call
from ..attention.heads import group_heads
from ..attention.probabilities import way_down
from ..attention.scores import obstacle_above, paths
from ..attention.softmax import softmax_by_hand
from ..ir.program import ATEN
from ..passes.base import Pass, PassRun
from ..rewrite.refusal import NotConcerned, Refused
from ..rewrite.rewriter import PlainTerms


@dataclass(frozen=True)
class FuseAttention(Pass):
    """softmax(scale * Q K^T + bias) V -> scaled_dot_product_attention, whatever it is written with: before autograd,
    so that training and inference are one problem and the choice of kernel is still open. Up to rounding."""

    grouped_heads: str = "cuda"
    """Where keys and values repeated for several heads are told to the kernel instead: on a GPU, always, or never."""
    name: ClassVar[str] = "fuse_attention"
    exact: ClassVar[bool] = False

    def run(self, run: PassRun) -> None:
        if run.program.dialect == ATEN and not run.program.has_composites:
            return  # the choice of kernel is made
        for node in list(run.program.graph.nodes):
            softmax_by_hand(run, node)
        for node in list(run.program.graph.nodes):
            if softmax_call(run.program, node) is not None:
                self._fuse(run, node)
            else:
                without_weights(run, self.name, node)
        if self.grouped_heads == "never":
            return
        for node in list(run.program.graph.nodes):
            group_heads(run, node, anywhere=self.grouped_heads == "always")

    def _fuse(self, run: PassRun, softmax: Node) -> None:
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
                    found = Attention(program, softmax, path, after, last, draws)
                    self._replace(run, found, same_strides)
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

    def _replace(self, run: PassRun, found: Attention, same_strides: bool) -> None:
        op = run.rewriter.emitter(found.last, self.name)
        try:
            new = found.build(op, same_strides)
            inside = {*found.covered, *op.made}
            for node in found.covered:
                if node is not found.last and any(u not in inside for u in node.users):
                    raise Refused(f"{node.name} is used outside the attention")
            terms = PlainTerms(takes_random=True, keeps_strides=False)
            run.rewriter.replace(found.last, new, op, found.covered, terms)
        except Exception:
            op.discard()
            raise
