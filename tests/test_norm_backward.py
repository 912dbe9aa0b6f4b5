"""triptych::norm_backward: a layer norm's gradients, and the sums over rows that its weights need; its kernel in Triton's
interpreter; and the rule that puts it into backward graphs."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests.test_kernels import NEEDS_TRITON, run_interpreted
from triptych.passes.session import watching
from triptych.post_grad import batch_gradient_sums
from triptych.post_grad.batch_gradient_sums import BatchGradientSums, BatchGradientSumsPass
from triptych.post_grad.fuse_norm_backward import FusedNormBackward, FuseNormBackward, _backward
from triptych.testing.check import run_pass

NORM_BACKWARD = torch.ops.triptych.norm_backward

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def operands(*shape, dtype=f64, grad_dtype=None, weight_dtype=None, added=True, other=False):
    """The operands of the operator for a layer norm of random numbers, and torch's gradients of it."""
    x, g, a = torch.randn(*shape), torch.randn(*shape), torch.randn(*shape)
    w = torch.randn(shape[-1])
    x, a, g, w = x.to(dtype), a.to(dtype), g.to(grad_dtype or dtype), w.to(weight_dtype or dtype)
    wide = torch.promote_types(dtype, f32)
    exact = [t.to(wide).requires_grad_() for t in (x, w, torch.zeros_like(w))]
    y, mean, rstd = torch.native_layer_norm(exact[0], shape[-1:], *exact[1:], 1e-5)
    gradients = torch.autograd.grad(y, exact, g.to(wide)) if x.numel() else [torch.zeros_like(t) for t in exact]
    h = torch.randn(shape).to(g.dtype) if other else None
    return [g if h is None else g - h, h, x, mean.detach(), rstd.detach(), w, a if added else None], gradients


SHAPES = [(5, 7, 16), (1, 3), (33, 40), (3, 0, 8), (4, 1), (130, 17), (0, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("with_result_sums", [False, True])
def test_the_definition_computes_torchs_gradients(shape, added, other, with_result_sums):
    given, (dx, dw, db) = operands(*shape, added=added, other=other)
    dx = dx + given[-1] if added else dx
    for rows_a_part in (1, 4, 1000):
        result, parts = NORM_BACKWARD(*given, rows_a_part, with_result_sums)
        torch.testing.assert_close(result, dx)
        wanted = [dw, db, dx.sum(tuple(range(dx.dim() - 1)))] if with_result_sums else [dw, db]
        torch.testing.assert_close(parts.sum(0), torch.cat(wanted))
        assert parts.shape[0] == -(-result[..., 0].numel() // rows_a_part) and result.is_contiguous()


def test_gradients_of_the_operator():
    given, _ = operands(3, 2, 4, other=True)
    given = [t.requires_grad_() for t in given]
    gradcheck(lambda *tensors: NORM_BACKWARD(*tensors, 4, True), given)


@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (2, 3, 0)], ids=str)
def test_rows_without_numbers(shape):
    given = [torch.zeros(shape), None, torch.zeros(shape), *[torch.zeros(*shape[:-1], 1)] * 2, torch.zeros(0), None]
    wanted = NORM_BACKWARD(*[None if t is None else t.to("meta") for t in given], 4, True)
    for got, want in zip(NORM_BACKWARD(*given, 4, True), wanted, strict=True):
        assert got.shape == want.shape and got.stride() == want.stride()


def test_gradients_where_operands_depend_on_each_other():
    """As in a norm of x written by hand: x is an operand three times, and the mean and the rstd are computed from it."""
    _, _, x, _, _, w, _ = operands(3, 4)[0]

    def result(x):
        mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, keepdim=True) + 0.1)
        return NORM_BACKWARD(x, None, x, mean, rstd, w, x, 2, True)

    assert gradcheck(result, x.requires_grad_()) and gradgradcheck(result, x)


def test_operands_that_do_not_fit():
    given, _ = operands(4, 6, other=True)
    for rows_a_part in (0, -1, -4):
        for device in ("cpu", "meta"):
            with pytest.raises(RuntimeError, match="at least one row"):
                NORM_BACKWARD(*(t.to(device) for t in given), rows_a_part, True)
    with pytest.raises(RuntimeError, match="floating-point"):
        NORM_BACKWARD(given[0], None, given[2].long(), *given[3:6], None, 4, True)
    with pytest.raises(RuntimeError, match="one device"):
        NORM_BACKWARD(*given[:3], given[3].to("meta"), *given[4:], 4, True)
    wrong = (given[0][:3], given[1].float(), given[2][:3], given[3][:3], given[4][:, 0], given[5][:5], given[6].float())
    for place, operand in enumerate(wrong):
        with pytest.raises(RuntimeError):
            NORM_BACKWARD(*given[:place], operand, *given[place + 1 :], 4, True)


