"""auto_chunker: heads that people train, in chunks of rows: equal to eager, and never whole in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import triptych
from tests.live_bytes import largest_value, peak_bytes
from triptych.passes.session import Session, watching

BATCH, LENGTH, HIDDEN, CLASSES = 3, 7, 8, 40
ROWS = BATCH * LENGTH
CHUNKS = 4
"""21 rows are chunks of 6, 6, 6 and 3."""
SMALL = {"auto_chunker.least_bytes": 0, "auto_chunker.chunks": CHUNKS}
WHOLE = ROWS * CLASSES
SOFT_TARGETS = torch.linspace(0, 9, WHOLE).view(ROWS, CLASSES).softmax(-1)


@dataclass
class Head:
    """The operands of a head, in one dtype; those that require a gradient have one after a step."""

    h: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    y: torch.Tensor

    @staticmethod
    def make(dtype: torch.dtype = torch.float32) -> Head:
        y = torch.randint(0, CLASSES, (ROWS,))
        y[4] = y[11] = -100
        h, w, b = torch.randn(ROWS, HIDDEN), torch.randn(CLASSES, HIDDEN) / 2, torch.randn(CLASSES)
        return Head(*(t.to(dtype).requires_grad_() for t in (h, w, b)), y)

    def to(self, dtype: torch.dtype) -> Head:
        def copy(t: torch.Tensor) -> torch.Tensor:
            return t.detach().to(dtype).requires_grad_(t.requires_grad)

        return Head(copy(self.h), copy(self.w), copy(self.b), self.y)

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [t.grad for t in (self.h, self.w, self.b) if t.grad is not None]


Loss = Callable[[Head], torch.Tensor]


def sequences(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of [batch, length, classes], and their targets."""
    return F.linear(head.h.view(BATCH, LENGTH, HIDDEN), head.w), head.y.view(BATCH, LENGTH)


def plain(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w), head.y)


def with_bias(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w, head.b), head.y)


def summed(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w), head.y.clamp(min=0), reduction="sum", ignore_index=0)


def weighted_rows(head: Head) -> torch.Tensor:
    losses = F.cross_entropy(F.linear(head.h, head.w), head.y, reduction="none")
    weights = torch.linspace(0, 1, ROWS, dtype=losses.dtype)
    return (losses * weights).sum() / weights.sum()


def weighted_classes(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w), head.y, weight=head.b.detach().abs())


def smoothed(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w, head.b), head.y, label_smoothing=0.1)


def z_loss(head: Head) -> torch.Tensor:
    logits = F.linear(head.h, head.w)
    return F.cross_entropy(logits, head.y) + 0.1 * logits.logsumexp(-1).square().mean()


def entropy(head: Head) -> torch.Tensor:
    p = F.linear(head.h, head.w).softmax(-1)
    return (p * p.log()).sum(-1).mean()


def soft_cap(head: Head) -> torch.Tensor:
    return F.cross_entropy(5 * torch.tanh(F.linear(head.h, head.w) / 5), head.y)


def llama(head: Head) -> torch.Tensor:
    """Labels padded by one and shifted; logits in float32."""
    logits, y = sequences(head)
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.double() if head.h.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1))


def shifted_logits(head: Head) -> torch.Tensor:
    """Whole sequences only, since each is cut."""
    logits, y = sequences(head)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].contiguous().view(-1))


def classes_second(head: Head) -> torch.Tensor:
    """`cross_entropy` of [batch, classes, length]."""
    logits, y = sequences(head)
    return F.cross_entropy(logits.transpose(1, 2), y)


def soft_targets(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w), SOFT_TARGETS.to(head.h.dtype))


def scaled_after(head: Head) -> torch.Tensor:
    return 3 * plain(head) / 7


def perplexity(head: Head) -> torch.Tensor:
    return plain(head).exp()


def frozen_weight(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w.detach()), head.y)


def tied(head: Head) -> torch.Tensor:
    hidden = F.embedding(head.y.clamp(min=0), head.w).tanh()
    return F.cross_entropy(F.linear(hidden, head.w), head.y)


def binary(head: Head) -> torch.Tensor:
    targets = F.one_hot(head.y.clamp(min=0), CLASSES).to(head.h.dtype)
    return F.binary_cross_entropy_with_logits(F.linear(head.h, head.w, head.b), targets)


def temperature(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w) * head.b[0].exp(), head.y)


