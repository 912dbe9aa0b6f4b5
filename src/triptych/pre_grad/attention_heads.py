"""attention_heads: keys and values that several heads share are passed to the kernel once, instead of repeated for each
head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F

from ..attention.heads import Repeated, unrepeated, without_kernel
from ..ir.facts import known_equal
from ..ir.program import ATEN, Value
from ..rewrite.clones import copied_as
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import NotConcerned
from ..rewrite.rule import FirstOf, Match, Rule

GROUPED = ["bf16[2, 4, 6, 8]", "bf16[2, 2, 6, 8]", "bf16[2, 2, 6, 8]"]
ANYWHERE: dict[str, Any] = {"dialects": ["torch"], "settings": {"anywhere": True}}


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
class GroupedHeads(Rule):
    """attention(q, repeat(k), repeat(v)) -> attention(q, k, v, enable_gqa=True), where a kernel supports grouped
    heads; up to rounding"""

    anywhere: bool = False
    """Rewrite even where no kernel is faster with grouped heads."""

    exact = False
    mixed_dtypes = True
    takes_random = True  # dropout stays what it was, in the same place

    def pattern(self, op, q, k, v, mask, dropout, causal, scale):
        return op.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=False)

    def check(self, m, q, mask):
        m.applies(m.program.dialect != ATEN or m.program.has_composites, "the kernel has been chosen already")
        key, value = self._repeated(m)
        m.applies(isinstance(q, Value) and q.is_tensor and q.rank == 4)
        m.applies(known_equal(key.shape[:3], value.shape[:3]))
        reason = None if self.anywhere else without_kernel(q.tensor, value, mask)
        m.require(reason is None, reason)
        m.cover([*key.nodes, *value.nodes])

    def rewrite(self, op, m):
        key, value = self._repeated(m)

        def attend() -> Value:
            return op.scaled_dot_product_attention(
                **{**m.root.call.args, "key": key.made(op), "value": value.made(op), "enable_gqa": True}
            )

        # another kernel may give its result other strides
        return FirstOf(attend, lambda: copied_as(op, attend(), m.root.tensor))

    def _repeated(self, m: Match) -> tuple[Repeated, Repeated]:
        key, value = (unrepeated(m.program, m.bindings[name]) for name in ("k", "v"))
        if key is None or value is None:
            raise NotConcerned("keys and values are not repeated")
        return key, value

    examples = [
        fires(_interleaved, *GROUPED, **ANYWHERE),
        fires(_expanded, *GROUPED, **ANYWHERE),
        fires(lambda q, k, v: F.scaled_dot_product_attention(q, k.expand(2, 4, 6, 8), v.expand(2, 4, 6, 8)),
              "bf16[2, 4, 6, 8]", "bf16[2, 1, 6, 8]", "bf16[2, 1, 6, 8]", **ANYWHERE),
        declines(_interleaved, *GROUPED, dialects=["torch"], because="save nothing here"),
        declines(_repeated_whole, *GROUPED, **ANYWHERE),
        declines(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *["bf16[2, 4, 6, 8]"] * 3, **ANYWHERE),
    ]  # fmt: skip


@dataclass(frozen=True)
class AttentionHeads(Pass):
    """Passes keys and values to attention with `enable_gqa` instead of repeating them for several heads. Up to
    rounding.

    The pass declines where no kernel supports grouped heads: they need a GPU, half precision, no mask, and heads that
    are at most 256 wide and as wide in the values as in the queries.
    """

    anywhere: bool = False
    """Rewrite even where no kernel is faster with grouped heads."""
    name: ClassVar[str] = "attention_heads"

    def rules(self) -> Sequence[Rule]:
        return (GroupedHeads(self.anywhere),)
