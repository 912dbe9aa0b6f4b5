"""What replaying guarantees: nothing that a user holds changes. Run on a CPU with a fake device, and on a GPU.

Whoever imports these tests provides `device`, which counts replays, and `codegen`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import triptych

WIDTH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def pair(make=Net):
    """A model to compile, and its twin that is not."""
    model = make()
    return model, copy.deepcopy(model)


def same_gradients(model, want):
    for mine, theirs in zip(model.parameters(), want.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)


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
    model, want = pair()
    run = compiled(model, codegen)
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, want)]
    losses = []
    for x in inputs(8):
        losses.append((step(run, x).detach(), step(want, x).detach()))
        same_gradients(model, want)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    for mine, theirs in losses:
        torch.testing.assert_close(mine, theirs)
    assert device.replays >= 10


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_micro_batches(device, codegen, set_to_none):
    model, want = pair()
    run, xs = compiled(model, codegen), inputs(12)
    for begin in range(0, 12, 3):
        for x in xs[begin : begin + 3]:
            step(run, x)
            step(want, x)
        same_gradients(model, want)
        model.zero_grad(set_to_none=set_to_none)
        want.zero_grad(set_to_none=set_to_none)
    assert device.replays >= 8


def test_gradients_that_a_user_holds(device, codegen):
    model, want = pair()
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
    model, want = pair()
    run = compiled(model, codegen)
    for _ in range(6):
        for net, call in ((model, run), (want, want)):
            net.zero_grad()
            losses = [call(x).square().mean() for x in inputs(3)]
            for loss in losses if order == "in turn" else reversed(losses):
                loss.backward()
        same_gradients(model, want)
    assert device.replays >= 6


def test_forward_without_backward_and_under_no_grad_in_between(device, codegen):
    model, want = pair()
    run, xs = compiled(model, codegen), inputs(4)
    for _ in range(5):
        y = run(xs[0])
        run(xs[1])  # no backward
        with torch.no_grad():
            z = run(xs[2])
        y.square().mean().backward()
        want(xs[0]).square().mean().backward()
        torch.testing.assert_close(z, want(xs[2]))
        same_gradients(model, want)
    assert device.replays >= 4


def test_a_graph_that_is_retained(device, codegen):
    model, want = pair()
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
    model, want = pair()
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
    model, want = pair()
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
    same_gradients(model, want)


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


@pytest.mark.parametrize("after", [lambda y: y * 1.0, torch.sin])
def test_inputs_with_one_gradient_do_not_share_it(device, codegen, after):
    def program(x, y):
        return after(x + y)

    run = compiled(program, codegen)
    mine, want = ([torch.ones(4, 4, requires_grad=True) for _ in range(2)] for _ in range(2))
    for n in range(8):
        run(*mine).sum().backward()
        program(*want).sum().backward()
        for x, y in zip(mine, want):
            torch.testing.assert_close(x.grad, y.grad)
        if n % 3 == 2:
            for x in (*mine, *want):
                x.grad = None


HOLDERS = {
    "its memory": lambda x: x.untyped_storage(),
    "a typed storage": lambda x: x.storage(),
    "a view": lambda x: x.view(-1),
    "an iterator": lambda x: iter(x.unbind(0)),
    "DLPack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "data": lambda x: x.data,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_gradients_of_which_something_else_is_held(device, codegen, holder):
    model, want = pair()
    run, held = compiled(model, codegen), []
    for x in inputs(8):
        step(run, x)
        step(want, x)
        for mine, theirs in zip(model.parameters(), want.parameters()):
            held.append((HOLDERS[holder](mine.grad), mine.grad.clone(), theirs.grad))
        model.zero_grad()
        want.zero_grad()
    for mine, then, theirs in held:
        if holder == "its memory":
            mine = torch.empty(0, device=then.device).set_(mine)[: then.numel()]
        elif holder == "a typed storage":
            mine = torch.empty(0, device=then.device).set_(mine)[: then.numel()]
        elif holder == "an iterator":
            mine = torch.stack([*mine])
        elif holder == "DLPack":
            mine = torch.utils.dlpack.from_dlpack(mine)
        torch.testing.assert_close(mine.reshape(-1), then.reshape(-1))
        torch.testing.assert_close(then, theirs)


GRADIENT_HOOKS = {
    "keeps it": lambda p, log: p.register_hook(log.append),
    "doubles it": lambda p, log: p.register_hook(lambda g: log.append(g) or 2 * g),
    "adds the last one": lambda p, log: p.register_hook(lambda g: log.append(g) or g + log[len(log) // 2]),
    "keeps what is accumulated": lambda p, log: p.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.detach())),
    "takes it away": lambda p, log: p.register_post_accumulate_grad_hook(
        lambda p: log.append(p.grad) or setattr(p, "grad", None)
    ),
    "puts another in its place": lambda p, log: p.register_post_accumulate_grad_hook(
        lambda p: log.append(p.grad) or setattr(p, "grad", torch.ones_like(p))
    ),
}  # fmt: skip


@pytest.mark.parametrize("hook", GRADIENT_HOOKS)
def test_hooks_on_gradients(device, codegen, hook):
    model, want = pair()
    run, logs = compiled(model, codegen), []
    for net in (model, want):
        logs.append([[] for _ in net.parameters()])
        for p, log in zip(net.parameters(), logs[-1]):
            GRADIENT_HOOKS[hook](p, log)
    for n, x in enumerate(inputs(8)):
        step(run, x)
        step(want, x)
        same_gradients(model, want)
        if n % 3 == 2:
            model.zero_grad()
            want.zero_grad()
    torch.testing.assert_close(logs[0], logs[1])


def test_the_program_inside_a_hook_of_its_backward(device, codegen):
    model, want = pair()
    run, logs = compiled(model, codegen), []
    for net, call in ((model, run), (want, want)):
        logs.append([])

        def hook(gradient, call=call, log=logs[-1]):
            with torch.enable_grad():
                x = torch.ones(4, WIDTH, device=gradient.device, requires_grad=True)  # not every thread has a default
                log.append(torch.autograd.grad(call(x).square().sum(), x)[0])

        net.first.bias.register_hook(hook)
    for x in inputs(8):
        step(run, x)
        step(want, x)
        same_gradients(model, want)
    torch.testing.assert_close(logs[0], logs[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_the_program(device, codegen, reentrant):
    model, want = pair()
    run = compiled(model, codegen)
    for n, x in enumerate(inputs(8)):
        x.requires_grad_()
        for call in (run, want):
            y = x
            for _ in range(3):
                y = checkpoint(call, y, use_reentrant=reentrant)
            y.square().mean().backward()
        same_gradients(model, want)
        if n % 3 == 2:
            model.zero_grad()
            want.zero_grad()


def test_results_that_share_memory_may_be_written(device, codegen):
    linear = nn.Linear(WIDTH, WIDTH)

    def program(x):
        y = linear(x).sin()
        return y[:, :4], y[:, 4:], y[:2].exp()

    run = compiled(program, codegen)
    for x in inputs(6):
        mine, want = run(x), program(x)
        for results in (mine, want):
            results[0].add_(1)
            sum(y.sum() for y in results).backward()
        torch.testing.assert_close(mine, want)
        del mine, want, results
    assert device.replays >= 4


def test_lazy_conjugates(device, codegen):
    def program(x):
        y = x * 2
        return y, y.conj()

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))

        def forward(self, x):
            return ((x @ self.weight).sin() @ self.weight).imag * (x.conj() * self.weight.conj()).real

    run, (model, want) = compiled(program, codegen), pair(Product)
    train = compiled(model, codegen)
    for n in range(6):
        x = torch.randn(4, 4, dtype=torch.complex64)
        x = x.conj() if n % 2 else x
        torch.testing.assert_close(run(x), program(x))
        step(train, x)
        step(want, x)
        same_gradients(model, want)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.norm(self.linear(x)).tanh()
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return x + y


def test_blocks_that_are_one_program(device, codegen):
    model, want = pair(lambda: nn.Sequential(*[Block() for _ in range(6)]).double())
    for block in model:
        block.compile(
            backend=triptych.compile_fx, options={"codegen": codegen, "cuda_graphs": "on"}, dynamic=False
        )
    held = []
    for n, x in enumerate(inputs(12)):
        for net in (model, want):
            net.train(n % 5 != 4)
            step(net, x.double())
        same_gradients(model, want)
        torch.testing.assert_close([*model.buffers()], [*want.buffers()])
        held.append((model[0].mean, want[0].mean))
        if n % 2:
            model.zero_grad()
            want.zero_grad()
    for mine, theirs in held:
        torch.testing.assert_close(mine, theirs)


def test_modes_in_turn(device, codegen):
    model, want = pair()
    run, held = compiled(model, codegen), []
    for n, x in enumerate(inputs(15)):
        if n % 3 == 2:
            step(run, x)
            step(want, x)
            same_gradients(model, want)
            continue
        with torch.inference_mode() if n % 3 else torch.no_grad():
            held.append((run(x), want(x)))
        assert held[-1][0].is_inference() == (n % 3 == 1)
    for mine, theirs in held:
        torch.testing.assert_close(mine, theirs)


def test_an_exception_in_a_hook_stops_the_backward(device, codegen):
    model, want = pair()
    run, seen = compiled(model, codegen), []

    def hook(gradient):
        seen.append(1)
        if len(seen) % 3 == 0:
            raise KeyError("no more of this")

    for p in model.parameters():
        p.register_hook(hook)
    for x in inputs(16):
        model.zero_grad()
        want.zero_grad()
        try:
            step(run, x)
        except KeyError:
            continue
        step(want, x)
        same_gradients(model, want)


def test_inputs_written_before_the_backward(device, codegen):
    def program(x, w):
        return (x * w).sin()

    run, w = compiled(program, codegen), torch.ones(4, WIDTH, requires_grad=True)
    for x in inputs(8):
        (want,) = torch.autograd.grad(program(x.clone(), w).sum(), w)
        y = run(x, w)
        x.add_(1)
        try:
            (mine,) = torch.autograd.grad(y.sum(), w)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            torch.testing.assert_close(mine, want)


def test_a_parameter_written_before_the_backward_is_an_error(device, codegen):
    model = Net()
    run = compiled(model, codegen)
    for x in inputs(6):
        y = run(x)
        with torch.no_grad():
            model.second.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
