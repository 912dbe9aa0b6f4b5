"""`canonicalize_aten_ir_passes` on graphs of some size: one form, reached at once, at no cost in facts computed."""

from __future__ import annotations

import operator

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from triptych.ir.fingerprint import fingerprint
from triptych.ir.program import Program
from triptych.ir.verify import verify
from triptych.joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from triptych.options import Options
from triptych.passes.base import PassRun
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.check import compare_graphs

aten = torch.ops.aten


def run(gm, limit=None):
    run = PassRun(Rewriter(Program(gm), "canonicalize_aten_ir_passes", limit), Options(), strict=True)
    CanonicalizeAtenIrPasses().run(run)
    gm.graph.lint()
    gm.recompile()
    return run.tally.fired


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


def test_a_torch_level_graph_is_left_alone():
    gm = torch.fx.symbolic_trace(lambda x: (2 * x).sum(-1))
    assert not run(gm)
