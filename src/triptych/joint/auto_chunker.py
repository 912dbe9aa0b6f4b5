"""`auto_chunker`: a large last product and its loss are computed in chunks of rows, together with their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from ..chunking.build import Builder
from ..chunking.cost import least_memory
from ..chunking.region import Region, dependents, read_region, tangent_dependents
from ..chunking.sizes import most_chunks
from ..cost import bytes_of, size_hint
from ..ir.facts import POLICY, fact, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..ir.traits import is_gemm
from ..rewrite.edits import Annotate, Edit, ReplaceAll, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule

LEAST_BYTES = 64 * 2**20
"""Products of fewer bytes are not split into chunks."""
TIMES_WIDER = 4
"""The product must have at least this many times as many columns as its left operand: else little memory is saved."""

SIZE = torch.ops.aten.sym_size.int

HIDDEN = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
WEIGHT = torch.linspace(1, -2, 64).view(16, 4).requires_grad_()
BIAS = torch.linspace(0, 1, 16).requires_grad_()
TARGETS = torch.tensor([3, 15, -100, 0, 7, 3])
TWO_CHUNKS = {"least_bytes": 0, "chunks": 2}
JOINT: dict[str, Any] = {"dialects": ("joint",), "settings": TWO_CHUNKS}
FORWARD: dict[str, Any] = {"dialects": ("aten",), "settings": TWO_CHUNKS}
SMALL: dict[str, Any] = {"dialects": ("aten",), "settings": {"least_bytes": 0}}


def _shifted(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, w.shape[0]), y[:, 1:].reshape(-1))


def _random_weights(h: Any, w: Any, y: Any) -> Any:
    losses = F.cross_entropy(F.linear(h, w), y, reduction="none")
    return losses.detach().sum(), (losses * torch.rand(6)).sum()


@dataclass(frozen=True)
class ChunkRows(Rule):
    """loss(h @ W), with its gradients -> cat or sum over chunks of h; gradients times that of the loss; up to rounding

    A chunk computes some rows of the product, of the loss, and of the gradients for a loss gradient of one; then the
    next chunk reuses its memory. The backward multiplies the sums by the loss gradient that comes in. So the product of
    all rows is at no time in memory, and nothing is computed twice.

    Not bit for bit: the gradient of the weight is a sum over chunks, rounded to its dtype after each. In bfloat16 the
    error of 8 chunks, which are the most in half precision by default, was twice that of the whole (relative to
    float64, 3.6e-3 and 1.8e-3; 5.3e-3 and 2.4e-3 for more classes); in float32 it was the same. And
    gradients are rounded before they are multiplied by the loss gradient, not after: where they leave the range of
    their dtype before, they stay infinite or zero. Where the loss gradient is infinite or NaN, a gradient is zero or
    not finite, as in eager, but not always NaN where it is in eager. The work of the backward is done in the forward: a
    program that asks for gradients and never uses them is slower.

    The number of rows may be symbolic. How many chunks there are is then decided for the size that the program was
    captured with, and the same graph computes every other size, also fewer rows than chunks.
    """

    least_bytes: int = LEAST_BYTES
    chunks: int = 0
    """The number of chunks, whatever it costs; 0: the cost model decides."""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        backward: set[Node] | None = None
        for node in program.calls_of("matmul", "addmm"):
            if node._erased or not _is_large(program, node, self.least_bytes):
                continue
            backward = tangent_dependents(program) if backward is None else backward
            if node not in backward:
                yield self._site(program, node, backward)
                backward = None

    def _site(self, program: Program, product: Node, backward: set[Node]) -> Match:
        try:
            region = read_region(program, product, backward)
        except Refused as refused:
            return Match.at(program, product, problem=refused.refusal)
        if problem := _problem(program, region):
            return Match.at(program, product, problem=problem)
        return Match.at(program, *region.outputs, covers=region.rows, about=product, before=_place(region),
                        region=region)  # fmt: skip

    def check(self, m, region):
        forward = [n for n in region.rows if not region.is_gradient(n)]
        products = [n for n in forward if is_gemm(m.program.value(n).op or "")]
        m.applies(products == [region.product], "{at} is another product of the same rows", at=products[-1])
        problem = "there are too few rows, or sequences, to split: {found}"
        m.require(most_chunks(region.units) > 1, problem, found=region.units)
        if not self.chunks:
            cost = least_memory(m.program, region)
            m.pays(cost.before, cost.after, saves=cost.saved_bytes)

    def rewrite(self, op, m, region):
        chunks = min(self.chunks, most_chunks(region.units)) or least_memory(m.program, region).chunks
        builder = Builder(m.program, op, region, chunks)
        whole = builder.build()
        m.leave_behind(builder.copies)  # erased where only the rows as a whole read them
        values = {n: v for n, v in whole.items() if not region.is_gradient(n)}
        edits = [Replacement(tuple(values), list(values.values()), op, tuple(region.rows), self)] if values else []
        kept: list[Edit] = []
        for gradient, unscaled in whole.items():
            if not region.is_gradient(gradient):
                continue
            late = op.at(gradient)
            scaled = late.mul(unscaled, Value(m.program, region.seed))
            # rows that a loss ignores have the gradient 0, even where the gradient of the loss is NaN
            nothing = late.full([], 0.0, dtype=scaled.dtype, device=scaled.device)
            scaled = late.where(late.eq(unscaled, 0), nothing, scaled)
            if scaled.dtype != unscaled.dtype:  # two scalars are promoted to the wider dtype
                scaled = late.to(scaled, dtype=unscaled.dtype)
            covered = (gradient,) if edits else tuple(region.rows)
            edits.append(Replacement((gradient,), scaled, late, covered, self))
            # computed in the forward, together with the loss: it must not be recomputed
            kept.append(Annotate(unscaled.node, POLICY, CheckpointPolicy.MUST_SAVE))
        return Together([ReplaceAll(edits, is_one=True), *kept])

    examples = [
        fires(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), HIDDEN, WEIGHT, TARGETS, **JOINT),
        fires(lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b), y, label_smoothing=0.1), HIDDEN, WEIGHT, BIAS,
              TARGETS, **JOINT),
        fires(lambda h, w, y: F.cross_entropy(30 * torch.tanh(F.linear(h, w) / 30), y, reduction="sum"), HIDDEN, WEIGHT,
              TARGETS, **JOINT),
        # whole sequences, since each is shifted by one
        fires(_shifted, HIDDEN.detach().view(2, 3, 4).requires_grad_(), WEIGHT, TARGETS.view(2, 3), **JOINT),
        # the gradient of the loss is itself computed from the loss
        fires(lambda h, w, y: F.cross_entropy(F.linear(h, w), y).exp(), HIDDEN, WEIGHT, TARGETS, **JOINT),
        # any number of rows
        fires(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), HIDDEN, WEIGHT, TARGETS, dynamic=True, **JOINT),
        # without a backward
        fires(lambda h, w: F.linear(h, w).logsumexp(-1).sum(), "f32[6, 4]", "f32[16, 4]", **FORWARD),
        declines(lambda h, w, y: (F.cross_entropy(logits := F.linear(h, w), y), logits), HIDDEN, WEIGHT, TARGETS,
                 because="is returned", **JOINT),
        declines(lambda h, w, y: F.nll_loss(F.log_softmax(F.linear(h, w), 0), y), HIDDEN, WEIGHT, TARGETS,
                 because="reduces over the rows", **JOINT),
        declines(lambda h, w, y: F.cross_entropy(F.linear(h, w), y, reduction="none"), HIDDEN, WEIGHT, TARGETS,
                 because="no single number", **JOINT),
        declines(lambda h, w, y: F.cross_entropy(F.dropout(F.linear(h, w)), y), HIDDEN, WEIGHT, TARGETS,
                 because="draws random numbers", **JOINT),
        # the chunks come before the first sum, and with them the gradients, which need the same draw
        declines(_random_weights, HIDDEN, WEIGHT, TARGETS, because="cannot be computed twice", **JOINT),
        # whole sequences, of which there must be four: two for each chunk
        declines(lambda h, w, y: F.cross_entropy(F.linear(h, w).mT, y), HIDDEN.detach().view(2, 3, 4).requires_grad_(),
                 WEIGHT, TARGETS.view(2, 3), dynamic=True, because="too few rows, or sequences", **JOINT),
        declines(lambda h, w, y: F.cross_entropy(F.linear(h.half(), w.half()), y), HIDDEN, WEIGHT, TARGETS,
                 because="may underflow", **JOINT),
        declines(lambda h, w: (F.linear(h, w).cumsum(0) ** 2).sum(), HIDDEN, WEIGHT, because="works along the rows",
                 **FORWARD),
        declines(lambda h, w: (F.linear(h, w).exp().sum(), w.mul_(0.5))[0], "f32[6, 4]", "f32[16, 4]",
                 because="is written", **FORWARD),
        # layers inside a network: another product of the same rows follows
        declines(lambda h, w, v: F.linear(F.linear(h, w).relu(), v), "f32[6, 4]", "f32[16, 4]", "f32[4, 16]",
                 **FORWARD),
        declines(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), HIDDEN, WEIGHT, TARGETS, dialects=("joint",)),
        declines(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), HIDDEN, WEIGHT, TARGETS, dialects=("joint",),
                 settings={"least_bytes": 0}, because="would cost"),
    ]  # fmt: skip


def _is_large(program: Program, node: Node, least_bytes: int) -> bool:
    """Is the node a matrix product of that many bytes, with many more columns than its inner size?"""
    call, result = program.call(node), tensor_fact(node)
    if call is None or call.mutates or call.op not in ("matmul", "addmm") or result is None or result.dim() != 2:
        return False
    inner = size_hint(tensor_of(call.args["self" if call.op == "matmul" else "mat1"]).shape[1])
    is_wide = size_hint(result.shape[1]) >= TIMES_WIDER * inner > 0
    return is_wide and result.dtype.is_floating_point and bytes_of(result) >= max(least_bytes, 1)


def _problem(program: Program, region: Region) -> Refusal | None:
    read = {operand for node in region.rows for operand in node.all_input_nodes}
    if writer := next((n for n in read if program.aliasing.written(n)), None):
        return Refusal("memory of {at} is written", at=writer)
    if checkpointed := next((n for n in region.rows if n.meta.get(POLICY) is not None), None):
        return Refusal("{at} is in a checkpointed region, which says itself what is computed again", at=checkpointed)
    return None


def _place(region: Region) -> Node:
    """The node before which the chunks are inserted: the first one that reads a result, or that is a gradient which
    they replace."""
    readers = [u for n in region.outputs for u in n.users if u not in region.rows and not region.is_gradient(n)]
    return min([*readers, *(n for n in region.outputs if region.is_gradient(n))])


@dataclass(frozen=True)
class SizesOfInputs(Rule):
    """sym_size(f(h @ W), 0) -> arithmetic on the sizes of inputs

    A node that reads a size off a value needs the value, whole, though not one of its elements.
    """

    least_bytes: int = LEAST_BYTES

    def sites(self, program: Program) -> Iterator[Match]:
        sizes = program.graph.find_nodes(op="call_function", target=SIZE)
        sizes = [n for n in sizes if not free_unbacked_symbols(fact(n))]
        if not sizes:
            return
        inside = dependents(n for n in program.graph.nodes if _is_large(program, n, self.least_bytes))
        for node in sizes:
            if node in inside:
                yield Match.at(program, node)

    def rewrite(self, op, m):
        return op.size_node(m.root.fact)

    examples = [
        fires(lambda h, w: F.linear(h, w)[:, 1:].reshape(-1).logsumexp(0), "f32[6, 4]", "f32[16, 4]", dynamic=True,
              **SMALL),
        declines(lambda h, w: F.linear(h, w)[:, 1:].reshape(-1).logsumexp(0), "f32[6, 4]", "f32[16, 4]", **SMALL),
        declines(lambda h, w: F.linear(h, w).sum() / h[:, 1:].reshape(-1).logsumexp(0), "f32[6, 4]", "f32[16, 4]",
                 dynamic=True, **SMALL),
    ]  # fmt: skip


@dataclass(frozen=True)
class AutoChunker(Pass):
    """Computes a large last product and its loss in chunks of rows, with their gradients, so that the logits of a large
    vocabulary are never in memory whole.

    With sizes that change (`dynamic=True`, or a second sequence length) there are as many chunks as pay for the size at
    which the graph is compiled; `auto_chunker.chunks` sets another number. Where a loss cuts off the end of each
    sequence, a chunk consists of whole sequences, and a symbolic number of them is split from four on. A number of rows
    that depends on data is left whole.

    With Inductor's kernels, a batch with fewer than two rows, or sequences, for each chunk may be compiled again, with
    fewer chunks or whole. Larger batches that come later may then use that graph as well, and need more memory. Pad
    such batches or leave them out.

    Gradients in float16 are left whole. They would be computed for a loss gradient of one, without the loss scale,
    which only the backward knows. For 4096 rows and 32000 classes that set 99% of the gradients of the logits to zero.
    The gradients of the rows and of the weight were off by 1.0e-2 and 4.1e-3; in eager, with a loss scale of 65536, by
    2.3e-4. Another fixed number in place of one overflows for some losses, whatever scale the training uses. Scaled
    gradients with sums in float32 would be as exact as eager, but take 6 bytes of memory more for each element of the
    weight, and 12 bytes of traffic for each element and chunk. Even with two chunks that takes more time than the
    memory is worth, below some 11000 rows on a V100 and 17000 on an H200, and saves no memory where there are fewer
    rows than six times the hidden size. So it is not done.
    """

    name = "auto_chunker"
    least_bytes: int = LEAST_BYTES
    """Products of fewer bytes stay whole."""
    chunks: int = 0
    """The number of chunks, whatever it costs; 0: the cost model decides."""

    def rules(self) -> Sequence[Rule]:
        return (
            SizesOfInputs(self.least_bytes),  # first: the other declines where a size is read off a value of the loss
            ChunkRows(self.least_bytes, self.chunks),
        )
