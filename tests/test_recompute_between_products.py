"""`recompute_between_products`: training steps whose forward never writes the matrix between two products."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import triptych
from tests.clock import clock_says
from tests.compare import check_training
from tests.models import Call
from triptych import _private
from triptych.cost import Moved, Operand
from triptych.ir.facts import POLICY
from triptych.ir.halves import computed_from_gradients
from triptych.ir.text import text
from triptych.joint.recompute_between_products import RecomputeBetweenProducts, RecomputeBetweenProductsPass
from triptych.kernels import pointwise
from triptych.passes.session import watching
from triptych.post_grad.b2b_gemm_pass import B2bGemmPass, FusedProducts
from triptych.rules import two_products
from triptych.testing.capture import capture_joint
from triptych.testing.check import apply_example

ROWS, ENDS, MIDDLE = 12, 4, 96
NAME = RecomputeBetweenProductsPass.name


@pytest.fixture
def always(monkeypatch):
    """Both passes take every site, on a CPU too."""
    monkeypatch.setattr(RecomputeBetweenProductsPass, "rules", lambda self: (RecomputeBetweenProducts(always=True),))
    monkeypatch.setattr(B2bGemmPass, "rules", lambda self: (FusedProducts(always=True),))


class Step:
    """A training step of a program, compiled for the code generator that runs graphs as they are."""

    def __init__(self, program, *inputs, more=(), **options):
        torch._dynamo.reset()
        options = {"codegen": "eager", "on_error": "raise", **options}
        with watching() as sessions:
            check_training(
                program, inputs, backend=triptych.compile_fx, options=options, input_gradients=False,
                dynamic=bool(more), more=[Call(arguments) for arguments in more],
            )  # fmt: skip
        self.records = [r for s in sessions for r in s.records]
        self.forward, self.backward = (next(s.graphs[g] for s in sessions if g in s.graphs) for g in BOTH)

    @property
    def fired(self):
        return sum(r.fired.total() for r in self.records if r.name == NAME)

    @property
    def reasons(self):
        return [d.reason for r in self.records if r.name == NAME for d in r.declines]

    def kept(self):
        """The largest value that the forward returns or saves."""
        returned = self.forward.graph.output_node().args[0]
        return max(v.meta["val"].numel() for v in returned if isinstance(v, torch.fx.Node) and v.op != "placeholder")


BOTH = ("forward", "backward")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def middles(gm):
    """The products between two that a graph computes: as large as the middle matrix, and no gradient."""
    late = computed_from_gradients(list(gm.graph.nodes))
    products = [n for n in gm.graph.nodes if n.target in PRODUCTS and n not in late]
    return [n for n in products if n.meta["val"].numel() >= ROWS * MIDDLE]


def random(*shape, grad=True, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def matrices(a=True, b=True, c=True):
    torch.manual_seed(0)
    return random(ROWS, ENDS, grad=a), random(ENDS, MIDDLE, grad=b), random(MIDDLE, 3, grad=c)


def mlp(activation, ends=ENDS, **how):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ends, MIDDLE, **how), activation, nn.Linear(MIDDLE, ends, **how))


class Residual(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(mlp(nn.GELU()) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(nn.GELU())

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


class Overwritten(nn.Module):
    """Writes what the first product reads: in eager the backward needs only the matrix between the products."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.linspace(-1, 1, ROWS * ENDS).view(ROWS, ENDS))

    def forward(self, b, c):
        result = F.relu(self.a @ b) @ c
        self.a.mul_(2)
        return result


