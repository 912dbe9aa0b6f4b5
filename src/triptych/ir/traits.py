"""What kind of operation a canonical name stands for, read from schemas and tags where they say it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .schema import overloads, packet_tags

COMMUTATIVE = frozenset(
    "add mul maximum minimum eq ne logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor".split()
)
GEMM = frozenset(
    "matmul addmm baddbmm linear convolution conv1d conv2d conv3d einsum scaled_dot_product_attention addbmm".split()
)
REDUCTION = frozenset("sum mean amax amin prod any all var std var_mean argmax argmin logsumexp norm".split())
VIEW = frozenset(
    "reshape permute expand squeeze unsqueeze slice select split unbind getitem detach alias diagonal as_strided "
    "unfold tensor_getitem view_as_real view_as_complex".split()
)
POINTWISE = frozenset(["to", "dropout", "prims.convert_element_type", "where", "clamp", "fill", "clone", "rdiv"])


@functools.cache
def is_pointwise(op: str) -> bool:
    """One result element from the operands' elements at the same place."""
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
    found = {name for name, test in tests.items() if test(op)}
    if op.endswith("_") and not op.endswith("__"):
        found.add("mutating")
    return frozenset(found)
