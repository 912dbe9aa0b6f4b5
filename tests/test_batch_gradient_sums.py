"""Gradients that are sums over rows: their last steps are one. On a CPU the rule is told to fire there."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import triptych
from triptych.cost import bytes_of, decision
from triptych.cost.clock import Clocked
from triptych.passes.session import watching
from triptych.post_grad import batch_gradient_sums
from triptych.post_grad.batch_gradient_sums import (
    USUAL,
    BatchGradientSums,
    BatchGradientSumsPass,
    SumsOfParts,
    parts_of,
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(BatchGradientSumsPass, "rules", lambda self: (BatchGradientSums(device="cpu"),))
    monkeypatch.setattr(batch_gradient_sums, "ENOUGH_RESULTS", 256)


def layers(*widths: int) -> nn.Module:
    pairs = zip(widths, widths[1:])
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in pairs))


def trained(model: nn.Module, x: torch.Tensor, **options) -> Counter:
    """Compiled, with gradients computed; how often each rule fired in the backward."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=triptych.compile_fx, options={"on_error": "raise", **options})
    with watching() as sessions:
        call(x).square().mean().backward()
    return sum((Counter(r.fired) for s in sessions for r in s.records if r.graph == "backward"), Counter())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_eager(dtype):
    model = layers(64, 128, 64, 64).to(dtype)
    exact = copy.deepcopy(model).double()
    x = torch.randn(8, 256, 64, dtype=dtype)
    exact(x.double()).square().mean().backward()
    assert trained(model, x, verify="each")["batch_gradient_sums"] == 1
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (got.grad - want.grad).norm() <= tolerance * want.grad.norm()
        assert got.grad.shape == got.shape and got.grad.stride() == got.stride()


def test_each_gradient_has_memory_of_its_own():
    """Later ones are added to the first, and the memory of one may be freed, resized or saved without the others."""
    model, x = layers(64, 64, 64), torch.randn(1024, 64)
    exact = copy.deepcopy(model)
    call = torch.compile(model, backend=triptych.compile_fx, options={"on_error": "raise"})
    for _ in range(3):
        call(x).square().mean().backward()
        exact(x).square().mean().backward()
    assert all(g.storage_offset() == 0 and g.untyped_storage().nbytes() == g.nbytes for g in gradients(model))
    first, second = (layer[0].bias.grad for layer in model)
    first.untyped_storage().resize_(0)
    torch.testing.assert_close(second, exact[1][0].bias.grad)


class Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def test_weights_in_float32_under_autocast():
    exact, x = layers(64, 64, 64), torch.randn(1024, 64)
    eager, ours = Autocast(copy.deepcopy(exact)), Autocast(copy.deepcopy(exact))
    for model in (exact, eager):
        model(x).square().mean().backward()
    assert trained(ours, x)["batch_gradient_sums"]
    for got, theirs, want in zip(*map(gradients, (ours, eager, exact)), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 1.5 * (theirs - want).norm() + 1e-3 * want.norm()


def test_it_is_removed_by_its_name():
    fired = trained(layers(64, 64, 64), torch.randn(1024, 64), remove_passes="batch_gradient_sums")
    assert not fired["batch_gradient_sums"]


@pytest.mark.parametrize("tune, times, fires", [
    ("unsure", (2.0, 1.0), True), ("unsure", (1.0, 2.0), False), ("unsure", None, True), ("off", (1.0, 2.0), True),
])  # fmt: skip
def test_what_the_device_says_decides(tune, times, fires, monkeypatch):
    answer = None if times is None else tuple(map(Clocked, times))
    monkeypatch.setattr(decision, "clocked", lambda old, new: answer)
    assert bool(trained(layers(64, 64, 64), torch.randn(1024, 64), tune=tune)["batch_gradient_sums"]) is fires


def test_one_question_stands_for_all_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(decision, "clocked", lambda old, new: asked.append(new))
    for widths in ((64, 64, 64), (32, 96)):
        trained(layers(*widths), torch.randn(1024, widths[0]))
    parts = {part for work in asked for part in work.parts if isinstance(part, SumsOfParts)}
    assert len(parts) > 1 and {part.like() for part in parts} == {USUAL}


def test_what_is_timed_is_float32_whatever_the_default_dtype_is():
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = USUAL.prepare(torch.device("cpu"))()
    finally:
        torch.set_default_dtype(usual)
    assert len(results) > 1 and {result.dtype for result in results} == {torch.float32}
    assert USUAL.bytes == sum(map(bytes_of, results)) + sum(operand.bytes for operand in USUAL.operands[0])


def test_large_sums_are_left_to_inductor(monkeypatch):
    monkeypatch.setattr(batch_gradient_sums, "MOST_ELEMENTS", 1024 * 64 - 1)
    assert not trained(layers(64, 64, 64), torch.randn(1024, 64))["batch_gradient_sums"]


def test_inputs_that_are_kept_for_the_sums_are_freed_as_early_as_before():
    """What a sum reads is read where the sum stood: at the end of the graph it would stay in memory until then."""
    model, x = layers(*[64] * 6), torch.randn(1024, 64)
    orders = []
    for removed in ("", "batch_gradient_sums"):
        torch._dynamo.reset()
        exp = triptych.explain(copy.deepcopy(model), x, train=True, options={"remove_passes": removed or None})
        nodes = list(exp.graphs["backward"].graph.nodes)
        places = {node: i for i, node in enumerate(nodes)}
        wide = [n for n in nodes if n.op == "call_function" and getattr(n.meta.get("val"), "numel", int)() == x.numel()]
        orders.append(sum(max(map(places.get, n.users), default=0) - places[n] for n in wide) / len(nodes))
    assert orders[0] < 1.2 * orders[1]


@pytest.mark.parametrize(
    "rows, parts", [(4096, 32), (8192, 64), (12608, 64), (1 << 20, 128), (300, 2), (255, None), (8191, None), (0, None)]
)
def test_parts_are_equal_and_long_enough(rows, parts):
    assert parts_of(rows) == parts
    assert parts is None or (rows % parts == 0 and rows // parts > 64)