PROGRAMS = {
    "relu": (lambda a, b, c: F.relu(a @ b) @ c, matrices(), 1),
    "gelu": (lambda a, b, c: F.gelu(a @ b) @ c, matrices(), 1),
    "turned": (lambda a, b, c: c.t() @ torch.tanh(b.t() @ a.t()), matrices(), 1),
    "a bias that is added": (lambda a, b, c, v: F.silu(a @ b + v) @ c, (*matrices(), random(MIDDLE)), 1),
    "no gradient but of A": (lambda a, b, c: F.gelu(a @ b) @ c, matrices(b=False, c=False), 1),
    "no gradient but of B": (lambda a, b, c: F.gelu(a @ b) @ c, matrices(a=False, c=False), 1),
    "no gradient but of C": (lambda a, b, c: F.gelu(a @ b) @ c, matrices(a=False, b=False), 1),
    "layers": (mlp(nn.GELU()), (random(ROWS, ENDS),), 1),
    "layers without biases": (mlp(nn.SiLU(), bias=False), (random(ROWS, ENDS),), 1),
    "layers of sequences": (mlp(nn.GELU(approximate="tanh")), (random(2, 6, ENDS),), 1),
    "several sites": (Residual(3), (random(2, 6, ENDS),), 3),
    "autocast": (Autocast(), (random(ROWS, ENDS),), 1),
    "an operand that is written": (Overwritten(), matrices(b=False)[1:], 1),
    "dropout behind": (lambda a, b, c: (F.relu(a @ b) @ c) * F.dropout(torch.ones(3), 0.0), matrices(), 1),
    "the result is read again": (lambda a, b, c: (y := F.relu(a @ b) @ c).exp() * y, matrices(), 1),
    "conditions": (lambda a, b, c: (lambda x: ((x > 0).float() + (x > 1)) * x)(a @ b) @ c, matrices(), 1),
    "operands from before": (lambda a, b, c: F.relu(a.sin() @ b.exp()) @ c.cos(), matrices(), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(always, name):
    """`Step` compares results and gradients with eager's."""
    program, inputs, sites = PROGRAMS[name]
    step = Step(program, *inputs)
    assert step.fired == sites
    assert text(step.forward).count("triptych.b2b_gemm(") == sites
    assert not middles(step.forward) and len(middles(step.backward)) == sites
    assert step.kept() < ROWS * MIDDLE


@pytest.mark.parametrize("name", ["gelu", "layers of sequences", "turned"])
def test_kernels(always, name):
    program, inputs, sites = PROGRAMS[name]
    # which would take the product in the backward apart
    step = Step(program, *inputs, codegen="inductor", remove_passes=["decompose_mem_bound_mm"])
    assert step.fired == sites and not middles(step.forward) and len(middles(step.backward)) == sites


def test_the_function_is_applied_where_the_product_is_read_anyway(always):
    """The figures of the cost model: one kernel of the backward computes gelu and its derivative."""
    torch._dynamo.reset()
    model, x = mlp(nn.GELU()), random(ROWS, ENDS)
    with watching() as sessions:
        torch.compile(model, backend=triptych.compile_fx)(x).sum().backward()
    kernels = {k: names for s in sessions for k, names in s.kernel_nodes["backward"].items()}
    assert sum("erf" in names for names in kernels.values()) == 1


def test_rows_of_any_number(always):
    step = Step(mlp(nn.GELU()), random(ROWS, ENDS), more=[(random(rows, ENDS),) for rows in (2 * ROWS, 5)])
    assert step.fired == 1 and not middles(step.forward) and len(middles(step.backward)) == 1


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(always, rows):
    step = Step(mlp(nn.GELU()), random(rows, ENDS))
    assert step.fired == 1 and "triptych.b2b_gemm(" in text(step.forward)


# ---- what stays as it is ----


def _used_elsewhere(a, b, c):
    y = F.relu(a @ b)
    return y @ c, y.mean()


def _checkpointed(a, b, c):
    return checkpoint(lambda a: F.relu(a @ b) @ c, a, use_reentrant=False).sin()


class _Norms(torch.autograd.Function):
    """A function whose backward reads the norms of rows."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.norm(dim=1, keepdim=True)


DECLINED = {
    "used elsewhere": (_used_elsewhere, "relu is used elsewhere, by mean"),
    "returned": (lambda a, b, c: ((y := a @ b), F.relu(y) @ c), "mm is used elsewhere, by output"),
    "computed twice": (lambda a, b, c: (F.relu(a @ b) @ c, (a @ b).mean()), "the forward computes it a second time"),
    "two readers": (lambda a, b, c: ((y := F.relu(a @ b)) @ c, y @ c.sin()), "relu is used elsewhere, by mm_"),
    "checkpointed": (_checkpointed, "is in a checkpointed region"),
    "norms": (lambda a, b, c: _Norms.apply(a @ b) @ c, "may be saved instead"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_declines(always, name):
    program, reason = DECLINED[name]
    apart = "fuse_parallel_linear_pass"  # which makes one product of two equal ones
    step = Step(program, *matrices(), remove_passes=[apart])
    without = Step(program, *matrices(), remove_passes=[apart, NAME])
    assert step.fired == 0 and any(reason in r for r in step.reasons)
    assert text(step.forward) == text(without.forward) and text(step.backward) == text(without.backward)


@pytest.mark.parametrize("removed", ["B2B_GEMM_PASS", "fused_products", NAME])
def test_whoever_removes_the_kernel_by_name_keeps_the_matrix(always, removed):
    program, inputs, _ = PROGRAMS["gelu"]
    step = Step(program, *inputs, remove_passes=[removed])
    assert step.fired == 0 and not step.reasons
    assert len(middles(step.forward)) == 1 and not middles(step.backward)
    assert "b2b_gemm" not in text(step.forward)


def test_the_names_of_the_other_pass():
    assert two_products.NAMES == {B2bGemmPass.name, *(rule.name for rule in B2bGemmPass().rules())}


def test_what_is_marked_is_what_lies_between():
    example = next(e for e in RecomputeBetweenProducts.examples if e.fires)
    joint, _ = capture_joint(example.program, example.inputs)
    apply_example(RecomputeBetweenProducts(), joint, example)
    marked = {n.name: n.meta[POLICY] for n in joint.graph.nodes if POLICY in n.meta}
    assert marked == dict.fromkeys(["mm", "relu"], CheckpointPolicy.MUST_RECOMPUTE)


def test_a_bias_as_large_as_the_matrix_does_not_bring_it_back(always):
    """To save a value behind the bias would cost no more than to save the bias."""
    a, b, c = random(1, 7), random(7, MIDDLE), random(MIDDLE, 3)
    step = Step(lambda a, b, c, v: ((v + a @ b) * 0.3 + 1) @ c, a, b, c, random(MIDDLE))
    assert step.fired == 1
    assert not [n for n in step.forward.graph.nodes if n.target in PRODUCTS]


def test_in_inference_the_other_pass_decides(always):
    torch._dynamo.reset()
    program, inputs, _ = PROGRAMS["gelu"]
    with watching() as sessions, torch.no_grad():
        torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})(*inputs)
    fired = {r.name for s in sessions for r in s.records if r.fired.total()}
    assert B2bGemmPass.name in fired and NAME not in fired


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
def test_with_a_budget_of_memory(always, budget):
    program, inputs, sites = PROGRAMS["several sites"]
    with _private.functorch_config.patch(activation_memory_budget=budget):
        step = Step(program, *inputs)
    assert step.fired == sites and not middles(step.forward)


def test_every_pass_is_verified(always):
    program, inputs, sites = PROGRAMS["several sites"]
    assert Step(program, *inputs, verify="each").fired == sites


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_region(always, codegen):
    """The graph of a region is partitioned by itself, once for all its calls."""

    @torch.compiler.nested_compile_region
    def region(x, b, c):
        return F.gelu(x @ b) @ c

    inputs = random(ROWS, 3), random(3, MIDDLE), random(MIDDLE, 3)
    step = Step(lambda a, b, c: region(region(a, b, c), b, c), *inputs, codegen=codegen)
    assert step.fired == 1
    bodies = [m for _, m in step.forward.named_modules() if isinstance(m, torch.fx.GraphModule) and m is not step.forward]
    assert bodies and all("triptych.b2b_gemm(" in text(body) and not middles(body) for body in bodies)


# ---- whether it pays ----


@pytest.fixture
def on_gpu(monkeypatch):
    """Sites are judged as on a GPU; returns the times to set: of the two products, of the kernel, and again."""
    times = {"before": 1.0, "kernel": 0.5, "again": 0.4}

    def seconds(old, new):
        kernel, first, _ = new.parts
        assert isinstance(kernel, two_products.B2bGemm) and old.parts[0] == first
        return None if times["again"] is None else (times["before"], times["kernel"] + times["again"])

    monkeypatch.setattr(two_products, "is_on_gpu", lambda node: True)
    monkeypatch.setattr(two_products, "FAR_LARGER", 1)
    return times, clock_says(monkeypatch, seconds)


@pytest.mark.parametrize("again, pays", [(0.4, True), (0.54, True), (0.56, False), (None, None)])
def test_time_and_memory(on_gpu, again, pays):
    """The backward may take a little longer, for the memory that is not held from the forward on."""
    times, _ = on_gpu
    times["again"] = again
    program, inputs, _ = PROGRAMS["gelu"]
    step = Step(program, *inputs)
    decisions = [d for r in step.records if r.name == NAME for d in r.decisions]
    if pays is None:  # not measured: the cost model decides
        assert [str(d) for d in decisions if not d.measured] or "modelled" in step.reasons[0]
    elif pays:
        (decision,) = decisions
        assert decision.measured and decision.after == 0.5 + again and decision.saves == 4 * ROWS * MIDDLE
    else:
        assert step.fired == 0 and re.search("would cost .* measured", step.reasons[0])


@pytest.mark.parametrize(
    "wanted, passes", [("abc", 1), ("ab", 0), ("a", 0), ("c", 2)], ids=["all", "A and B", "A", "C"]
)
def test_what_the_backward_writes_again(on_gpu, wanted, passes):
    program, *_ = PROGRAMS["gelu"]
    Step(program, *matrices(**{name: name in wanted for name in "abc"}))
    ((old, new),) = on_gpu[1]
    assert new.parts[-1] == Moved(passes * old.parts[0].result_bytes, launches=0)


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_timed_computes_the_same(turned):
    bias = None if turned else Operand.contiguous((MIDDLE,), torch.float32)
    a, b, c = (Operand.contiguous(shape, torch.float32) for shape in ((ROWS, ENDS), (ENDS, MIDDLE), (MIDDLE, 3)))
    if turned:
        a, b, c = (Operand.contiguous(operand.shape[::-1], torch.float32).mT for operand in (a, b, c))
    kernel = two_products.B2bGemm(a, b, c, bias, str(pointwise.Pointwise((pointwise.Step("relu", (0,)),))), turned)
    device = torch.device("cpu")
    middle, last = (product.prepare(device)() for product in (kernel.first, kernel.second))
    assert Operand.of(middle) == kernel.middle and kernel.second.flops == 2 * ROWS * MIDDLE * 3
    assert Operand.of(kernel.prepare(device)()) == (Operand.of(last).mT if turned else Operand.of(last))


def test_a_matrix_that_is_not_far_larger(on_gpu, monkeypatch):
    monkeypatch.setattr(two_products, "FAR_LARGER", 4)
    step = Step(lambda a, b, c: F.relu(a @ b) @ c, *matrices())
    assert step.reasons == ["the middle matrix is not far larger than the others"]


def test_on_a_cpu_nothing_is_looked_at():
    step = Step(*PROGRAMS["gelu"][:1], *PROGRAMS["gelu"][1])
    assert step.fired == 0 and not step.reasons and len(middles(step.forward)) == 1
