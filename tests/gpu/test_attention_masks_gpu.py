"""Attention masks on a GPU: which kernel attention ends in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triptych

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Q = (2, 8, 128, 64)


def _full(q, bias):
    keep = torch.arange(q.shape[-2], device=q.device)[None, None, :, None] >= 0
    return F.scaled_dot_product_attention(q, q, q, keep.expand(q.shape[0], -1, -1, q.shape[-2]))


def _lower(q, bias):
    at = torch.arange(q.shape[-2], device=q.device)
    return F.scaled_dot_product_attention(q, q, q, (at[None, :] <= at[:, None]).expand(q.shape[0], 1, -1, -1))


def _relative(q, bias):
    """A bias looked up by position and permuted, as T5 has it."""
    return F.scaled_dot_product_attention(q, q, q, bias.permute(2, 0, 1)[None])


def _for_all_keys(q, bias):
    """A bias of one number for all keys, in attention written by hand."""
    return (q @ q.mT * 0.1 + bias[:, :, 0].sum(1)[None, None, :, None]).softmax(-1) @ q


FUSED = ("flash", "cudnn", "efficient")


@pytest.mark.parametrize("program", [_full, _lower, _relative, _for_all_keys])
def test_kernels(program):
    q = torch.randn(Q, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(Q[-2], Q[-2], Q[1], device="cuda", dtype=torch.bfloat16)
    seen = []

    def compile_fn(gm, example_inputs):
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm

    torch._dynamo.reset()
    run = torch.compile(
        lambda *args: program(*args).transpose(1, 2).reshape(2, 128, -1) * 2, backend=triptych.make_backend(compile_fn)
    )
    with torch.no_grad():
        actual = run(q, bias)
        exact, eager = (
            program(*inputs).transpose(1, 2).reshape(2, 128, -1) * 2
            for inputs in ((q.double(), bias.double()), (q, bias))
        )
    # of a row whose scores are nearly equal, a bfloat16 score may be rounded to another weight
    assert (actual - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-2
    assert any(kernel in target for target in seen for kernel in FUSED), [t for t in seen if "attention" in t or "bmm" in t]
