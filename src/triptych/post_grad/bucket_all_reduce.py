"""`bucket_all_reduce`: joins several all-reduces into one, however their results are used."""

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

    The joined all-reduce starts once the last operand is computed. Operations that use one of the earlier results move
    after its wait.
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
    """Joins all-reduces of one process group, reduction and dtype into buckets, of gradients and of other values.

    `megabytes` limits the size of a bucket; a bucket is closed earlier once it is so large that its start-up time is
    negligible. `by` says how tensors are joined: "concatenation" copies them into one tensor, "coalesced" hands them to
    the process group as a list.
    """

    name = "bucket_all_reduce"
    default = False

    megabytes: float = DEFAULT_MEGABYTES
    by: str = "concatenation"

    def rules(self) -> Sequence[Rule]:
        return (JoinAllReduces(self.megabytes, self.by),)
