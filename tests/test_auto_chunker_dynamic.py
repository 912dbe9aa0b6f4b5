"""auto_chunker with symbolic numbers of rows: one graph for all of them, equal to eager, and no large value in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import triptych
from tests.live_bytes import largest_value, peak_bytes
from triptych.passes.session import Session, watching

HIDDEN, CLASSES, CHUNKS = 8, 40, 4
SMALL = {"auto_chunker.least_bytes": 0, "auto_chunker.chunks": CHUNKS}
BATCH, LENGTH = 9, 7
WHOLE = BATCH * LENGTH * CLASSES
SIZES = (12, 8, 30)
"""Of a dim that is marked as dynamic, after the first size."""
TINY = (7, 4, 3, 11)
"""Mostly fewer than two for each chunk."""

T = torch.Tensor
Loss = Callable[[T, T, T, T], T]


def plain(h: T, w: T, b: T, y: T) -> T:
    return F.cross_entropy(F.linear(h, w, b).view(-1, CLASSES), y.view(-1))


def llama(h: T, w: T, b: T, y: T) -> T:
    """As models of Hugging Face compute it: labels padded by one and shifted; logits in float32."""
    logits = F.linear(h, w).float()
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1))


def counted_tokens(h: T, w: T, b: T, y: T) -> T:
    """With accumulated gradients: a sum over the number of all tokens."""
    losses = F.cross_entropy(F.linear(h, w).view(-1, CLASSES), y.view(-1), reduction="sum")
    return losses / (y != -100).sum()


def masked(h: T, w: T, b: T, y: T) -> T:
    losses = F.cross_entropy(F.linear(h, w).view(-1, CLASSES), y.view(-1), reduction="none").view(y.shape)
    mask = (y > 3).to(h.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def means_of_sequences(h: T, w: T, b: T, y: T) -> T:
    losses = F.cross_entropy(F.linear(h, w).view(-1, CLASSES), y.view(-1), reduction="none").view(y.shape)
    return losses.mean(1).mean()


def z_loss(h: T, w: T, b: T, y: T) -> T:
    logits = F.linear(h, w).view(-1, CLASSES)
    return F.cross_entropy(logits, y.view(-1)) + 0.1 * logits.logsumexp(-1).square().mean()


def smoothed(h: T, w: T, b: T, y: T) -> T:
    return F.cross_entropy(F.linear(h, w, b).view(-1, CLASSES), y.view(-1), label_smoothing=0.1)


def bias_added_later(h: T, w: T, b: T, y: T) -> T:
    return F.cross_entropy(F.linear(h, w).view(-1, CLASSES) + b, y.view(-1))


def shifted_logits(h: T, w: T, b: T, y: T) -> T:
    """Whole sequences only, since each is cut."""
    logits = F.linear(h, w)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), y[..., 1:].contiguous().view(-1))


def all_but_the_last(h: T, w: T, b: T, y: T) -> T:
    logits = F.linear(h, w)[:, : h.shape[1] - 1]
    return F.cross_entropy(logits.reshape(-1, CLASSES), y[:, 1:].reshape(-1))


def classes_second(h: T, w: T, b: T, y: T) -> T:
    return F.cross_entropy(F.linear(h, w, b).transpose(1, 2), y)


def contrastive(h: T, w: T, b: T, y: T) -> T:
    """As many columns as rows."""
    narrow = h.view(-1, HIDDEN)[:, :4].contiguous()
    return F.cross_entropy(narrow @ narrow.t(), torch.arange(narrow.shape[0]))


ROWS: list[Loss] = [
    plain, llama, counted_tokens, masked, means_of_sequences, z_loss, smoothed, bias_added_later, contrastive,
]  # fmt: skip
SEQUENCES: list[Loss] = [shifted_logits, all_but_the_last, classes_second]


def operands(batch: int, length: int) -> tuple[T, T, T, T]:
    torch.manual_seed(100 * batch + length)
    h, w, b = torch.randn(batch, length, HIDDEN), torch.randn(CLASSES, HIDDEN), torch.randn(CLASSES)
    y = torch.randint(0, CLASSES, (batch, length))
    y[::3, -1] = -100
    return h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), y


def step(loss: Loss, given: Sequence[T]) -> list[T]:
    """The loss and its gradients."""
    given = [t.detach().requires_grad_(t.requires_grad) for t in given]
    value = loss(*given)
    value.backward()
    return [value.detach(), *(t.grad for t in given if t.grad is not None)]


def compiled(loss: Loss, **options: Any) -> Loss:
    return torch.compile(loss, backend=triptych.compile_fx, options={"codegen": "eager", **SMALL, **options})


def shapes(dims: Sequence[int], sizes: Sequence[int], first: tuple[int, int]) -> list[tuple[int, int]]:
    """The first shape, then others with these sizes in the dynamic dims; in the second of two the order is reversed."""
    others = [list(first) for _ in sizes]
    for dim, order in zip(dims, (sizes, sizes[::-1])):
        for shape, size in zip(others, order):
            shape[dim] = size
    return [first, *((batch, length) for batch, length in others)]


def check(
    loss: Loss, dims: Sequence[int], sizes: Sequence[int] = SIZES, first: tuple[int, int] = (BATCH, LENGTH), **options: Any
) -> list[Session]:
    """Each size of the dynamic dims gives what eager gives."""
    program = compiled(loss, **options)
    with watching() as sessions:
        for shape in shapes(dims, sizes, first):
            given = operands(*shape)
            exact = step(loss, [t.double() if t.is_floating_point() else t for t in given])

            def marked(h: T, w: T, b: T, y: T) -> T:
                for dim in dims:
                    torch._dynamo.mark_dynamic(h, dim)
                    torch._dynamo.mark_dynamic(y, dim)
                return program(h, w, b, y)

            chunked = step(marked, given)
            assert len(chunked) == len(exact)
            for want, value in zip(exact, chunked):
                torch.testing.assert_close(value.double(), want.double(), atol=1e-5, rtol=1e-5)
    assert fired(sessions[0]) == 1, reasons(sessions[0])
    return sessions


def fired(session: Session) -> int:
    return sum(r.fired["chunk_rows"] for r in session.records)


def reasons(session: Session) -> list[str]:
    return [d.reason for r in session.records for d in r.declines if d.rule == "chunk_rows"]


DIMS = pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["batch", "length", "both"])


@DIMS
@pytest.mark.parametrize("loss", [*ROWS, *SEQUENCES], ids=lambda f: f.__name__)
def test_equal_to_eager_by_one_graph(loss, dims):
    (session,) = check(loss, dims)
    forward, backward = session.graphs["forward"], session.graphs["backward"]
    if loss is not contrastive:
        assert largest_value(forward) < WHOLE / 2 and largest_value(backward) < WHOLE / 2
    assert not any(n.target is torch.ops.aten.mm.default for n in backward.graph.nodes)


@pytest.mark.parametrize("loss", [plain, z_loss, counted_tokens, bias_added_later], ids=lambda f: f.__name__)
def test_fewer_rows_than_chunks(loss):
    """Then the first chunk has all rows, and the others have none; that takes no other graph."""
    assert len(check(loss, (0,), sizes=(*TINY, 2), first=(21, 1))) == 1


@DIMS
@pytest.mark.parametrize("loss", SEQUENCES, ids=lambda f: f.__name__)
def test_fewer_sequences_than_chunks(loss, dims):
    assert len(check(loss, dims, sizes=TINY)) == 1


def test_fewer_rows_than_chunks_by_kernels():
    """Here Inductor does not ask whether a chunk is empty; of some other losses it does, and makes another graph."""
    assert len(check(plain, (0,), sizes=(4, 2), first=(21, 1), codegen="inductor")) == 1


@pytest.mark.slow
def test_fewer_rows_than_chunks_of_another_loss_by_kernels():
    check(z_loss, (0,), sizes=(4,), first=(21, 1), codegen="inductor")


@DIMS
@pytest.mark.parametrize("loss", [llama, z_loss, counted_tokens, shifted_logits], ids=lambda f: f.__name__)
def test_equal_by_kernels(loss, dims):
    assert len(check(loss, dims, codegen="inductor")) == 1


@pytest.mark.parametrize("loss", [llama, shifted_logits], ids=lambda f: f.__name__)
def test_each_pass_is_verified(loss):
    check(loss, (0, 1), verify="each", sizes=SIZES[:1])


@pytest.mark.parametrize("loss", [llama, shifted_logits], ids=lambda f: f.__name__)
def test_as_little_memory_as_with_a_known_number_of_rows(loss):
    def peak(dynamic: bool) -> int:
        with watching() as sessions:
            step(torch.compile(loss, backend=triptych.compile_fx, dynamic=dynamic, options=options), given)
        assert fired(sessions[0]) == 1
        return peak_bytes(sessions[0].graphs["forward"])

    given = operands(64, 8)
    options = {"codegen": "eager", "auto_chunker.least_bytes": 0, "auto_chunker.chunks": 16}
    static, symbolic = peak(dynamic=False), peak(dynamic=True)
    assert symbolic <= 1.01 * static < 64 * 8 * CLASSES * 4


@pytest.mark.parametrize("loss", [llama, shifted_logits], ids=lambda f: f.__name__)
def test_lengths_that_change(loss):
    """Without a mark: the second length makes the graph a dynamic one, and the third needs no other."""
    program = compiled(loss)
    with watching() as sessions:
        for length in (7, 12, 30, 3):
            given = operands(BATCH, length)
            for want, value in zip(step(loss, given), step(program, given)):
                torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-5)
    assert [fired(s) for s in sessions] == [1, 1]


class LanguageModel(torch.nn.Module):
    """An embedding that is the head, too, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(CLASSES, HIDDEN)
        self.layer = torch.nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: T) -> T:
        logits = self.head(self.layer(self.tokens(x))).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def test_a_model_trains_on_batches_of_several_sizes():
    batches = [torch.randint(0, CLASSES, shape) for shape in ((8, 7), (8, 9), (9, 12), (11, 5), (8, 31), (9, 7))]
    losses = []
    for compile_model in (lambda model: model, compiled):
        torch.manual_seed(1)
        model = LanguageModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        program = compile_model(model)
        with watching() as sessions:
            for x in batches:
                optimizer.zero_grad()
                loss = program(x)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert [fired(s) for s in sessions] == [1, 1, 1]  # static, by length, by length and batch
    assert losses[: len(batches)] == pytest.approx(losses[len(batches) :], rel=1e-4)


