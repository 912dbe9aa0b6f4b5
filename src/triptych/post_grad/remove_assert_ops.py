"""`remove_assert_ops`: drops run-time checks of metadata that the compiler already knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import fact, known_equal
from ..ir.refusal import Refusal
from ..rewrite.edits import Erase
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import Refused
from ..rewrite.rule import Rule

check_metadata = torch.ops.aten._assert_tensor_metadata.default


def _proved(x):
    check_metadata(x, None, None, torch.float32, device=torch.device("cpu"), layout=torch.strided)
    return x.relu()


def _any_size(x):
    check_metadata(x, None, None, torch.float32)
    return x.relu()


def _user_assert(x):
    torch.ops.aten._assert_async.msg((x == x).all(), "NaN came in")
    return x.relu()


class DropMetadataAssert(Rule):
    """_assert_tensor_metadata(x, shape, stride, dtype, device, layout) -> nothing, where the facts prove all of them"""

    def pattern(self, op):
        return op.call_of("_assert_tensor_metadata")

    def check(self, m):
        if problem := unproved(m.root.call):
            raise Refused(problem)

    def rewrite(self, op, m):
        return Erase([m.root.node])

    examples = [
        fires(_proved, "f32[4, 8]", dialects=("aten",)),
        fires(_any_size, "f32[4, 8]", dialects=("aten",), dynamic=True),
        declines(_user_assert, "f32[4, 8]", dialects=("aten",)),
    ]


@dataclass(frozen=True)
class RemoveAssertOps(Pass):
    """Drops asserts on shape, stride, dtype, device or layout that the facts prove; user asserts stay."""

    name = "remove_assert_ops"

    def rules(self) -> Sequence[Rule]:
        return (DropMetadataAssert(),)


def unproved(call: Call) -> Refusal | None:
    """The first part of a metadata assert that the facts do not prove; None if they prove all of it."""
    operand = call.args.get("a")
    value = fact(operand) if isinstance(operand, Node) else None
    if not isinstance(value, torch.Tensor):
        return Refusal("nothing is known of the value", at=operand if isinstance(operand, Node) else None)
    there: dict[str, Any] = {
        "dtype": value.dtype,
        "device": value.device,
        "layout": value.layout,
        "size": value.shape,
    }
    if value.layout == torch.strided:
        there["stride"] = value.stride()
    for part, wanted in call.args.items():
        if part == "a" or wanted is None:
            continue
        if part not in there:
            return Refusal(f"the {part} is not known", at=operand, wanted=wanted)
        if part in ("size", "stride"):
            same = known_equal(list(there[part]), list(wanted))
        elif part == "device":
            same = there[part] == torch.device(wanted)
        else:
            same = there[part] == wanted
        if not same:
            sentence = f"{part} {{wanted}} is asserted, {{found}} is recorded"
            return Refusal(sentence, at=operand, wanted=wanted, found=there[part])
    return None
