"""Choices, bounds and comparisons that known values decide: part of `constant_fold_uniform_value`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import known_equal, tensor_fact
from ..ir.values.ranges import representable
from ..rewrite.examples import declines, fires
from .known_operands import Build, DecidedOperation, Site

CHOICES = frozenset(("where", "masked_fill"))


def _mask(x):
    keep = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool) & (
        torch.zeros(x.shape[0], dtype=torch.int64) == 0
    )
    return torch.where(keep, x @ x.t(), float("-inf"))


def _triangles(x):
    n = x.shape[0]
    rows, keys = torch.arange(n)[:, None], torch.arange(n)
    return torch.where((keys <= rows) | (keys > rows), x, 0.0) + x.masked_fill((keys < rows) & (keys > rows), 1.0)


def _one_sequence(x):
    """Which of several packed sequences each position belongs to: there is one."""
    positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return x.masked_fill(sequence != 0, 0.0) + 1


def _choice(site: Site) -> tuple[Node, Any, Any] | None:
    """A boolean mask and the values where it is true and where it is not."""
    args = site.call.args
    mask = args.get("condition", args.get("mask"))
    fact = tensor_fact(mask)
    if not isinstance(mask, Node) or fact is None or fact.dtype != torch.bool:
        return None
    yes, no = (args.get(name) for name in (("self", "other") if site.call.op == "where" else ("value", "self")))
    return mask, yes, no


class ChooseBranch(DecidedOperation):
    """where(mask, a, b) -> a, where the mask is true everywhere; b, where it is false everywhere"""

    ops = CHOICES

    def decide(self, site: Site) -> Build | None:
        if (choice := _choice(site)) is None:
            return None
        mask, yes, no = choice
        if site.knowledge.is_all_true(mask):
            chosen, dropped = yes, no
        elif site.knowledge.is_all_false(mask):
            chosen, dropped = no, yes
        else:
            return None
        if isinstance(chosen, Node) and tensor_fact(chosen) is not None:
            return site.is_operand(chosen, dropped)
        return site.is_number(chosen, dropped) if isinstance(chosen, (bool, int, float)) else None

    examples = [
        fires(_mask, "f32[4, 8]"),
        fires(_mask, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.where(torch.zeros(8, dtype=torch.bool), x.sin(), x.cos()), "f32[4, 8]"),
        fires(lambda x: x.sin().masked_fill(torch.zeros(4, 8) > 0, 2.0), "f32[4, 8]"),
        fires(lambda x: (y := x.sin(), torch.where(torch.ones(4) > 0, x, y)), "f32[4]"),
        fires(lambda x: x.masked_fill(torch.arange(4)[:, None] < 0, 2.0) * 3, "f32[4, 8]"),
        fires(lambda x: x.masked_fill(torch.arange(x.shape[0])[:, None] < 0, 2.0) * 3, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.where(torch.arange(8) - 8 < 0, x, 1.0).sin(), "f32[4, 8]"),
        fires(_triangles, "f32[6, 6]"),
        fires(_triangles, "f32[6, 6]", dynamic=True),
        fires(_one_sequence, "f32[2, 6]"),
        fires(_one_sequence, "f32[2, 6]", dynamic=True),
        declines(lambda x: x.masked_fill(torch.ones(8, 8).tril() == 0, 2.0), "f32[8, 8]"),
    ]


class ChooseTruth(DecidedOperation):
    """where(mask, true, false) -> mask; where(mask, false, true) -> not mask"""

    ops = CHOICES

    def decide(self, site: Site) -> Build | None:
        if site.result.dtype != torch.bool or (choice := _choice(site)) is None:
            return None
        mask, yes, no = choice
        if site.knowledge.is_all_true(mask) or site.knowledge.is_all_false(mask):
            return None
        numbers = site.number(yes), site.number(no)
        if numbers == (True, False):
            return site.is_operand(mask)
        if numbers == (False, True):
            return lambda op: op.expand(op.logical_not(mask), list(site.result.shape))
        return None

    examples = [
        fires(lambda x: torch.where(x > 0, True, False) & torch.where(x > 1, False, True), "f32[4, 8]"),
        declines(lambda x: torch.where(x > 0, x > 1, False), "f32[4, 8]"),
    ]


class WithinBounds(DecidedOperation):
    """clamp(x, low, high), relu(x), abs(x), maximum(x, y), minimum(x, y) -> x, where x is always within the bounds

    For floats, a bound of zero counts only where its sign cannot be seen; maximum and minimum stay, because of NaN.
    """

    ops = frozenset("clamp relu abs maximum minimum".split())

    def decide(self, site: Site) -> Build | None:
        operand: Any = site.call.args.get("self")
        fact = tensor_fact(operand)
        if fact is None or fact.dtype != site.result.dtype:
            return None
        if site.call.op in ("maximum", "minimum"):
            return _one_side_wins(site)
        bounds: dict[str, Any] = {"min": 0}
        if site.call.op == "clamp":
            limits = ((k, v) for k, v in site.call.args.items() if k in ("min", "max") and v is not None)
            bounds = {name: site.number(bound) for name, bound in limits}
        inside = all(_respects(site, operand, name, bound) for name, bound in bounds.items())
        return site.is_operand(operand) if inside else None

    examples = [
        fires(lambda x: x.sigmoid().clamp(-1, 2) + 1, "f32[4, 8]"),
        fires(lambda x: x.exp().relu() + 1, "f32[4, 8]"),
        fires(lambda x: torch.maximum(x.clamp(0, 3), torch.full_like(x, 7)) + 1, "i64[4, 8]", dynamic=True),
        fires(lambda x: torch.minimum(x.clamp(0, 3), torch.arange(4, 12)) + 1, "i64[4, 8]"),
        declines(lambda x: x.clamp(0, 1).clamp(0, 1), "f32[4, 8]"),  # of -0.0 the first may make 0.0
        declines(lambda x: torch.maximum(x.sigmoid(), torch.full((8,), -1.0)), "f32[4, 8]"),  # NaN wins
    ]


def _respects(site: Site, operand: Node, name: str, bound: Any) -> bool:
    dtype = site.result.dtype
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not representable(bound, dtype):
        return False
    about = site.knowledge.interval(operand)
    inside = about.low >= bound if name == "min" else about.high <= bound
    if bound != 0 or not dtype.is_floating_point:
        return inside
    # a clamp with a bound of zero may give the sign of the bound to a zero
    return inside and name == "min" and math.copysign(1, bound) > 0 and site.knowledge.never_negative_zero(operand)


def _one_side_wins(site: Site) -> Build | None:
    left: Any = site.call.args.get("self")
    right: Any = site.call.args.get("other")
    facts = [tensor_fact(left), tensor_fact(right)]
    if any(f is None or f.dtype != site.result.dtype or f.dtype.is_floating_point for f in facts):
        return None  # a float may be NaN, and then it wins
    a, b = site.knowledge.interval(left), site.knowledge.interval(right)
    larger = left if a.low >= b.high else right if b.low >= a.high else None
    if larger is None:
        return None
    winner = larger if site.call.op == "maximum" else (right if larger is left else left)
    return site.is_operand(winner, dropped=right if winner is left else left)


class CompareWithTruth(DecidedOperation):
    """mask == true, mask != false -> mask; mask == false, mask != true -> not mask"""

    ops = frozenset(("eq", "ne"))

    def decide(self, site: Site) -> Build | None:
        mask: Any = site.call.args.get("self")
        fact, number = tensor_fact(mask), site.number(site.call.args.get("other"))
        if fact is None or fact.dtype != torch.bool or number not in (0, 1):
            return None
        if bool(number) == (site.call.op == "eq"):
            return site.is_operand(mask)
        if known_equal(fact.shape, site.result.shape):
            return lambda op: op.logical_not(mask)
        return None

    examples = [
        fires(lambda x: ((x > 0) == True).logical_not() != False, "f32[4, 8]"),  # noqa: E712
        fires(lambda x: (x > 0) == False, "f32[4, 8]"),  # noqa: E712
        declines(lambda x: x == 1, "f32[4, 8]"),
    ]
