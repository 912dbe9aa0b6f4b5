"""Linear layers joined, split, turned and compressed: whole programs through the compiler, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from tests.compare import assert_close
from triptych.ir.program import Program
from triptych.passes.session import watching
from triptych.pre_grad.fuse_parallel_linear_pass import FuseParallelLinearPass
from triptych.pre_grad.fuse_split_linear_add_pass import FuseSplitLinearAddPass
from triptych.pre_grad.permute_fusions import PermutedLeft
from triptych.rewrite.layout import follow
from triptych.rewrite.refusal import Refused
from triptych.testing import run_pass
from triptych.testing.capture import capture_torch


class Attention(nn.Module):
    """Query, key and value over one input; grouped heads, and a key without bias, as models have it."""

    def __init__(self, width=32, heads=4, groups=2, bias=True):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=bias)
        self.gate, self.up = nn.Linear(width, 48, bias=False), nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(48, width)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(n, 3) for n in (2, 5, 1))

    def forward(self, x):
        a, b, c = (layer(piece) for layer, piece in zip(self.parts, x.split([2, 5, 1], -1)))
        return a + b + c


class Lce(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, n, bias=bias) for n in (3, 4, 5))

    def forward(self, x):
        return sum(F.relu(layer(x.transpose(1, 2)).transpose(1, 2)).sum(1) for layer in self.layers)


class Compress(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 2))

    def forward(self, x):
        return x @ x.transpose(1, 2) @ self.w


CASES = {
    "parallel, kernel": (Attention(), (2, 6, 32), {"fuse_parallel_linear_pass.own_pointers": True},
                         "fuse_parallel_linear_pass", 2),
    "split": (Split(), (512, 8), {}, "fuse_split_linear_add_pass", 1),
    "simple lce": (Lce(False), (2, 8, 16), {"add_passes": "use_triton_lce_replace_simple_LCE"},
                   "use_triton_lce_replace_simple_LCE", 3),
    "normal lce": (Lce(True), (2, 8, 16), {"add_passes": "use_triton_lce_replace_normal_LCE"},
                   "use_triton_lce_replace_normal_LCE", 3),
    "matmul lce": (Lce(True), (2, 8, 16), {"add_passes": "use_matmul_lce_replace_normal_LCE"},
                   "use_matmul_lce_replace_normal_LCE", 3),
    "fused lce": (Lce(True), (64, 8, 64), {"add_passes": "use_matmul_fuse_lce_replace_first_LCE"},
                  "use_matmul_fuse_lce_replace_first_LCE", 1),
    "dot compress": (Compress(), (2, 16, 4), {"add_passes": "use_triton_dot_compress"}, "use_triton_dot_compress", 1),
}  # fmt: skip


BY_KERNELS = {("parallel, kernel", True), ("normal lce", False)}
"""One operator of each kind, one of them trained; the same pair the other way round is marked slow."""


@pytest.mark.parametrize(
    "name, train, codegen",
    [(name, train, "eager") for name in CASES for train in (False, True)]
    + [(name, train, "inductor") for name, train in sorted(BY_KERNELS)]
    + [pytest.param(name, not train, "inductor", marks=pytest.mark.slow) for name, train in sorted(BY_KERNELS)],
)
def test_against_eager(name, train, codegen):
    model, shape, options, wanted, count = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"codegen": codegen, **options})
    x = torch.randn(shape, requires_grad=train)
    with torch.set_grad_enabled(train), watching() as sessions:
        got = compiled(x)
    fired = {r.name: r.rewrites for s in sessions for r in s.records}
    if not (train and name == "fused lce"):  # there the weights' gradients taken apart may cost more
        assert fired[wanted] == count, fired
    want = model(x)
    assert_close(got, want)
    if train:
        inputs = [x, *model.parameters()]
        weights = torch.randn_like(want)
        grads = [torch.autograd.grad((y * weights).sum(), inputs) for y in (want, got)]
        for name, one, other in zip(("x", *dict(model.named_parameters())), *grads, strict=True):
            assert_close(other, one, name)


@pytest.mark.parametrize("pass_, program", [
    (FuseParallelLinearPass, lambda x, w, v, u: F.linear(x, w).relu() + F.linear(x, w) * F.linear(x, v) + x @ u.t()),
    (FuseParallelLinearPass, lambda x, w, v, u: F.linear(x, w).relu() + F.linear(x, v).relu() + F.linear(x, u)),
    (FuseSplitLinearAddPass, lambda x, w, v, u: (lambda a, b: F.linear(a, w[:, 32:]) + b @ v[:, 32:].t())(*x.chunk(2, 1))),
])  # fmt: skip
def test_gradients_of_the_rewritten_graph(pass_, program):
    """The graph before and after the pass, differentiated, in float64; a weight used twice counts twice."""
    torch.manual_seed(0)
    inputs = [torch.randn(*s, dtype=torch.double) for s in ((4096, 64), (2, 64), (2, 64), (2, 64))]
    before, given = capture_torch(program, inputs)
    after, _ = capture_torch(program, inputs)
    assert run_pass(pass_, after).fired
    found = []
    for gm in (before, after):
        leaves = [i.detach().clone().requires_grad_() for i in given]
        results = gm(*leaves)
        found.append(torch.autograd.grad(sum((r**2).sum() for r in results), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


def test_frozen_weights_are_joined_once():
    model = Attention(bias=False)
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager", "freeze": True})
    x = torch.randn(2, 6, 32)
    with torch.no_grad(), watching() as sessions:
        torch.testing.assert_close(compiled(x), model(x))
        (record,) = [r for r in sessions[0].records if r.name == "fuse_parallel_linear_pass"]
        assert record.fired["joined_weights"] == 2 and all(d.pays for d in record.decisions)
        model.q.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_layers_over_features_are_not_copied():
    """By default, without any option: torch would copy x to fold its batch into rows, once for all three layers."""

    def copies(remove):
        torch._dynamo.reset()
        options = {"codegen": "eager", "remove_passes": remove}
        with torch.no_grad(), watching() as sessions:
            got = torch.compile(model, backend=triptych.compile_fx, options=options)(x)
            assert_close(got, model(x))
        return [n for n in sessions[0].graphs["forward"].graph.nodes if n.target is torch.ops.aten.clone.default]

    model, x = Lce(True), torch.randn(64, 8, 256)
    assert len(copies("permute_linear_fusion")) == 1 and not copies("")


def test_autocast():
    """The kernel takes what it is given, and autocast gives linear layers other numbers: those are joined."""
    model = Attention()
    options = {"codegen": "eager", "fuse_parallel_linear_pass.own_pointers": True}
    compiled = torch.compile(model, backend=triptych.compile_fx, options=options)
    x = torch.randn(64, 6, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_close(compiled(x), model(x))


def test_no_weight_is_stale_without_the_promise():
    model = Attention(bias=False)
    options = {"codegen": "eager", "fuse_parallel_linear_pass.own_pointers": True}
    compiled = torch.compile(model, backend=triptych.compile_fx, options=options)
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        compiled(x)
        for parameter in model.parameters():
            parameter.data.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_grouping_takes_linear_time():
    """Hundreds of layers over one input are one group: no pair is looked at."""
    layers = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(200))

    def program(x):
        return sum(layer(x).sum() for layer in layers)

    gm, _ = capture_torch(program, [torch.randn(2, 8)])
    tally = run_pass(FuseParallelLinearPass, gm, options={"freeze": True})
    assert tally.fired["joined_weights"] == 1
    assert len([n for n in gm.graph.nodes if n.target is F.linear]) == 1


# ---- values that lie otherwise in memory ----

X = torch.randn(4, 8)


@pytest.mark.parametrize("program, seen", [
    (lambda x: x.relu().sum(), False),
    (lambda x: x.relu() @ x.t(), False),
    (lambda x: x.relu().contiguous() * 2, False),
    (lambda x: (x.relu() + 1).exp().softmax(-1).argmax(), False),
    (lambda x: x.relu().reshape(-1) * 2, False),
    (lambda x: torch.cat([x.relu(), x]), False),
    (lambda x: x.relu().contiguous(), False),
    (lambda x: x.relu(), True),
    (lambda x: x.relu() * 2, True),
    (lambda x: x.relu().view(-1) * 2, True),
    (lambda x: x.relu().stride(0) + x.sum(), False),  # Dynamo took the number it was
    (lambda x: torch.as_strided(x.relu(), (2,), (1,)) * 2, True),
    (lambda x: F.dropout(x.relu()).sum(), True),
    (lambda x: x.relu().add_(1).sum(), True),
    (lambda x: (y := x.relu(), y.contiguous())[1:] + (y.t(),), True),
])  # fmt: skip
def test_who_sees_how_a_value_lies(program, seen):
    gm, _ = capture_torch(program, [X])
    made = Program(gm)
    (node,) = [n for n in gm.graph.nodes if n.target == "relu"]
    with made.computing(node):
        turned = torch.empty_like(node.meta["example_value"].t()).contiguous().t()
    try:
        follow(made, {node: turned})
    except Refused:
        assert seen
    else:
        assert not seen or not node.users


def test_facts_follow_what_lies_otherwise():
    """After a rewrite that changes strides, what is known of later values is what they will be."""
    gm, _ = capture_torch(lambda a, b: (a.mT.contiguous() @ b).relu(), [torch.randn(2, 3, 4), torch.randn(2, 3, 5)])
    from triptych.rewrite.driver import run_rules
    from triptych.rewrite.rewriter import Rewriter
    from triptych.verify.structure import verify

    tally = run_rules(Rewriter(Program(gm)), [PermutedLeft()])
    assert tally.fired
    verify(gm)


def test_accessors():
    def program(x, w, b):
        return torch.addmm(b, x, w.t()), F.linear(x, w, bias=b), x @ w.t()

    gm, _ = capture_torch(program, [torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)])
    addmm, linear, product = gm.graph.output_node().args[0]
    for node in (addmm, linear):
        layer = triptych.NormalizedLinearNode(node)
        assert [n.name for n in (layer.get_input(), layer.get_weight(), layer.get_bias())] == ["l_x_", "l_w_", "l_b_"]
    matmul = triptych.NormalizedMatmulNode(product)
    assert matmul.get_input().name == "l_x_" and matmul.get_other().args[0].name == "l_w_"
    with pytest.raises(triptych.TriptychError, match="not a linear layer"):
        triptych.NormalizedLinearNode(product)
    with pytest.raises(triptych.TriptychError, match="not a product"):
        triptych.NormalizedMatmulNode(linear)


def test_frozen_layers_are_not_joined_with_trained_ones():
    def program(x, w, v):
        return F.linear(x, w).relu(), F.linear(x, v).relu()

    given = [torch.randn(4096, 64), torch.randn(2, 64, requires_grad=True), torch.randn(2, 64)]
    trained, frozen = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})(*given)
    assert trained.requires_grad and not frozen.requires_grad
