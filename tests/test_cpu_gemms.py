"""`grouped_gemm_pass` and `concat_linear_woq_int4`: fewer calls, results equal to eager, by both code generators."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests import models
from tests.compare import check_inference, check_training
from triptych.cost import Operand, Work, clock, decision, device_model
from triptych.cost.clock import Clocked
from triptych.ir.program import Program
from triptych.options import Options
from triptych.passes.catalogue import list_passes
from triptych.passes.session import watching
from triptych.pipeline import POST_GRAD
from triptych.post_grad import grouped_gemm_pass
from triptych.post_grad.concat_linear_woq_int4 import BLOCK, ConcatLinearWoqInt4, ConcatLinearWoqInt4Pass
from triptych.post_grad.grouped_gemm_pass import GroupedGemmPass
from triptych.post_grad.joined_on_cpu import concatenated, copies
from triptych.pre_grad.joined_products import pieces, surely_copied
from triptych.rewrite.rule import Match
from triptych.testing.capture import capture_aten
from triptych.testing.check import run_example, run_pass

CODEGENS = ["eager", "inductor"]
INT4_MM = torch.ops.aten._weight_int4pack_mm_for_cpu


def fired(sessions, rule):
    return sum(r.fired[rule] for s in sessions for r in s.records)


def check(model, x, *, codegen, more=(), dynamic=False, **options):
    """Compiled equal to eager, every rewrite verified; returns the watched compiles."""
    torch._dynamo.reset()
    with watching() as sessions:
        check_inference(
            model, (x,), backend=triptych.compile_fx, dynamic=dynamic, fullgraph=True,
            options={"codegen": codegen, "verify": "each", "on_error": "raise", "freeze": True, **options},
            more=[models.Call((other,), {}) for other in more],
        )  # fmt: skip
    return sessions


# ---- grouped_gemm_pass ----


class Projections(nn.Module):
    """By einsum, over weights of three dims: products that only ATen shows."""

    def __init__(self, inner=16, sizes=(8, 4, 4), dtype=torch.float32):
        super().__init__()
        made = [torch.randn(inner, 2, size, dtype=dtype) / inner**0.5 for size in sizes]
        self.weights = nn.ParameterList(map(nn.Parameter, made))

    def forward(self, x):
        return [torch.einsum("bsi,ihd->bshd", x, w).relu().sum(-1) for w in self.weights]


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_become_one_product(codegen, dtype):
    sessions = check(Projections(dtype=dtype), torch.randn(2, 3, 16, dtype=dtype), codegen=codegen)
    assert fired(sessions, "grouped_gemm") == 1


@pytest.mark.parametrize("codegen", CODEGENS)
def test_any_number_of_rows(codegen):
    others = [torch.randn(n, 3, 16) for n in (5, 9)]
    sessions = check(Projections(), torch.randn(4, 3, 16), codegen=codegen, more=others, dynamic=True)
    assert fired(sessions, "grouped_gemm") == 1
    sessions = check(Projections(), torch.randn(0, 3, 16), codegen=codegen)
    assert fired(sessions, "grouped_gemm") == 1


@pytest.mark.parametrize("codegen", CODEGENS)
def test_layers_that_stage_one_left(codegen):
    layers = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 4)])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return [layer(x).relu().sum(-1) for layer in self.layers]

    removed = "fuse_parallel_linear_pass,group_batch_fusion_passes"
    sessions = check(Model(), torch.randn(2, 3, 16), codegen=codegen, remove_passes=removed)
    assert fired(sessions, "grouped_gemm") == 1


def test_weights_are_concatenated_once():
    model, x = Projections(), torch.randn(2, 3, 16)
    options = {"codegen": "eager", "freeze": True}
    torch._dynamo.reset()
    with torch.no_grad(), watching() as sessions:
        compiled = torch.compile(model, backend=triptych.compile_fx, options=options)
        torch.testing.assert_close(compiled(x), model(x))
        assert fired(sessions, "grouped_gemm") == 1
        assert any("done once" in r.note for s in sessions for r in s.records if r.note)
        model.weights[1].mul_(2)  # noticed: the weights are concatenated anew
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training(codegen):
    """Many rows and a few columns: joined in the forward although its weights are concatenated at each step."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 1, 2) / 8) for _ in range(8))

        def forward(self, x):
            return sum(torch.einsum("bsi,ihd->bshd", x, w).tanh().sum(-1) for w in self.weights)

    torch._dynamo.reset()
    with watching() as sessions:
        check_training(
            Towers(), (torch.randn(4, 128, 64),), backend=triptych.compile_fx,
            options={"codegen": codegen, "verify": "each", "on_error": "raise"},
        )  # fmt: skip
    assert fired(sessions, "grouped_gemm") >= 1


