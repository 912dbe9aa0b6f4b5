"""Writes in place on a GPU: user Triton kernels, and the memory that a cache's update takes."""

from __future__ import annotations

import pytest
import torch

import triptych
from tests.compare import check_inference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

try:
    import triton
    import triton.language as tl
except ImportError:
    pytest.skip("needs Triton", allow_module_level=True)


@triton.jit
def add_into(out, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < count
    tl.store(out + at, tl.load(out + at, kept) + tl.load(x + at, kept), kept)


def launch(out, x):
    add_into[(triton.cdiv(out.numel(), 256),)](out, x, out.numel(), BLOCK=256)


def on_an_input(out, x):
    launch(out, x * 2)
    return out.sum()


def on_a_temporary(out, x):
    y = out + 1
    launch(y, x)
    return y, x


def on_what_is_read_later(out, x):
    y = out + 1
    before = y.clone()
    launch(y, x)
    return y - before, before


def twice(out, x):
    launch(out, x)
    launch(out, out.sin())
    return out * 1


def on_itself(out, x):
    launch(out, out.flip(0).contiguous())


def foreach_with_flip(out, x):
    torch._foreach_add_([out, x], [x.flip(0), out.flip(0)])


def index_add_of_its_flip(out, x):
    out.index_add_(0, torch.arange(8, device=out.device) // 2, out.flip(0))


PROGRAMS = (
    on_an_input, on_a_temporary, on_what_is_read_later, twice, on_itself, foreach_with_flip, index_add_of_its_flip,
)  # fmt: skip


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_caller_sees_what_eager_does(program, codegen):
    args = (torch.randn(8, 64, device="cuda"), torch.randn(8, 64, device="cuda"))
    check_inference(program, args, backend=triptych.compile_fx, options={"codegen": codegen})


def updated_by_kernel(cache, k, positions):
    launch(cache.view(-1)[: k.numel()], k)
    return cache[0, 0].sum()


def updated_rows(cache, k, positions):
    cache.index_copy_(2, positions, k)
    return cache[0, 0].sum()


def updated_slice(cache, k, positions):
    cache[:, :, 5:6] = k
    return cache[0, 0].sum()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("update", [updated_by_kernel, updated_rows, updated_slice], ids=lambda p: p.__name__)
def test_a_cache_is_not_copied(update, codegen):
    cache = torch.zeros(4, 8, 1024, 64, device="cuda")
    k, position = torch.randn(4, 8, 1, 64, device="cuda"), torch.tensor([5], device="cuda")
    call = torch.compile(update, backend=triptych.compile_fx, options={"codegen": codegen})
    call(cache, k, position)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(cache, k, position)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < cache.numel() * cache.element_size() / 4, f"{taken} bytes for an update of one row"
