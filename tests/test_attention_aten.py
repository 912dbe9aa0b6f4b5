"""`fuse_attention_aten_pass`: attention in graphs after autograd, on both code generators and through the stage alone.

What may be fused, and what rows without a key become, is decided by the reader and the planner of `fuse_attention`. So
its collection of idioms is run here again, decomposed and after the joint stage, in inference.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych import _private
from triptych.cost import Waiting, Work
from triptych.ir.program import Program
from triptych.joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from triptych.joint.pass_patterns import PassPatterns
from triptych.joint.remove_noop_ops import RemoveNoopOps
from triptych.passes.session import watching
from triptych.post_grad.eliminate_dead_code import EliminateDeadCode
from triptych.post_grad.fuse_attention_aten_pass import FuseAttentionAtenPass
from triptych.testing.check import run_pass

from . import attention_further_idioms, attention_mask_idioms, attention_sink_idioms  # noqa: F401  (register their idioms)
from .attention_idioms import IDIOMS
from .test_attention import as_double, compare, in_double, make_inputs

NAME = "fuse_attention_aten_pass"
ADDED = {"add_passes": [NAME], "remove_passes": ["fuse_attention"]}

REWRITTEN_FIRST = {
    "PoolingByHand", "assigned", "assigned_expanded", "assigned_finite", "assigned_rows_without_a_key",
    "assigned_to_all_heads", "assigned_to_keys", "assigned_triangle", "external_memory", "grouped_by_einsum",
    "learned_queries_einsum", "multi_query_einsum", "nan_chosen", "nan_filled", "nan_taken_out_where_none_is",
    "nan_to_num_below", "off_by_one", "off_by_one_and_mask", "off_by_one_without_a_shift", "one_key",
    "one_query_for_all", "products_by_hand", "products_by_hand_of_heads", "put_by_index", "renormalised_after_a_mask",
    "renormalised_after_masked_fill", "renormalised_after_where", "renormalised_and_gated", "renormalised_in_float32",
    "renormalised_triangle", "rows_and_columns", "softmax_divided_late", "softmax_of_log_softmax",
    "softmax_of_logsumexp",
}  # fmt: skip
"""Idioms that stage 1 rewrites before it looks for attention, or whose decomposition hides which axis is which."""
ONLY_HERE = {"detached_scores", "queries_written_in_between", "scores_in_autocast", "scores_without_gradient"}
"""Idioms that are refused for the sake of a gradient, a write or a region, which such a graph has not."""
NOT_IN_HALF = {
    "infinity_cut_off", "masked_then_divided_by_a_constant", "masked_then_divided_by_a_tensor", "scale_of_each_head",
    "scale_tensor", "temperature_learned",
}  # fmt: skip
"""Idioms with a scale in a tensor, which the joint stage applies after the maximum where the softmax is wider than the
scores; and one with a bound that is computed in float32."""
NAMES = sorted(IDIOMS)


def decomposed(program, inputs, mode="fake"):
    with torch.no_grad():
        return make_fx(
            torch.func.functionalize(program), tracing_mode=mode, decomposition_table=_private.select_decomp_table(),
            _allow_non_fake_inputs=True,
        )(*inputs)  # fmt: skip


def fused(gm):
    for each in (RemoveNoopOps, EliminateDeadCode, CanonicalizeAtenIrPasses, PassPatterns):
        run_pass(each, gm)
    tally = run_pass(FuseAttentionAtenPass, gm)
    gm.graph.lint()
    return tally


def kernels(gm):
    return [n for n in gm.graph.nodes if "_scaled_dot_product_" in str(n.target)]


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def wanted(name, dtype=torch.float32):
    idiom = IDIOMS[name]
    is_missed = name in REWRITTEN_FIRST or "dropout" in idiom.tags or (dtype != torch.float32 and name in NOT_IN_HALF)
    return 1 if name in ONLY_HERE else 0 if is_missed else idiom.fuses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 4 == 0 else pytest.mark.slow) for i, name in enumerate(NAMES)]
)
def test_idioms(name, dtype):
    idiom = IDIOMS[name]
    inputs = [x.detach() for x in make_inputs(idiom, dtype)]
    program = copy.deepcopy(idiom.program)
    if isinstance(program, torch.nn.Module):
        program.to(dtype).requires_grad_(False)
    gm = decomposed(program, inputs)
    original = copy.deepcopy(gm)
    tally = fused(gm)
    reasons = [d.reason for d in tally.declines.values()]
    assert tally.fired["fuse_attention_aten"] == len(kernels(gm)) == wanted(name, dtype), reasons
    with torch.no_grad():
        results = [as_list(graph(*inputs)) for graph in (original, gm)]
        exact = as_list(in_double(original).double()(*map(as_double, inputs)))
    for before, after, right in zip(*results, exact) if "dropout" not in idiom.tags else ():
        compare(name, [before], after, right, dtype)
        assert all(b == a for b, a, n in zip(before.stride(), after.stride(), before.shape) if n > 1)


def test_the_collection_is_counted():
    assert sum(map(wanted, NAMES)) == 208 and {*REWRITTEN_FIRST, *ONLY_HERE} <= set(NAMES)


# ---- the stage alone ----


def attention(q, k, v, mask):
    return (q @ k.mT / 8**0.5).masked_fill(mask, -math.inf).softmax(-1) @ v


def operands():
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    mask[0, 0, 2], mask[1, 0, 3, 1:] = True, True
    return [*(torch.randn(2, 4, 6, 8) for _ in range(3)), mask]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("table", [None, "inductor"])
def test_a_traced_graph(mode, table):
    inputs = operands()
    table = _private.select_decomp_table() if table else None
    gm = make_fx(attention, tracing_mode=mode, decomposition_table=table)(*inputs)
    before = gm(*inputs)
    assert before[0, :, 2].isnan().all() and not before[1].isnan().any()
    triptych.post_grad_passes(gm, is_inference=True, add_passes=NAME)
    gm.recompile()
    assert len(kernels(gm)) == 1 and not any("bmm" in str(n.target) for n in gm.graph.nodes)
    torch.testing.assert_close(gm(*inputs), before, equal_nan=True)


def _copied_values_written(q, k, v):
    v = v.clone()
    probabilities = (q @ k.mT).softmax(-1)
    v[:, :, 0] = 0
    return probabilities @ v


def _copied_keys_written(q, k, v):
    k = k.clone()
    keys = k.transpose(2, 3).contiguous()
    k.add_(1)
    return (q @ keys).softmax(-1) @ v, k


@pytest.mark.parametrize("table", [None, "inductor"])
@pytest.mark.parametrize("program", [_copied_values_written, _copied_keys_written])
def test_a_copy_is_not_its_source_where_one_of_them_is_written(program, table):
    inputs = operands()[:3]
    table = _private.select_decomp_table() if table else None
    gm = make_fx(program, tracing_mode="fake", decomposition_table=table, _allow_non_fake_inputs=True)(*inputs)
    triptych.post_grad_passes(gm, is_inference=True, add_passes=NAME)
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), program(*inputs))


@pytest.mark.parametrize("shape", [(8, 6, 1), (8, 1, 6)])
def test_factors_after_the_batch_axes_were_merged(shape):
    def program(q, k, v, factor):
        probabilities = torch.bmm(q, k.mT).view(2, 4, 6, 6).softmax(-1).view(8, 6, 6)
        return torch.bmm(probabilities * factor, v).view(2, 4, 48)

    inputs = [*(torch.randn(8, 6, 8) for _ in range(3)), torch.randn(shape)]
    gm = decomposed(program, inputs)
    assert run_pass(FuseAttentionAtenPass, gm).fired["fuse_attention_aten"] == len(kernels(gm)) == 1
    torch.testing.assert_close(gm(*inputs), program(*inputs))


def test_the_callers_autocast_is_no_part_of_the_graph():
    inputs = operands()
    gm = decomposed(attention, inputs)
    before = gm(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert run_pass(FuseAttentionAtenPass, gm).fired["fuse_attention_aten"] == 1
    assert not any(n.target is torch.ops.aten._to_copy.default for n in gm.graph.nodes)
    torch.testing.assert_close(gm(*inputs), before, equal_nan=True)


def test_it_runs_only_if_it_is_added():
    gm = make_fx(attention, tracing_mode="fake")(*operands())
    triptych.post_grad_passes(gm, is_inference=True)
    assert not kernels(gm)


@pytest.mark.parametrize("decompose", [True, False])
def test_an_exported_program(decompose):
    """One that is not decomposed yet gets the operator whose kernel is still to be chosen."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return attention(q, k, v, mask)

    inputs = operands()
    exported = torch.export.export(Attention(), tuple(inputs))
    gm = (exported.run_decompositions() if decompose else exported).graph_module
    triptych.post_grad_passes(gm, is_inference=True, add_passes=NAME)
    gm.recompile()
    (call,) = [n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert (call.target is torch.ops.aten.scaled_dot_product_attention.default) is not decompose
    torch.testing.assert_close(gm(*inputs)[0], attention(*inputs), equal_nan=True)


@pytest.mark.parametrize("batch", [None, torch.export.Dim("batch", min=2)], ids=["static", "dynamic"])
def test_an_exported_program_will_be_decomposed_again(batch):
    """So the first stage fuses in one that was decomposed, with symbolic sizes or without."""

    class Attention(torch.nn.Module):
        def forward(self, q):
            return (q @ q.mT).softmax(-1) @ q

    q = torch.randn(2, 4, 6, 8)
    exported = torch.export.export(Attention(), (q,), dynamic_shapes={"q": {0: batch}}).run_decompositions()
    optimised = triptych.optimize(exported)
    calls = [str(n.target) for n in optimised.graph.nodes]
    assert "aten.scaled_dot_product_attention.default" in calls and "aten.bmm.default" not in calls
    assert not [key for key in optimised.graph_module.meta if "triptych" in key]
    torch.testing.assert_close(optimised.module()(q), Attention()(q))


def test_a_graph_with_symbolic_sizes_has_no_composite():
    """`sym_size` has one kernel for all devices, and is not decomposed for that."""
    gm = make_fx(attention, tracing_mode="symbolic")(*operands())
    assert any("sym_size" in str(n.target) for n in gm.graph.nodes)
    assert not Program(gm).has_composites


# ---- declined ----


def reasons_of(program, *inputs, **how):
    gm = decomposed(program, inputs)
    for each in (RemoveNoopOps, EliminateDeadCode):
        run_pass(each, gm)
    before = str(gm.graph)
    tally = run_pass(FuseAttentionAtenPass, gm, **how)
    assert not tally.fired and str(gm.graph) == before
    return [d.reason for d in tally.declines.values()]


def test_what_is_declined_stays_as_it_was():
    """A softmax stays written out, as code generators want it."""
    q, k, v, mask = operands()
    assert "used 2 times" in str(reasons_of(lambda q, k, v: (lambda p: (p @ v, p))((q @ k.mT).softmax(-1)), q, k, v))
    assert "used outside" in str(reasons_of(lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s))(q @ k.mT), q, k, v))
    assert "no kernel" in str(reasons_of(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, torch.randn(2, 4, 6, 64)))
    assert "training" in str(reasons_of(attention, q, k, v, mask, is_inference=False))
    assert "tanh" in str(reasons_of(lambda q, k, v: torch.tanh(q @ k.mT).softmax(-1) @ v, q, k, v))


