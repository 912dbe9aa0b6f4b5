"""Products fused with the collectives around them: forms beyond the declared examples, and what must not change."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
import torch

import triptych
from triptych.communication.example_group import (
    NAME,
    SYMMETRIC,
    all_gather_along,
    reduce_scatter_along,
    register,
    register_symmetric,
)
from triptych.ir.collectives import collectives
from triptych.ir.program import Program
from triptych.post_grad.micro_pipeline_tp_pass import MicroPipelineTpPass
from triptych.spmd_check import sequences
from triptych.testing.capture import capture_aten
from triptych.testing.check import compare_graphs, run_pass
from triptych.verify.structure import verify

functional = torch.ops._c10d_functional
SEEDS = 30


def fused(program, *inputs, exact=False):
    """The graph after the pass, its meaning compared."""
    gm, inputs = capture_aten(program, inputs)
    before = capture_aten(program, inputs)[0]
    tally = run_pass(MicroPipelineTpPass, gm)
    gm.graph.lint()
    gm.recompile()
    compare_graphs(before, gm, inputs, exact=exact)
    return gm, tally


def names(gm):
    return [n.target._schema.name.partition("::")[2] for n in gm.graph.nodes if "symm_mem" in str(n.target)]


def as_view(x, dim):
    """The gather along a dim as our other passes write it: a view, a permutation and a copy."""
    whole = all_gather_along(x).view(2, *x.shape)
    order = [*range(1, dim + 1), 0, *range(dim + 1, x.dim() + 1)]
    shape = list(x.shape)
    shape[dim] *= 2
    return whole.permute(order).contiguous().view(shape)


@pytest.mark.parametrize("rows, width, gains", [(16384, 128, True), (3, 8, False)])
@pytest.mark.parametrize(
    "program",
    [lambda x, w: all_gather_along(x) @ w, lambda x, w: reduce_scatter_along(torch.cat([x, x]) @ w)],
    ids=["gather", "scatter"],
)  # fmt: skip
def test_what_it_gains_is_recorded_and_it_is_done_in_any_case(program, rows, width, gains):
    gm, _ = capture_aten(program, [torch.ones(rows, width), torch.ones(width, width)])
    tally = run_pass(MicroPipelineTpPass, gm)
    assert tally.fired.total() == 1
    (decision,) = tally.decisions
    assert decision.by_name and (0 < decision.after < 0.95 * decision.before) is gains
    assert ("added by name" in str(decision)) is not gains


@pytest.mark.parametrize(
    ("gather", "dim"), [(all_gather_along, 0), (all_gather_along, 1), (all_gather_along, 2), (as_view, 1), (as_view, 2)]
)
def test_every_dim_of_four_is_gathered(gather, dim):
    gm, _ = fused(lambda x, w: gather(x, dim) @ w, torch.randn(2, 3, 4, 8), torch.randn(8, 5))
    assert names(gm) == ["fused_all_gather_matmul"]
    assert list(collectives(gm.graph)) == []


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_dim_of_four_is_scattered(dim):
    gm, _ = fused(lambda x, w: reduce_scatter_along(x @ w, dim), torch.randn(2, 4, 6, 8), torch.randn(8, 5))
    assert names(gm) == ["fused_matmul_reduce_scatter"]
    assert list(collectives(gm.graph)) == []


def test_a_permutation_that_is_no_gather_is_left_alone():
    """The ranks' parts come last, not between two dims that were neighbours: elements of another order."""

    def program(x, w):
        return all_gather_along(x).view(2, 3, 4, 8).permute(2, 0, 1, 3).contiguous().view(-1, 8) @ w

    gm, tally = fused(program, torch.randn(3, 4, 8), torch.randn(8, 5))
    assert not tally.fired


def test_rows_that_run_over_two_ranks_are_left_alone():
    gm, tally = fused(lambda x, w: all_gather_along(x).view(-1, 10) @ w, torch.randn(3, 5), torch.randn(10, 4))
    assert not tally.fired
    assert "whole rows" in next(iter(tally.declines.values())).reason


