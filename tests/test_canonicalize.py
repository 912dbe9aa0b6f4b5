"""`canonicalize_aten_ir_passes` on graphs of some size: one form, reached at once, at no cost in facts computed."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from triptych.ir.fingerprint import fingerprint
from triptych.ir.program import Program
from triptych.joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture_aten
from triptych.testing.check import compare_graphs, run_pass
from triptych.verify.structure import verify

aten = torch.ops.aten


def run(gm, limit=None):
    tally = CanonicalizeAtenIrPasses().run(Rewriter(Program(gm), "canonicalize_aten_ir_passes", limit), strict=True)
    gm.graph.lint()
    gm.recompile()
    return tally.fired


def attention(x, w):
    q, k, v = (x @ w).chunk(3, dim=-1)
    scores = 0.5 * (q @ k.transpose(-2, -1))
    out = scores.softmax(dim=-1) @ v + x
    return out.sum(-1)


def traced(program, *inputs):
    return make_fx(program, tracing_mode="fake")(*inputs)


INPUTS = (torch.randn(2, 4, 8), torch.randn(8, 24))


def test_a_second_run_finds_nothing():
    gm = traced(attention, *INPUTS)
    before = traced(attention, *INPUTS)
    fired = run(gm)
    assert {"negative_dims", "transpose_as_permute", "operand_order"} <= set(fired), fired
    assert not run(gm)
    verify(gm)
    compare_graphs(before, gm, INPUTS)


def test_nothing_is_computed(monkeypatch):
    gm = traced(attention, *INPUTS)
    monkeypatch.setattr(Program, "computing", None)
    assert run(gm)


def test_no_negative_dim_is_left():
    gm = traced(attention, *INPUTS)
    run(gm)
    for node in gm.graph.nodes:
        if node.target in (aten._softmax.default, aten.sum.dim_IntList, aten.split.Tensor):
            dims = [a for a in node.args[1:] if isinstance(a, (int, list))]
            assert all(d >= 0 for dim in dims for d in (dim if isinstance(dim, list) else [dim])), node.format_node()


def test_the_limit_of_rewrites_is_kept():
    assert run(traced(attention, *INPUTS), limit=1).total() == 1


def test_spellings_meet():
    """Two ways to write one thing are one after the pass."""

    def form(program):
        gm = traced(program, torch.randn(4, 8), torch.randn(4, 8))
        run(gm)
        return fingerprint(gm.graph)

    assert form(lambda x, y: (x + y) * 2) == form(lambda x, y: aten.mul.Scalar(y + x, 2))
    assert form(lambda x, y: x.t().sum(-1)) == form(lambda x, y: x.permute(1, 0).sum(1))


def test_quantization_has_one_form():
    from torch._higher_order_ops import InvokeQuant

    invoke = InvokeQuant(codegen_low_precision=False)
    x, w, s = torch.randn(4, 8), torch.randint(-5, 5, (8, 8), dtype=torch.int8), torch.rand(8)
    seen = {}

    def program(x, w, s):
        return x @ invoke(lambda w, s: w.to(torch.float32) * s, w, s, scheme="int8")

    def compiler(gm, inputs):
        seen["fired"], seen["graph"] = run(gm), gm.graph
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(program, backend=aot_autograd(fw_compiler=compiler))(x, w, s)
    torch.testing.assert_close(result, program(x, w, s))
    assert seen["fired"]["quantization_form"] == 1
    (call,) = [n for n in seen["graph"].nodes if str(n.target) == "invoke_quant"]
    assert call.meta["quant_options"] == invoke and call.kwargs == {"scheme": "int8"}
    assert not any(n.target is operator.getitem for n in seen["graph"].nodes)
    # Inductor cannot generate code for the call that made the options
    assert not any(n.target is InvokeQuant for n in seen["graph"].nodes)
    with torch.no_grad():
        compiled = torch.compile(program, backend="triptych", options={"on_error": "raise"})
        torch.testing.assert_close(compiled(x, w, s), program(x, w, s))


def test_a_torch_level_graph_is_left_alone():
    gm = torch.fx.symbolic_trace(lambda x: (2 * x).sum(-1))
    assert not run(gm)


@pytest.fixture
def quantized():
    """Registers the operators."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401

    return torch.ops.quantized_decomposed


@pytest.mark.parametrize("constant", [lambda v, t: torch.full((), v, dtype=t), lambda v, t: torch.tensor(v, dtype=t)])
def test_quantizing_by_known_tensors_is_quantizing_by_numbers(quantized, constant):
    def program(x):
        scale, zero = constant(0.1, torch.float32), constant(3, torch.int64)
        low, high = constant(-128, torch.int64), constant(127, torch.int64)
        small = quantized.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
        again = quantized.quantize_per_tensor.tensor2(x, scale, zero, low, high, torch.int8)
        return (
            quantized.dequantize_per_tensor.tensor(small, scale, zero, -128, 127, torch.int8),
            quantized.dequantize_per_tensor.tensor2(again, scale, zero, low, high, torch.int8, out_dtype=torch.float32),
        )

    gm, inputs = capture_aten(program, [torch.randn(4, 8)])
    before, _ = capture_aten(program, [torch.randn(4, 8)])
    tally = run_pass(CanonicalizeAtenIrPasses, gm)
    assert tally.fired["quantize_by_numbers"] == 4 and not tally.declines
    forms = {str(n.target).rpartition(".")[2] for n in gm.graph.nodes if "quantize" in str(n.target)}
    assert forms == {"default"}
    compare_graphs(before, gm, inputs)


def test_quantizing_by_unknown_tensors_stays(quantized):
    def program(x, scale, zero):
        return quantized.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)

    gm, _ = capture_aten(program, [torch.randn(4), torch.tensor(0.1), torch.tensor(3)])
    tally = run_pass(CanonicalizeAtenIrPasses, gm)
    assert not tally.fired["quantize_by_numbers"]
    assert "not known" in next(iter(tally.declines.values())).reason