def test_the_cost_model_is_asked(monkeypatch):
    def require_quicker(m, plan):
        assert tuple(plan.attn_mask.shape) == (2, 1, 6, 6)
        m.pays(*(Work.of(torch.device("cpu"), Waiting(seconds)) for seconds in (1e-6, 2e-6)))

    monkeypatch.setattr("triptych.attention.fuse.require_quicker", require_quicker)
    assert reasons_of(attention, *operands()) == ["would cost 2.0 us instead of 1.0 us, modelled"]


def test_a_copy_of_what_is_written_later_is_read():
    """Operands are read before they were copied for their product, unless they are written."""

    def program(q, k, v):
        queries = q.transpose(1, 2).clone()
        q.add_(1.0)
        return (queries @ k.mT).softmax(-1) @ v

    inputs = [torch.randn(2, 6, 4, 8), *(torch.randn(2, 4, 6, 8) for _ in range(2))]
    gm = decomposed(program, [x.clone() for x in inputs])
    assert fused(gm).fired["fuse_attention_aten"] == 1
    want, got = ([x.clone() for x in inputs] for _ in range(2))
    torch.testing.assert_close(gm(*got), program(*want))
    assert torch.equal(want[0], got[0])


# ---- compiled ----


def several(q, k, v, mask, bias, x):
    """Attentions of several kinds: a mask with a row without a key, a triangle, a bias, heads from one projection, a
    softmax in float32, repeated heads."""
    above = torch.ones(6, 6, dtype=torch.bool).triu(1)
    parts = x.view(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4)
    half = [p.bfloat16() for p in parts]
    repeated = [t[:, :2].repeat_interleave(2, 1) for t in (k, v)]
    return (
        attention(q, k, v, mask),
        (k @ q.mT * 0.3).masked_fill(above, -math.inf).softmax(-1) @ v,
        (q @ v.mT + bias).softmax(-1) @ k,
        ((parts[0] @ parts[1].mT * 0.2).softmax(-1) @ parts[2]).transpose(1, 2).reshape(2, 6, 32),
        torch.softmax((half[0] @ half[1].mT * 0.3).float(), -1).to(torch.bfloat16) @ half[2],
        (q @ repeated[0].mT * 0.5).softmax(-1) @ repeated[1],
    )