@pytest.mark.parametrize("leading", [(), (512,), (8, 64)])
def test_linear_layers_of_an_exported_program(leading):
    """Export leaves `linear` whole, whose activation has any number of dims."""
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 4) for _ in range(8))

        def forward(self, x):
            return sum(layer(x).relu().sum(-1) for layer in self.layers)

    model, x = Layers(), torch.randn(*leading, 256)
    gm = torch.export.export(model, (x,)).module()
    tally = run_pass(GroupedGemmPass, gm)
    assert tally.fired["grouped_gemm"] == 1
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("leading", [(), (512,), (8, 64)])
def test_what_is_timed_of_layers_over_any_number_of_dims_are_products_of_matrices(leading, monkeypatch, tmp_path):
    layers = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
    x, rows = torch.randn(*leading, 16), math.prod(leading)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    program = Program(torch.export.export(Both(), (x,)).module(), [x])
    (site,) = grouped_gemm_pass.GroupedGemm().sites(program)
    group = site.bindings["group"]
    old, new = grouped_gemm_pass._works(program, group)
    new += copies(program, group, [True, True])
    check_that_it_is_timed((old, new), monkeypatch, tmp_path)
    assert [part.prepare(torch.device("cpu"))().shape for part in old.parts] == [(rows, 4)] * 2


def test_a_view_after_the_first_product_is_taken_before_it():
    def program(x, w, v):
        first = (x @ w).relu().sum()
        return first + (x @ v.view(256, 1, 2).view(256, 2)).sum()

    given = torch.randn(512, 256), torch.randn(256, 2), torch.randn(512)
    gm, _ = capture_aten(program, list(given))
    assert run_pass(GroupedGemmPass, gm).fired["grouped_gemm"] == 1
    assert sum("mm" in str(n.target) for n in gm.graph.nodes) == 1
    torch.testing.assert_close(gm(*given), program(*given))


@pytest.mark.parametrize("written", ["x", "v"])
def test_nothing_is_joined_over_a_write(written):
    """Graphs of a compile are functional; one that somebody hands to the stage need not be."""

    def program(x, w, v):
        first = (x @ w).sum()
        (x if written == "x" else v)[0].add_(1)
        return first + (x @ v).sum()

    given = torch.randn(512, 16), torch.randn(16, 4), torch.randn(16, 6)
    gm = make_fx(program)(*(t.clone() for t in given))
    outcome = run_pass(GroupedGemmPass, gm, options={"freeze": True})
    assert not outcome.fired
    assert any("a write or a region boundary" in str(d.reason) for d in outcome.declines.values())


WEIGHTS = {
    "mm": (lambda k, n: (k, n), lambda w, k, n: w),
    "transposed": (lambda k, n: (n, k), lambda w, k, n: w.t()),
    "viewed": (lambda k, n: (k * n,), lambda w, k, n: w.view(k, n)),
    "viewed and transposed": (lambda k, n: (n, k, 1), lambda w, k, n: w.view(n, k).t()),
    "slice": (lambda k, n: (k + 1, n + 2), lambda w, k, n: w[1:, 1 : n + 1]),
    "expanded": (lambda k, n: (1, n), lambda w, k, n: w.expand(k, n)),
    "half": (lambda k, n: (2 * k, n), lambda w, k, n: w.chunk(2)[1]),
}
"""Shapes of weights by their spelling, and the spelling."""
USES = {
    "relu": lambda y: y.relu(),
    "sum": lambda y: y.sum(),
    "returned": lambda y: y,
    "viewed": lambda y: y.view(-1),
    "turned": lambda y: y.t(),
    "written": lambda y: y.add_(1),
}


