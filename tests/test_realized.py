"""Masks that several layers read are computed once."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import triptych


def layers(x, bias):
    for i in range(3):
        x = F.scaled_dot_product_attention(x + i, x * 0.5, x, attn_mask=bias)
    return x


def for_all_heads(x, keep):
    return layers(x, torch.where(keep, 0.0, -1e9)[:, None])


def for_each_head(x, keep):
    return layers(x, torch.where(keep, 0.0, -1e9)[:, None] + torch.arange(4.0)[:, None, None])


def by_hand(x, keep):
    bias = torch.where(keep, 0.0, -1e9)[:, None] + torch.arange(4.0)[:, None, None]
    for i in range(3):
        x = ((x + i) @ (x * 0.5).mT + bias).softmax(-1) @ x
    return x


@pytest.mark.parametrize("program", [for_all_heads, for_each_head, by_hand])
def test_a_mask_is_computed_once_for_all_layers(program):
    torch._dynamo.reset()
    x, keep = torch.randn(2, 4, 24, 16), torch.rand(2, 24, 24) > 0.3
    keep[..., 0] = True
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(program, backend=triptych.compile_fx, dynamic=False), x, keep)
        torch.testing.assert_close(got, program(x, keep), rtol=1e-4, atol=1e-4)
    assert len(re.findall(r"= empty_strided_cpu\(\([\d, ]*24, 24\)", code)) == 1
