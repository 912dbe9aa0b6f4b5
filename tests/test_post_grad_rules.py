"""The patterns of the post-grad stage on whole programs: equal to eager, by both code generators."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests import models
from tests.compare import check_inference, check_training
from triptych import Options
from triptych.joint.pass_patterns import PassPatterns
from triptych.passes.catalogue import list_passes, rules_of
from triptych.passes.session import watching
from triptych.pipeline import steps
from triptych.post_grad.group_batch_fusion_passes import BatchFusionOnAten
from triptych.post_grad.pass_patterns import PostGradPatterns
from triptych.post_grad.post_grad_fusions import PadAtenMmPass
from triptych.rules.eliminate_common_subexpressions import EliminateCommonSubexpressions
from triptych.testing.capture import capture_aten
from triptych.testing.check import compare_graphs, run_pass

CODEGENS = ["eager", "inductor"]


def check(program, *inputs, codegen, dynamic=False, more=(), **options):
    """Compiled equal to eager, every rewrite verified; returns how often each rule fired."""
    torch._dynamo.reset()
    with watching() as sessions:
        check_inference(
            program, inputs, backend=triptych.compile_fx, dynamic=dynamic, fullgraph=True,
            options={"codegen": codegen, "verify": "each", "on_error": "raise", **options},
            more=[models.Call(tuple(args), {}) for args in more],
        )  # fmt: skip
    return sum((r.fired for s in sessions for r in s.records if r.stage == "post_grad"), start=type(sessions[0].records[0].fired)())


def on_fake_gpu(program, *shapes, dtype=torch.bfloat16, **options):
    """The patterns over a program on a GPU that need not be there: what they decide, not what it computes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(program)(*[torch.empty(s, device="cuda", dtype=dtype) for s in shapes])
    return gm, run_pass(PostGradPatterns, gm, options=options)


A, B = torch.randn(4, 5), torch.randn(5, 6)


# ---- alpha and beta, NaN, dtypes, empty and 0-d tensors, dynamic sizes ----


@pytest.mark.parametrize("codegen", CODEGENS)
def test_alpha_scales_what_it_scaled(codegen):
    def program(a, b, t):
        product = a @ b
        return torch.add(a @ b, t, alpha=3), torch.add(t, product, alpha=3), torch.add(a @ b, t, alpha=-0.5).relu()

    check(program, A, B, torch.randn(6), codegen=codegen)
    check(program, A, B, torch.randn(4, 6), codegen=codegen)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_bias_times_zero_is_not_read(codegen):
    nan = torch.full((6,), torch.nan)

    def program(t, a, b):
        return torch.addmm(t, a, b, beta=0), torch.addmm(t, a, b, beta=0).relu()

    check(program, nan, A, B, codegen=codegen)
    gm, _ = capture_aten(program, [nan, A, B])
    assert run_pass(PostGradPatterns, gm).fired["unfuse_bias_add_to_pointwise"] == 2
    assert not any("addmm" in str(n.target) for n in gm.graph.nodes)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_product_or_sum_times_zero_keeps_its_nan(codegen):
    nan = torch.full((4, 6), torch.nan)
    check(lambda a, b, t: (torch.add(a @ b, t, alpha=0), torch.add(t, a @ b, alpha=0)), A, B, nan, codegen=codegen)
    check(lambda a, b, t: torch.add(t, a @ b, alpha=0), A * torch.inf, B, torch.ones(6), codegen=codegen)


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int8, torch.float16, torch.float64], ids=str)
def test_counts_have_the_dtype_asked_for(codegen, dtype):
    def program(x):
        ones = torch.ones(300, 2, dtype=torch.int64)
        return ones.cumsum(0, dtype=dtype) + 0, torch.ones(()).cumsum(0) * x, torch.ones(0, 2).cumsum(-1) + x.sum()

    fired = check(program, torch.randn(3), codegen=codegen)
    assert fired["pointless_cumsum_replacement"] == (2 if dtype == torch.int8 else 3)  # 300 is no int8


