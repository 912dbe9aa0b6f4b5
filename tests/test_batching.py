"""Towers: like networks written one after the other become one network over stacked values."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import triptych
from triptych.ir.program import Program
from triptych.passes.session import watching


class Tower(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.relu = nn.ReLU(inplace=inplace)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        return torch.sigmoid(self.second(self.relu(self.norm(self.first(x)))))


class Towers(nn.Module):
    def __init__(self, result: str = "cat", count: int = 32, inplace: bool = False) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(inplace) for _ in range(count))
        self.result = result

    def forward(self, x):
        inputs = x if isinstance(x, list) else [x] * len(self.towers)
        results = [tower(one) for tower, one in zip(self.towers, inputs)]
        if self.result == "cat":
            return torch.cat(results, dim=1)
        return {"stack": torch.stack, "list": list, "sum": sum}[self.result](results)


def inputs(own: bool, count: int = 32, dtype: torch.dtype = torch.float64):
    torch.manual_seed(1)
    return [torch.randn(6, 24, dtype=dtype) for _ in range(count)] if own else torch.randn(6, 24, dtype=dtype)


def compile_and_watch(model, x, **options):
    with watching() as sessions:
        result = torch.compile(model, backend=triptych.compile_fx, options=options)(x)
    return result, sessions[0]


def operations(gm) -> Counter[str]:
    program = Program(gm)
    return Counter(call.op for node in gm.graph.nodes if (call := program.call(node)) is not None)


GEMMS = ("linear", "baddbmm", "matmul", "addmm")


@pytest.mark.parametrize(
    "own, result, inplace",
    [
        (False, "cat", False), (True, "list", False), (False, "sum", False), (True, "stack", True),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in [(True, "cat", False), (False, "stack", False), (False, "cat", True)]],
    ],
)  # fmt: skip
def test_towers_become_one(own, result, inplace):
    model, x = Towers(result, inplace=inplace).double(), inputs(own)
    with torch.no_grad():
        got, session = compile_and_watch(model, x, freeze=True, codegen="eager")
        torch.testing.assert_close(got, model(x), rtol=1e-10, atol=1e-12)
    counted = operations(session.graphs["pre_grad"])
    assert sum(counted[g] for g in GEMMS) == 2
    assert counted["layer_norm"] == counted["relu"] == counted["sigmoid"] == 1
    main = operations(session.graphs["forward"])
    between = main["stack"] + main["cat"] - own - (result == "cat")  # own inputs are put together, the results joined
    assert between <= 0 and main["split"] == 0


@pytest.mark.parametrize("own", [False, True])
def test_gradients(own):
    model, x = Towers("sum").double(), inputs(own)
    other = copy.deepcopy(model)
    got, session = compile_and_watch(other, x, codegen="eager")
    assert any(r.fired["batch_linear"] for r in session.records)
    got.square().sum().backward()
    model(x).square().sum().backward()
    for (name, want), given in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(given.grad, want.grad, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_lie_as_their_weights(transposed, codegen):
    """Autograd would copy each of the others, one by one."""
    model, x = Towers("sum", count=8), inputs(True, 8, torch.float32)
    for layer in model.modules() if transposed else ():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    got, session = compile_and_watch(model, x, codegen=codegen)
    assert any(r.fired["batch_linear"] for r in session.records)
    for weight, gradient in zip(model.parameters(), torch.autograd.grad(got.sum(), list(model.parameters()))):
        assert gradient.stride() == weight.stride()


def test_gradients_made_of_two_tensors_lie_as_they_say():
    model, x = Towers("sum", count=8), inputs(True, 8, torch.float32)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))
    got, session = compile_and_watch(model, x, codegen="eager")
    assert any(r.fired["batch_linear"] for r in session.records)
    weights = [weight for weight in model.parameters() if isinstance(weight, TwoTensor)]
    for gradient in torch.autograd.grad(got.sum(), weights):
        assert gradient.stride() == gradient.a.stride() == gradient.b.stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_makes_the_same_of_it(dynamic):
    model = Towers("cat", count=8)
    x = inputs(False, dtype=torch.float32)
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"freeze": True}, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x[:4]), model(x[:4]))


def test_a_changed_weight_shows():
    model, x = Towers("cat", count=8), inputs(False, dtype=torch.float32)
    for options in ({}, {"freeze": True}):
        compiled = torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager", **options})
        with torch.no_grad():
            compiled(x)
            model.towers[3].first.weight.mul_(2)
            torch.testing.assert_close(compiled(x), model(x))


def test_the_report_has_both_figures():
    model, x = Towers("cat", count=8), inputs(False, dtype=torch.float32)
    explanation = triptych.explain(model, x, options={"codegen": "eager"})
    (decision,) = [d for r in explanation.passes if r.name == "group_batch_fusion_passes" for d in r.decisions]
    assert decision.before > decision.after > 0
    assert str(decision) in str(explanation)
    data = [d for p in explanation.to_dict()["passes"] for d in p["decisions"]]
    assert dataclasses.asdict(decision) in data and decision.rule == "batch_linear"


def test_batched_dropout_drops_as_many():
    def program(x, *weights):
        return torch.stack([nn.functional.dropout(x @ w, 0.25) for w in weights])

    x, weights = torch.ones(64, 64), [torch.ones(64, 64) for _ in range(8)]
    with watching() as sessions:
        dropped = torch.compile(program, backend=triptych.compile_fx)(x, *weights)
    assert sessions[0].records and any(r.fired["batch_dropout"] for r in sessions[0].records)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 64 / 0.75))
    shares = kept.double().mean(dim=(1, 2))
    assert ((shares - 0.75).abs() < 0.05).all()
    together = (kept[0] & kept[1]).double().mean()
    assert abs(together - 0.75**2) < 0.05  # members draw independently
    with watching() as sessions:
        torch.compile(program, backend=triptych.compile_fx, options={"fallback_random": True})(x, *weights)
    assert not any(r.fired["batch_dropout"] for r in sessions[0].records)


def test_time_grows_with_the_graph():
    """Members are found by scheduling, not by comparing each with each."""
    import time

    def seconds(count: int) -> float:
        graph = torch.fx.symbolic_trace(Towers("cat", count))
        best = float("inf")
        for _ in range(2):
            gm = copy.deepcopy(graph)
            start = time.process_time()
            triptych.pre_grad_passes(gm, [torch.randn(6, 24)])
            best = min(best, time.process_time() - start)
        return best

    small, large = seconds(32), seconds(128)
    assert large < 4 * 2.5 * small


def test_view_of_a_member_that_is_written():
    """The stack does not follow a write to a member: what sees the member's memory is not taken from the stack."""

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(32))

        def forward(self, x):
            results = []
            for layer in self.layers:
                h = layer(x)
                row = h[0]
                h += 1
                results.append(h.relu() + (row * 2).exp())
            return torch.cat(results)

    model, x = Program().double(), torch.randn(4, 16, dtype=torch.float64)
    with torch.no_grad():
        got, session = compile_and_watch(model, x, freeze=True, codegen="eager")
        torch.testing.assert_close(got, model(x))
    assert any(r.fired["batch_linear"] for r in session.records)


