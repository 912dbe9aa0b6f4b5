"""Layouts of inputs are compared in one call, and a wrong one is noticed at any call."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from triptych import _private, compile_fx
from triptych.codegen.layout_checks import layouts_of

pytestmark = pytest.mark.fast


@pytest.fixture
def runners():
    """The runners of the generated code that the test has loaded so far."""
    torch._dynamo.reset()
    first = len(_private.PyCodeCache.modules)
    modules = _private.PyCodeCache.modules
    return lambda: [m.runner for m in modules[first:] if hasattr(getattr(m, "runner", None), "call_without_checks")]


def count_without_checks(runner) -> list[int]:
    """Grows by one at each call without checks."""
    calls: list[int] = []
    unchecked = runner.call_without_checks

    def counted(args):
        calls.append(len(args))
        return unchecked(args)

    runner.call_without_checks = counted
    return calls


def compiled_directly(f, *args):
    """What the backend returns, without Dynamo's guards in front of it."""
    graphs = []
    torch.compile(f, backend=lambda gm, inputs: graphs.append((gm, inputs)) or gm)(*args)
    [(gm, inputs)] = graphs
    return compile_fx(gm, inputs)


def test_inputs_are_checked_one_by_one_at_the_first_call_only(runners):
    call = torch.compile(lambda x: torch.cdist(x, x).relu() + 1, backend=compile_fx)
    x = torch.randn(8, 4)
    wanted = torch.cdist(x, x).relu() + 1
    assert torch.equal(call(x), wanted)
    (runner,) = runners()
    unchecked = count_without_checks(runner)
    for _ in range(3):
        assert torch.equal(call(x.clone()), wanted)
    assert len(unchecked) == 3


def test_results_of_operators_are_checked_at_every_call():
    """They may change with a setting of torch that nothing guards."""
    order = [0, 1]

    @torch.library.custom_op("triptych_test::laid_out", mutates_args=())
    def laid_out(x: torch.Tensor) -> torch.Tensor:
        return x.permute(order).contiguous().permute(order).clone()

    laid_out.register_fake(lambda x: x.new_empty(x.shape))
    call = torch.compile(lambda x: laid_out(x) + x, backend=compile_fx)
    x = torch.randn(4, 4)
    for _ in range(2):
        assert torch.equal(call(x), x + x)
    order.reverse()
    with pytest.raises(AssertionError, match="stride"):
        call(x)


def test_another_layout_is_refused_at_any_call(runners):
    x = torch.randn(4, 4)
    call = compiled_directly(lambda x: x.relu() + 1, x)
    for _ in range(2):
        assert torch.equal(call(x)[0], x.relu() + 1)
    assert runners()[0].known_layouts.guards is not None
    with pytest.raises(AssertionError, match="expected size|stride"):
        call(x.t())
    with pytest.raises(AssertionError, match="expected size"):
        call(torch.randn(3, 4))
    assert torch.equal(call(x)[0], x.relu() + 1)


def test_saved_tensors_of_another_layout_are_refused(runners):
    """Hooks can hand the backward other tensors than the forward saved, at any step."""
    call = torch.compile(lambda x: (x.sin() * x.t()).cos().sum(), backend=compile_fx)
    x = torch.randn(4, 4).t().requires_grad_()
    for _ in range(2):
        call(x).backward()
    assert all(runner.known_layouts.guards is not None for runner in runners())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.clone(memory_format=torch.contiguous_format)):
        loss = call(x)
    with pytest.raises(AssertionError, match="stride"):
        loss.backward()


def test_inputs_that_are_not_plain_tensors_are_checked_at_each_call(runners):
    call = torch.compile(lambda x: x.relu() + x.shape[0], backend=compile_fx, dynamic=True)
    for size in (3, 4, 5):
        x = torch.randn(size, 2)
        assert torch.equal(call(x), x.relu() + size)
    assert all(runner.known_layouts.guards is None for runner in runners())
    assert layouts_of([torch.ones(2), 3]) is None
    assert layouts_of([torch.ones(2).to_sparse()]) is None


def test_layouts_hold_no_tensor():
    x = torch.randn(3, 4)
    layouts, alive = layouts_of([x]), weakref.ref(x)
    assert layouts.check(torch.randn(3, 4)) and not layouts.check(torch.randn(4, 3).t())
    del x
    gc.collect()
    assert alive() is None


def test_several_graphs_and_grad_modes(runners):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    call = torch.compile(model, backend=compile_fx)
    x = torch.randn(3, 4)
    for _ in range(3):
        with torch.inference_mode():
            torch.testing.assert_close(call(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(call(x), model(x))
        call(x).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])
        model.zero_grad()


def test_a_copy_starts_anew(runners):
    call = torch.compile(lambda x: x.relu() + 1, backend=compile_fx)
    x = torch.randn(4, 4)
    call(x), call(x)
    (runner,) = runners()
    copied = copy.deepcopy(runner)
    assert runner.known_layouts.guards is not None and copied.known_layouts.guards is None
    assert torch.equal(copied.call([x])[0], x.relu() + 1) and copied.known_layouts.guards is not None
    assert copied.call_with_checks.__self__ is copied


def test_the_layouts_of_an_odd_first_call_are_replaced(runners):
    odd, plain = torch.randn(308).as_strided((1, 4), (77, 1)), torch.randn(1, 4)
    call = compiled_directly(lambda x: x.relu() + 1, plain)
    call(odd), call(plain)
    (runner,) = runners()
    without_checks = count_without_checks(runner)
    for _ in range(3):
        assert torch.equal(call(plain)[0], plain.relu() + 1)
    assert len(without_checks) == 3