def linear_loss(head: Head) -> torch.Tensor:
    return F.linear(head.h, head.w).mean()


def contrastive(head: Head) -> torch.Tensor:
    """Each row against all rows: a chunk reads its own rows of the hidden states, and all of them."""
    narrow = head.h[:, :4].contiguous()
    return F.cross_entropy(narrow @ narrow.t(), torch.arange(ROWS))


def two_heads(head: Head) -> torch.Tensor:
    return plain(head) + 0.5 * F.cross_entropy(F.linear(head.h.sin(), head.w.cos()), head.y.flip(0))


FIRES: list[Loss] = [
    plain, with_bias, summed, weighted_rows, weighted_classes, smoothed, z_loss, entropy, soft_cap, llama, shifted_logits,
    classes_second, soft_targets, scaled_after, perplexity, frozen_weight, tied, temperature, two_heads,
    linear_loss, contrastive,
]  # fmt: skip


def compiled(loss: Loss, **options: Any) -> Loss:
    return torch.compile(loss, backend=triptych.compile_fx, options={"codegen": "eager", **SMALL, **options})


def step(loss: Loss, head: Head) -> list[torch.Tensor]:
    value = loss(head)
    value.backward()
    return [value.detach(), *head.gradients]


def fired(sessions: list[Session]) -> int:
    return sum(r.fired["chunk_rows"] for s in sessions for r in s.records)


def reasons(sessions: list[Session]) -> list[str]:
    return [d.reason for s in sessions for r in s.records for d in r.declines if d.rule == "chunk_rows"]


def check(loss: Loss, head: Head, **options: Any) -> list[Session]:
    """Compiled is as near to float64 as eager is, but for the rounding of each chunk."""
    exact = step(loss, head.to(torch.float64))
    eager = step(loss, head.to(head.h.dtype))
    with watching() as sessions:
        chunked = step(compiled(loss, **options), head.to(head.h.dtype))
    assert len(exact) == len(chunked) == len(eager)
    for want, plain_value, value in zip(exact, eager, chunked):
        assert value.dtype == plain_value.dtype and value.stride() == plain_value.stride()
        scale, precision = want.abs().max(), torch.finfo(value.dtype).eps
        allowed = 2 * CHUNKS * precision * scale + 2 * (plain_value.double() - want).abs().max()
        assert (value.double() - want).abs().max() <= allowed
    return sessions


@pytest.mark.parametrize("loss", FIRES, ids=lambda f: f.__name__)
def test_equal_to_eager(loss):
    sessions = check(loss, Head.make())
    assert fired(sessions) == (2 if loss is two_heads else 1), reasons(sessions)


@pytest.mark.parametrize("loss", [plain, with_bias, llama, smoothed, z_loss, shifted_logits], ids=lambda f: f.__name__)
def test_equal_to_eager_in_bfloat16(loss):
    assert fired(check(loss, Head.make(torch.bfloat16))) == 1


@pytest.mark.parametrize("loss", [llama, with_bias, shifted_logits, entropy], ids=lambda f: f.__name__)
def test_equal_by_kernels(loss):
    assert fired(check(loss, Head.make(), codegen="inductor")) == 1


@pytest.mark.parametrize("loss", [plain, with_bias, llama, smoothed, z_loss, tied], ids=lambda f: f.__name__)
def test_no_value_has_all_rows_and_classes(loss):
    """Neither in the forward nor in the backward, which gets gradients that are ready but for one factor."""
    (session,) = check(loss, Head.make())
    forward, backward = session.graphs["forward"], session.graphs["backward"]
    assert largest_value(forward) < WHOLE / 2 and largest_value(backward) < WHOLE / 2
    assert not any(n.target is torch.ops.aten.mm.default for n in backward.graph.nodes)


def test_chunks_need_less_memory_one_after_the_other():
    def graphs(**options: Any) -> Any:
        with watching() as sessions:
            step(compiled(plain, **options), head.to(torch.float32))
        return sessions[0].graphs

    head = Head.make()
    head.h, head.y = torch.randn(64, 4, requires_grad=True), torch.randint(0, 512, (64,))
    head.w = torch.randn(512, 4, requires_grad=True)
    whole, chunked = graphs(remove_passes="auto_chunker"), graphs(**{"auto_chunker.chunks": 16})
    rest = 4 * (head.h.numel() + head.w.numel())
    assert peak_bytes(whole["forward"]) > 64 * 512 * 4
    # values of four of 64 rows, the weight and its gradient, which has a second copy where it is not added in place
    assert peak_bytes(chunked["forward"]) < 6 * 4 * 512 * 4 + 4 * rest
    # nothing but the gradients that are ready, multiplied one after the other; kernels need no more than these
    assert peak_bytes(chunked["backward"]) <= 3 * rest + 8
    products = [n for n in chunked["forward"].graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]
    shapes = [tuple(n.meta["val"].shape) for n in products]
    assert [sorted(shapes[i : i + 3]) for i in range(0, 48, 3)] == [[(4, 4), (4, 512), (512, 4)]] * 16


