"""NaN and infinity in queries and keys: a row of hand-written attention is NaN where it is NaN in eager.

On a CPU the kernels of torch give zero for some of these rows. Which ones depends on the number of keys, on the dtype
and on the instruction set, so several sizes are tried.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych.ir.program import Program
from triptych.kernels.nan_rows import nan_rows
from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

WIDTH = 16
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(q, k, v):
    return (q @ k.mT / 4).softmax(-1) @ v


def negative(q, k, v):
    return (q @ k.mT * -0.25).softmax(-1) @ v


def wide_values(q, k, v):
    return (q @ k.mT / 4).softmax(-1) @ torch.cat([v, v], -1)


def biased(q, k, v):
    bias = torch.linspace(-1, 1, k.shape[-2]).to(q.dtype)
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def causal(q, k, v):
    above = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / 4).masked_fill(above, -math.inf).softmax(-1) @ v


def causal_sum(q, k, v):
    """NaN plus -inf is NaN: a row is NaN because of later keys, too."""
    above = torch.full((q.shape[-2], k.shape[-2]), -math.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT / 4 + above).softmax(-1) @ v


def low_everywhere(q, k, v):
    """Numbers so low that they swallow the scores, unless these are NaN."""
    return (q @ k.mT / 4 + torch.full((q.shape[-2], 1), -1e9)).softmax(-1) @ v


PROGRAMS = {f.__name__: f for f in (plain, negative, wide_values, biased, causal, causal_sum)}


def one_query(q, k, number):
    q[0, 0, 3, 2] = number


def one_query_signs_alike(q, k, number):
    """All scores of the row are infinite of the same sign, or NaN."""
    q[0, 0, 3, 2] = number
    k[..., 2] = k[..., 2].abs() + 0.1


def all_queries(q, k, number):
    q[..., 2] = number


def first_key(q, k, number):
    k[0, 0, 0, 2] = number


def one_key(q, k, number):
    k[0, 0, 4, 2] = number


def last_key(q, k, number):
    k[0, 0, -1, 2] = number


def all_keys(q, k, number):
    k[..., 2] = number


def all_keys_at_different_places(q, k, number):
    for j in range(k.shape[-2]):
        k[0, 0, j, j % WIDTH] = number
    q[0, 0] = q[0, 0].abs() * (-1 if number > 0 else 1)


PLACES = [
    one_query, one_query_signs_alike, all_queries, first_key, one_key, last_key, all_keys, all_keys_at_different_places,
]  # fmt: skip
SIZES = [6, 40]
"""Fewer keys than a vector has elements, and more, with a rest."""


def operands(count, place=None, number=math.nan, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, count, WIDTH, generator=generator).to(dtype) for _ in range(3))
    if place is not None:
        place(q, k, number)
    return q, k, v


def fused(program, *inputs, dynamic=False):
    """The fused graph, and a function that runs it: Dynamo orders the inputs of a graph by their first use."""
    torch._dynamo.reset()
    gm, args = capture_torch(program, inputs, dynamic)
    names = [str(n.target) for n in gm.graph.find_nodes(op="placeholder")]
    tally = run_pass(FuseAttention, gm)
    assert tally.fired["fuse_attention"] == 1, [d.reason for d in tally.declines.values()]
    assert len(args) == len(names)

    def run(*given):
        by_name = dict(zip(("L_q_", "L_k_", "L_v_"), given))
        return gm(*(by_name[name] for name in names))[0]

    return gm, run


def same_nan(want, got):
    assert torch.equal(want.isnan(), got.isnan())
    tolerance = 0.05 if want.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_nan_where_they_are_in_eager(name, count, dtype):
    program, rows = PROGRAMS[name], 0
    _, run = fused(program, *operands(count, dtype=dtype))
    for place in PLACES:
        for number in NUMBERS.values():
            inputs = operands(count, place, number, dtype)
            want = program(*inputs)
            rows += int(want.isnan().any(-1).sum())
            same_nan(want, run(*inputs))
    assert rows > 8 * count


@pytest.mark.parametrize("train", [False, True])
def test_a_row_of_low_numbers_is_nan_if_its_query_is(train):
    """Otherwise its scores are lost to rounding, and the kernel gets zeros for its query."""
    _, run = fused(low_everywhere, *(x.requires_grad_(train) for x in operands(6)))
    for number in NUMBERS.values():
        inputs = operands(6, one_query, number)
        want, got = low_everywhere(*inputs), run(*inputs)
        assert want[0, 0, 3].isnan().all()
        same_nan(want, got)


def gradients(program, inputs):
    given = [x.clone().requires_grad_() for x in inputs]
    result = program(*given)
    return torch.autograd.grad((result * torch.linspace(0, 1, result.numel()).view(result.shape)).sum(), given)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_nan_where_they_are_in_eager(name):
    """They may be NaN at more places: a key that a mask hides from a NaN row has no gradient from it in eager."""
    program = PROGRAMS[name]
    for count in SIZES:
        _, run = fused(program, *(x.requires_grad_() for x in operands(count)))
        for place in PLACES:
            for number in NUMBERS.values():
                inputs = operands(count, place, number)
                for want, got in zip(gradients(program, inputs), gradients(run, inputs)):
                    assert not (want.isnan() & ~got.isnan()).any(), f"{place.__name__}, {number}"
                    if name == "plain" and want.isnan().all(-1).all():
                        assert got.isnan().all()


def test_results_and_gradients_that_are_finite_are_those_of_the_kernel():
    """The factor is one, and not a number close to it."""
    inputs = operands(40)
    gm, run = fused(plain, *(x.requires_grad_() for x in operands(40)))
    want, wants = run(*inputs), gradients(run, inputs)
    (call,) = rows_calls(gm)
    call.replace_all_uses_with(call.args[0])
    gm.graph.erase_node(call)
    gm.recompile()
    assert torch.equal(want, run(*inputs))
    for one, other in zip(wants, gradients(run, inputs)):
        assert torch.equal(one, other)


def rows_calls(gm):
    return [n for n in gm.graph.nodes if n.target is torch.ops.triptych.nan_rows.default]


def test_symbolic_sizes():
    for program in (plain, causal):
        gm, _ = fused(program, *operands(40), dynamic=True)
        assert len(rows_calls(gm)) == 1
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"}, dynamic=True)
        for count in (40, 6):
            for place in (one_query, first_key, one_key):
                inputs = operands(count, place)
                same_nan(program(*inputs), compiled(*inputs))


def test_autocast_rounds_to_infinity():
    """What float16 does not hold is infinite for eager's product, and for the kernel."""
    q, k, v = operands(40)
    q[0, 0, 3] = 1e5
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        _, run = fused(plain, *operands(40))
        want, got = plain(q, k, v), run(q, k, v)
    assert want[0, 0, 3].isnan().all() and want.isnan().any(-1).sum() == 1
    assert torch.equal(want.isnan(), got.isnan())


