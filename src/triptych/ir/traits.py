"""What kind of operation a canonical name stands for, by the table of operations and torch's schemas and tags."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .operations import with_trait
from .schema import overloads, packet_tags

COMMUTATIVE, GEMM, REDUCTION = with_trait("commutative"), with_trait("gemm"), with_trait("reduction")
VIEW, POINTWISE = with_trait("view"), with_trait("pointwise")


@functools.cache
def is_pointwise(op: str) -> bool:
    """Does each element of the result come from the operands' elements at the same position?"""
    if op in POINTWISE:
        return True
    return bool(overloads(op)) and all(
        "pointwise" in {str(t).rpartition(".")[2] for t in s.overload.tags} for s in overloads(op)
    )


def is_commutative(op: str) -> bool:
    return op in COMMUTATIVE


def is_gemm(op: str) -> bool:
    return op in GEMM


@functools.cache
def is_reduction(op: str) -> bool:
    return op in REDUCTION or "reduction" in packet_tags(op)


@functools.cache
def is_view(op: str) -> bool:
    """The result may share its operand's memory."""
    if op in VIEW:
        return True
    return any(
        r.alias_info is not None and not r.alias_info.is_write
        for s in overloads(op)
        for r in s.overload._schema.returns
    )


@functools.cache
def is_random(op: str) -> bool:
    return "nondeterministic_seeded" in packet_tags(op)


def traits(op: str) -> frozenset[str]:
    """All traits of an operation by name."""
    tests: dict[str, Callable[[str], bool]] = {
        "pointwise": is_pointwise, "commutative": is_commutative, "gemm": is_gemm, "reduction": is_reduction,
        "view": is_view, "random": is_random,
    }  # fmt: skip
    names = {name for name, test in tests.items() if test(op)}
    if op.endswith("_") and not op.endswith("__"):
        names.add("mutating")
    return frozenset(names)
