"""The arithmetic of operators: which are matrix products under other names, and what operators of our own compute.

A report counts products in graphs that many passes have rewritten. A product has several spellings beside those of the
table of operations: in place, by a library's own operator, quantized. Operators that compute several products at once,
or a product and more, state their products where they are registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node, map_arg

from .facts import fact
from .sizes import elements
from .traits import is_gemm

PRODUCTS = "triptych_products"
"""The attribute of an operator of ours that has a function of its arguments, with a fact for each tensor. It gives the
products that a call computes: rows, columns, and the terms of each sum of each. A batch counts among the rows."""

WORK = "triptych_work"
"""The entry in the meta of a launch of a kernel, whose operands do not say what it computes: a `ProductCount`."""


@dataclass(frozen=True)
class ProductCount:
    """What an operation computes, beside reading and writing memory."""

    gemms: int = 0
    """Matrix products, convolutions and attentions."""
    flops: float = 0.0

    @staticmethod
    def of(products: Iterable[tuple[Any, Any, Any]]) -> ProductCount:
        flops = [2.0 * elements(product) for product in products]
        return ProductCount(sum(one > 0 for one in flops), sum(flops))

    def shared(self, parts: int) -> list[ProductCount]:
        """The work of each of several launches that compute it together."""
        gemms, more = divmod(self.gemms, parts)
        return [ProductCount(gemms + (part < more), self.flops / parts) for part in range(parts)]

    def without(self, gemms: int) -> ProductCount:
        """What is left if so many of the products are computed elsewhere."""
        left = max(0, self.gemms - gemms)
        return ProductCount(left, self.flops * left / self.gemms if self.gemms else 0.0)


def declared_work(node: Node) -> ProductCount | None:
    """What the operator of a node, or the pass that wrote the node, says that it computes; None if neither does."""
    if WORK in node.meta and is_launch(node):
        return node.meta[WORK]
    if node.op != "call_function":
        return None
    name = str(node.target)
    products = WITH_COMMUNICATION.get(name.removesuffix(".default")) or getattr(node.target, PRODUCTS, None)
    if products is None or any(fact(operand) is None for operand in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), fact)
    if name.startswith("symm_mem."):
        return ProductCount.of(products(fact(node), *args))
    return ProductCount.of(products(*args, **kwargs))


def _gathered_products(result: Any, a: Any, others: Any, *rest: Any) -> Iterable[tuple[Any, Any, Any]]:
    """Of the gathered rows with each of the matrices."""
    return [(elements(made.shape[:-1]), *b.shape[::-1]) for made, b in zip(result[1], others)]


def _scattered_product(result: Any, a: Any, b: Any, *rest: Any) -> Iterable[tuple[Any, Any, Any]]:
    return [(elements(a.shape[:-1]), *b.shape[::-1])]


WITH_COMMUNICATION: Mapping[str, Any] = {
    "symm_mem.fused_all_gather_matmul": _gathered_products,
    "symm_mem.fused_all_gather_scaled_matmul": _gathered_products,
    "symm_mem.fused_matmul_reduce_scatter": _scattered_product,
    "symm_mem.fused_scaled_matmul_reduce_scatter": _scattered_product,
}
"""Operators of torch that communicate while they multiply."""


def is_launch(node: Node) -> bool:
    """Does the node launch a Triton kernel?"""
    return str(getattr(node.target, "__name__", "")).startswith("triton_kernel_wrapper")


OTHER_PRODUCTS: Mapping[str, str] = {
    "mv": "a matrix and a vector", "dot": "two vectors", "vdot": "two vectors", "addmv": "a matrix and a vector",
    "_addmm_activation": "with an activation", "_int_mm": "of int8",
    "_scaled_mm": "of float8", "_scaled_mm_v2": "of float8", "_scaled_grouped_mm": "of float8",
    "_scaled_grouped_mm_v2": "of float8", "_grouped_mm": "of several matrices",
    "_weight_int8pack_mm": "of a packed weight", "_weight_int4pack_mm": "of a packed weight",
    "_weight_int4pack_mm_for_cpu": "of a packed weight", "_mixed_dtypes_linear": "of two dtypes",
    "_sparse_semi_structured_linear": "of a sparse weight", "_sparse_semi_structured_mm": "of a sparse weight",
    "_sparse_semi_structured_addmm": "of a sparse weight", "_cslt_sparse_mm": "of a sparse weight",
    "_linear_pointwise": "by oneDNN", "_mkl_linear": "by MKL", "qlinear_pointwise": "by oneDNN, quantized",
}  # fmt: skip
"""Products that no row of the table of operations has, most of which code generators and libraries bring."""


LIBRARIES = frozenset(("mkldnn", "mkl", "onednn"))
"""Whose operators have names such as `onednn.qlinear_pointwise` in a graph."""


def product_name(operation: str) -> str:
    """The name of a product without the mark of an in-place form; empty for other operations."""
    library, _, name = operation.removesuffix("_").rpartition(".")
    if library and library not in LIBRARIES:
        return ""
    return name if is_gemm(name) or name in OTHER_PRODUCTS else ""
