"""Registers our operators: for each a schema, an implementation for any device, one for CUDA, a fake implementation,
and its gradient."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import _private

Product = tuple[Any, Any, Any]
"""A matrix product: rows, columns, and the terms of each sum; sizes may be symbols. A batch counts among the rows."""

LIBRARY = torch.library.Library("triptych", "FRAGMENT")

# torch notes the line of each registration. To find it, `inspect` would search all modules for the one of this file
getattr(inspect, "modulesbyfile", {}).setdefault(__file__, __name__)

CUDA_FORMS: dict[str, Callable[..., Any]] = {}
"""The CUDA implementations, by the name of the operator."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels support; for other dtypes the implementation for any device runs."""


def register(
    schema: str,
    *,
    anywhere: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., None],
    products: Callable[..., Iterable[Product]],
) -> None:
    """`anywhere` is the definition of the operator: what `cuda` computes is the same up to rounding. `products` are the
    matrix products that it computes, for reports."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")(anywhere)
    torch.library.impl(LIBRARY, name, "CUDA")(cuda)
    torch.library.register_fake(f"triptych::{name}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"triptych::{name}", backward, setup_context=save, lib=LIBRARY)
    CUDA_FORMS[name] = cuda
    getattr(torch.ops.triptych, name).default.triptych_products = products  # where reports look for it


def check(condition: Any, message: Callable[[], str]) -> None:
    """Requires that a condition on an operator's arguments holds. A condition on symbolic sizes is passed to torch's
    own check, which is slow; this runs on every call of an operator, most often with a plain True."""
    if condition is not True:
        _private.check(condition, message)


def no_products(*operands: Any) -> tuple[Product, ...]:
    """For operators that only sum, copy or calculate element by element."""
    return ()


def rows_of(x: torch.Tensor) -> int:
    """How many vectors a tensor consists of, all its dimensions but the last."""
    return math.prod(x.shape[:-1])


def gradients_of(
    definition: Callable[..., Any], tensors: Sequence[torch.Tensor | None], wanted: Sequence[int], grads: Any
) -> list[torch.Tensor | None]:
    """The gradients of `definition(*tensors)`, one for each tensor: None for those whose places are not in `wanted`.

    For operators whose gradient is that of their definition. The definition gets views of the tensors: a tensor that is
    passed twice then gets two gradients, and one from which another was computed gets none by way of that other.
    """
    again = torch.is_grad_enabled()  # a second derivative is wanted
    with torch.enable_grad():
        views = [None if t is None else t.view_as(t) for t in tensors]
        results = definition(*views)
    inputs: list[Any] = [views[i] for i in wanted]
    gradients: list[torch.Tensor | None] = [None] * len(tensors)
    for i, gradient in zip(wanted, torch.autograd.grad(results, inputs, grads, create_graph=again, allow_unused=True)):
        gradients[i] = gradient
    return gradients


@functools.cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_gpu(*tensors: torch.Tensor | None) -> bool:
    """Do Triton kernels run on these?"""
    given = [t for t in tensors if t is not None]
    dtype = given[0].dtype
    return dtype in KERNEL_DTYPES and triton_is_there() and all(t.is_cuda and t.dtype == dtype for t in given)


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact to float32 unless the user allows TF32."""
    if dtype != torch.float32:
        return "tf32"  # of no meaning for 16-bit operands
    from ..cost.device import tf32_is_allowed  # not with the operators, which `import triptych` registers

    return "tf32" if tf32_is_allowed() else "ieee"
