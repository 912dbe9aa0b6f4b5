"""Draws from the backend's generator: distribution, range, independence, reproduction, both directions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, symbolic_trace

import triptych
from triptych.joint.replace_random_passes import ReplaceRandomPasses
from triptych.testing import run_pass
from triptych.testing.capture import capture_aten, capture_torch

N = 200_000
EPS = 6 / math.sqrt(N)
"""Six standard errors of a mean whose deviation is at most one."""

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def draws(gm):
    return [n for n in gm.graph.nodes if "inductor_rand" in str(n.target)]


def seeds(gm):
    return [n for n in gm.graph.nodes if "inductor_seeds" in str(n.target)]


def replaced(program, *inputs, dialect="aten"):
    gm, _ = (capture_aten if dialect == "aten" else capture_torch)(program, list(inputs))
    tally = run_pass(ReplaceRandomPasses, gm)
    assert tally.fired and not tally.declines
    return gm


def run_eager(program, *inputs):
    return replaced(program, *inputs)


def run_compiled(program, *inputs):
    """Through the whole flow and Inductor's kernels."""
    seen = []

    def hook(gm: torch.fx.GraphModule):
        seen.append(len(draws(gm)))

    def backend(gm, example_inputs):
        return triptych.compile_fx(gm, example_inputs, options={"joint_custom_post_pass": hook})

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(*inputs)
    assert seen and max(seen) > 0
    return compiled


@pytest.mark.parametrize("how", [run_eager, run_compiled])
def test_statistics_of_every_draw(how):
    def program(x):
        first, second = torch.rand_like(x), torch.rand_like(x)
        return (
            first, second, torch.randn_like(x), torch.randint(-3, 10, x.shape), torch.bernoulli(x),
            torch.rand(x.shape, dtype=bf16), torch.rand(x.shape, dtype=f16), torch.randn(x.shape, dtype=bf16),
        )  # fmt: skip

    x = torch.full((N,), 0.3)
    run = how(program, x)
    torch.manual_seed(1)
    first, second, normal, whole, chance, in_bf16, in_f16, normal_bf16 = run(x)
    for uniform in (first, second, in_bf16, in_f16):
        assert uniform.min() >= 0 and uniform.max() < 1
        assert abs(uniform.double().mean() - 0.5) < EPS
        assert abs(uniform.double().var() - 1 / 12) < EPS
    for gauss in (normal, normal_bf16):
        assert abs(gauss.double().mean()) < EPS and abs(gauss.double().var() - 1) < 3 * EPS
    assert (in_bf16.dtype, in_f16.dtype, normal_bf16.dtype) == (bf16, f16, bf16)
    assert whole.dtype == torch.int64
    counts = torch.bincount(whole + 3, minlength=13).double() / N
    assert len(counts) == 13 and (counts - 1 / 13).abs().max() < EPS
    assert set(chance.unique().tolist()) == {0.0, 1.0} and abs(chance.mean() - 0.3) < EPS
    pairs = torch.stack([first, second, normal])
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < EPS
    lagged = torch.stack([first[1:], first[:-1]])
    assert torch.corrcoef(lagged)[0, 1].abs() < EPS

    torch.manual_seed(1)
    again = run(x)
    assert all(
        torch.equal(a, b)
        for a, b in zip(again, (first, second, normal, whole, chance, in_bf16), strict=False)
    )
    other = run(x)
    assert not any(torch.equal(a, b) for a, b in zip(other, again, strict=True))


def test_sixteen_bits_stay_below_one_at_the_very_top():
    """Where the generator gives the largest number below 1, a plain cast would round it up to 1."""
    for dtype in (bf16, f16):
        gm = replaced(lambda x: torch.rand(4, dtype=x.dtype), torch.zeros(1, dtype=dtype))
        top = torch.full((4,), 1 - 2**-24)
        assert top.to(dtype).max() == 1
        for node in draws(gm):
            node.replace_all_uses_with(gm.graph.placeholder("top"))
        gm.recompile()
        highest = 1 - torch.finfo(dtype).eps / 2
        values = {n: top for n in gm.graph.nodes if n.name == "top"}
        result = torch.fx.Interpreter(gm).run(torch.zeros(1), initial_env=dict(values))
        assert result.dtype == dtype and (result == highest).all()


def test_one_load_of_seeds_and_the_draws_in_their_order():
    gm = replaced(
        lambda x: (torch.rand(2), torch.randn(3), torch.randint(0, 5, (4,)), F.dropout(x)), torch.ones(8)
    )
    assert len(seeds(gm)) == 1 and seeds(gm)[0].args[0] == 4
    lookups = [n for n in gm.graph.nodes if "lookup_seed" in str(n.target)]
    assert [n.args[1] for n in lookups] == [0, 1, 2, 3]
    assert len(draws(gm)) == 4