def test_too_few_sequences():
    """Two or three sequences of a symbolic number cannot be split: of four, each chunk has two."""
    with watching() as sessions:
        step(torch.compile(shifted_logits, backend=triptych.compile_fx, dynamic=True, options=SMALL), operands(3, LENGTH))
    assert not fired(sessions[0]) and "too few rows, or sequences, to split: s" in reasons(sessions[0])[0]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_rows_that_depends_on_data():
    def some(h: T, w: T, b: T, y: T) -> T:
        return F.cross_entropy(F.linear(h[y != -100], w), y[y != -100])

    given = operands(BATCH, LENGTH)
    with watching() as sessions:
        values = step(compiled(some), given)
    assert [fired(s) for s in sessions] == [0] and "depend on data" in reasons(sessions[0])[0]
    for want, value in zip(step(some, given), values):
        torch.testing.assert_close(value, want)


def test_the_decision_is_made_for_the_size_at_hand():
    """Rows by which chunks pay when the graph is compiled decide, also about how many chunks there are."""
    decisions = []
    for rows in (16, 1024):
        torch._dynamo.reset()
        h, w = torch.randn(rows, 64, requires_grad=True), torch.randn(16384, 64, requires_grad=True)
        y = torch.randint(0, 16384, (rows,))

        def loss(h: T, w: T, y: T) -> T:
            return F.cross_entropy(F.linear(h, w), y)

        for dynamic in (False, True):
            with watching() as sessions:
                program = torch.compile(loss, backend=triptych.compile_fx, dynamic=dynamic, options={"codegen": "eager"})
                program(h, w, y).backward()
            decisions.append([d for s in sessions for r in s.records for d in r.decisions if d.rule == "chunk_rows"])
    small, dynamic_small, (large,), (dynamic_large,) = decisions
    assert small == dynamic_small == []
    assert dynamic_large.saves == large.saves == 60 * 2**20
    assert dynamic_large.before == large.before and dynamic_large.after == large.after
