"""Attention in every spelling of `attention_idioms`: found where it is to be found, and as exact as it was.

By default every idiom runs in float32 with gradients, and a fixed part of them in bfloat16 and with symbolic sizes;
with TRIPTYCH_ALL_ATTENTION=1 all of them run in all ways.
"""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F

from triptych.attention import mask_plan
from triptych.attention.sinks import further_keys, require_quick_gradient
from triptych.ir.text import text
from triptych.pre_grad.attention_heads import AttentionHeads
from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.pre_grad.remove_noop_pass import RemoveNoopPass
from triptych.rewrite.refusal import Refused
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

from . import attention_further_idioms, attention_mask_idioms, attention_sink_idioms  # noqa: F401  (register their idioms)
from .attention_idioms import IDIOMS, Idiom, S
from .fuzz.noise import Noise

ALL = os.environ.get("TRIPTYCH_ALL_ATTENTION") == "1"
NAMES = sorted(IDIOMS)
FUSING = [n for n in NAMES if IDIOMS[n].fuses]
MASKED = ("CausalBuffer", "causal_and_padding", "gpt1")
"""Triangles that stay masks: one could be changed, the other has padding beside it."""
COUNTS = (305, 241, 237)
"""Idioms, attentions found in them, idioms with any."""
SOME = NAMES if ALL else NAMES[::3]
INFERENCE = NAMES if ALL else [n for n in FUSING if {"dead", "sunk", "cut"} & {s[0] for s in IDIOMS[n].inputs if s}]
"""What is done otherwise where no gradient is asked for is what becomes of rows without a key."""
NOISY_RUNS = 3
"""How often the unfused program is run with noise, for the error that is due to rounding."""
DYNAMIC = [n for n in (NAMES if ALL else NAMES[1::3]) if "static" not in IDIOMS[n].tags]


def make_input(spec, dtype, generator):
    kind, shape = spec if spec and isinstance(spec[0], str) else ("float", spec)
    if kind == "float":
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    if kind == "ids":
        return torch.randint(0, 4, shape, generator=generator)
    keep = torch.rand(shape, generator=generator) > 0.4
    keep[..., 0] = True
    if kind in ("dead", "cut", "sunk"):
        keep[..., -1, :] = False
    if kind in ("keep", "dead"):
        return keep
    lowest = -math.inf if kind == "cut" else torch.finfo(dtype).min
    return torch.zeros(shape, dtype=dtype).masked_fill(~keep, lowest)


def make_inputs(idiom: Idiom, dtype):
    generator = torch.Generator().manual_seed(0)
    return [make_input(spec, dtype, generator) for spec in idiom.inputs]


