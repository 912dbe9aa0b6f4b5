"""`bucket_all_gather`: joins several all-gathers into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..communication.example_group import all_gather, all_reduce, wait
from ..communication.rule import BY_SIZE, DEFAULT_MEGABYTES, JoinCollectives
from ..communication.units import in_modules
from ..ir.collectives import ALL_GATHER
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
LAYERS = ("f32[4, 8]", "f32[4, 8]", "f32[2, 3]")


def _two_layers(x: Any, weight: Any, bias: Any) -> Any:
    y = x @ wait(all_gather(weight)).t()
    return y.relu().sum() + wait(all_gather(bias * 2))


def _three_layers(x: Any, *weights: Any) -> Any:
    for weight in weights:
        x = x @ wait(all_gather(weight)).t()
    return x


def _one_needs_the_other(x: Any) -> Any:
    return wait(all_gather(wait(all_gather(x)) + 1))


def _gather_and_reduce(x: Any, y: Any) -> Any:
    return wait(all_gather(x)) + 1, wait(all_reduce(y)) + 1


@dataclass(frozen=True)
class JoinAllGathers(JoinCollectives):
    """all_gather(x), all_gather(y), ... -> all_gather(cat(x, y, ...)), each result a part of every rank's row

    The joined all-gather starts where the first one did, so that users of the first result do not wait longer. The
    operations that compute the operands of the others move before it.
    """

    exact = True
    kind = ALL_GATHER
    at_first = True

    # fmt: off
    examples = [
        fires(_two_layers, *LAYERS, **ATEN),
        fires(_two_layers, *LAYERS, settings={"by": "coalesced"}, **ATEN),
        fires(lambda x, y: (wait(all_gather(x)), wait(all_gather(y))), "bf16[3]", "bf16[]", **ATEN),
        fires(
            _three_layers, "f32[4, 8]", *["f32[4, 8]"] * 3, settings={"group_by": "module"},
            prepare=in_modules("layers.0.first", "layers.0.second", "layers.1.first"), **ATEN,
        ),
        declines(
            _two_layers, *LAYERS, settings={"group_by": "module"}, prepare=in_modules("layers.0", "layers.1"), **ATEN
        ),
        declines(_two_layers, *LAYERS, settings={"megabytes": 1e-5}, **ATEN),
        declines(_one_needs_the_other, "f32[4]", **ATEN),
        declines(_gather_and_reduce, "f32[4]", "f32[4]", **ATEN),
        declines(_two_layers, *LAYERS, dynamic=True, because="sizes are symbolic", **ATEN),
    ]
    # fmt: on


@dataclass(frozen=True)
class BucketAllGather(Pass):
    """Joins all-gathers of one process group and dtype into buckets.

    `megabytes` limits the size of a bucket; a bucket is closed earlier once it is so large that its start-up time is
    negligible. `by` says how tensors are joined: "concatenation" copies them into one tensor, "coalesced" hands them to
    the process group as a list. `group_by="module"` makes one bucket for each unit of FSDP: for each module in a list,
    such as `layers.3`, and otherwise for each child of the model.
    """

    name = "bucket_all_gather"
    default = False

    megabytes: float = DEFAULT_MEGABYTES
    by: str = "concatenation"
    group_by: str = BY_SIZE

    def rules(self) -> Sequence[Rule]:
        return (JoinAllGathers(self.megabytes, self.by, self.group_by),)