@NEEDS_TRITON
def test_the_kernel_in_the_interpreter():
    run_interpreted("tests.test_norm_backward", "check_kernel")


def check_kernel():
    from triptych.kernels.norm_backward import anywhere, fake, sums_of_parts
    from triptych.kernels.triton_norm_backward import launch

    torch.manual_seed(0)
    both = [False, True]
    for shape, added, other, sums in itertools.product([*SHAPES, (37, 600), (9, 5000)], both, both, both):
        # the interpreter rounds to bf16 by cutting off bits
        for dtypes in ((f32, f32, f32), (bf16, bf16, bf16), (f32, f16, f32), (f16, f16, f32)):
            grad = {"grad_dtype": dtypes[1], "other": other}
            given, _ = operands(*shape, dtype=dtypes[0], weight_dtype=dtypes[2], added=added, **grad)
            for rows_a_part in (4, 6):
                wanted = anywhere(*given, rows_a_part, sums)
                empty = [torch.full_like(t, torch.nan) for t in fake(*given, rows_a_part, sums)]
                dx, parts = launch(*given, rows_a_part, sums, *empty)
                tolerance = {f32: 1e-5, bf16: 2e-2, f16: 2e-3}[dtypes[0]]
                torch.testing.assert_close(dx, wanted[0], rtol=tolerance, atol=tolerance * 4)
                if sums:  # those of the kernel's own numbers, which it has rounded
                    wanted[1][:, 2 * shape[-1] :] = sums_of_parts(dx.float(), rows_a_part)
                torch.testing.assert_close(parts, wanted[1], rtol=tolerance, atol=tolerance * 2 * rows_a_part)
                torch.testing.assert_close(parts[:, 2 * shape[-1] :], wanted[1][:, 2 * shape[-1] :])
    x = torch.randn(6, 5)
    x[1, 2], x[3] = torch.nan, torch.inf
    given, _ = operands(6, 5, dtype=f32, added=False)
    given[2] = x
    wanted, got = anywhere(*given, 4, True), launch(*given, 4, True, *fake(*given, 4, True))
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-5)


# ---- the rule, told to fire on a CPU ----


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(FuseNormBackward, "rules", lambda self: (FusedNormBackward(device="cpu"),))


class Block(nn.Module):
    """Two layers with norms before them, as in a transformer: x + f(norm(x))."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.first(self.norm1(x))
        return x + F.gelu(self.second(self.norm2(x)))


class BlockWithNormsLast(Block):
    """The same with the norms last, norm(x + f(x)): the gradient of a norm's result is a sum of two."""

    def forward(self, x):
        x = self.norm1(x + self.first(x))
        return self.norm2(x + self.second(F.gelu(x)))


def trained(model: nn.Module, x: torch.Tensor, dynamic: bool = False, **options) -> Counter:
    """Compiled, with gradients computed; how often each rule fired in the backward."""
    torch._dynamo.reset()
    how = {"on_error": "raise", **options}
    call = torch.compile(model, backend=triptych.compile_fx, dynamic=dynamic, options=how)
    with watching() as sessions:
        call(x).square().mean().backward()
    return sum((Counter(r.fired) for s in sessions for r in s.records if r.graph == "backward"), Counter())


def stack(width: int = 32, depth: int = 3, block: type[Block] = Block, **how) -> nn.Module:
    """Later layers first in the backward: what reaches them is computed by products."""
    return nn.Sequential(*(block(width, **how) for _ in range(depth)), nn.Linear(width, 4))