@pytest.mark.parametrize("loss", [plain, with_bias])
def test_kernels_keep_the_chunks_apart(loss):
    """Inductor would run all products before the first gradient: the count of rows that are not ignored is part of one
    kernel with the sum of their losses. And it would sum up the gradient of the bias at the end."""
    with watching() as sessions:
        step(compiled(loss, codegen="inductor"), Head.make())
    code = sessions[0].kernels["forward"]
    chunk = -(-ROWS // CHUNKS)
    buffers = re.findall(r"empty_strided_cpu\(\((\d+), (\d+)\)", code)
    assert (str(ROWS), str(CLASSES)) not in buffers
    assert buffers.count((str(chunk), str(CLASSES))) == 1  # a product, over which its gradient is written
    assert buffers.count((str(CLASSES), str(HIDDEN))) == 1  # the gradient of the weight, added to in place
    backward = sessions[0].kernels["backward"]
    assert "empty_strided_cpu((" not in backward.partition("def call")[2].partition("return")[0]  # written in place


def test_gradients_add_up():
    head = Head.make()
    eager = head.to(torch.float32)
    program = compiled(with_bias)
    for factor in (1.0, 0.5, -3.0):
        (program(head) * factor).backward()
        (with_bias(eager) * factor).backward()
    for one, other in zip(head.gradients, eager.gradients):
        torch.testing.assert_close(one, other)


def test_all_rows_ignored():
    """The loss is NaN, and the gradients are zero, as in eager."""
    head = Head.make()
    head.y = torch.full((ROWS,), -100)
    value, *gradients = step(compiled(plain), head)
    assert value.isnan() and all(not g.any() for g in gradients)


@pytest.mark.parametrize("after", [torch.exp, torch.square, lambda loss: loss.exp().log()])
def test_no_gradient_where_all_rows_are_ignored_and_the_loss_is_used_further(after):
    """The loss and its gradient are NaN; those of the rows are zero, as in eager."""
    head = Head.make()
    head.y = torch.full_like(head.y, -100)
    with watching() as sessions:
        values = step(compiled(lambda head: after(plain(head))), head)
    assert fired(sessions) == 1
    assert values[0].isnan() and all(not value.any() for value in values[1:])


@pytest.mark.parametrize("rows, inner", [(0, 4), (8, 0)])
def test_nothing_to_chunk(rows, inner):
    def program(h, w):
        return F.linear(h, w).logsumexp(-1).sum()

    with watching() as sessions:
        fast = torch.compile(
            program, backend=triptych.compile_fx, options={"codegen": "eager", "verify": "each", "on_error": "raise", **SMALL}
        )
        given = torch.randn(rows, inner), torch.randn(16, inner)
        torch.testing.assert_close(fast(*given), program(*given))
    assert not fired(sessions) and not [w for s in sessions for w in s.warnings]


def test_autocast():
    def loss(head: Head) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(F.linear(head.h, head.w, head.b), head.y)

    head = Head.make()
    with watching() as sessions:
        chunked = step(compiled(loss), head.to(torch.float32))
    assert fired(sessions) == 1
    for one, other in zip(chunked, step(loss, head.to(torch.float32))):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_without_a_gradient():
    head = Head.make()
    with watching() as sessions, torch.no_grad():
        value = compiled(plain)(head)
    assert fired(sessions) == 1
    torch.testing.assert_close(value, plain(head))
    forward = sessions[0].graphs["forward"]  # values were moved down to where they are read: the chunks stay apart
    assert largest_value(forward) < WHOLE / 2 and peak_bytes(forward) < 4 * WHOLE + 4 * head.w.numel()


def with_logits(head: Head) -> Any:
    logits = F.linear(head.h, head.w)
    return F.cross_entropy(logits, head.y), logits


def per_row(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h, head.w), head.y, reduction="none")


