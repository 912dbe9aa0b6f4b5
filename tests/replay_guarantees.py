"""What replaying guarantees: nothing that a user holds changes. Run on a CPU with a fake device, and on a GPU.

Whoever imports these tests provides `device`, which counts replays, and `codegen`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych

WIDTH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def compiled(program, codegen, **options):
    options = {"codegen": codegen, "cuda_graphs": "on", **options}
    return torch.compile(program, backend=triptych.compile_fx, options=options, dynamic=False)


def inputs(count, *shape):
    torch.manual_seed(7)
    return [torch.randn(*(shape or (4, WIDTH))) for _ in range(count)]


def test_results_of_earlier_calls_stay(device, codegen):
    model = Net()
    run, xs = compiled(model, codegen), inputs(7)
    with torch.no_grad():
        held = [run(x) for x in xs]
        for x, y in zip(xs, held):
            torch.testing.assert_close(y, model(x))
    assert device.replays >= 5


def test_views_and_several_results_of_one_memory_stay(device, codegen):
    def program(x):
        y = x * 2
        return y, y[1:], y.t(), x.expand(3, *x.shape)

    run, xs = compiled(program, codegen), inputs(6)
    held = [run(x) for x in xs]
    for x, found in zip(xs, held):
        for mine, want in zip(found, program(x)):
            assert torch.equal(mine, want) and mine.stride() == want.stride()
    assert device.replays >= 4


def step(run, x):
    loss = run(x).square().mean()
    loss.backward()
    return loss


def test_training_with_gradients_set_to_none(device, codegen):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run = compiled(model, codegen)
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, want)]
    losses = []
    for x in inputs(8):
        losses.append((step(run, x).detach(), step(want, x).detach()))
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    for mine, theirs in losses:
        torch.testing.assert_close(mine, theirs)
    assert device.replays >= 10


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_micro_batches(device, codegen, set_to_none):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run, xs = compiled(model, codegen), inputs(12)
    for begin in range(0, 12, 3):
        for x in xs[begin : begin + 3]:
            step(run, x)
            step(want, x)
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
        model.zero_grad(set_to_none=set_to_none)
        want.zero_grad(set_to_none=set_to_none)
    assert device.replays >= 8


def test_gradients_that_a_user_holds(device, codegen):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run, held = compiled(model, codegen), []
    for x in inputs(8):
        step(run, x)
        held.append([p.grad for p in model.parameters()])
        model.zero_grad()
        step(want, x)
        held[-1] = list(zip(held[-1], [p.grad.clone() for p in want.parameters()]))
        want.zero_grad()
    for pairs in held:
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("order", ["in turn", "reversed"])
def test_forward_called_several_times_before_its_backwards(device, codegen, order):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run = compiled(model, codegen)
    for _ in range(6):
        for net, call in ((model, run), (want, want)):
            net.zero_grad()
            losses = [call(x).square().mean() for x in inputs(3)]
            for loss in losses if order == "in turn" else reversed(losses):
                loss.backward()
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert device.replays >= 6


def test_forward_without_backward_and_under_no_grad_in_between(device, codegen):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run, xs = compiled(model, codegen), inputs(4)
    for _ in range(5):
        y = run(xs[0])
        run(xs[1])  # no backward
        with torch.no_grad():
            z = run(xs[2])
        y.square().mean().backward()
        want(xs[0]).square().mean().backward()
        torch.testing.assert_close(z, want(xs[2]))
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert device.replays >= 4


def test_a_graph_that_is_retained(device, codegen):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run = compiled(model, codegen)
    for x in inputs(6):
        for call in (run, want):
            loss = call(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None


def test_a_graph_that_is_retained_now_and_then(device, codegen):
    """Compiled for one backward, the backward may overwrite what the forward saved."""
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run = compiled(model, codegen)
    for n, x in enumerate(inputs(9)):
        for call in (run, want):
            loss = call(x).square().mean()
            if n % 3 == 1:
                loss.backward(retain_graph=True)
            loss.backward()
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None


def test_hooks_on_saved_tensors_may_keep_them(device, codegen):
    model = Net()
    run, kept = compiled(model, codegen), []

    def pack(x):
        kept.append((x, x.clone()))
        return x

    for x in inputs(6):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = run(x)
        y.sum().backward()
        model.zero_grad()
    for x, before in kept:
        torch.testing.assert_close(x, before)


def test_an_exception_between_forward_and_backward(device, codegen):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run = compiled(model, codegen)
    for n, x in enumerate(inputs(9)):
        try:
            y = run(x)
            if n % 3 == 1:
                raise KeyError("nobody calls backward")
            y.sum().backward()
            want(x).sum().backward()
        except KeyError:
            del y
    for mine, theirs in zip(model.parameters(), want.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_parameters_that_move_are_noticed(device, codegen):
    model = Net()
    run, xs = compiled(model, codegen), inputs(12)
    with torch.no_grad():
        for n, x in enumerate(xs):
            if n == 4:
                model.first.weight.data = torch.randn_like(model.first.weight)
            if n == 6:
                model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
            if n == 8:
                model.second.weight.mul_(2)
            torch.testing.assert_close(run(x), model(x))
    assert device.replays >= 6


def test_inputs_of_other_strides(device, codegen):
    def program(x):
        return x.sin() + 1

    run = compiled(program, codegen)
    for n, x in enumerate(inputs(10, WIDTH, WIDTH)):
        x = x.t() if n % 2 else x
        torch.testing.assert_close(run(x), program(x))
    expanded = torch.randn(1, WIDTH).expand(WIDTH, WIDTH)
    for _ in range(4):
        torch.testing.assert_close(run(expanded), program(expanded))


def test_dynamic_sizes_are_recorded_a_bounded_number_of_times(device, codegen):
    def program(x):
        return x.softmax(-1)

    run = torch.compile(program, backend=triptych.compile_fx, options={"codegen": codegen, "cuda_graphs": "on"}, dynamic=True)
    for size in [*range(2, 30), *range(2, 30), *range(2, 30)]:
        x = torch.randn(size, 3)
        torch.testing.assert_close(run(x), program(x))
    assert 0 < device.replays and len(device.graphs) <= 8


def test_written_inputs(device, codegen):
    def program(cache, x, at):
        cache.index_copy_(0, at, x)
        return cache.sum()

    run = compiled(program, codegen)
    mine, want = torch.zeros(16, WIDTH), torch.zeros(16, WIDTH)
    for n, x in enumerate(inputs(16, 1, WIDTH)):
        at = torch.tensor([n])
        torch.testing.assert_close(run(mine, x, at), program(want, x, at))
        assert torch.equal(mine, want)
        if n == 8:
            mine = mine.clone()  # it lies elsewhere now
    assert device.replays >= 8


def test_a_cache_that_is_returned_and_passed_in_again(device, codegen):
    def program(cache, x):
        cache = torch.cat([cache[1:], x])
        return cache, cache.mean()

    run = compiled(program, codegen)
    mine = want = torch.zeros(16, WIDTH)
    for x in inputs(10, 1, WIDTH):
        (mine, a), (want, b) = run(mine, x), program(want, x)
        torch.testing.assert_close((mine, a), (want, b))


def test_two_programs_in_turn(device, codegen):
    models = [Net(), Net()]
    runs = [compiled(model, codegen) for model in models]
    held = []
    for x in inputs(8):
        y = runs[0](x)
        z = runs[1](y)
        z.sum().backward()
        want = models[1](models[0](x))
        held.append((z.detach(), want.detach()))
        grads = [p.grad.clone() for model in models for p in model.parameters()]
        for model in models:
            model.zero_grad()
        want.sum().backward()
        for mine, p in zip(grads, [p for model in models for p in model.parameters()]):
            torch.testing.assert_close(mine, p.grad)
            p.grad = None
    for mine, want in held:
        torch.testing.assert_close(mine, want)