def test_seeds_are_counted_for_the_draws_that_were_replaced():
    gm, _ = capture_aten(
        lambda x: (torch.rand(2, dtype=f64), torch.rand(2), torch.randperm(4)), [torch.ones(1)]
    )
    tally = run_pass(ReplaceRandomPasses, gm)
    assert seeds(gm)[0].args[0] == 1 and tuple(seeds(gm)[0].meta["val"].shape) == (1,)
    reasons = [d.reason for d in tally.declines.values()]
    assert any("resolution" in r for r in reasons) and any("no such draw" in r for r in reasons)

    gm, _ = capture_aten(lambda x: torch.rand(2, dtype=f64), [torch.ones(1)])
    run_pass(ReplaceRandomPasses, gm)
    assert not seeds(gm)


def test_a_generator_of_its_own_is_kept():
    graph = Graph()
    generator = graph.placeholder("generator")
    graph.output(graph.call_function(torch.rand, ((4,),), {"generator": generator}))
    gm = GraphModule(torch.nn.Module(), graph)
    tally = run_pass(ReplaceRandomPasses, gm)
    assert not tally.fired and "generator of the user" in next(iter(tally.declines.values())).reason
    assert torch.equal(gm(torch.Generator().manual_seed(3)), gm(torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_dropout_keeps_and_scales(p, dtype):
    x = torch.ones(N, dtype=dtype)
    x[0] = float("inf")
    for program in (
        lambda x: torch.native_dropout(x, p, True),
        lambda x: (F.dropout(x, p, training=True), x > 0),
    ):
        gm, _ = capture_torch(program, [x])
        run_pass(ReplaceRandomPasses, gm)
        value, mask = gm(x)
        kept = (value[1:] != 0).double().mean()
        assert abs(kept - (1 - p)) < EPS
        wanted = (
            {0.0}
            if p == 1
            else {0.0, (torch.ones((), dtype=dtype) / (1 - p)).item()} - ({0.0} if p == 0 else set())
        )
        assert set(value[1:].unique().tolist()) == wanted
        assert p < 1 or value[0].isnan()
    gm, _ = capture_torch(lambda x: torch.native_dropout(x, p, True), [x])
    run_pass(ReplaceRandomPasses, gm)
    value, mask = gm(x)
    assert torch.equal(mask[1:], value[1:] != 0)


def test_dropout_whose_results_are_taken_often_or_never():
    def program(x):
        torch.native_dropout(x, 0.5, True)
        return torch.native_dropout(x, 0.5, True)[0]

    gm, inputs = capture_aten(program, [torch.ones(8)])
    piece = next(n for n in gm.graph.nodes if n.users and "getitem" in n.name)
    with gm.graph.inserting_after(piece):
        again = gm.graph.call_function(piece.target, piece.args)
    again.meta = dict(piece.meta)
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = ((piece, again),)
    assert run_pass(ReplaceRandomPasses, gm).fired["native_dropout"] == 1
    first, second = gm(*inputs)
    assert torch.equal(first, second)


def test_forward_and_backward_agree():
    def program(x):
        return (F.dropout(x, 0.4, training=True) * torch.rand_like(x)).sum()

    run = run_compiled(program, torch.ones(16, 16, requires_grad=True))
    x = torch.full((16, 16), 3.0, requires_grad=True)
    torch.manual_seed(5)
    loss = run(x)
    loss.backward()
    # the loss is linear in x, so the gradient times x gives the loss only if both used the same draws
    assert torch.allclose((x.grad * x).sum(), loss, rtol=1e-5)
    assert 0.25 < (x.grad == 0).float().mean() < 0.55


def test_a_graph_without_facts():
    for dtype in (f32, bf16, f16):
        gm = symbolic_trace(lambda x: x * 0 + torch.rand_like(x))
        assert run_pass(ReplaceRandomPasses, gm).fired["rand_like"] == 1
        x = torch.ones(N, dtype=dtype)
        torch.manual_seed(0)
        first = gm(x)
        torch.manual_seed(0)
        assert torch.equal(first, gm(x)) and first.dtype == dtype
        assert first.min() >= 0 and first.max() < 1 and abs(first.double().mean() - 0.5) < EPS + 2**-8


def test_an_exported_graph_that_is_not_aten():
    gm, _ = torch._dynamo.export(lambda x: x + torch.rand_like(x))(torch.ones(4, 8))
    assert run_pass(ReplaceRandomPasses, gm).fired["rand_like"] == 1
    torch.manual_seed(0)
    first = gm(torch.zeros(4, 8))
    torch.manual_seed(0)
    assert torch.equal(first, gm(torch.zeros(4, 8))) and 0 <= first.min() and first.max() < 1


def test_a_dropout_module_and_one_in_place():
    class Model(torch.nn.Module):
        def __init__(self, inplace):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5, inplace=inplace)

        def forward(self, x):
            return self.drop(x + 1) * 2

    assert run_pass(ReplaceRandomPasses, symbolic_trace(Model(False).train())).fired["dropout"] == 1
    assert not run_pass(ReplaceRandomPasses, symbolic_trace(Model(True).train())).fired
    assert not run_pass(ReplaceRandomPasses, symbolic_trace(Model(False).eval())).fired
