"""A head in chunks on a GPU: equal gradients, and less memory than with all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych.passes.session import watching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def head(h, w, y):
    return F.cross_entropy(F.linear(h, w).float(), y)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_less_memory(dtype, is_dynamic):
    rows, hidden, classes = 4096, 512, 32768
    h = torch.randn(rows, hidden, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(classes, hidden, device="cuda") / 32).to(dtype).requires_grad_()
    y = torch.randint(0, classes, (rows,), device="cuda")
    if is_dynamic:
        torch._dynamo.mark_dynamic(h, 0)
        torch._dynamo.mark_dynamic(y, 0)

    def step(loss):
        h.grad = w.grad = None
        loss(h, w, y).backward()
        return h.grad, w.grad

    def peak(loss):
        step(loss)  # compiles
        h.grad = w.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = step(loss)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, gradients

    with watching() as sessions:
        options = {"auto_chunker.chunks": 8}  # the decision is not what is tested
        chunked, gradients = peak(torch.compile(head, backend=triptych.compile_fx, options=options))
    assert sum(r.fired["chunk_rows"] for s in sessions for r in s.records) == 1
    whole, expected = peak(torch.compile(head, backend="inductor"))
    product = rows * classes * dtype.itemsize
    assert whole >= product
    # the gradients, a chunk of the product, and rows of other values
    assert chunked < (h.numel() + w.numel()) * dtype.itemsize + product / 4
    for one, other in zip(gradients, expected):
        assert (one.float() - other.float()).norm() < (1e-2 if dtype == torch.bfloat16 else 1e-3) * other.float().norm()