def over_rows(head: Head) -> torch.Tensor:
    logits = F.linear(head.h, head.w)
    return F.cross_entropy(logits - logits.mean(0), head.y)


def half(head: Head) -> torch.Tensor:
    return F.cross_entropy(F.linear(head.h.half(), head.w.half()), head.y)


def squared_gradient(head: Head) -> torch.Tensor:
    return Steep.apply(F.linear(head.h, head.w).sin()).mean()


class Steep(torch.autograd.Function):
    """Its gradient is the square of the gradient that comes in."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient


def checkpointed(head: Head) -> torch.Tensor:
    return checkpoint(lambda h, w: F.cross_entropy(F.linear(h, w), head.y), head.h, head.w, use_reentrant=False)


@pytest.mark.parametrize(
    "loss, reason",
    [
        (with_logits, "is returned"),
        (per_row, "no single number"),
        (over_rows, "not known before all rows are"),
        (half, "may underflow"),
        (squared_gradient, "proportional"),
        (checkpointed, "checkpointed"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_left_whole(loss, reason):
    head = Head.make()
    with watching() as sessions:
        results = compiled(loss)(head)
        torch.autograd.backward(results, [torch.ones_like(r) for r in ([results] if torch.is_tensor(results) else results)])
    assert fired(sessions) == 0
    assert any(reason in r for r in reasons(sessions)), reasons(sessions)


def test_large_products_are_chunked_and_others_not():
    """By default, as the cost model says; the report names the memory and both times."""

    def loss(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    with watching() as sessions:
        for rows in (16, 1024):
            h, w = torch.randn(rows, 64, requires_grad=True), torch.randn(16384, 64, requires_grad=True)
            program = torch.compile(loss, backend=triptych.compile_fx, options={"codegen": "eager"}, dynamic=False)
            program(h, w, torch.randint(0, 16384, (rows,))).backward()
    assert [fired([s]) for s in sessions] == [0, 1] and not reasons(sessions)
    (decision,) = [d for s in sessions for r in s.records for d in r.decisions if d.rule == "chunk_rows"]
    assert re.fullmatch(r"[\d.]+ us instead of [\d.]+ us, saves 60 MiB, modelled", str(decision))


@pytest.mark.parametrize("dtype, chunks", [(torch.float32, 16), (torch.bfloat16, 8)])
def test_fewer_chunks_in_half_precision(dtype, chunks):
    """Each chunk rounds the gradient of the weight once more."""
    h, w = (torch.randn(n, 8).to(dtype).requires_grad_() for n in (2048, 20480))
    options = {"codegen": "eager", "tune": "off"}
    with watching() as sessions:
        torch.compile(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), backend=triptych.compile_fx, options=options)(
            h, w, torch.zeros(2048, dtype=torch.int64)
        )
    graph = sessions[0].graphs["forward"].graph
    logits = [n for n in graph.nodes if n.op == "call_function" and "mm" in str(n.target) and n.meta["val"].shape[1:] == (20480,)]
    assert len(logits) == chunks


def both_and_sum(head: Head) -> Any:
    loss, other = plain(head), head.h.square().mean()
    return loss, other, loss + 0.1 * other


def test_several_results_with_gradients_of_their_own():
    """The gradient of the head is proportional to the sum of two gradients that come in."""
    head = Head.make()
    eager = head.to(torch.float32)
    with watching() as sessions:
        results = compiled(both_and_sum)(head)
    assert fired(sessions) == 1, reasons(sessions)
    directions = [torch.tensor(v) for v in (2.0, -1.0, 0.5)]
    torch.autograd.backward(results, directions)
    torch.autograd.backward(both_and_sum(eager), directions)
    for one, other in zip(head.gradients, eager.gradients):
        torch.testing.assert_close(one, other)


class LanguageModel(torch.nn.Module):
    """An embedding that is the head, too, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(CLASSES, HIDDEN)
        self.layer = torch.nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.tokens(x))).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def test_a_model_trains():
    x = torch.randint(0, CLASSES, (BATCH, LENGTH))
    losses = []
    for compile_model in (lambda model: model, compiled):
        torch.manual_seed(1)
        model = LanguageModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        program = compile_model(model)
        with watching() as sessions:
            for _ in range(4):
                optimizer.zero_grad()
                loss = program(x)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert fired(sessions) == 1, reasons(sessions)
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-4) and losses[3] < losses[0]