# ---- infinity that is meant ----


@pytest.mark.parametrize("program", [plain, causal])
def test_infinite_keys_may_mask(program):
    """A further column of the queries is one, and that of the keys -inf where a key is to be left out."""
    q, k, v = operands(40)
    q, k = F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1))
    k[..., 5:9, -1] = -math.inf
    v = F.pad(v, (0, 1))
    _, run = fused(program, q, k, v)
    want = program(q, k, v)
    assert not want.isnan().any()
    same_nan(want, run(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [all_keys, all_keys_at_different_places])
def test_a_sink_keeps_a_row_from_being_empty(place, dtype):
    """A row whose scores are all -inf is zero: the sink has all the weight."""

    def beside_a_sink(q, k, v):
        return torch.cat([q @ k.mT, torch.zeros_like(q[..., :1])], -1).softmax(-1)[..., :-1] @ v

    for count in SIZES:
        _, run = fused(beside_a_sink, *operands(count, dtype=dtype))
        for number in NUMBERS.values():
            inputs = operands(count, place, number, dtype)
            same_nan(beside_a_sink(*inputs), run(*inputs))


def test_numbers_that_are_huge_but_finite_may_mask():
    q, k, v = operands(40)
    q, k, v = F.pad(q, (0, 1), value=2.0), F.pad(k, (0, 1)), F.pad(v, (0, 1))
    k[..., 5:9, -1] = torch.finfo(torch.float32).min
    _, run = fused(plain, q, k, v)
    same_nan(plain(q, k, v), run(q, k, v))


def test_values_of_zero_give_zero():
    """A row of zeros is no sign of a row without a score."""
    q, k, v = operands(40)
    _, run = fused(plain, q, k, v)
    assert torch.equal(run(q, k, v * 0), torch.zeros_like(v))


def test_products_beyond_the_dtype():
    """Scores that overflow to -inf in all of a row, and to +inf."""
    for sign in (-1, 1):
        q, k, v = operands(40)
        q[0, 0, 3], k[0, 0] = 1e25, sign * 1e25
        _, run = fused(plain, q, k, v)
        want, got = plain(q, k, v), run(q, k, v)
        assert want[0, 0, 3].isnan().all()
        assert torch.equal(want[0, 0, 3].isnan(), got[0, 0, 3].isnan()) and not got[0, 1].isnan().any()


# ---- the operator ----


def test_the_operator_does_not_rely_on_the_kernel():
    """Whatever a kernel says, a row with a score that is NaN or +inf becomes NaN, and no other row."""
    for place in (one_query, first_key, one_key, last_key):
        for number in NUMBERS.values():
            q, k, v = operands(40, place, number)
            for later, program in ((False, plain), (True, causal)):
                want = program(q, k, v).isnan()
                got = nan_rows(torch.ones_like(v), q, k, later).isnan()
                scores = (q @ k.mT).masked_fill(torch.ones(40, 40).triu(1) > 0, -math.inf) if later else q @ k.mT
                empty = (scores == -math.inf).all(-1, True)  # these are zero in the result of a kernel
                assert torch.equal(got | empty, want)


def test_keys_after_a_row_may_be_hidden():
    q, k, v = operands(40, last_key)
    rows = torch.ops.triptych.nan_rows(v, q, k, True)[0, 0].isnan().all(-1)
    assert rows.nonzero().tolist() == [[39]]
    assert torch.ops.triptych.nan_rows(v, q, k)[0, 0].isnan().all()


def test_after_autograd_it_is_operations_of_aten():
    gm = make_fx(torch.ops.triptych.nan_rows.default, tracing_mode="fake")(*operands(6)[::-1], True)
    calls = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert calls and all(str(target).startswith("aten.") for target in calls)


# ---- everywhere else ----


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("train", [False, True])
def test_compiled(codegen, train):
    """A diverged model does not report finite numbers."""
    torch.manual_seed(0)
    inner = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def layer(x):
        q, k, v = inner(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * 0.3).masked_fill(above, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=triptych.compile_fx, options={"codegen": codegen}, dynamic=False)
    for count in SIZES:
        for token in (None, 0, 4):
            x = torch.randn(2, count, WIDTH, requires_grad=train)
            if token is not None:
                x.data[0, token] = math.nan
            with torch.set_grad_enabled(train):
                want, got = layer(x), compiled(x)
            same_nan(want.detach(), got.detach())
            if train:
                wants, gots = (torch.autograd.grad(y.sum(), [x, *inner.parameters()]) for y in (want, got))
                for one, other in zip(wants, gots):
                    same_nan(one, other)


@pytest.mark.parametrize("name", PROGRAMS)
def test_after_autograd(name):
    program = PROGRAMS[name]
    for count in SIZES:
        gm = make_fx(program, tracing_mode="fake")(*operands(count))
        triptych.post_grad_passes(gm, is_inference=True, add_passes="fuse_attention_aten_pass")
        gm.recompile()
        assert any("flash_attention" in str(n.target) for n in gm.graph.nodes)
        for place in PLACES:
            for number in NUMBERS.values():
                inputs = operands(count, place, number)
                same_nan(program(*inputs), gm(*inputs))


def test_an_exported_program_calls_aten_only():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(q, k, v)

    for train in (False, True):
        exported = triptych.optimize(torch.export.export(Attention(), operands(6)), train=train)
        calls = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
        assert "aten.scaled_dot_product_attention.default" in calls and all(c.startswith("aten.") for c in calls)
        for place in PLACES:
            inputs = operands(6, place)
            same_nan(causal(*inputs), exported.module()(*inputs))


def test_attention_that_is_called_by_name_stays_as_it_is():
    gm, _ = capture_torch(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), operands(6))
    run_pass(FuseAttention, gm)
    assert not rows_calls(gm)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_on_a_cpu(device):
    """On a GPU the kernel's result stays as it is."""
    gm = torch.fx.symbolic_trace(plain)
    with FakeTensorMode():
        Program(gm, [torch.empty(1, 2, 6, WIDTH, device=device) for _ in range(3)])
        assert run_pass(FuseAttention, gm).fired["fuse_attention"] == 1
    assert len(rows_calls(gm)) == (device == "cpu")
