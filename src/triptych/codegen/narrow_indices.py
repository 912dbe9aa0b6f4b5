"""Integers that Inductor computes as expressions of sizes and indices, in dtypes that do not represent all of them.

Inductor takes `arange`, a fill with a symbolic number, and what is computed from them for expressions without limits,
and lets every cast pass: `torch.arange(3, 7).to(torch.bool).sum()` is 18 there, `torch.full((4,), n, dtype=torch.bool)`
has n in it, and integers neither wrap around in 8 bits nor are rounded in 16. Here an expression ends at the operation
whose result the dtype may not represent: that operation is computed, as it is for any other tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _private

WIDE = (torch.int64, torch.float64)
"""No size and no index is beyond these."""


def only_what_fits(
    propagate: Callable[..., Any], indices: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`IndexPropagation.propagate_sympy`, which is given as `propagate`."""
    result = propagate(indices, name, args, kwargs)
    if not result.is_symbolic or _represents_all(result.value, indices.var_to_range):
        return result
    if name != "index_expr":
        return indices.fallback(name, args, kwargs)
    expression, dtype = args
    # vectors of indices are counted up in their dtype, where every step would be rounded
    wide = indices.fallback(name, (expression, torch.int64), {})
    return indices.fallback("to_dtype", (wide, dtype), {"src_dtype": torch.int64})


def _represents_all(value: Any, ranges: Any) -> bool:
    """Does the dtype of an expression represent every number that it may be? Sizes are taken to fit into 32 bits."""
    if value.dtype in WIDE or value.is_constant():
        return True
    bounds = _private.bound_sympy(value.expr, dict(ranges))
    if bounds.is_bool:
        return True
    least, most = limits(value.dtype)
    unbounded = value.dtype == torch.int32 and not (bounds.upper.is_finite and bounds.lower.is_finite)
    return unbounded or bool(least <= bounds.lower and bounds.upper <= most)


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """A dtype represents all integers from the first to the second."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        most = int(2 / torch.finfo(dtype).eps)
        return -most, most
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
