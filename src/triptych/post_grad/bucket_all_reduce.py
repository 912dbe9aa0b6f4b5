"""`bucket_all_reduce`: several all-reduces become one, whatever is computed with their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..communication.example_group import OTHER, all_reduce, wait
from ..communication.rule import DEFAULT_MEGABYTES, JoinCollectives
from ..ir.collectives import ALL_REDUCE
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
OPERANDS = ("f32[4, 8]", "f32[4, 2]")


def _two_products(x: Any, y: Any) -> Any:
    first = wait(all_reduce(x)).relu()
    second = wait(all_reduce(y.exp()))
    return first.t() @ second


def _one_needs_the_other(x: Any, y: Any) -> Any:
    return wait(all_reduce(y.t() @ wait(all_reduce(x))))


def _two_groups(x: Any, y: Any) -> Any:
    return wait(all_reduce(x)).t() @ wait(all_reduce(y, group=OTHER))


@dataclass(frozen=True)
class JoinAllReduces(JoinCollectives):
    """all_reduce(x), all_reduce(y), ... -> all_reduce(cat(x, y, ...)), up to the order of sums over ranks

    The joined one starts behind the last operand; what needs one of the first results moves behind its wait.
    """

    exact = False
    kind = ALL_REDUCE

    examples = [
        fires(_two_products, *OPERANDS, **ATEN),
        fires(_two_products, *OPERANDS, settings={"by": "coalesced"}, **ATEN),
        declines(_one_needs_the_other, *OPERANDS, **ATEN),
        declines(_two_groups, *OPERANDS, **ATEN),
        declines(_two_products, *OPERANDS, settings={"megabytes": 1e-6}, **ATEN),
    ]


@dataclass(frozen=True)
class BucketAllReduce(Pass):
    """Joins all-reduces of one process group, reduction and dtype into buckets, gradients or not.

    `megabytes` limits a bucket; one that is large enough is closed before. `by` says how tensors are joined:
    "concatenation" copies them into one, "coalesced" hands them to the process group as a list.
    """

    name = "bucket_all_reduce"
    default = False

    megabytes: float = DEFAULT_MEGABYTES
    by: str = "concatenation"

    def rules(self) -> Sequence[Rule]:
        return (JoinAllReduces(self.megabytes, self.by),)