def test_towers_of_different_depth_are_computed_once():
    """A stack of some members only takes them from the stack before it; nothing is computed beside it."""

    def program(x, *weights):
        results = []
        for i, w in enumerate(weights):
            for _ in range(1 + i % 2):
                x = F.linear(x, w).relu()
            results.append(x)
            x = weights[0][:4]
        return results

    given = [torch.randn(4, 16), *(torch.randn(16, 16) for _ in range(16))]
    torch._dynamo.reset()
    with watching() as sessions:
        got = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})(*given)
    torch.testing.assert_close(got, program(*given))
    counted = operations(sessions[0].graphs["pre_grad"])
    assert sum(counted[g] for g in GEMMS) <= 4, counted


def test_a_view_that_is_also_used_elsewhere():
    """It is taken from the members; what follows it begins a chain of its own or is left alone."""

    def program(*values):
        sums = [F.linear(x, w).softmax(-1) for x, w in zip(values[:8], values[8:])]
        return torch.cat([s * 2 for s in sums]), sums[3][0] + 1

    given = [*(torch.randn(4, 16) for _ in range(8)), *(torch.randn(16, 16) for _ in range(8))]
    torch._dynamo.reset()
    with watching() as sessions:
        got = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})(*given)
    torch.testing.assert_close(got, program(*given))
    assert not any(r.error for r in sessions[0].records)


def test_what_no_gradient_reaches_has_none():
    def program(x, *weights):
        results = [torch.relu(nn.functional.linear(x, w)) for w in weights]
        return sum(results[:8]) + sum(r.detach() for r in results[8:])

    torch.manual_seed(0)
    x, weights = torch.randn(4, 8), [torch.randn(8, 8, requires_grad=True) for _ in range(16)]
    with watching() as sessions:
        result = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})(x, *weights)
    assert sum(r.fired["batch_linear"] for r in sessions[0].records) == 2
    result.sum().backward()
    assert [w.grad is None for w in weights] == [False] * 8 + [True] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numeric_check_lets_rounding_pass(dtype):
    model, x = Towers("cat", count=8).to(dtype), inputs(False, dtype=dtype)
    _, session = compile_and_watch(model, x, codegen="eager", verify="each")
    assert not session.warnings and any(r.fired["batch_linear"] for r in session.records)