@pytest.mark.parametrize("codegen", CODEGENS)
def test_empty_products(codegen):
    def program(a, b, t):
        return a @ b + t, torch.addmm(t, a, b).relu()

    for rows, inner in [(0, 5), (4, 0), (0, 0)]:
        check(program, torch.randn(rows, inner), torch.randn(inner, 6), torch.randn(6), codegen=codegen)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_dynamic_sizes(codegen):
    def program(a, b, t):
        scores = a @ b + t
        counts = torch.ones(a.shape[0], dtype=torch.int64).cumsum(0)
        return scores, torch.cat(scores.split([2, scores.shape[1] - 2], 1), 1) * 2, counts

    def sized(rows, columns):
        return torch.randn(rows, 5), torch.randn(5, columns), torch.randn(columns)

    fired = check(program, *sized(4, 6), codegen=codegen, dynamic=True, more=[sized(7, 9)])
    assert fired["pointless_cumsum_replacement"]


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_softmax_of_infinite_rows(codegen):
    inf = torch.inf
    x = torch.tensor([[inf, 0.0], [-inf, -inf], [torch.nan, 1.0], [-inf, 2.0]])
    check(lambda x: (x.softmax(1), x.log_softmax(0), x.logsumexp(1)), x, codegen=codegen)


# ---- weights that stay ----