def run_with_gradients(program, inputs, unread_row=False):
    """Results and the gradients of every input that has one."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs]
    torch.manual_seed(0)
    made = program(*given)
    made = list(made) if isinstance(made, (tuple, list)) else [made]
    wanted = [x for x in given if torch.is_tensor(x) and x.requires_grad]
    if not any(m.requires_grad for m in made):
        return [m.detach() for m in made], [m.requires_grad for m in made]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(m.shape, generator=generator) for m in made]
    if unread_row:
        weights[0][..., -1, :] = 0
    loss = sum((m * w.to(m.dtype)).sum() for m, w in zip(made, weights) if m.requires_grad)
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    results = [*(m.detach() for m in made), *(torch.zeros(()) if g is None else g for g in gradients)]
    return results, [m.requires_grad for m in made] + [g is not None for g in gradients]


def run_with_noise(program, inputs, unread_row=False):
    """The results of machines that round otherwise: a rounding is added to every operation."""
    for seed in range(NOISY_RUNS):
        with Noise(seed, roundings=1.0):
            yield run_with_gradients(program, inputs, unread_row)[0]


def as_double(value):
    if not torch.is_tensor(value) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def in_double(gm):
    """The same graph with every floating-point number in double precision."""
    gm = copy.deepcopy(gm)
    narrow = (torch.float32, torch.bfloat16, torch.float16)

    def widened(value):
        return torch.float64 if isinstance(value, torch.dtype) and value in narrow else value

    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "_enter_autocast":
            node.args = (*node.args[:2], False, *node.args[3:])
            continue
        node.args = tuple(map(widened, node.args))
        node.kwargs = {k: widened(v) for k, v in node.kwargs.items()}
        if node.op == "call_method" and node.target in ("float", "half", "bfloat16"):
            node.target = "double"
    gm.recompile()
    return gm


def gm_results(gm):
    return gm.graph.output_node().args[0]


def check(name, dtype, dynamic=False, train=True):
    idiom = IDIOMS[name]
    torch._dynamo.reset()
    program = copy.deepcopy(idiom.program)
    inputs = make_inputs(idiom, dtype)
    if not train:
        inputs = [x.detach() for x in inputs]
    if isinstance(program, torch.nn.Module):
        program.to(dtype).requires_grad_(train)
    gm, args = capture_torch(program, inputs, dynamic)
    original = copy.deepcopy(gm)
    run_pass(NormalizationPassAten, gm)
    run_pass(RemoveNoopPass, gm)
    tally = run_pass(FuseAttention, gm)
    gm.graph.lint()
    fired = {k: v for k, v in tally.fired.items() if k == "fuse_attention"}
    reasons = [d.reason for d in tally.declines.values()]
    assert sum(fired.values()) == idiom.fuses, f"{name}: fused {fired}, declined {reasons}\n{text(gm)}"
    if not idiom.fuses:
        assert not idiom.because or any(idiom.because in r for r in reasons), f"{name} declined: {reasons}"
    if "dropout" in idiom.tags:
        gm(*args)
        return gm
    if not idiom.fuses and not tally.fired:
        return gm
    unread_row = "sunk" in idiom.tags
    unfused, kinds = run_with_gradients(original, args, unread_row)
    fused, fused_kinds = run_with_gradients(gm, args, unread_row)
    assert kinds == fused_kinds, "other results require a gradient"
    exact, _ = run_with_gradients(in_double(original), [as_double(a) for a in args], unread_row)
    noisy = run_with_noise(original, args, unread_row)
    for want, got in zip(unfused[: len(gm_results(gm))], fused):
        strides = [(w, g) for w, g, n in zip(want.stride(), got.stride(), want.shape) if n > 1]
        assert all(w == g for w, g in strides), f"{name}: strides {want.stride()} became {got.stride()}"
    for got, right, *wants in zip(fused, exact, unfused, *noisy):
        compare(name, wants, got, right, dtype)
    return gm


def compare(name, wants, got, right, dtype):
    """The fused result is as near to the one in double precision as the unfused ones, give or take some roundings.

    The error of a single unfused run says little where a sum cancels (the gradient of a temperature is one number):
    it may be small by chance.
    """
    want = wants[0]
    assert want.dtype == got.dtype and want.shape == got.shape, name
    assert torch.equal(want.isnan(), got.isnan()), f"{name}: NaN in other places"
    if not want.numel():
        return
    *wants, got, right = (torch.where(want.isnan(), 0, x.double()) for x in (*wants, got, right))
    size = max(right.abs().max().item(), 1.0)
    eps = torch.finfo(dtype).eps
    *errors, after = ((x - right).abs().max().item() for x in (*wants, got))
    before = max([errors[0], *filter(math.isfinite, errors[1:])])
    assert after <= 2 * before + 8 * eps * size, f"{name}: an error of {before:.1e} became {after:.1e} ({dtype})"


@pytest.mark.parametrize("name", NAMES)
def test_float32(name):
    check(name, torch.float32)


@pytest.mark.parametrize("name", INFERENCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference(name, dtype):
    with torch.no_grad():
        check(name, dtype, train=False)


@pytest.mark.parametrize("name", SOME)
def test_bfloat16(name):
    check(name, torch.bfloat16)


@pytest.mark.parametrize("name", ["gated", "gated_with_bias", "gated_with_bias_in_between", "gated_with_bias_behind"])
def test_float16(name):
    """What is finite in other dtypes is infinite there."""
    check(name, torch.float16)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.slow) for i, name in enumerate(DYNAMIC)]
)
def test_symbolic_sizes(name):
    check(name, torch.float32, dynamic=True)


def test_the_collection_is_counted():
    """Fusions that stop firing show here as well as in their own test."""
    assert (len(NAMES), sum(i.fuses for i in IDIOMS.values()), len(FUSING)) == COUNTS


def fused(program, *inputs, options=None, dynamic=False):
    gm, args = capture_torch(program, inputs, dynamic)
    run_pass(NormalizationPassAten, gm)
    tally = run_pass(FuseAttention, gm, options=options)
    tally.fired.update(run_pass(AttentionHeads, gm, options=options).fired)
    return gm, args, tally


def attention_calls(gm):
    return [n for n in gm.graph.nodes if "scaled_dot_product_attention" in str(n.target)]


@pytest.mark.parametrize("name", [n for n in NAMES if "causal" in IDIOMS[n].tags and n not in MASKED])
def test_a_triangle_needs_no_mask(name):
    (call,) = attention_calls(check(name, torch.float32))
    assert call.kwargs.get("is_causal") is True and call.kwargs.get("attn_mask") is None


def test_rows_proved_to_keep_a_key_are_not_looked_after():
    (call,) = attention_calls(gm := check("sliding_window", torch.float32))
    assert not [n for n in gm.graph.nodes if "any" in str(n.target)]
    (rows,) = call.users
    assert rows.target is torch.ops.triptych.nan_rows.default and next(iter(rows.users)).op == "output"


def test_a_mask_is_made_ready_once_for_all_layers():
    def layers(q, k, v, mask):
        for _ in range(3):
            q = (q @ k.mT * 0.35).masked_fill(~mask, -1e9).softmax(-1) @ v
        return q

    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    gm, _, tally = fused(layers, *inputs, torch.rand(2, 1, 6, 6) > 0.5)
    assert tally.fired["fuse_attention"] == 3
    assert len({call.kwargs["attn_mask"] for call in attention_calls(gm)}) == 1


def test_dropout_is_as_often_as_asked_for():
    """Every draw is one of dropout's, and their mean is the result without it."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    v = torch.eye(6).expand(1, 2, 6, 6)
    gm, args, tally = fused(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1), 0.25) @ v, q, k, v)
    assert tally.fired["fuse_attention"] == 1
    made = torch.stack([gm(*args)[0] for _ in range(600)])
    weights = F.softmax(q @ k.mT, -1)
    torch.testing.assert_close((made == 0).float().mean(), torch.tensor(0.25), atol=0.01, rtol=0)
    torch.testing.assert_close(made[made != 0], (weights / 0.75).expand_as(made)[made != 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.mean(0), weights, atol=0.06, rtol=0)


@pytest.mark.parametrize("options", [{"fallback_random": True}, {"codegen": "eager"}])
def test_dropout_keeps_the_stream_of_eager_where_that_is_asked_for(options):
    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    _, _, tally = fused(lambda q, k, v: F.dropout(F.softmax(q @ k.mT, -1), 0.1) @ v, *inputs, options=options)
    assert not tally.fired
    assert "other numbers" in next(iter(tally.declines.values())).reason


@pytest.mark.parametrize("repeat", ["interleave", "expand", "one"])
@pytest.mark.parametrize("causal", [False, True])
def test_repeated_heads_are_told_to_the_kernel(repeat, causal):
    def program(q, k, v):
        if repeat == "interleave":
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        elif repeat == "expand":
            k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 6, 8) for x in (k, v))
        else:
            k, v = (x[:, :1].expand(-1, 4, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = [torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)]
    gm, args, tally = fused(program, *inputs, options={"attention_heads.anywhere": True})
    assert tally.fired["grouped_heads"] == 1
    torch.testing.assert_close(gm(*args)[0], program(*inputs))
    (call,) = attention_calls(gm)
    assert call.kwargs["enable_gqa"] is True and call.kwargs.get("is_causal", False) is causal


@pytest.mark.parametrize("dim", [0, 2])
def test_repeated_in_another_way_is_not_repeated_heads(dim):
    def program(q, k, v):
        return F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, dim) for x in (k, v)))

    half = [2, 4, 6, 8]
    half[dim] //= 2
    inputs = [torch.randn(2, 4, 6, 8), torch.randn(half), torch.randn(half)]
    _, _, tally = fused(program, *inputs, options={"attention_heads.anywhere": True})
    assert not tally.fired


