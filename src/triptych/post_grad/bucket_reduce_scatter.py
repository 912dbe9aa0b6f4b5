"""`bucket_reduce_scatter`: joins several reduce-scatters into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..communication.example_group import reduce_scatter, wait
from ..communication.rule import BY_SIZE, DEFAULT_MEGABYTES, JoinCollectives
from ..communication.units import in_modules
from ..ir.collectives import REDUCE_SCATTER
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
GRADIENTS = ("f32[4, 8]", "f32[4, 2]")


def _two_gradients(x: Any, dy: Any) -> Any:
    weight = wait(reduce_scatter(dy.t() @ x))
    bias = wait(reduce_scatter(dy.sum(0)))
    return weight * 0.5, bias * 0.5


def _returned(x: Any, dy: Any) -> Any:
    return wait(reduce_scatter(dy.t() @ x, "avg")), wait(reduce_scatter(dy, "avg"))


def _two_reductions(x: Any, dy: Any) -> Any:
    return wait(reduce_scatter(x)) + 1, wait(reduce_scatter(dy, "avg")) + 1


def _one_needs_the_other(x: Any) -> Any:
    return wait(reduce_scatter(wait(reduce_scatter(x)) + 1))


@dataclass(frozen=True)
class JoinReduceScatters(JoinCollectives):
    """reduce_scatter(x), reduce_scatter(y), ... -> reduce_scatter(cat(x, y, ...)), by rank; up to the order of sums

    The joined reduce-scatter starts once the last operand is computed. Operations that use one of the earlier results
    move after its wait.
    """

    exact = False
    kind = REDUCE_SCATTER

    examples = [
        fires(_two_gradients, *GRADIENTS, **ATEN),
        fires(_two_gradients, *GRADIENTS, settings={"by": "coalesced"}, **ATEN),
        fires(_returned, *GRADIENTS, **ATEN),
        declines(
            _two_gradients, *GRADIENTS, settings={"group_by": "module"}, prepare=in_modules("layers.0", "head"), **ATEN
        ),
        declines(_two_gradients, *GRADIENTS, settings={"megabytes": 1e-6}, **ATEN),
        declines(_two_reductions, *GRADIENTS, **ATEN),
        declines(_one_needs_the_other, "f32[4]", **ATEN),
    ]


@dataclass(frozen=True)
class BucketReduceScatter(Pass):
    """Joins reduce-scatters of one process group, reduction and dtype into buckets.

    `megabytes` limits the size of a bucket; a bucket is closed earlier once it is so large that its start-up time is
    negligible. `by` says how tensors are joined: "concatenation" copies them into one tensor, "coalesced" hands them to
    the process group as a list. `group_by="module"` makes one bucket for each unit of FSDP: for each module in a list,
    such as `layers.3`, and otherwise for each child of the model.
    """

    name = "bucket_reduce_scatter"
    default = False

    megabytes: float = DEFAULT_MEGABYTES
    by: str = "concatenation"
    group_by: str = BY_SIZE

    def rules(self) -> Sequence[Rule]:
        return (JoinReduceScatters(self.megabytes, self.by, self.group_by),)
