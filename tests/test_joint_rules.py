"""The rules of the joint stage on joint graphs: forward and backward of a training step, static and dynamic."""

from __future__ import annotations

import copy
import math
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych.ir.facts import fact
from triptych.joint import softmax_scale
from triptych.joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from triptych.joint.pad_mm import PadMmPass
from triptych.joint.pass_patterns import PassPatterns
from triptych.joint.scatter_upon_const_tensor import ScatterUponConstTensor
from triptych.passes.session import watching
from triptych.testing import compare_graphs, run_pass
from triptych.testing.capture import capture_aten, capture_joint
from triptych.verify.structure import verify

STATIC_AND_DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])

aten = torch.ops.aten
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


def learned(*shape, dtype=f32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def on_joint_graph(program, inputs, dynamic=False, exact=False, passes=(PassPatterns,), **options):
    """Captures the joint graph, runs the rules over it and compares results and gradients with the graph before."""
    gm, given = capture_joint(program, inputs, dynamic)
    before = copy.deepcopy(gm)
    run_pass(CanonicalizeAtenIrPasses, gm)
    tallies = [run_pass(p, gm, options={f"{p.name}.{k}": v for k, v in options.items()}) for p in passes]
    gm.graph.lint()
    verify(gm)
    compare_graphs(before, gm, given, exact)
    return gm, tallies[-1]


def calls(gm, name):
    return [n for n in gm.graph.nodes if n.op == "call_function" and name in str(n.target)]


# ---- bmm_to_mm ----


@STATIC_AND_DYNAMIC
def test_a_batch_of_one_forward_and_backward(dynamic):
    def program(x, w):
        return torch.bmm(x.unsqueeze(0), w.unsqueeze(0)).squeeze(0).sum()

    gm, tally = on_joint_graph(program, [learned(6, 8), learned(8, 4)], dynamic)
    assert tally.fired["bmm_to_mm"] == 3, tally.declines
    assert not calls(gm, "bmm") and len(calls(gm, "aten.mm")) == 3
    gm.graph.eliminate_dead_code()  # the views that made the batch are gone with it
    assert not calls(gm, "unsqueeze") and not calls(gm, "squeeze")


# ---- scatter_upon_const_tensor ----


@STATIC_AND_DYNAMIC
@pytest.mark.parametrize("ignored", [False, True])
def test_the_backward_of_a_cross_entropy_needs_no_scatter(dynamic, ignored):
    target = torch.tensor([1, -100 if ignored else 4, 9, 0, 3])

    gm, tally = on_joint_graph(F.cross_entropy, [learned(5, 10), target], dynamic, exact=True)
    assert tally.fired["scatter_upon_const_tensor"] == 1
    assert not calls(gm, "scatter")
    # the forward's own gather checks the target: no second one
    assert len(calls(gm, "gather")) == 1


@STATIC_AND_DYNAMIC
def test_the_backward_of_a_gather(dynamic):
    def program(x, index):
        return x.log_softmax(-1).gather(1, index.unsqueeze(1)).sum()

    gm, tally = on_joint_graph(program, [learned(5, 10), torch.tensor([1, 4, 9, 0, 3])], dynamic)
    assert tally.fired["scatter_upon_const_tensor"] == 1 and len(calls(gm, "gather")) == 1


def one_hot(index):
    return torch.zeros(4, 10).scatter(1, index, 1.0) * 2


def check_out_of_range(codegen):
    """What is in range is written, and what is not raises, compiled as in eager."""
    options = {"codegen": codegen}
    if codegen == "eager":  # there the rule would decline
        options["joint_custom_pre_pass"] = ScatterUponConstTensor(always=True)
    compiled = torch.compile(one_hot, backend=triptych.compile_fx, fullgraph=True, options=options)
    index = torch.tensor([[1], [2], [3], [9]])
    with watching() as sessions:
        assert torch.equal(compiled(index), one_hot(index))
    assert any(r.fired["scatter_upon_const_tensor"] for s in sessions for r in s.records)
    for place in (10, -1):
        index[2] = place
        for program in (one_hot, compiled):
            with pytest.raises((RuntimeError, IndexError)):
                program(index)


def check_out_of_range_without_us():
    compiled = torch.compile(lambda x, index: x.gather(1, index) * 2, backend="inductor", fullgraph=True)
    with pytest.raises((RuntimeError, IndexError)):
        compiled(torch.zeros(4, 10), torch.tensor([[1], [2], [10], [9]]))


def exit_code(check, *args):
    """Of a process of its own: negative if a signal ended it."""
    process = multiprocessing.get_context("spawn").Process(target=check, args=args)
    process.start()
    process.join()
    return process.exitcode


def test_an_index_out_of_range_still_raises():
    check_out_of_range("eager")


def test_an_index_out_of_range_still_raises_from_a_kernel():
    """On some machines an error inside a C++ kernel of Inductor's ends the process, whoever wrote the graph."""
    code = exit_code(check_out_of_range, "inductor")
    if code < 0 and exit_code(check_out_of_range_without_us) < 0:
        pytest.skip(f"signal {-code}: stock Inductor's kernels cannot raise here either")
    assert code == 0


def test_another_index_proves_nothing():
    """A gather by another index, or over another size, does not check this one."""

    def program(x, i, j):
        return x.gather(1, i), x[:, :5].gather(1, j), torch.zeros(4, 10).scatter(1, j, 1.0)

    index = torch.tensor([[1], [2], [3], [4]])
    gm, inputs = capture_aten(program, [torch.randn(4, 10), index, index])
    run_pass(PassPatterns, gm)
    assert len(calls(gm, "gather")) == 3
    bad = index.clone()
    bad[0] = 10
    with pytest.raises((RuntimeError, IndexError)):
        gm(inputs[0], index, bad)


# ---- softmax scale ----


@pytest.mark.parametrize(
    "dynamic, dtype",
    [(False, f32), (True, bf16), (False, f16)]
    + [pytest.param(dynamic, dtype, marks=pytest.mark.slow) for dynamic, dtype in ((True, f32), (False, bf16), (True, f16))],
)
@pytest.mark.parametrize("scale", ["small", "negative", "large", "div", "tensor"])
def test_scaled_softmax_of_a_training_step(dynamic, dtype, scale):
    # the numbers are written out: one from outside would come in as a tensor where sizes are dynamic
    scaled = {
        "small": lambda x, s: x * 0.125, "negative": lambda x, s: x * -0.125, "large": lambda x, s: x * 3.0,
        "div": lambda x, s: x / 8, "tensor": lambda x, s: x * s.exp(),
    }[scale]  # fmt: skip

    def program(q, k, s):
        return scaled(q @ k.transpose(-2, -1), s).softmax(-1).sin().sum()

    inputs = [learned(2, 6, 8, dtype=dtype), learned(2, 6, 8, dtype=dtype), learned(2, 1, 1, dtype=dtype)]
    gm, given = capture_joint(program, inputs, dynamic)
    before = copy.deepcopy(gm)
    run_pass(CanonicalizeAtenIrPasses, gm)
    tally = run_pass(PassPatterns, gm)
    name = "div_softmax_pattern" if scale == "div" else "mul_softmax_pattern"
    if scale == "tensor" and dtype == f32:
        assert not tally.fired[name] and any("tiny" in d.reason for d in tally.declines.values())
        return
    assert tally.fired[name] == 1, tally.declines
    wide = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in given]
    exact, plain, new = before_in_double(program, wide, dynamic, inputs), before(*given), gm(*given)
    for reference, one, other in zip(exact, plain, new, strict=True):
        if isinstance(reference, torch.Tensor):
            error = (one.double() - reference).abs().max()
            allowed = 1.5 * error + 4 * torch.finfo(dtype).eps * reference.abs().max()
            assert (other.double() - reference).abs().max() <= allowed


