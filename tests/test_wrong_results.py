"""Programs that once came out wrong, or did not compile, each with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from triptych.testing.check import compare, compare_graphs


def run_both(program, *inputs, grad=False):
    """Outputs, inputs after the call, and gradients: eager and compiled alike."""

    def run(function):
        given = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(grad and t.is_floating_point()) for t in inputs]
        made = function(*given)
        made = list(made) if isinstance(made, (tuple, list)) else [made]
        if grad:
            sum(t.sum() for t in made if t.requires_grad).backward()
        gradients = [t.grad for t in given if t.grad is not None]
        return [t.detach() for t in (*made, *given, *gradients)]

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})
    compare(run(program), run(compiled))


def changes_shape_in_place(x):
    y = x * 2
    a = y.view(1, 4, 8) * 3  # the fake tensor of y, asked after the whole trace, has this shape already
    y.unsqueeze_(0)
    return a, y.view(1, 4, 8) + 1, y


def writes_out(x, y):
    copied = y.clone()
    F.normalize(x, dim=0, out=y)
    return copied * 2


def writes_unsafe_piece(x):
    first, second = (x * 3).unsafe_chunk(2)
    first.mul_(2)  # forbidden for a piece of `split`
    return first + second


X = torch.arange(32.0).view(4, 8)
C = torch.tensor([1 + 2j, 3 - 1j, -2j, 5 + 0j])

PROGRAMS = {
    # pieces of a split whose places go back and forth overlap: the third begins at 1, not at 2
    "overlapping pieces": (lambda x: torch.tensor_split(x, (2, 1, 3))[2] * 2, torch.arange(4.0)),
    "shape changed in place": (changes_shape_in_place, X),
    "detach under func.grad": (lambda x: torch.func.grad(lambda y: (y.detach() * y).sum())(x), torch.arange(4.0)),
    "detach under jvp": (lambda x: torch.func.jvp(lambda y: y + y.detach(), (x,), (x + 1,))[1], torch.arange(4.0)),
    "stack under vmap": (lambda x: torch.func.vmap(lambda y: torch.stack(y.unbind()) * 2 + y.view(8))(x), X),
    "out= of a function written in Python": (writes_out, torch.arange(1.0, 5.0), torch.zeros(4)),
    "conjugate, minus 0": (lambda x: torch.view_as_real(x.conj() - 0) * 2, C),
    "conjugate, copied": (lambda x: torch.view_as_real(x.conj().clone()) * 2, C),
    "conjugate, put together": (lambda x: torch.view_as_real(torch.cat(x.conj().chunk(2))) * 2, C),
    # on the CPU a single number keeps its precision as the second operand only
    "half times a float number": (lambda s, x: x.half() * s, torch.tensor(0.1234567), X / 7),
    "cat of one tensor twice, channels last": (
        lambda x: torch.cat([x, x], 1), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),  # fmt: skip
    "minus 0, complex": (lambda x: (x - 0) * 1, torch.tensor([complex(1, -0.0)])),
    "movedim of a number": (lambda x: x.movedim(0, 0) + 1, torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_is_eager(name):
    program, *inputs = PROGRAMS[name]
    run_both(program, *inputs)


def test_pieces_that_may_be_written_stay_so():
    run_both(writes_unsafe_piece, torch.arange(4.0), grad=True)


def test_detach_of_a_leaf_made_in_the_graph():
    graph = torch.fx.Graph()
    leaf = graph.call_function(torch.ones, (4,), {"requires_grad": True})
    cut = graph.call_method("detach", (leaf,))
    graph.output((graph.call_function(torch.mul, (cut, leaf)), leaf))
    gm = triptych.pre_grad_passes(torch.fx.GraphModule(nn.Module(), graph))
    product, made = gm()
    assert torch.autograd.grad(product.sum(), made)[0].tolist() == [1.0] * 4


class Rescales(nn.Module):
    """The embedding scales rows of its weight, which the copy must not see."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, 8, max_norm=1.0)
        self.weight = self.rows.weight

    def forward(self, index):
        before = self.weight.detach().clone()
        return self.rows(index), before * 2


