"""`compute_masks_again`: recomputes a comparison mask in the backward if the compared value is saved for it anyway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import Work, bytes_of, read_and_written
from ..ir.calls import read
from ..ir.effects import effects
from ..ir.facts import tensor_of
from ..ir.partitioned import backward_of, kept_values
from ..ir.program import Program
from ..ir.traits import is_pointwise, is_view
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.partitioned import KeepInstead, behind_views
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

COMPARISONS = frozenset(getattr(torch.ops.aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne"))

BOTH: dict[str, Any] = {"dialects": ("partitioned",)}
X = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
STACKED = [torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_(), torch.ones(3, 4, 5, requires_grad=True)]


def _large(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in ((128, 32, 64), (32, 64, 1))]


class ComputeMasksAgain(Rule):
    """saved for the backward: x.t(), x <= 0 -> x; the backward computes x.t() and x <= 0 from it

    The partitioner treats x and a view of x as different values, and then saves the mask although x is saved anyway.
    The rule saves writing the mask to memory and reading it again. In return the kernel of the backward that needs the
    mask reads x, unless it does so anyway. In half precision these are as many bytes; in float32 they are more, so that
    the rule declines if the tensors are large.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        backward = backward_of(program.gm)
        if backward is None:
            return
        for mask in [n for n in kept_values(program.gm, backward) if _is_comparison(n)]:
            saved, inputs = kept_values(program.gm, backward), backward.inputs
            (compared,) = mask.all_input_nodes
            views = [n for n in saved if compared in behind_views(n) and n.name in inputs]
            if mask.name not in inputs:
                continue
            if not views:
                yield Match.at(program, mask, problem="the compared value is not saved for the backward")
            elif any(compared in effects(user).writes for user in compared.users):
                yield Match.at(program, mask, problem="the compared value is written in place")
            else:
                source = compared if compared in views else views[0]
                yield Match.at(program, mask, compared=compared, held=source)

    def check(self, m, compared, held):
        m.pays(*_forms(m, compared.node, held.node))

    def rewrite(self, op, m):
        return KeepInstead(m.bindings["compared"], m.bindings["held"], m.root.node)

    examples = lazily(lambda: [
        fires(lambda x, w: torch.bmm(torch.relu(x).permute(1, 0, 2), w), *STACKED, **BOTH),
        fires(lambda x, w: torch.bmm(torch.relu(x).permute(1, 0, 2), w), *STACKED, **BOTH, dynamic=True),
        declines(lambda x, w: torch.bmm(torch.relu(x).permute(1, 0, 2), w), *_large(torch.float32), **BOTH,
                 because="would cost"),
        fires(lambda x, w: torch.bmm(torch.relu(x).permute(1, 0, 2), w), *_large(torch.bfloat16), **BOTH),
        declines(lambda x: (x > 0) * x.sin(), X, **BOTH),
        declines(lambda x, w: x @ w, X, torch.ones(4, 2, requires_grad=True), **BOTH),
    ])  # fmt: skip


def _forms(m: Match, compared: Node, held: Node) -> tuple[Work, Work]:
    """The kernel that computes the mask and the one in the backward that needs it, with and without the saved mask."""
    value, mask = tensor_of(compared), tensor_of(m.root.node)
    gradients = (value, value)
    saved = Work(value.device, held=bytes_of(mask))
    if m.program.options.codegen != "inductor":  # the comparison is a kernel of its own in either graph
        either = read_and_written(value, mask), read_and_written(mask, *gradients)
        return saved + either, Work.of(value.device, either)
    backward = backward_of(m.program.gm)
    assert backward is not None
    read_anyway = (value,) if _is_read_by_pointwise(backward.inputs[held.name]) else ()
    old = saved + [read_and_written(value, mask), read_and_written(*gradients, *read_anyway, mask)]
    return old, Work.of(value.device, read_and_written(value), read_and_written(*gradients, value))


def _is_read_by_pointwise(node: Node) -> bool:
    """Does a pointwise operation read the value, or a view of it?"""
    calls = {user: read(user) for user in node.users}
    return any(
        call is not None and (is_pointwise(call.op) or (is_view(call.op) and _is_read_by_pointwise(user)))
        for user, call in calls.items()
    )


def _is_comparison(node: Node) -> bool:
    return node.op == "call_function" and node.target in COMPARISONS and len(node.all_input_nodes) == 1


@dataclass(frozen=True)
class ComputeMasksAgainPass(Pass):
    """Recomputes a comparison in the backward if the compared value is saved for the backward anyway."""

    name = "compute_masks_again"
    changes_interface = True

    def rules(self) -> Sequence[Rule]:
        return (ComputeMasksAgain(),)