def before_in_double(program, wide, dynamic, inputs):
    """The same step in float64: what both ways are compared with."""
    doubles = [i.detach().double().requires_grad_() for i in inputs]
    gm, given = capture_joint(program, doubles, dynamic)
    return gm(*(w if isinstance(w, torch.Tensor) else g for w, g in zip(wide, given, strict=True)))


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [-math.inf, 0.0, 1.0], [math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0],
                                    [6e4, -6e4, 0.0], [-6e4, -6.5e4, -6e4], [0.0, -0.0, 0.0]])  # fmt: skip
@pytest.mark.parametrize("scale", [2.0, -2.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e-7, -6e4])
@pytest.mark.parametrize("division", [False, True])
def test_a_scale_of_unknown_sign(monkeypatch, values, scale, division):
    """On a CPU such scales are left alone; the rewrite itself is right there too."""
    monkeypatch.setattr(softmax_scale._ScaledSoftmax, "CONTRACTS", ("cpu", "cuda"))

    def program(x, s):
        return softmax_scale.by_hand((x / s if division else x * s).float())

    inputs = [torch.tensor([values], dtype=f16), torch.tensor([[scale]], dtype=f16)]
    gm, _ = capture_aten(program, inputs)
    tally = run_pass(PassPatterns, gm)
    assert tally.fired.total() == 1
    torch.testing.assert_close(gm(*inputs), program(*inputs), equal_nan=True, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [f32, f16])