class Counts(nn.Module):
    """A hook does what the module does not say."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.calls = 0

        def hook(module, inputs):
            self.calls += 1

        self.act.register_forward_pre_hook(hook)

    def forward(self, x):
        self.act(x)
        return x + 1


def test_an_embedding_that_scales_its_weight():
    gm = torch.fx.symbolic_trace(Rescales())
    index = torch.tensor([0, 2])
    with torch.no_grad():
        gm.rows.weight.fill_(3.0)
    before = copy.deepcopy(gm)
    compare_graphs(before, triptych.pre_grad_passes(gm, [index]), [index])


def test_a_module_with_hooks_is_called_though_nobody_uses_it():
    program = Counts()
    gm = torch.fx.symbolic_trace(program)
    x = torch.ones(3)
    triptych.pre_grad_passes(gm, [x])
    triptych.post_grad_passes(gm, is_inference=True)
    program.calls = 0
    gm(x)
    assert program.calls == 1


class CountsCalls(nn.Module):
    """The gradient is computed from a buffer that the forward writes: recomputed from the buffer, it would be off."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x) * self.calls


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y / (self.mean.abs() + 1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("module", [CountsCalls, RunningMean])
def test_gradients_from_buffers_that_are_written(module, dynamic):
    torch._dynamo.reset()
    eager = module()
    copied = copy.deepcopy(eager)
    compiled = torch.compile(copied, backend=triptych.compile_fx, options={"codegen": "eager"}, dynamic=dynamic)
    x = torch.randn(4, 6)
    for _ in range(3):
        eager(x).square().sum().backward()
        compiled(x).square().sum().backward()
    for want, got in zip([*eager.buffers(), *eager.parameters()], [*copied.buffers(), *copied.parameters()]):
        torch.testing.assert_close(got, want)
    for want, got in zip(eager.parameters(), copied.parameters()):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.tanh().clone(),
        lambda x: (x * 2).exp() * 1,
        lambda x: (lambda y: (y.clone(), (y * y).sum()))(x * 2)[0],
    ],
    ids=["clone of a saved result", "times one", "clone of a saved operand"],
)
def test_a_returned_copy_may_be_written_before_the_backward(program, codegen):
    """What the backward needs, autograd must find as it was: a copy of it that is returned stays a copy."""

    def gradient(function):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        result = function(x)
        kept = result.detach().clone()
        result.mul_(3)
        result.sum().backward()
        return kept, x.grad

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="triptych", options={"codegen": codegen})
    torch.testing.assert_close(gradient(program), gradient(compiled))


@pytest.mark.parametrize(
    ("drop", "shape"),
    [(F.dropout1d, (64, 8)), (F.dropout1d, (2, 64, 8)), (F.dropout2d, (2, 64, 8)), (F.dropout2d, (2, 64, 3, 4)),
     (F.dropout3d, (64, 2, 3, 4)), (F.dropout3d, (2, 64, 2, 3, 4)),
     (nn.Dropout1d(), (64, 8)), (nn.Dropout3d(), (64, 2, 3, 4)), (nn.Dropout3d(), (2, 64, 2, 3, 4))],
)  # fmt: skip
def test_whole_slices_are_dropped(drop, shape):
    """Without a batch the slices lie along the first dim."""
    dims = [d for d in range(len(shape)) if shape[d] in (64, 2) and d < 2 and not (shape[0] == 64 and d == 1)]
    torch._dynamo.reset()
    made = torch.compile(drop, backend=triptych.compile_fx, options={"codegen": "eager"})(torch.ones(shape))
    rest = [d for d in range(len(shape)) if d not in dims]
    assert torch.equal(made.amax(rest), made.amin(rest)) and 0 < (made == 0).float().mean() < 1


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_requires_no_gradient_in_eager_requires_none(codegen):
    options = {"codegen": codegen}

    def detached(x):
        return (h := x * 2), h[0].detach(), h.detach()[1]

    weight = nn.Parameter(torch.ones(2, 3))
    found = torch.compile(detached, backend=triptych.compile_fx, options=options)(weight)
    assert [t.requires_grad for t in found] == [True, False, False]
    with torch.no_grad():
        assert not torch.compile(lambda w: w.double(), backend=triptych.compile_fx, options=options)(weight).requires_grad
