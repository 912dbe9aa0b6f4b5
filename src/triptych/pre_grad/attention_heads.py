"""attention_heads: heads that share keys and values are told to the kernel, instead of repeating those for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F

from ..attention.heads import group_heads
from ..ir.program import ATEN
from ..passes.base import Pass, PassRun
from ..testing.examples import declines, fires

GROUPED = ["bf16[2, 4, 6, 8]", "bf16[2, 2, 6, 8]", "bf16[2, 2, 6, 8]"]
ANYWHERE: dict[str, Any] = {"dialects": ["torch"], "options": {"attention_heads.anywhere": True}}


def _interleaved(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def _expanded(q: Any, k: Any, v: Any) -> Any:
    b, g, s, d = k.shape
    k, v = (x[:, :, None].expand(b, g, 2, s, d).reshape(b, 2 * g, s, d) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _repeated_whole(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@dataclass(frozen=True)
class AttentionHeads(Pass):
    """Keys and values repeated for several heads are given to attention as they are, with `enable_gqa`, where a kernel
    takes them so: on a GPU, in half precision, without a mask. Up to rounding."""

    anywhere: bool = False
    """Also where no kernel gains by it."""
    name: ClassVar[str] = "attention_heads"
    exact: ClassVar[bool] = False

    def run(self, run: PassRun) -> None:
        if run.program.dialect == ATEN and not run.program.has_composites:
            return  # the choice of kernel is made
        for node in list(run.program.graph.nodes):
            group_heads(run, node, self.anywhere)

    examples = [
        fires(_interleaved, *GROUPED, **ANYWHERE),
        fires(_expanded, *GROUPED, **ANYWHERE),
        fires(lambda q, k, v: F.scaled_dot_product_attention(q, k.expand(2, 4, 6, 8), v.expand(2, 4, 6, 8)),
              "bf16[2, 4, 6, 8]", "bf16[2, 1, 6, 8]", "bf16[2, 1, 6, 8]", **ANYWHERE),
        declines(_interleaved, *GROUPED, dialects=["torch"], because="save nothing here"),
        declines(_repeated_whole, *GROUPED, **ANYWHERE),
        declines(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *["bf16[2, 4, 6, 8]"] * 3, **ANYWHERE),
    ]  # fmt: skip
