"""`unaligned_linear`: computes a layer whose result has rows of unaligned length by a kernel that stores such rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import device_model
from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program
from ..kernels import parallel_linear
from ..kernels.capture import is_launched
from ..kernels.registry import triton_is_there
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Rule
from .padding_cost import Padding, Site, modelled, needed_padding, operands, product_site, seconds_of, timed

RATE = 0.6
"""Assumed rate of the kernel, relative to the library's on aligned sizes."""

HALF = (torch.float16, torch.bfloat16)
ALWAYS = {"always": True}


@dataclass(frozen=True)
class UnalignedLinear(Rule):
    """x @ w.t() -> triptych::parallel_linear(x, [w]), where rows of the result are not aligned; up to rounding

    An example is the logits of a language model whose vocabulary has an odd size, such as 50257: the operands are
    aligned, but the rows of the result are not. The library stores such rows slowly, or pads them, and then the whole
    result must be copied.
    """

    always: bool = False
    """Rewrite on every device and without asking the cost model: for tests of the rewrite itself."""
    measure: bool = True
    """Time the kernels on the device; otherwise the cost model decides."""

    exact = False

    def pattern(self, op, x: Tensor, w: Tensor, b: Tensor):
        return op.any_of(op.matmul(x, w), op.addmm(b, x, w))

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        result = tensor_fact(node)
        return result is not None and result.dtype in HALF

    def check(self, m, x, w, b):
        m.applies(m.root.known and x.known and w.known and x.rank == w.rank == 2 and x.dtype in HALF)
        m.applies(self.always or (x.device.type == "cuda" and triton_is_there()))
        m.applies(known(x.stride[1] == 1) and known(w.stride[0] == 1))
        m.applies(b is None or (b.rank == 1 and known_equal(b.shape, m.root.shape[1:])))
        tensors = [value.tensor for value in (x, w, b) if value is not None]
        if not self.always:
            m.applies(is_launched(m.program.options, tensors))
        padding = needed_padding(m, x.tensor, w.tensor)
        m.applies(padding == Padding(n=padding.n) and padding.n > 0)
        m.applies(all(not isinstance(s, int) or s > 0 for s in (*x.shape, *w.shape)))
        if not self.always:
            site = product_site(m, x, w, padding)
            measure = (lambda: _timed(site)) if self.measure else None
            m.pays(*_modelled(site), measure=measure, error=math.inf)  # the model does not know which kernels exist

    def rewrite(self, op, x, w, b):
        biases = [] if b is None else [b]
        results = op.call(torch.ops.triptych.parallel_linear.default, x, [op.permute(w, [1, 0])], biases, None)
        return op.getitem(results, 0)

    examples = [
        fires(lambda x, w: torch.mm(x, w.t()), "bf16[8, 16]", "bf16[9, 16]", settings=ALWAYS),
        fires(lambda x, w, b: torch.addmm(b, x, w.t()), "f16[8, 16]", "f16[9, 16]", "f16[9]", settings=ALWAYS),
        declines(lambda x, w: torch.mm(x, w.t()), "bf16[8, 16]", "bf16[9, 16]"),
        declines(lambda x, w: torch.mm(x, w.t()), "bf16[8, 16]", "bf16[16, 16]", settings=ALWAYS),
        declines(lambda x, w: torch.mm(x, w.t()), "bf16[8, 15]", "bf16[9, 15]", settings=ALWAYS),
        declines(lambda x, w: torch.mm(x, w), "bf16[8, 16]", "bf16[16, 9]", settings=ALWAYS),
        declines(lambda x, w: torch.mm(x, w.t()), "f32[8, 16]", "f32[9, 16]", settings=ALWAYS),
        declines(lambda x, w, b: torch.addmm(b, x, w.t()), "f16[8, 16]", "f16[9, 16]", "f16[8, 9]", settings=ALWAYS),
        declines(lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), "f16[8, 16]", "f16[9, 16]", "f16[9]",
                 settings=ALWAYS),
    ]  # fmt: skip


def _modelled(site: Site) -> tuple[float, float]:
    return min(modelled(site)), device_model(site.device).gemm(site.m, site.n, site.k, site.dtype, rate=RATE)


def _timed(site: Site) -> tuple[float, float] | None:
    """Seconds of the library, with or without padding, whichever is quicker, and of the kernel."""
    others = timed(site)
    ours = None if others is None else seconds_of(site, "by triptych::parallel_linear", _work)
    return None if others is None or ours is None else (min(others), ours)


def _work(site: Site) -> Callable[[], Any]:
    x, w = operands(site)
    return lambda: parallel_linear.cuda(x, [w.t()], [], None)