def test_heads_repeated_as_a_whole_are_not_groups():
    def program(q, k, v):
        k, v = (x[:, None].expand(-1, 2, -1, -1, -1).reshape(2, 4, 6, 8) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    inputs = [torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)]
    _, _, tally = fused(program, *inputs, options={"attention_heads.anywhere": True})
    assert not tally.fired


@pytest.mark.parametrize("weights", ["returned", "masked", "unread"])
def test_the_layer_of_torch(weights):
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    cut = torch.zeros(6, 6, dtype=torch.bool)

    def program(x):
        made, read = layer(x, x, x, attn_mask=cut if weights == "masked" else None)
        return (made, read) if weights == "returned" else made

    x = torch.randn(2, 6, 16)
    gm, args, tally = fused(program, x)
    assert bool(tally.fired["fuse_attention"]) == (weights != "returned")
    torch.testing.assert_close(gm(*args)[0], layer(x, x, x)[0])


def test_a_write_between_scores_and_softmax_is_seen():
    """The value read by its first name after a write is the written one."""

    def program(q, k, v, mask):
        scores = q @ k.mT
        scores.mul_(0.35)
        scores.masked_fill_(mask, -1e9)
        return scores.softmax(-1) @ v

    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)] + [torch.rand(6, 6) > 0.6]
    gm, args, tally = fused(program, *inputs)
    assert tally.fired["fuse_attention"] == 1
    torch.testing.assert_close(gm(*args)[0], program(*inputs))


