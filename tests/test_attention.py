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

from triptych.ir.text import text
from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.pre_grad.remove_noop_pass import RemoveNoopPass
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

from .attention_idioms import IDIOMS, Idiom

ALL = os.environ.get("TRIPTYCH_ALL_ATTENTION") == "1"
NAMES = sorted(IDIOMS)
FUSING = [n for n in NAMES if IDIOMS[n].fuses]
SOME = NAMES if ALL else NAMES[::3]
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


def check(name, dtype, dynamic=False):
    idiom = IDIOMS[name]
    torch._dynamo.reset()
    program = copy.deepcopy(idiom.program)
    inputs = make_inputs(idiom, dtype)
    if isinstance(program, torch.nn.Module):
        program.to(dtype)
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
    for want, got in zip(unfused[: len(gm_results(gm))], fused):
        strides = [(w, g) for w, g, n in zip(want.stride(), got.stride(), want.shape) if n > 1]
        assert all(w == g for w, g in strides), f"{name}: strides {want.stride()} became {got.stride()}"
    for want, got, right in zip(unfused, fused, exact):
        compare(name, want, got, right, dtype)
    return gm


def compare(name, want, got, right, dtype):
    """The fused result is as near to the one in double precision as the unfused one, give or take some roundings."""
    assert want.dtype == got.dtype and want.shape == got.shape, name
    assert torch.equal(want.isnan(), got.isnan()), f"{name}: NaN in other places"
    if not want.numel():
        return
    want, got, right = (torch.where(want.isnan(), 0, x.double()) for x in (want, got, right))
    size = max(right.abs().max().item(), 1.0)
    eps = torch.finfo(dtype).eps
    before, after = ((x - right).abs().max().item() for x in (want, got))
    assert after <= 4 * before + 8 * eps * size, f"{name}: an error of {before:.1e} became {after:.1e} ({dtype})"


@pytest.mark.parametrize("name", NAMES)
def test_float32(name):
    check(name, torch.float32)


@pytest.mark.parametrize("name", SOME)
def test_bfloat16(name):
    check(name, torch.bfloat16)


@pytest.mark.parametrize("name", DYNAMIC)
def test_symbolic_sizes(name):
    check(name, torch.float32, dynamic=True)