def takes_row_scales():
    """Can torch multiply 8-bit floats on this CPU whose rows have a scale each?"""
    a = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(a, a.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_row_scales = pytest.mark.skipif(not takes_row_scales(), reason="this torch takes one scale a matrix on a CPU")


@needs_row_scales
def test_scales_are_gathered_with_their_rows():
    e4m3 = torch.float8_e4m3fn

    def program(x, w):
        scale, columns = x.abs().amax(1, keepdim=True), torch.ones(1, w.shape[0])
        whole = all_gather_along((x / scale).to(e4m3).view(torch.uint8)).view(e4m3)
        return torch.ops.aten._scaled_mm(whole, w.to(e4m3).t(), all_gather_along(scale), columns, out_dtype=torch.bfloat16)

    gm, _ = fused(program, torch.randn(16, 32), torch.randn(16, 32))
    assert names(gm) == ["fused_all_gather_scaled_matmul"]  # the one collective that is left


@needs_row_scales
def test_scales_of_all_rows_are_split_among_the_ranks():
    """Row-wise scales that every rank has for all rows, of a tensor that is gathered along dim 1."""
    e4m3 = torch.float8_e4m3fn

    def program(x, w, scale):
        whole = all_gather_along(x.to(e4m3).view(torch.uint8), 1).view(e4m3)
        columns = torch.ones(1, 16)
        return torch.ops.aten._scaled_mm(whole.view(-1, 32), w.to(e4m3).t(), scale, columns, out_dtype=torch.bfloat16)

    gm, _ = fused(program, torch.randn(2, 8, 32), torch.randn(16, 32), torch.rand(32, 1) + 1)
    assert names(gm) == ["fused_all_gather_scaled_matmul"]


def test_a_gathered_tensor_with_one_row_a_rank_and_one_scale_is_left_alone():
    """The operator would take the scale for that of this rank's row, and gather the scales of the others."""
    e4m3 = torch.float8_e4m3fn

    def program(x, w):
        one = torch.full((1, 1), 2.0)
        whole = all_gather_along(x.to(e4m3).view(torch.uint8)).view(e4m3)
        return torch.ops.aten._scaled_mm(whole, w.to(e4m3).t(), one, one, out_dtype=torch.bfloat16)

    gm, tally = fused(program, torch.randn(1, 32), torch.randn(16, 32))
    assert not tally.fired


@needs_row_scales
@pytest.mark.parametrize("dim", [0, 1])
def test_scaled_products_are_scattered(dim):
    e4m3 = torch.float8_e4m3fn

    def program(x, w, scale):
        columns = torch.ones(1, 16)
        y = torch.ops.aten._scaled_mm(x.to(e4m3), w.to(e4m3).t(), scale, columns, out_dtype=torch.bfloat16)
        return reduce_scatter_along(y.view(4, 4, 16), dim)

    gm, _ = fused(program, torch.randn(16, 32), torch.randn(16, 32), torch.rand(16, 1) + 1)
    assert names(gm) == ["fused_scaled_matmul_reduce_scatter"]


def by_hand(written):
    """The gather of an input, and a write to `written` before the product."""
    register_symmetric()
    graph = torch.fx.Graph()
    values = {name: graph.placeholder(name) for name in ("x", "w")}
    started = graph.call_function(functional.all_gather_into_tensor.default, (values["x"], 2, SYMMETRIC))
    whole = graph.call_function(functional.wait_tensor.default, (started,))
    if written:
        graph.call_function(torch.ops.aten.add_.Tensor, (values[written], 1))
    graph.output((graph.call_function(torch.ops.aten.mm.default, (whole, values["w"])),))
    gm = torch.fx.GraphModule({}, graph)
    Program(gm, [torch.ones(3, 8), torch.ones(8, 5)])  # leaves the facts on the nodes
    return gm


@pytest.mark.parametrize(("written", "fires"), [("", 1), ("x", 0), ("w", 1)])
def test_a_write_to_what_is_gathered_is_not_overtaken(written, fires):
    """The weight may be written: the operator stands behind the write, as the product does."""
    tally = run_pass(MicroPipelineTpPass, by_hand(written))
    assert tally.fired.total() == fires
    if not fires:
        (declined,) = tally.declines.values()
        assert declined.reason == "add__tensor writes a gathered operand before the product"


def two_products(writes):
    """Products of one gathered tensor, and something that is written between them."""
    register_symmetric()
    graph = torch.fx.Graph()
    x, w, v = (graph.placeholder(name) for name in "xwv")
    started = graph.call_function(functional.all_gather_into_tensor.default, (x, 2, SYMMETRIC))
    whole = graph.call_function(functional.wait_tensor.default, (started,))
    first = graph.call_function(torch.ops.aten.mm.default, (whole, w))
    graph.call_function(torch.ops.aten.add_.Tensor, ({"v": v, "whole": whole}[writes], 1))
    graph.output((first, graph.call_function(torch.ops.aten.mm.default, (whole, v))))
    gm = torch.fx.GraphModule({}, graph)
    Program(gm, [torch.ones(3, 8), torch.ones(8, 5), torch.ones(8, 5)])
    return gm


def test_a_product_does_not_move_over_a_write_to_its_weight():
    """The first is fused; the second reads the gathered tensor that the operator returns."""
    inputs = [torch.randn(3, 8), torch.randn(8, 5), torch.randn(8, 5)]
    gm = two_products("v")
    expected = gm(*[i.clone() for i in inputs])
    assert run_pass(MicroPipelineTpPass, gm).fired.total() == 1
    gm.recompile()
    assert [n.name.partition("_")[0] for n in gm.graph.nodes].count("mm") == 1
    for got, want in zip(gm(*[i.clone() for i in inputs]), expected):
        torch.testing.assert_close(got, want)


def test_a_gathered_tensor_that_is_written_is_left_alone():
    tally = run_pass(MicroPipelineTpPass, two_products("whole"))
    assert not tally.fired
    assert "writes the gathered tensor" in next(iter(tally.declines.values())).reason


def test_ranks_compare_fused_operators_too():
    gm, _ = fused(lambda x, w: reduce_scatter_along(all_gather_along(x) @ w), torch.randn(3, 8), torch.randn(8, 5))
    (compared,) = sequences(gm.graph).values()
    assert compared[0] == f"fused_all_gather_matmul(float32[3, 8], float32[8, 5]) over {SYMMETRIC}"


def test_explain_says_why_nothing_was_fused():
    """In a group without symmetric memory, which is most of them."""
    register()

    def program(x, w):
        return functional.wait_tensor(functional.all_gather_into_tensor(x, 2, NAME)) @ w

    options = {"codegen": "eager", "add_passes": ["micro_pipeline_tp_pass"]}
    explanation = triptych.explain(program, torch.ones(3, 8), torch.ones(8, 5), options=options)
    (refusal,) = [one for one in explanation.refusals() if one.rule == "fuse_all_gather_matmul"]
    assert refusal.reason == f"symmetric memory is not enabled for the process group {NAME}"


def test_a_device_without_kernels_is_a_reason(monkeypatch):
    """Symmetric memory may be enabled for a group whose tensors are on the CPU."""
    monkeypatch.setattr("triptych._private.has_kernel", lambda *given: False)
    gm, _ = capture_aten(lambda x, w: all_gather_along(x) @ w, [torch.ones(3, 8), torch.ones(8, 5)])
    tally = run_pass(MicroPipelineTpPass, gm)
    (declined,) = tally.declines.values()
    assert declined.reason == "symm_mem.fused_all_gather_matmul has no kernel for the device cpu"


def test_nothing_moves_over_a_fused_operator_and_none_is_dropped():
    gm, _ = fused(lambda x, w: all_gather_along(x) @ w, torch.randn(3, 8), torch.randn(8, 5))
    (node,) = [n for n in gm.graph.nodes if "symm_mem" in str(n.target)]
    effects = Program(gm).aliasing.effects(node)
    assert effects.kept and effects.barrier


def test_work_grows_with_the_number_of_layers():
    def work(layers):
        def program(x, *weights):
            for weight in weights:
                x = reduce_scatter_along(torch.relu(all_gather_along(x) @ weight) @ weight.t())
            return x

        gm, _ = capture_aten(program, [torch.ones(2, 8), *[torch.ones(8, 4) for _ in range(layers)]])
        calls = 0

        def count(frame, event, arg):
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            run_pass(MicroPipelineTpPass, gm)
        finally:
            sys.setprofile(before)
        assert len(names(gm)) == 2 * layers
        return calls

    work(2)  # tables that are read once
    assert work(20) < 2.5 * work(10)


def random_program(seed):
    """Gathers and scatters along any dim in any spelling, with views between them and products; sizes of 1, and sizes as
    many as there are ranks, make dims look alike."""
    choose = random.Random(seed)
    shape = [choose.choice((1, 2, 2, 3, 4)) for _ in range(choose.randint(1, 3))] + [choose.choice((2, 4, 6))]
    dim = choose.randrange(len(shape))
    scatter_dim = choose.randrange(len(shape))
    spelled = choose.choice((all_gather_along, as_view)) if dim else all_gather_along
    shuffles, elsewhere, before_product = (choose.random() < 0.3 for _ in range(3))
    products, reduction = choose.randint(1, 3), choose.choice(("sum", "avg"))

    def program(x, *weights):
        whole = spelled(x, dim)
        if shuffles:  # elements in another order than gathered
            whole = whole.transpose(0, -2).contiguous().view(whole.shape)
        flat = whole.view(-1, whole.shape[-1])
        used = [flat.sum()] if before_product else []
        results = [flat @ weight for weight in weights[:products]]
        last = (whole.tanh() if apart else whole) @ weights[-1]
        last = last.relu() if activated else last
        scattered = last if last.shape[scatter_dim] % 2 else reduce_scatter_along(last, scatter_dim, reduction)
        return (*results, scattered, *used, *([whole.exp()] if elsewhere else []))

    activated, apart = choose.random() < 0.2, choose.random() < 0.6
    width = shape[-1] * (2 if dim == len(shape) - 1 else 1)
    generator = torch.Generator().manual_seed(seed)
    sizes = [shape, *([width, choose.choice((1, 2, 5))] for _ in range(products)), [width, choose.choice((2, 3, 4))]]
    return program, [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_programs_mean_the_same(seed, monkeypatch):
    monkeypatch.setattr("triptych.communication.gather_matmul.LAST_DIM", 1)
    monkeypatch.setattr("triptych.communication.matmul_scatter.LAST_DIM", 1)
    program, inputs = random_program(seed)
    gm, _ = fused(program, *inputs)
    verify(gm)


def test_random_programs_are_fused(monkeypatch):
    """The comparison above would be empty if nothing were."""
    monkeypatch.setattr("triptych.communication.gather_matmul.LAST_DIM", 1)
    monkeypatch.setattr("triptych.communication.matmul_scatter.LAST_DIM", 1)
    counts = Counter()
    for seed in range(SEEDS):
        program, inputs = random_program(seed)
        gm, _ = capture_aten(program, inputs)
        counts.update(run_pass(MicroPipelineTpPass, gm).fired)
    assert min(counts["fuse_all_gather_matmul"], counts["fuse_matmul_reduce_scatter"]) > 8
