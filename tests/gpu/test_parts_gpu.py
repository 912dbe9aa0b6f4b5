"""What families of rules describe as parts of work can be timed on a GPU, and takes about as long as the model says."""

from __future__ import annotations

import pytest
import torch

from triptych.attention.cost import AttentionAsWritten, AttentionKernel
from triptych.cost import Operand, clock, device_model
from triptych.post_grad.decompose_mem_bound_mm import NarrowProduct
from triptych.post_grad.int_mm_mul_cost import Int8Product, ScaledProduct
from triptych.post_grad.reduced_atomic_contention import AddedRows
from triptych.rules.two_products import B2bGemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
FAR = 30.0
"""A model may be wrong by this factor; more means that something else is timed than it describes."""


def matrix(*shape, dtype=bf16):
    return Operand.contiguous(shape, dtype)


HEADS = Operand.of(torch.empty(4, 1024, 16, 64, dtype=bf16, device="meta").transpose(1, 2))
BIAS, ABOVE = Operand((4, 16, 1024, 1024), (0, 0, 1024, 1), bf16), matrix(1024, 1024, dtype=torch.bool)
SCALES = matrix(8192, 1, dtype=f32), matrix(4096, dtype=f32)
INT8 = matrix(8192, 512, dtype=i8), matrix(4096, 512, dtype=i8).mT

PARTS = {
    "attention as written": AttentionAsWritten(HEADS, HEADS, HEADS, False),
    "attention as written, training": AttentionAsWritten(HEADS, HEADS, HEADS, True),
    "attention": AttentionKernel(HEADS, HEADS, HEADS, False),
    "causal attention, training": AttentionKernel(HEADS, HEADS, HEADS, True, is_causal=True),
    "attention with a mask": AttentionKernel(HEADS, HEADS, HEADS, False, ABOVE),
    "attention with a bias that gets a gradient": AttentionKernel(HEADS, HEADS, HEADS, True, BIAS, mask_trains=True),
    "two products": B2bGemm(matrix(32768, 64), matrix(64, 4096), matrix(4096, 64), matrix(4096), "relu v0"),
    "two products, turned": B2bGemm(*(matrix(*s).mT for s in ((64, 32768), (4096, 64), (64, 4096))), None, "relu v0", True),
    "int8 product": Int8Product(*INT8),
    "int8 product, scaled": ScaledProduct(*INT8, scales=SCALES, dtypes=(f32, f32, bf16)),
    "narrow product": NarrowProduct(matrix(1 << 20, 4, dtype=f32), matrix(4, 4, dtype=f32)),
    "additions": AddedRows(65536, 2, 768, f32),
    "additions to copies": AddedRows(65536, 2, 768, f32, 64),
}  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize("name", PARTS)
def test_a_part_takes_about_as_long_as_modelled(name, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_known", {})
    monkeypatch.setattr(clock, "brought_answer", lambda *_: None)
    device = torch.device("cuda", torch.cuda.current_device())
    model, part = device_model(device), PARTS[name]
    timed = clock.part_on_gpu(part, device, model)
    assert timed is not None and 1 / FAR < timed.seconds / part.seconds(model) < FAR
