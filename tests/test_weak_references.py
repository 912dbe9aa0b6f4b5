"""After a compile nothing holds on to the user's tensors, and nothing piles up from one compile to the next."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import triptych
from triptych.passes import session as sessions
from triptych.passes.session import Session

CODEGENS = ("eager", "inductor")
X = torch.randn(3, 8)


def compiled_by(backend, codegen):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"options": {"codegen": codegen}} if codegen else {}
    return model, torch.compile(model, backend=backend, **options)


def call(compiled, train):
    with torch.set_grad_enabled(train):
        result = compiled(X)
        if train:
            result.sum().backward()
    return result


own = triptych.make_backend(lambda gm, inputs: gm.forward)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("backend", "codegen"), [(triptych.compile_fx, c) for c in CODEGENS] + [(own, "")])
def test_parameters_can_be_swapped_after_a_compile(backend, codegen, train):
    torch._dynamo.reset()
    model, compiled = compiled_by(backend, codegen)
    call(compiled, train)
    for parameter in model.parameters():
        assert not weakref.getweakrefs(parameter)
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.randn_like(parameter)))
    torch.testing.assert_close(call(compiled, False), model(X))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    torch.testing.assert_close(call(compiled, train), model(X))


def test_a_frame_in_two_parts():
    """The second graph is compiled with the first one still there."""
    torch._dynamo.reset()
    model = nn.Linear(8, 8)

    def function(x):
        y = model(x)
        torch._dynamo.graph_break()
        return model(y * 2)

    compiled = torch.compile(function, backend=triptych.compile_fx, options={"codegen": "eager"}, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 8)
        torch.testing.assert_close(compiled(x), function(x))
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(8, 8)))
    torch.testing.assert_close(compiled(X), function(X))


def test_without_dynamo():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = triptych.compile_fx(torch.fx.symbolic_trace(model), [X], options={"codegen": "eager"})
    torch.testing.assert_close(compiled(X), model(X))
    assert not weakref.getweakrefs(model[0].weight) and not weakref.getweakrefs(X)
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.randn(8, 8)))
    torch.testing.assert_close(compiled(X), model(X))


@pytest.mark.parametrize(
    ("train", "freeze"), [(True, False), *(pytest.param(*way, marks=pytest.mark.slow) for way in ((False, False), (False, True)))]
)
def test_compiles_leave_nothing_behind(train, freeze, monkeypatch):
    """Nothing of ours outlives the program. Torch has fake modes in caches of its own: no more of them with us."""
    opened: list[weakref.ref[Session]] = []

    def noted(*args, **kwargs):
        session = sessions.open_session(*args, **kwargs)
        opened.append(weakref.ref(session))
        return session

    monkeypatch.setattr("triptych.backend.open_session", noted)

    def compile_some(count, **how):
        for _ in range(count):
            torch._dynamo.reset()
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
            call(torch.compile(model, **how), train)
        torch._dynamo.reset()
        gc.collect()
        live = [type(o) for o in gc.get_objects()]
        return {kind: sum(issubclass(t, kind) for t in live) for kind in (GraphModule, Session, FakeTensorMode)}

    ours = {"backend": triptych.compile_fx, "options": {"codegen": "eager", "freeze": freeze}}
    before = compile_some(4, **ours)
    after = compile_some(4, **ours)
    by_torch = compile_some(4, backend="aot_eager")
    assert len(opened) == 8 and not any(ref() for ref in opened)
    assert after[GraphModule] <= before[GraphModule] and after[Session] <= before[Session]
    torchs_own = by_torch[FakeTensorMode] - after[FakeTensorMode]
    assert after[FakeTensorMode] <= before[FakeTensorMode] + max(torchs_own, 2)