@pytest.mark.parametrize(
    "block, dtype, fused", [(Block, f32, 1), (Block, bf16, 5), (BlockWithNormsLast, f32, 0), (BlockWithNormsLast, bf16, 6)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_eager(on_the_cpu, block, dtype, fused, bias):
    model, x = stack(bias=bias, block=block).to(dtype), torch.randn(4, 16, 32, dtype=dtype, requires_grad=True)
    exact, y = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    exact(y).square().mean().backward()
    # in float32 the partitioner keeps most normalised values, from which the operator does not start
    assert trained(model, x, verify="each")["fused_norm_backward"] == fused
    for got, want in zip([x, *model.parameters()], [y, *exact.parameters()], strict=True):
        tolerance = 1e-5 if dtype == f32 else 3e-2
        assert (got.grad - want.grad).norm() <= tolerance * want.grad.norm()
        assert got.grad.shape == got.shape and got.grad.stride() == got.stride()


def test_under_autocast(on_the_cpu):
    class Autocast(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autocast("cpu", bf16):
                return self.model(x).float()

    model, x = stack(depth=1), torch.randn(4, 16, 32)
    eager, ours = Autocast(copy.deepcopy(model)), Autocast(copy.deepcopy(model))
    model(x).square().mean().backward()
    eager(x).square().mean().backward()
    trained(ours, x)
    for theirs, got, want in zip(eager.parameters(), ours.parameters(), model.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 1.5 * (theirs.grad - want.grad).norm() + 1e-3 * want.grad.norm()


def test_one_launch_finishes_the_sums_of_all_norms(on_the_cpu, monkeypatch):
    monkeypatch.setattr(BatchGradientSumsPass, "rules", lambda self: (BatchGradientSums(device="cpu"),))
    monkeypatch.setattr(batch_gradient_sums, "ENOUGH_RESULTS", 256)
    model, x = stack().to(bf16), torch.randn(4, 256, 32, dtype=bf16)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    with watching() as sessions:
        fired = trained(model, x, verify="each")
    backward = sessions[0].graphs["backward"]
    assert fired["fused_norm_backward"] and fired["batch_gradient_sums"]
    (finished,) = backward.graph.find_nodes(op="call_function", target=torch.ops.triptych.sum_parts.default)
    norms = backward.graph.find_nodes(op="call_function", target=NORM_BACKWARD.default)
    assert len(norms) == 4 and len(finished.args[0]) > 4  # also those of biases; the first norm has no gradient of x
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 3e-2 * want.grad.norm()


def test_removed_by_its_name_and_with_sizes_that_are_not_known(on_the_cpu):
    for how in ({"remove_passes": "fuse_norm_backward"}, {"dynamic": True}):
        model, x = stack(depth=1).to(bf16), torch.randn(4, 16, 32, dtype=bf16)
        exact = copy.deepcopy(model)
        exact(x).square().mean().backward()
        assert not trained(model, x, **how)["fused_norm_backward"]
        for got, want in zip(model.parameters(), exact.parameters(), strict=True):
            assert (got.grad - want.grad).norm() <= 3e-2 * want.grad.norm()


def test_products_of_symbolic_sizes(on_the_cpu):
    """The backward multiplies numbers of rows, which are no tensors."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            rows = self.linear(self.norm(x)).reshape(x.shape[0] * x.shape[1], 16)
            return rows @ rows.t()

    model, x = Products(), torch.randn(4, 8, 16, requires_grad=True)
    exact = copy.deepcopy(model)
    exact(x).square().mean().backward()
    trained(model, x, dynamic=True, verify="each")
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 1e-4 * want.grad.norm()


def test_why_it_declines_is_said(on_the_cpu):
    torch._dynamo.reset()
    exp = triptych.explain(stack(depth=1).to(bf16), torch.randn(64, 32, dtype=bf16), train=True)
    (decline,) = (d for p in exp.passes if p.name == "fuse_norm_backward" for d in p.declines)
    assert decline.reason.endswith("and would have to be written to memory")


def test_a_write_to_an_operand_in_between(on_the_cpu):
    """The gradient is cast, then overwritten: the operator would read the new numbers."""

    def program(g, *others, writes):
        half = g.cos()
        wide = half.float()
        return half.zero_() if writes else half, _backward(wide, *others)

    given = torch.randn(64, 16, dtype=bf16), torch.randn(64, 16), torch.randn(64, 1), torch.rand(64, 1), torch.randn(16)
    for writes in (False, True):
        gm = make_fx(functools.partial(program, writes=writes))(*given)
        tally = run_pass(FuseNormBackward, gm)
        assert bool(tally.fired) is not writes
    (decline,) = tally.declines.values()
    assert decline.reason.endswith("writes to an operand in between")
