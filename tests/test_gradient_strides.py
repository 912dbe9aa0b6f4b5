"""A gradient that a compiled backward returns has strides that the backward of an operation before it can rely on.

Stage 1 rewrites a program before autograd differentiates it, so autograd may give a gradient other strides than in eager.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych.passes.session import watching

CODEGENS = ["eager", "inductor"]
ONES = torch.ones(2, 4, 5)

PROGRAMS = {
    "stacked pieces": (lambda x: torch.stack(x.unbind(1), 2) * 1.0, (2, 5, 4)),
    "stacked chunks": (lambda x: torch.stack(x.chunk(5, 1)).relu(), (2, 5, 4)),
    "concatenated pieces": (lambda x: torch.cat([t.unsqueeze(0) for t in x.unbind(2)]), (2, 5, 4)),
    "permuted product": (lambda x: (x @ ONES).mT.contiguous(), (2, 5, 4)),
    "attention": (lambda x: (x @ x.mT).softmax(-1) @ x, (2, 6, 4)),
    "weights joined by columns": (lambda x, w, v: (x @ w).relu() + (x @ v).sin(), (6, 4), (4, 5), (4, 5)),
    "sum of stacked pieces": (lambda x: torch.stack(x.unbind(1)).sum(0), (2, 5, 4)),
    "pieces in a concatenation": (lambda x: torch.cat([*x.split(2, 1), x.exp()], 1).relu(), (2, 4)),
}


class NeedsView(torch.autograd.Function):
    """The identity, whose backward takes a view of the gradient that not every strides allow."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.view(-1) * 2).view(gradient.shape)


def compiled(program, codegen, **how):
    torch._dynamo.reset()
    return torch.compile(program, backend=triptych.compile_fx, options={"codegen": codegen}, **how)


def gradients(program, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = program(*leaves)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(out, leaves, seed)


def copies_of(program, inputs, codegen="eager"):
    """How many gradients the backward of the compiled program copies, and the gradients."""
    with watching() as sessions:
        given = gradients(compiled(program, codegen), inputs)
    records = [r for session in sessions for r in session.records if r.name == "gradient_strides"]
    assert any(r.graph == "backward" for r in records)
    return sum(r.rewrites for r in records), given


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_are_those_of_eager(name, codegen, dynamic):
    program, *shapes = PROGRAMS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    want, got = gradients(program, inputs), gradients(compiled(program, codegen, dynamic=dynamic), inputs)
    assert [g.stride() for g in got] == [g.stride() for g in want]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_before_the_program_may_view_the_gradient(name, codegen):
    program, *shapes = PROGRAMS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    whole = compiled(program, codegen)
    want = gradients(lambda *xs: program(*map(NeedsView.apply, xs)), inputs)
    got = gradients(lambda *xs: whole(*map(NeedsView.apply, xs)), inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_gradients_of_leaves_have_the_strides_of_the_leaves(codegen):
    program, shape = PROGRAMS["attention"]
    function = compiled(program, codegen)
    for x in (torch.randn(shape), torch.randn(2, 4, 6).mT):
        x.requires_grad_()
        for _ in range(2):
            function(x).sum().backward()
            assert x.grad.stride() == x.stride()


@pytest.mark.parametrize("codegen", CODEGENS)
def test_inputs_in_channels_last(codegen):
    """Eager computes a contiguous gradient of pieces that are stacked, and one in channels_last of a pointwise function."""
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    programs = [lambda x: torch.stack(x.unbind(3), 2) * 1.0, lambda x: torch.cat([t.relu() for t in x.split(2, 1)], 1)]
    for program in programs:
        (want,), (got,) = gradients(program, [x]), gradients(compiled(program, codegen), [x])
        assert got.stride() == want.stride()


def test_a_gradient_that_is_returned_twice_is_copied_once():
    def program(x, y):
        return torch.stack((x + y).unbind(1), 2) * 1.0

    copies, (left, right) = copies_of(program, [torch.randn(2, 5, 4), torch.randn(2, 5, 4)])
    assert copies == 1
    assert left.is_contiguous() and right.is_contiguous()


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.permute(2, 0, 1).contiguous(),
        lambda x: x.sum(1),
        lambda x: F.relu(x.transpose(0, 2)).chunk(2, dim=1)[0].exp(),
    ],
    ids=["permuted", "expanded", "spelling"],
)
def test_a_program_without_rewrites_has_the_gradients_of_autograd(program, codegen):
    x = torch.randn(2, 6, 4)
    copies, (got,) = copies_of(program, [x], codegen)
    (want,) = gradients(torch.compile(program, backend="aot_eager"), [x])
    assert copies == 0
    if codegen == "eager":
        assert got.stride() == want.stride()


def test_a_gradient_as_its_tensor_is_not_copied():
    """A rewrite alone costs nothing: pieces are put together again, and the gradient is contiguous."""
    copies, _ = copies_of(lambda x: torch.cat(x.unbind(1), 1).relu(), [torch.randn(2, 5, 4)])
    assert copies == 0


def test_a_cached_program_is_not_taken_for_one_that_was_rewritten():
    """Two programs may be the same after stage 1; only the gradients of the rewritten one are copied."""

    def written_so(x):
        return x.permute(0, 2, 1).contiguous() * 2.0

    def rewritten(x):
        return (x.permute(0, 2, 1).contiguous() * 2.0).view(2, 4, 5)

    inputs = [torch.randn(2, 5, 4)]
    for _ in range(2):
        assert not gradients(compiled(written_so, "inductor"), inputs)[0].is_contiguous()
        assert gradients(compiled(rewritten, "inductor"), inputs)[0].is_contiguous()