class Scaled(nn.Module):
    """A convolution and a linear, each followed by arithmetic with buffers."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(36, 8)
        self.register_buffer("scale", torch.randn(4, 1, 1))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x):
        y = (self.conv(x) * self.scale).relu()
        return (self.linear(y.flatten(1)) - self.shift) * 0.5


@pytest.mark.parametrize("codegen", CODEGENS)
def test_arithmetic_behind_frozen_weights_is_folded_into_them(codegen):
    model = Scaled().eval()
    fired = check(model, torch.randn(2, 3, 5, 5), codegen=codegen, freeze=True)
    assert fired["binary_folding"] == 3
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"codegen": codegen, "freeze": True})
    x = torch.randn(2, 3, 5, 5)
    with torch.no_grad(), watching() as sessions:
        compiled(x)
        calls = [str(n.target) for n in sessions[0].graphs["forward"].graph.nodes if n.op == "call_function"]
        assert not any(name.startswith(("aten.mul", "aten.sub")) for name in calls)  # nor any of it on every call
        model.scale.mul_(2)
        model.linear.weight.add_(1)
        torch.testing.assert_close(compiled(x), model(x))  # a weight that changed all the same


def test_weights_that_may_change_are_left_alone():
    assert not check(Scaled().eval(), torch.randn(2, 3, 5, 5), codegen="eager")["binary_folding"]


# ---- what the cost model decides on a GPU ----


def test_a_bias_of_one_row_is_added_by_the_product_unless_a_kernel_follows():
    shapes = (512, 512), (512, 512), (512,)
    assert on_fake_gpu(lambda a, b, t: a @ b + t, *shapes)[1].fired["addmm"] == 1
    assert not on_fake_gpu(lambda a, b, t: (a @ b + t).relu(), *shapes)[1].fired["addmm"]
    _, residual = on_fake_gpu(lambda a, b, t: a @ b + t, (512, 512), (512, 512), (512, 512))
    assert not residual.fired["addmm"] and "would cost" in next(iter(residual.declines.values())).reason


def test_a_residual_is_added_by_the_kernel_that_follows():
    def program(t, a, b):
        return torch.addmm(t, a, b).relu()

    shapes = (512, 512), (512, 512), (512, 512)
    assert on_fake_gpu(program, *shapes, dtype=torch.float32)[1].fired["unfuse_bias_add_to_pointwise"] == 1
    _, half = on_fake_gpu(program, *shapes)
    assert not half.fired["unfuse_bias_add_to_pointwise"]
    assert "rounded" in next(iter(half.declines.values())).reason


def test_fused_and_unfused_sums_do_not_take_turns():
    gm, _ = on_fake_gpu(lambda t, a, b: torch.addmm(t, a, b).relu(), (64,), (64, 64), (64, 64), dtype=torch.float32)
    assert not run_pass(PostGradPatterns, gm).fired


def softmax(x):
    exponential = (x - x.amax(1, True)).exp()
    return exponential / exponential.sum(1, True)


def test_rows_that_no_cache_holds_are_read_once_less():
    long, tally = on_fake_gpu(softmax, (1024, 131072), dtype=torch.float32)
    assert tally.fired["prepare_softmax"] == 1 and not any("amax" in str(n.target) for n in long.graph.nodes)
    _, short = on_fake_gpu(softmax, (4096, 4096), dtype=torch.float32)
    assert not short.fired and "would cost" in next(iter(short.declines.values())).reason
    _, few = on_fake_gpu(softmax, (8, 1 << 24), dtype=torch.float32)
    assert not few.fired and "split" in next(iter(few.declines.values())).reason
    _, eager = on_fake_gpu(softmax, (1024, 131072), dtype=torch.float32, codegen="eager")
    assert not eager.fired


@pytest.mark.parametrize(
    "dtype, shape, fires",
    [
        (torch.float32, (4096, 50304), True), (torch.bfloat16, (4096, 50304), False),
        (torch.float32, (8192, 128256), True), (torch.bfloat16, (8192, 128256), False),
        (torch.float32, (8192, 32000), False), (torch.bfloat16, (8192, 32000), False),
    ],
)  # fmt: skip
def test_one_pass_is_taken_where_memory_decides(dtype, shape, fires):
    """As on an H200, where one pass computes longer than two: logits of 16 bits are read twice in less time."""
    _, tally = on_fake_gpu(lambda x: (x.float() - x.float().amax(1, True)).exp().sum(1, True), shape, dtype=dtype)
    assert bool(tally.fired["prepare_softmax"]) is fires


@pytest.mark.parametrize("inner, columns, fires", [(4, 4, True), (1, 64, True), (16, 16, False), (64, 4, False)])
def test_products_of_few_columns_are_pointwise_on_a_gpu(inner, columns, fires):
    """As on an H200: 52 us against 8 us for 4 columns, and 76 us against 598 us for 16."""
    shapes = (1048576, inner), (inner, columns)
    _, tally = on_fake_gpu(lambda a, b: a @ b, *shapes, dtype=torch.float32)
    assert bool(tally.fired["decompose_mem_bound_mm"]) is fires


@pytest.mark.parametrize("inner, fires", [((64, 64), True), ((128, 16), True), ((1024, 1024), False)])
def test_sums_of_products_of_short_rows_are_one_product(inner, fires):
    """As on an H200: 51 us against 20 us for rows of 64, and 35 us against 38 us for rows of 1024."""
    first, second = inner
    columns = 4096 if fires else 1024
    shapes = (4096, first), (first, columns), (4096, second), (second, columns)
    _, tally = on_fake_gpu(lambda a, b, c, d: a @ b + c @ d, *shapes)
    assert bool(tally.fired["mm_plus_mm"]) is fires


# ---- whole models ----


QUICK = {("bert", "training"), ("resnet", "inference")}
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.slow)
    for name in ("bert", "gpt2", "llama", "t5", "resnet")
    for kind in ("inference", "training")
]


@pytest.mark.parametrize("name, kind", CASES)
def test_models_with_every_rewrite_verified(name, kind):
    case = models.build(name)
    compare = {"inference": check_inference, "training": check_training}[kind]
    with watching() as sessions:
        compare(
            case.model, case.call.args, case.call.kwargs, backend=triptych.compile_fx, fullgraph=True,
            options={"codegen": "eager", "verify": "each", "on_error": "raise"},
        )  # fmt: skip
    assert not [w for s in sessions for w in s.warnings if "undone" in w]
    assert any(r.stage == "post_grad" and r.name == "pass_patterns" for s in sessions for r in s.records)


def test_a_cat_that_holds_a_slice_of_another_is_one_cat():
    def program(a, b):
        both = torch.cat([a, b], 1)
        return torch.cat([both, both[:, :2]], 1)

    gm, inputs = capture_aten(program, [torch.randn(4, 3), torch.randn(4, 5)])
    before = copy.deepcopy(gm)
    tally = run_pass(PostGradPatterns, gm)
    assert tally.fired == {"cat_slice_cat": 1, "cat_of_cat": 1}
    assert len([n for n in gm.graph.nodes if "cat" in str(n.target)]) == 1
    compare_graphs(before, gm, inputs)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_pieces_put_together_along_another_dim(codegen):
    """No view of the whole has them in this order. That it has not is found out while AOTAutograd is tracing."""

    def program(x):
        first, second = torch.tensor_split(x, 2)
        return torch.hstack([first.relu(), second.relu()]), second

    check(program, torch.randn(6, 2), codegen=codegen)  # an error in a rule would be raised


def test_a_split_of_the_gradient_is_no_split():
    """The gradient of a cat is a split, whose pieces a second cat puts together."""
    def program(x, w):
        a, b = x.split([2, 6], 1)
        return F.linear(torch.cat([a, b], 1), w).square().sum()

    check_training(program, (torch.randn(4, 8), torch.randn(3, 8)), backend=triptych.compile_fx,
                   options={"codegen": "eager", "verify": "each"})  # fmt: skip


# ---- names ----


def test_two_stages_share_a_name_and_each_its_options():
    assert {p.stage for p in list_passes() if p.name == "pass_patterns"} == {"joint", "post_grad"}
    both = {rule.name for rule in rules_of("pass_patterns")}
    assert {"bmm_to_mm", "addmm"} <= both
    removed = Options(remove_passes=("pass_patterns",))
    for stage in ("joint", "post_grad"):
        assert not {PassPatterns, PostGradPatterns} & set(steps(stage, removed))


def test_pad_mm_is_a_pass():
    (info,) = [p for p in list_passes("joint") if p.name == "pad_mm"]
    assert info.default and set(info.options) == {"always", "measure", "unaligned"}


@pytest.mark.parametrize("name", ["addmm", "pointless_cumsum_replacement"])
def test_each_rule_is_removed_by_its_name(name):
    def program(a, b, t):
        return a @ b + t, torch.ones(6).cumsum(0) + t

    gm, _ = capture_aten(program, [torch.randn(4, 16), torch.randn(16, 6), torch.randn(6)])
    tally = run_pass(PostGradPatterns, gm, options={"remove_passes": name})
    assert not tally.fired[name] and tally.fired.total() == 1


def test_custom_passes_are_told_whether_a_backward_follows():
    told = []

    def note(graph, is_inference):
        told.append(is_inference)

    options = {"codegen": "eager", "post_grad_custom_pre_pass": note, "post_grad_custom_post_pass": note}
    compiled = torch.compile(lambda x: x.sin(), backend=triptych.compile_fx, options=options)
    compiled(torch.randn(3))
    assert told == [True, True]
    compiled(torch.randn(3, requires_grad=True)).sum().backward()
    assert told == [True, True] + [False] * 4


# ---- by name only ----


@pytest.mark.parametrize(
    "name, program, rule",
    [
        ("decompose_mm_pass", lambda x, y: x[:, :2] @ y[:2], "decompose_mem_bound_mm"),
        ("unbind_stack_aten_pass", lambda x, y: torch.cat([p.unsqueeze(1) for p in x.unbind()], 1) + y, "unbind_stack_aten"),
        ("split_cat_aten_pass", lambda x, y: torch.cat([y, *x.split([2, 1, 5])[1:]]), "split_cat_aten"),
        ("select_cat_aten_pass", lambda x, y: torch.cat([x.select(0, i) for i in range(8)]) * 2, "select_cat_aten"),
        ("move_view_after_cat_aten_pass", lambda x, y: torch.cat([p.reshape(1, 32) for p in x.split(4)]) * 2,
         "move_view_after_cat_aten"),
        ("normalization_aten_pass", lambda x, y: torch.ops.aten.add.Scalar(x, 2), "scalar_overload"),
    ],
)  # fmt: skip
def test_optional_fusions(name, program, rule):
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    for added in (False, True):
        gm, given = capture_aten(program, inputs)
        before = copy.deepcopy(gm)
        options = Options.make({"add_passes": name} if added else {})
        fired = [run_pass(p, gm, options={"add_passes": name}).fired for p in steps("post_grad", options) if p.name == name]
        assert bool(fired) is added and all(counts[rule] for counts in fired)
        compare_graphs(before, gm, given, exact=False)


def test_products_are_padded_once_more():
    gm, given = capture_aten(lambda a, b: a @ b, [torch.randn(6, 7), torch.randn(7, 10)])
    before = copy.deepcopy(gm)
    assert run_pass(PadAtenMmPass, gm, options={"pad_aten_mm_pass.always": True}).fired["pad_mm"] == 1
    compare_graphs(before, gm, given, exact=False)


# ---- batch fusion ----


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList([nn.Linear(16, 16) for _ in range(8)]) for _ in range(2))

    def forward(self, x):
        return torch.cat([second(first(x).tanh()).relu() for first, second in zip(self.first, self.second)], 1)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_batch_fusion_in_parts(codegen):
    wanted = "batch_linear_post_grad,batch_aten_tanh"
    options = {"add_passes": wanted, "remove_passes": "batch_operations,fuse_parallel_linear_pass"}
    fired = check(Towers(), torch.randn(4, 16), codegen=codegen, **options)
    assert fired["batch_linear_post_grad"] == 2 and fired["batch_aten_tanh"] == 1 and not fired["batch_aten_relu"]


def test_batch_fusion_runs_only_if_it_is_added():
    names = {p.name: p for p in list_passes("post_grad")}
    for name in ("group_batch_fusion_passes", "batch_linear_post_grad", "group_linear", "batch_aten_div"):
        assert not names[name].default
    assert BatchFusionOnAten not in steps("post_grad", Options())
    for name in ("group_batch_fusion_passes", "batch_aten_add"):
        assert BatchFusionOnAten in steps("post_grad", Options(add_passes=(name,)))
    assert {rule.name for rule in rules_of("batch_aten_mul")} == {"batch_aten"}


def test_optional_fusions_by_one_name():
    def added(**options):
        return {e.name for e in steps("post_grad", Options(**options))} - {e.name for e in steps("post_grad", Options())}

    name = "POST_GRAD_FUSIONS"
    whole = added(add_passes=(name,))
    assert len(whole) == 8 and whole >= {"fuse_attention_aten_pass", "pad_aten_mm_pass"}
    assert added(add_passes=(name,), remove_passes=("pad_aten_mm_pass",)) == whole - {"pad_aten_mm_pass"}
    assert added(add_passes=tuple(whole), remove_passes=(name,)) == set()
    (info,) = [p for p in list_passes() if p.name == name]
    assert not info.default and all(member in info.purpose for member in whole)
    assert {rule.name for rule in rules_of("split_cat_aten_pass")} <= {rule.name for rule in rules_of(name)}


@pytest.mark.parametrize("codegen", CODEGENS)
def test_fusions_added_by_one_name_fire(codegen):
    rule = triptych.rule(lambda x: x.tanh(), lambda x: torch.cat([p.tanh() for p in torch.cat(x.split(2)).split(3)]))
    options = {"add_rules": [rule], "remove_passes": "pass_patterns"}
    rule.stages = ("post_grad",)
    fired = check(lambda x: x.tanh() * 2, torch.randn(6, 4), codegen=codegen, add_passes="POST_GRAD_FUSIONS", **options)
    assert fired["split_cat_aten"]


@pytest.mark.parametrize("codegen", CODEGENS)
def test_equal_values_are_computed_once(codegen):
    w = torch.randn(8, 8)

    def two_products(x):
        return (x @ w).relu().sum(1) + (x @ w).sin().sum(1), x.topk(2)[0].sum() + x.topk(2)[1].sum()

    fired = check(two_products, torch.randn(4, 8), codegen=codegen)
    assert fired["merge_equal_values"] >= 2  # what is computed from equal values is equal, too


@pytest.mark.parametrize("codegen", CODEGENS)
def test_results_that_are_both_returned_stay_two(codegen):
    """The caller may write one of them; so with a view of one."""
    x = torch.randn(4, 8)
    for program in (lambda x: (x.exp(), x.exp()), lambda x: (x.exp().t(), x.exp()[1:])):
        assert not check(program, x, codegen=codegen)["merge_equal_values"]
        torch._dynamo.reset()
        first, second = torch.compile(program, backend=triptych.compile_fx, options={"codegen": codegen})(x)
        kept = second.clone()
        first.zero_()
        assert torch.equal(second, kept)


def test_a_value_is_computed_again_after_a_write():
    """Of a graph that writes in the middle, as a user of the stage may have: tracing makes none."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    with FakeTensorMode():
        value = torch.empty(4)
    x = graph.placeholder("x")
    before = graph.call_function(aten.exp.default, (x,))
    written = graph.call_function(aten.mul_.Tensor, (x, 2))
    after = graph.call_function(aten.exp.default, (x,))
    total = graph.call_function(aten.add.Tensor, (before, after))
    graph.output((total,))
    for node in (x, before, written, after, total):
        node.meta["val"] = value if node in (x, written) else value.clone()
    tally = run_pass(EliminateCommonSubexpressions, torch.fx.GraphModule({}, graph))
    assert not tally.fired and "writes an operand in between" in next(iter(tally.declines.values())).reason


@pytest.mark.parametrize("codegen", CODEGENS)
def test_what_gives_a_size_its_symbol_stays(codegen):
    def program(x):
        return x.nonzero().sum() + (x.nonzero() * 2).amax()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert not check(program, torch.tensor([2, 0, 3, 4]), codegen=codegen)["merge_equal_values"]