@pytest.mark.parametrize("freeze", [True, False])
def test_random_groups(freeze, monkeypatch):
    """Whatever it costs: weights, biases and uses of every kind, over two activations."""
    monkeypatch.setattr(Match, "pays", lambda *args, **how: None)
    fires = 0
    for seed in range(40):
        pick = random.Random(seed)
        torch.manual_seed(seed)
        k, mostly_biased = pick.choice([4, 6]), pick.random() < 0.5
        layers = []
        for _ in range(pick.randint(2, 6)):
            spelling, n, use = pick.choice(list(WEIGHTS)), pick.choice([1, 2, 6]), pick.choice(list(USES))
            layers.append((spelling, n, (pick.random() < 0.2) != mostly_biased, use, pick.random() < 0.2))

        def program(x, *operands, k=k, layers=layers):
            results = []
            for (spelling, n, biased, use, second), weight, bias in zip(layers, operands[::2], operands[1::2]):
                matrix, activation = WEIGHTS[spelling][1](weight, k, n), x * 2 if second else x
                product = torch.addmm(bias, activation, matrix) if biased else activation @ matrix
                results.append(USES[use](product))
            return results

        shapes = [shape for spelling, n, *_ in layers for shape in (WEIGHTS[spelling][0](k, n), (n,))]
        given = [torch.randn(pick.choice([0, 1, 5]), k), *map(torch.randn, shapes)]
        gm, _ = capture_aten(program, [t.clone() for t in given])
        wanted = gm(*given)
        fires += run_pass(GroupedGemmPass, gm, options={"freeze": freeze}).fired["grouped_gemm"]
        torch.testing.assert_close(gm(*given), wanted)
    assert fires >= 20


# ---- concat_linear_woq_int4 ----