def test_scores_whose_view_is_written_stay():
    def program(q, k, v):
        scores = q @ k.mT
        scores[:, 0].zero_()
        return scores.softmax(-1) @ v

    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    gm, args, tally = fused(program, *inputs)
    assert not tally.fired["fuse_attention"]
    torch.testing.assert_close(gm(*args)[0], program(*inputs))


@pytest.mark.parametrize(("device", "width", "gradient", "gains"), [
    ("cuda", 64, True, True), ("cuda", 128, False, True), ("cpu", 128, True, True), ("cuda", 128, True, False),
])  # fmt: skip
def test_a_sink_is_a_key_where_that_gains(device, width, gradient, gains):
    if gains:
        require_quick_gradient(torch.device(device), width, gradient)
    else:
        with pytest.raises(Refused, match="costs more"):
            require_quick_gradient(torch.device(device), width, gradient)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["gpt_oss", "sink_and_mask", "sink_and_finite_mask", "sink_of_each_query"])
def test_more_keys_beside_a_sink(name, dynamic, monkeypatch):
    """As on a GPU, whose kernels want a multiple of eight."""
    monkeypatch.setattr(mask_plan, "further_keys", lambda keys: 8)
    (call,) = attention_calls(gm := check(name, torch.float32, dynamic))
    if not dynamic:
        assert [call.kwargs["attn_mask"].meta["example_value"].shape[-1]] == [S + 8], text(gm)


def test_how_many_keys_are_added():
    class Keys:
        def __init__(self, size, device):
            self.shape, self.device = (2, 4, size, 64), torch.device(device)

    assert [further_keys(Keys(n, "cuda")) for n in (1024, 1023, 1021)] == [8, 1, 3]
    assert further_keys(Keys(1024, "cpu")) == 1


@pytest.mark.parametrize("sink", [-math.inf, -1e9, -3e38, 50.0, math.nan])
@pytest.mark.parametrize("fill", [-math.inf, -1e4, -1e9])
def test_sinks_of_all_sizes(sink, fill):
    """Also where the sink is as low as what is masked, and a row has nothing but that."""

    def program(q, k, v, keep, sinks):
        scores = (q @ k.mT * 0.35).masked_fill(~keep, fill)
        return torch.cat([scores, sinks.expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1] @ v

    keep = torch.rand(2, 1, 6, 6) > 0.5
    keep[..., -1, :] = False
    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    gm, args, tally = fused(program, *inputs, keep, torch.full((1, 4, 1, 1), sink))
    assert tally.fired["fuse_attention"] == 1
    torch.testing.assert_close(gm(*args)[0], program(*inputs, keep, torch.full((1, 4, 1, 1), sink)), equal_nan=True)


@pytest.mark.parametrize("size", [100.0, 1e4])
def test_large_scores(size):
    """Where the softmax is one-hot, fused as unfused."""
    inputs = [torch.randn(2, 4, 6, 8) * size for _ in range(3)]
    program = IDIOMS["negative_scale"].program
    gm, args, tally = fused(program, *inputs)
    assert tally.fired["fuse_attention"] == 1
    torch.testing.assert_close(gm(*args)[0], program(*inputs))


def test_half_precision_does_not_overflow_where_it_did_not():
    inputs = [torch.randn(2, 4, 6, 8).half() * 40 for _ in range(3)]
    program = IDIOMS["scale_on_q"].program
    gm, args, tally = fused(program, *inputs)
    assert tally.fired["fuse_attention"] == 1
    assert gm(*args)[0].isfinite().all()
    torch.testing.assert_close(gm(*args)[0], program(*inputs), atol=0.5, rtol=0.05)


EXPERTS = {
    "a new axis": lambda p, experts: (p[:, :, None] * experts).sum(1),
    "a view": lambda p, experts: (p.view(16, 4, 1) * experts).sum(1),
    "an axis of one element in both": lambda p, experts: (p.view(16, 1, 4, 1) * experts[:, None]).sum(2),
    "a new axis before one that is stretched": lambda p, e: (p.view(16, 4, 1).unsqueeze(1) * e[:, None]).sum(2),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_weighted_by_their_gates_stay_pointwise(name):
    """Scores and a weighted sum as in attention, but every row has values of its own, and the keys are a weight."""

    def program(x, gate, experts):
        return EXPERTS[name](torch.softmax(F.linear(x, gate), -1), experts)

    inputs = torch.randn(16, 8), torch.randn(4, 8), torch.randn(16, 4, 8)
    gm, args, tally = fused(program, *inputs)
    assert tally.fired["pointwise_again"] == 1 and "einsum" not in text(gm)
    torch.testing.assert_close(gm(*args)[0], program(*inputs))