def test_no_overflow_that_was_not_there(dtype):
    """Scores whose difference is beyond the dtype, scaled down far: the softmax must not lose them."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, 0.0, largest / 2]], dtype=dtype)
    for scale in (1 / largest, 2 / largest, 1e-3 if dtype == f16 else 1e-36):
        program = (lambda s: lambda x: softmax_scale.by_hand(x * s))(scale)
        gm, _ = capture_aten(program, [x])
        run_pass(PassPatterns, gm)
        torch.testing.assert_close(gm(x), program(x))


# ---- pad_mm ----


@STATIC_AND_DYNAMIC
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_padded_products_forward_and_backward(dynamic, dtype):
    weight, bias = torch.nn.Parameter(torch.randn(11, 13).to(dtype)), torch.nn.Parameter(torch.randn(11).to(dtype))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = weight, bias

        def forward(self, x):
            return F.linear(x.tanh(), self.weight, self.bias).square().sum()

    x = learned(6, 13, dtype=dtype)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    gm, tally = on_joint_graph(Model(), [x], None if dynamic else False, passes=[PadMmPass], always=True)
    assert tally.fired["pad_mm"] == 3, tally.declines
    for product in (*calls(gm, "aten.mm"), *calls(gm, "aten.addmm")):
        a, b = (fact(n) for n in product.args[-2:])
        alignment = 4 if dtype == f32 else 8
        assert b.shape[-1] % alignment == 0
        assert a.shape[-1 if a.stride(-1) == 1 else -2] % alignment == 0


def test_padding_through_the_whole_flow():
    model = torch.nn.Sequential(torch.nn.Linear(13, 11), torch.nn.ReLU(), torch.nn.Linear(11, 3))
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"pad_mm.always": True})
    x = torch.randn(6, 13)
    with watching() as sessions:
        loss = compiled(x).square().sum()
        loss.backward()
    assert sum(r.fired["pad_mm"] for s in sessions for r in s.records) >= 5
    reference(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_one_padded_operand_serves_several_products():
    def program(a, b, c):
        return a @ b, a @ c

    gm, tally = run_padding(program, torch.randn(6, 7), torch.randn(7, 8), torch.randn(7, 12))
    assert tally.fired["pad_mm"] == 2 and len(calls(gm, "constant_pad_nd")) == 3


def run_padding(program, *inputs):
    gm, given = capture_aten(program, list(inputs))
    before = copy.deepcopy(gm)
    tally = run_pass(PadMmPass, gm, options={"pad_mm.always": True})
    compare_graphs(before, gm, given, exact=False)
    return gm, tally


def fake_gpu(program, *shapes, dtype=bf16):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(program)(*[torch.empty(s, device="cuda", dtype=dtype) for s in shapes])


def test_the_model_decides_where_nothing_can_be_measured():
    """Large products are worth two copies, small ones are not; both figures are kept."""
    large = fake_gpu(lambda a, b: a @ b, (4096, 4095), (4095, 4095))
    tally = run_pass(PadMmPass, large)
    assert tally.fired["pad_mm"] == 1
    (decision,) = tally.decisions
    assert 0 < decision.after < decision.before
    small = fake_gpu(lambda a, b: a @ b, (64, 63), (63, 65))
    tally = run_pass(PadMmPass, small)
    assert not tally.fired["pad_mm"] and "would cost" in next(iter(tally.declines.values())).reason


def test_float32_without_tensor_cores_is_not_padded():
    gm = fake_gpu(lambda a, b: a @ b, (4096, 4095), (4095, 4095), dtype=f32)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not run_pass(PadMmPass, gm).fired["pad_mm"]


# ---- fix_iota_device ----


def to_gpu(x, **how):
    return aten._to_copy.default(x, device=torch.device("cuda:0"), **how)


def counting(x):
    positions = torch.arange(8)
    causal = to_gpu(positions[None, :] <= positions[:, None])
    picked = aten.index.Tensor(x, [None, (torch.arange(8) + 1) * 2 - 2])
    return torch.where(causal, x, 0.0) + picked + to_gpu(positions, dtype=x.dtype)


def test_positions_are_counted_where_they_are_used():
    gm = fake_gpu(counting, (8, 8), dtype=f32)
    elsewhere = [n for n in gm.graph.nodes if isinstance(fact(n), torch.Tensor) and fact(n).device.type == "cpu"]
    assert elsewhere
    tally = run_pass(PassPatterns, gm)
    gm.graph.lint()
    assert tally.fired["fix_iota_device"] == 3
    assert not [n for n in gm.graph.nodes if isinstance(fact(n), torch.Tensor) and fact(n).device.type == "cpu"]
    assert not calls(gm, "device_put")


def test_positions_that_the_cpu_needs_too_stay_there_too():
    def program(x):
        positions = torch.arange(8)
        return x + to_gpu(positions), positions * 2

    gm = fake_gpu(program, (8, 8), dtype=f32)
    assert run_pass(PassPatterns, gm).fired["fix_iota_device"] == 1
    assert len(calls(gm, "arange")) == 2


# ---- all of them ----


RULES = ["bmm_to_mm", "mul_softmax_pattern", "scatter_upon_const_tensor"]


@pytest.mark.parametrize("name", RULES)
def test_each_can_be_removed_by_name(name):
    def program(x, target):
        scores = torch.bmm(x[None], x.t()[None]).squeeze(0)
        return (scores * 0.5).softmax(-1).sum() + F.cross_entropy(scores, target)

    gm, _ = capture_joint(program, [learned(4, 4), torch.tensor([1, 2, 3, 0])])
    triptych.joint_graph_passes(gm)
    gm, _ = capture_joint(program, [learned(4, 4), torch.tensor([1, 2, 3, 0])])
    run_pass(CanonicalizeAtenIrPasses, gm)
    with_it = run_pass(PassPatterns, copy.deepcopy(gm)).fired
    without = run_pass(PassPatterns, gm, options={"remove_passes": name}).fired
    assert with_it[name] and not without[name]
    assert all(without[other] for other in RULES if other != name)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_weight_that_stays_is_padded_once(codegen):
    model = torch.nn.Sequential(torch.nn.Linear(13, 11), torch.nn.ReLU(), torch.nn.Linear(11, 16)).eval()
    options = {"freeze": True, "pad_mm.always": True, "codegen": codegen}
    compiled = torch.compile(model, backend=triptych.compile_fx, options=options)
    x = torch.randn(6, 13)
    with torch.no_grad(), watching() as sessions:
        torch.testing.assert_close(compiled(x), model(x))
    padded = calls(sessions[0].graphs["forward"], "constant_pad_nd")
    assert len(padded) == 2 and all("constant" not in n.args[0].name for n in padded)  # only what comes in
    with torch.no_grad():
        for _ in range(2):
            model[0].weight.mul_(2)  # and yet a weight that changes is seen
            torch.testing.assert_close(compiled(x), model(x))