def packed(out, inner, group_size=32, dtype=torch.bfloat16):
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (out, inner), dtype=torch.int32), 1)
    return weight, (torch.randn(inner // group_size, out, 2) * 0.1).to(dtype)


class Int4Layers(nn.Module):
    def __init__(self, inner, *outs, group_size=32, dtype=torch.bfloat16):
        super().__init__()
        self.group_size = group_size
        self.count = len(outs)
        for i, out in enumerate(outs):
            weight, scales = packed(out, inner, group_size, dtype)
            self.register_buffer(f"weight{i}", weight)
            self.register_buffer(f"scales{i}", scales)

    def results(self, x):
        given = ((getattr(self, f"weight{i}"), getattr(self, f"scales{i}")) for i in range(self.count))
        return [INT4_MM(x, weight, self.group_size, scales) for weight, scales in given]

    def forward(self, x):
        return [y.float().relu() for y in self.results(x)]


ROWS = [0, 1, 2, 3, 4, 5, 8, 33]
SIZES = [(64, 64), (64, 128, 192), (128, 16), (64, 32), (64, 48), (256, 80), (192, 64, 112)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_concatenated_blocks_are_the_packed_concatenation(dtype):
    """What the rule rests on: the packed form of whole blocks is that of each, and columns do not see each other."""
    for (inner, group_size), outs in itertools.product([(32, 32), (128, 64), (256, 128), (256, 256)], SIZES):
        plain = [torch.randint(0, 16, (out, inner), dtype=torch.int32) for out in outs]
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        weights = [pack(weight, 1) for weight in plain]
        assert torch.equal(torch.cat(weights), pack(torch.cat(plain), 1))
        scales = [torch.randn(inner // group_size, out, 2).to(dtype) for out in outs]
        for rows in ROWS:
            x = torch.randn(rows, inner).to(dtype)
            apart = [INT4_MM(x, weight, group_size, s) for weight, s in zip(weights, scales)]
            joined = INT4_MM(x, torch.cat(weights), group_size, torch.cat(scales, 1))
            assert torch.equal(joined, torch.cat(apart, 1)), (inner, group_size, outs, rows)


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("outs", [(64, 64), (48, 64, 128)])
def test_int4_layers_have_the_same_bits_in_one_call(codegen, outs):
    model, x = Int4Layers(64, *outs), torch.randn(3, 64, dtype=torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad(), watching() as sessions:
        options = {"codegen": codegen, "verify": "each", "on_error": "raise", "freeze": True}
        compiled = torch.compile(model, backend=triptych.compile_fx, fullgraph=True, options=options)
        for got, wanted in zip(compiled(x), model(x)):
            assert torch.equal(got, wanted)
        assert fired(sessions, "concat_linear_woq_int4") == 1
        before = copy.deepcopy(model)
        model.scales1.mul_(2)
        assert all(torch.equal(got, wanted) for got, wanted in zip(compiled(x), model(x)))
        assert not torch.equal(model(x)[1], before(x)[1])


@pytest.mark.parametrize("codegen", CODEGENS)
def test_int4_with_any_number_of_rows(codegen):
    first, *others = (torch.randn(n, 64, dtype=torch.bfloat16) for n in (5, 7, 2))
    sessions = check(Int4Layers(64, 64, 64), first, codegen=codegen, more=others, dynamic=True)
    assert fired(sessions, "concat_linear_woq_int4") == 1
    sessions = check(Int4Layers(64, 64, 64), first[:0], codegen=codegen)
    assert fired(sessions, "concat_linear_woq_int4") == 1


def test_weights_packed_in_the_program():
    """`freeze` packs them once, and then they are joined."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(2):
                self.register_buffer(f"w{i}", torch.randint(0, 16, (64, 32), dtype=torch.int32))
                self.register_buffer(f"s{i}", torch.randn(1, 64, 2, dtype=torch.bfloat16))

        def forward(self, x):
            pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
            return [INT4_MM(x, pack(w, 1), 32, s).sum(-1) for w, s in ((self.w0, self.s0), (self.w1, self.s1))]

    sessions = check(Model(), torch.randn(4, 32, dtype=torch.bfloat16), codegen="eager")
    assert fired(sessions, "concat_linear_woq_int4") == 1


def test_only_frozen_weights_are_joined():
    sessions = check(Int4Layers(64, 64, 64), torch.randn(4, 64, dtype=torch.bfloat16), codegen="eager", freeze=False)
    assert not fired(sessions, "concat_linear_woq_int4")


def test_the_block_is_a_multiple_of_every_cpu_s():
    assert all(BLOCK % rows == 0 for rows in (16, 32, 64))


# ---- where the cost model cannot tell, both ways are timed ----


class Linears(nn.Module):
    """Their results are returned, so that the pieces of the joined product are copied."""

    def __init__(self, inner=256, outs=(64,) * 3, dtype=torch.bfloat16):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(out, inner, dtype=dtype)) for out in outs)

    def forward(self, x):
        return [torch.einsum("bi,oi->bo", x, weight) for weight in self.weights]


def decided(model, x, name, dynamic=False, **options):
    """Did the pass fire, and what was said?"""
    torch._dynamo.reset()
    given = {"codegen": "eager", "freeze": True, **options}
    with torch.no_grad(), watching() as sessions:
        torch.compile(model, backend=triptych.compile_fx, options=given, dynamic=dynamic)(x)
    (record,) = [r for s in sessions for r in s.records if r.name == name]
    told = [str(d) for d in record.decisions] or [d.reason for d in record.declines]
    return bool(sum(record.fired.values())), told[0] if told else ""


@pytest.fixture
def times(monkeypatch):
    """Pretend that each site takes these seconds, apart and joined; lists the works that were asked about."""
    asked = []
    answer = [(100e-6, 50e-6)]

    def clocked(old, new):
        if not old.by_clock or max(old.seconds(), new.seconds()) > clock.LONGEST_ON_CPU:
            return None
        asked.append((old, new))
        return None if answer[0] is None else tuple(map(Clocked, answer[0]))

    monkeypatch.setattr(decision, "clocked", clocked)
    return asked, answer


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_measured_products_decide(times, dtype, dynamic):
    asked, answer = times
    model, x = Linears(dtype=dtype), torch.randn(64, 256, dtype=dtype)
    fires, told = decided(model, x, "grouped_gemm_pass", dynamic)
    assert fires and told == "50.0 us instead of 100.0 us, measured"
    ((old, new),) = asked
    assert [part.sizes for part in old.parts] == [(1, 64, 64, 256)] * 3
    whole, *copied = new.parts  # the weights are concatenated once
    assert whole.sizes == (1, 64, 192, 256) and len(copied) == 3
    assert [part.operands[0][0] for part in copied] == [Operand.contiguous((64, 64), dtype)] * 3
    answer[0] = (100e-6, 99e-6)
    fires, told = decided(model, x, "grouped_gemm_pass", dynamic)
    assert not fires and told.endswith("too small a gain to be sure of, measured")
    answer[0] = None  # nothing can be timed: the model decides
    assert decided(model, x, "grouped_gemm_pass", dynamic)[1].endswith("modelled")


def test_what_is_not_timed(times):
    asked, _ = times
    assert decided(Linears(), torch.randn(64, 256).bfloat16(), "grouped_gemm_pass", tune="off")[1].endswith("modelled")
    decided(Linears(16, (8, 8)), torch.randn(4, 16).bfloat16(), "grouped_gemm_pass")  # a few microseconds
    decided(Linears(1024, (1024,) * 2), torch.randn(2048, 1024).bfloat16(), "grouped_gemm_pass")  # too long
    decided(Linears(dtype=torch.float32, outs=(4,) * 8), torch.randn(512, 256), "grouped_gemm_pass")  # far apart
    assert not asked


class Int4Returned(Int4Layers):
    def forward(self, x):
        return self.results(x)


@pytest.mark.parametrize("joined, is_fired", [(20e-6, True), (27e-6, False)])
def test_measured_int4_products_decide(times, joined, is_fired):
    asked, answer = times
    answer[0] = (27e-6, joined)
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    fires, told = decided(Int4Returned(256, *(256,) * 3), x, "concat_linear_woq_int4")
    assert fires == is_fired and told.endswith("measured") and len(asked) == 1
    asked.clear()
    assert decided(Int4Layers(256, *(256,) * 3), x, "concat_linear_woq_int4")[0]  # nothing is copied: sure
    assert not asked


def test_generated_code_copies_all_pieces_in_one_call():
    gm, _ = capture_aten(lambda x, w, v: (x @ w, x @ v), [torch.randn(8, 16), torch.randn(16, 4), torch.randn(16, 2)])
    model, cpu = device_model("cpu"), torch.device("cpu")
    for of_group in (pieces, copies):
        costs = []
        for codegen in CODEGENS:
            program = Program(gm, options=Options.make({"codegen": codegen}))
            (site,) = grouped_gemm_pass.GroupedGemm().sites(program)
            group = site.bindings["group"]
            ways = (surely_copied(program, group), [True, False], [False, False])
            costs.append([Work.of(cpu, of_group(program, group, one)).seconds(model) for one in ways])
        assert costs[0][0] - costs[1][0] == pytest.approx(model.launch)
        assert costs[0][1:] == costs[1][1:] == [pytest.approx(model.copy(2 * 8 * 4 * 4)), 0]


def works_of(rule, model, x, monkeypatch, **options):
    """The works of the one site of a model that the clock is asked about."""
    asked = []
    monkeypatch.setattr(decision, "clocked", lambda old, new: asked.append((old, new)))
    decided(model, x, rule, tune="all", **options)
    return asked[0]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("codegen", CODEGENS)
def test_what_is_timed_runs(frozen, codegen, monkeypatch, tmp_path):
    model, x = Linears(outs=(64, 128), dtype=torch.float32), torch.randn(64, 256)
    with monkeypatch.context() as patch:
        works = works_of("grouped_gemm_pass", model, x, patch, codegen=codegen, freeze=frozen)
    in_one = codegen == "inductor"
    assert len(works[1].parts) == 1 + (not frozen) + (1 if in_one else 2)
    check_that_it_is_timed(works, monkeypatch, tmp_path)
    runs = [part.prepare(torch.device("cpu")) for work in works for part in work.parts[:2]]
    assert [run().shape for run in runs[:3]] == [(64, 64), (64, 128), (64, 192)]
    assert frozen or sorted(runs[3]().shape) == [192, 256]


def test_int4_products_that_are_timed_run(monkeypatch, tmp_path):
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        works = works_of("concat_linear_woq_int4", Int4Returned(256, 64, 128), x, patch)
    check_that_it_is_timed(works, monkeypatch, tmp_path)
    runs = [part.prepare(torch.device("cpu")) for work in works for part in work.parts]
    assert [run().shape for run in runs[:3]] == [(4, 64), (4, 128), (4, 192)]


def check_that_it_is_timed(works, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
    monkeypatch.setattr(clock, "SPREAD", 100.0)  # other programs may run beside the test
    monkeypatch.setattr(clock, "_known", {})
    times = clock.clocked(*(replace(work, by_clock=True) for work in works))
    assert all(0 < time.seconds < 1 for time in times)


def test_biases_are_added_and_concatenated():
    weights, biases = [torch.empty(6, 3), torch.empty(6, 2)], [torch.empty(3), torch.empty(2)]
    for tensors, dim in ((weights, 1), (biases, 0)):
        joined = concatenated(tensors, dim).prepare(torch.device("cpu"))()
        assert joined.shape == torch.cat(tensors, dim).shape


def test_examples_do_not_depend_on_the_machine(monkeypatch):
    """Neither in the tests nor in `triptych passes`: nothing is timed for them."""
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
    monkeypatch.setattr(decision, "clocked", lambda old, new: pytest.fail("timed"))
    for rule in (grouped_gemm_pass.GroupedGemm(), ConcatLinearWoqInt4()):
        for example in rule.examples:
            run_example(rule, example, "aten")


# ---- the stage ----


def test_names_and_place():
    names = [entry.name for entry in POST_GRAD]
    first = names.index("grouped_gemm_pass")
    assert names[first - 1 : first + 3] == [
        "post_grad_custom_pre_pass", "grouped_gemm_pass", "concat_linear_woq_int4", "group_batch_fusion_passes",
    ]  # fmt: skip
    listed = {entry.name for entry in list_passes()}
    assert {GroupedGemmPass.name, ConcatLinearWoqInt4Pass.name} <= listed
