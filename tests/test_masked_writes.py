"""`x[mask] = number` makes a new value where nobody else sees the memory, and stays a write where anybody does."""

from __future__ import annotations

import copy

import pytest
import torch

import triptych
from triptych.ir.text import text
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.testing.capture import capture_torch
from triptych.testing.check import compare_gradients, compare_graphs, run_pass

X = (2, 3, 4, 4)


def normalized(program, *inputs, dynamic=False):
    torch._dynamo.reset()
    gm, args = capture_torch(program, inputs, dynamic)
    original = copy.deepcopy(gm)
    tally = run_pass(NormalizationPassAten, gm)
    gm.graph.lint()
    compare_graphs(original, gm, args)
    compare_gradients(original, gm, args, none_is_zero=True)
    return gm, tally


def whole(x, mask):
    x[mask] = -2.0


def behind_slices(x, mask):
    x[:, :, mask] = 3


def behind_dots(x, mask):
    x[..., mask] = 3


def before_dots(x, mask):
    x[mask, ...] = -0.0


def one_axis_in_the_middle(x, mask):
    x[..., mask, :] = float("-inf")


def number_in_a_tensor(x, mask):
    x[mask] = torch.full((), 2.0)


def number_with_a_gradient(x, mask):
    x[mask] = x.new_ones(3).sum() * 2


def one_of_its_own_numbers(x, mask):
    x[mask] = x[0, 0, 0, 0]


def by_index_put(x, mask):
    x.index_put_((mask,), torch.tensor(1.5))


FORMS = [
    (whole, X), (whole, X[:2]), (whole, X[:1]), (behind_slices, X[2:]), (behind_slices, X[2:3]), (behind_dots, X[1:]),
    (before_dots, X[:2]), (one_axis_in_the_middle, X[2:3]), (number_in_a_tensor, X), (number_with_a_gradient, X[:3]),
    (by_index_put, X), (one_of_its_own_numbers, X),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("write", "shape"), FORMS)
def test_a_masked_write_makes_a_new_value(write, shape, dynamic):
    def program(x, mask):
        y = x * 2
        z = y + 1
        write(y, mask)
        return y, z

    x = torch.randn(X, requires_grad=True)
    gm, tally = normalized(program, x, torch.rand(shape) > 0.5, dynamic=dynamic)
    assert tally.fired["out_of_place"] == 1
    assert "setitem" not in text(gm) and "index_put" not in text(gm)


def to_the_input(x, mask):
    x[mask] = 0
    return x


def to_a_view(x, mask):
    y = x * 2
    y[0][mask[0]] = 0
    return y


def seen_by_a_view(x, mask):
    y = x * 2
    z = y.view(-1)
    y[mask] = 0
    return z


def several_numbers(x, mask):
    y = x * 2
    y[mask] = x[:, 0, 0, :1].sum(0)
    return y


def part_of_a_slice(x, mask):
    y = x * 2
    y[:1, mask[0]] = 0
    return y


def new_axis(x, mask):
    y = x * 2
    y[None, mask] = 0
    return y


def added_up(x, mask):
    y = x * 2
    y.index_put_((mask,), torch.tensor(1.5), accumulate=True)
    return y


def by_numbers(x, mask):
    y = x * 2
    y[mask.long()] = 0
    return y


@pytest.mark.parametrize(
    "program",
    [
        to_the_input, to_a_view, seen_by_a_view, several_numbers, part_of_a_slice, new_axis,
        added_up, by_numbers,
    ],
)  # fmt: skip
def test_other_writes_stay(program):
    gm, _ = normalized(program, torch.randn(X), torch.rand(X) > 0.5)
    assert "masked_fill" not in text(gm)


@pytest.mark.parametrize("write", [lambda y, mask: y.mul_(mask), whole])
def test_a_write_that_autograd_does_not_follow_stays(write):
    """What is written under no_grad keeps its gradient; what is made there has none."""

    def program(x, mask):
        y = x * 2
        with torch.no_grad():
            write(y, mask)
        return y * 2

    inputs = torch.randn(X, requires_grad=True), torch.rand(X) > 0.5
    gm, tally = normalized(program, *inputs)
    assert not tally.fired["out_of_place"]
    assert gm(*inputs)[0].requires_grad


def _all_of_it(y, v):
    y[:] = v


def _slices_in_order(y, v):
    y[:, 0:3, :] = v


def _one_row_for_all(y, v):
    y[...] = v[:1]


def _of_another_dtype(y, v):
    y[:] = v.double()


@pytest.mark.parametrize("write", [_all_of_it, _slices_in_order, _one_row_for_all, _of_another_dtype])
def test_a_write_of_everything_is_what_is_written(write):
    def program(x):
        y = x * 2
        before = y[1].view(-1)[2:].exp()
        write(y, (y.view(-1) + 1).view(X))
        return y.sin(), before

    gm, tally = normalized(program, torch.randn(X, requires_grad=True))
    assert tally.fired["out_of_place"] == 1 and "setitem" not in text(gm)


def _view_read_afterwards(x):
    y = x * 2
    seen = y[0].view(-1)
    y[:] = y + 1
    return y, seen.exp()


def _view_of_a_view_read_afterwards(x):
    y = x * 2
    seen = y[0].view(-1)
    summed = seen.sum()
    y[:] = y + summed
    return y, seen[2:] + 0


def _view_returned(x):
    y = x * 2
    seen = y[0]
    y[:] = y + 1
    return y + 0, seen


def _a_part(x):
    y = x * 2
    y[:, :2] = y[:, 1:] + 1
    return y


def _every_second(x):
    y = x * 2
    y[::2] = 1 + y[::2]
    return y


def _an_input(x):
    x[:] = x + 1
    return x * 2


@pytest.mark.parametrize(
    "program", [_view_read_afterwards, _view_of_a_view_read_afterwards, _view_returned, _a_part, _every_second, _an_input]
)
def test_a_write_that_others_see_or_of_a_part_stays(program):
    gm, tally = normalized(program, torch.randn(X))
    assert not tally.fired["out_of_place"] and "setitem" in text(gm)


def test_what_is_written_and_changed_afterwards():
    """The copy is taken at the write."""

    def program(x):
        y, z = x * 2, x + 1
        y[:] = z
        z.mul_(3)
        return y, z

    normalized(program, torch.randn(X))


def test_a_masked_write_of_an_exported_graph_is_found_by_attention():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, mask):
            scores = (q @ k.mT * 0.3).index_put((mask,), torch.full((), -1e9))
            return scores.softmax(-1) @ v

    torch.manual_seed(0)
    inputs = (*(torch.randn(2, 3, 6, 8) for _ in range(3)), torch.rand(2, 3, 6, 6) > 0.8)
    wanted = Attention()(*inputs)
    gm = triptych.pre_grad_passes(torch.export.export(Attention(), inputs).module(), list(inputs))
    assert "scaled_dot_product_attention" in text(gm) and "index_put" not in text(gm)
    torch.testing.assert_close(gm(*inputs), wanted)