def inputs_of_several():
    return [*operands(), torch.randn(4, 6, 6), torch.randn(2, 6, 96)]


@pytest.mark.parametrize("codegen, dynamic", [("eager", False), ("eager", True), ("inductor", False)])
def test_compiled(codegen, dynamic):
    torch.manual_seed(0)
    inputs = inputs_of_several()
    options = {**ADDED, "codegen": codegen, "verify": "each"}
    with torch.no_grad(), watching() as sessions:
        compiled = torch.compile(several, backend=triptych.compile_fx, options=options, dynamic=dynamic)
        for want, got in zip(several(*inputs), compiled(*inputs)):
            rounding = {"rtol": 2e-2, "atol": 2e-2} if want.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(got, want, equal_nan=True, **rounding)
            assert got.stride() == want.stride()
    (record,) = (record for session in sessions for record in session.records if record.name == NAME)
    assert record.fired["fuse_attention_aten"] == 6, [d.reason for d in record.declines]


def test_a_training_step_stays_as_it_is():
    q, k, v, mask = operands()
    given = [x.requires_grad_() for x in (q, k, v)]
    options = {**ADDED, "codegen": "eager"}
    explanation = triptych.explain(attention, *given, torch.zeros_like(mask), train=True, options=options)
    assert not any(record.fired["fuse_attention_aten"] for record in explanation.runs_of(NAME))


def test_attention_that_a_pass_of_the_user_uncovers():
    """Something between the softmax and the product with the values, which the user knows to be nothing."""

    def hidden(q, k, v):
        return torch.clamp((q @ k.mT * 0.3).softmax(-1), 0.0, 1.0) @ v

    def drop_clamp(graph: torch.fx.Graph):
        for node in list(graph.nodes):
            if "clamp" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)

    q, k, v, _ = operands()
    options = {"codegen": "eager", "add_passes": [NAME], "post_grad_custom_pre_pass": drop_clamp}
    with torch.no_grad():
        explanation = triptych.explain(hidden, q, k, v, options=options)
    (before,), (after,) = explanation.runs_of("fuse_attention"), explanation.runs_of(NAME)
    assert not before.fired["fuse_attention"] and after.fired["fuse_attention_aten"] == 1
    assert "1 attention fused" in str(explanation)
