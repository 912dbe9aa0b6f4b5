"""Checks at run time of what the compiler knows already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import fact, known_equal
from ..passes.base import Pass, PassRun
from ..testing.examples import declines, fires

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


@dataclass(frozen=True)
class RemoveAssertOps(Pass):
    """Drops asserts on shape, stride, dtype, device or layout that the facts prove; user asserts stay."""

    name = "remove_assert_ops"

    def run(self, run: PassRun) -> None:
        for node in list(run.program.graph.nodes):
            call = run.program.call(node)
            if call is None or call.op != "_assert_tensor_metadata" or run.spent:
                continue
            problem = unproved(call)
            if problem:
                run.declined("drop_metadata_assert", node, problem)
            else:
                run.rewriter.erase(node)
                run.fired("drop_metadata_assert")

    examples = [
        fires(_proved, "f32[4, 8]", dialects=("aten",)),
        fires(_any_size, "f32[4, 8]", dialects=("aten",), dynamic=True),
        declines(_user_assert, "f32[4, 8]", dialects=("aten",)),
    ]


def unproved(call: Call) -> str | None:
    """The first part of a metadata assert that the facts do not prove, in words."""
    operand = call.args.get("a")
    value = fact(operand) if isinstance(operand, Node) else None
    if not isinstance(value, torch.Tensor):
        return "nothing is known of the value"
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
            return f"the {part} is not known"
        if part in ("size", "stride"):
            same = known_equal(list(there[part]), list(wanted))
        elif part == "device":
            same = there[part] == torch.device(wanted)
        else:
            same = there[part] == wanted
        if not same:
            return f"{part} {wanted} is asserted, {there[part]} is recorded"
    return None
