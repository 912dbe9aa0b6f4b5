"""triptych::int_mm_mul: a product of int8 matrices multiplied by scales, where the int32 product is never written.

    y = a @ b, summed in int32 and rounded to dtypes[0]
    y = y * scales[i], rounded to dtypes[i + 1]; for each scale, in order

Every scale is broadcast to the result. Multiplications are computed in float32, as torch computes them for 16-bit
dtypes too, so with these roundings the result has the bits of torch's own sequence of operations. Dtypes are given by
name ("bfloat16"), because torch does not support lists of dtypes in all that it does with operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import KERNEL_DTYPES, Product, check, gradients_of, register, triton_is_there

Tensor = torch.Tensor

LARGEST_INNER = (2**31 - 1) // 2**14
"""A sum of this many products of int8 numbers fits in int32, whatever the numbers are. Kernels differ in what they do
with a sum that does not: some wrap around, others stop at the largest number."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def _check(a: Tensor, b: Tensor, scales: Sequence[Tensor], dtypes: Sequence[str]) -> None:
    from ..ir.facts import known_equal  # not with the operators, which `import triptych` registers

    check(a.dim() == b.dim() == 2, lambda: "int_mm_mul takes two matrices")
    check(a.dtype == b.dtype == torch.int8, lambda: f"the matrices are int8, not {a.dtype} and {b.dtype}")
    check(a.shape[1] == b.shape[0], lambda: f"a has {a.shape[1]} columns, b {b.shape[0]} rows")
    check(len(scales) > 0, lambda: "int_mm_mul takes at least one scale")
    check(len(dtypes) == len(scales) + 1, lambda: "one dtype for the product and one for each scale")
    check(all(name in DTYPES for name in dtypes), lambda: f"the result is one of {', '.join(DTYPES)}, not {dtypes}")
    for scale in scales:
        check(scale.dim() <= 2 and scale.is_floating_point(), lambda: "every scale has floats, in at most two dims")
        for size, wanted in zip(reversed(scale.shape), (b.shape[1], a.shape[0])):
            if not known_equal(size, 1):
                check(size == wanted, lambda: "a scale has another shape than the product")


def anywhere(a: Tensor, b: Tensor, scales: Sequence[Tensor], dtypes: Sequence[str]) -> Tensor:
    _check(a, b, scales, dtypes)
    first, *others = (DTYPES[name] for name in dtypes)
    y = torch.ops.aten._int_mm.default(a, b).to(first)
    for scale, dtype in zip(scales, others):
        wide = torch.promote_types(torch.promote_types(y.dtype, scale.dtype), torch.float32)
        y = (y.to(wide) * scale.to(wide)).to(dtype)
    return y


def multiplies_int8(device: torch.device) -> bool:
    """Does Triton multiply int8 matrices on this GPU? Not on those older than Ampere."""
    if not triton_is_there():
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernel(a: Tensor, b: Tensor, scales: Sequence[Tensor], dtypes: Sequence[str]) -> bool:
    """Does the Triton kernel compute this?"""
    on_gpu = all(t.is_cuda for t in (a, b, *scales)) and multiplies_int8(a.device)
    floats = {*map(DTYPES.get, dtypes), *(scale.dtype for scale in scales)}
    return on_gpu and floats <= {*KERNEL_DTYPES} and a.shape[1] <= LARGEST_INNER


def cuda(a: Tensor, b: Tensor, scales: Sequence[Tensor], dtypes: Sequence[str]) -> Tensor:
    _check(a, b, scales, dtypes)
    if not has_kernel(a, b, scales, dtypes):
        return anywhere(a, b, scales, dtypes)
    from .triton_int_mm_mul import launch

    return launch(a, b, scales, [DTYPES[name] for name in dtypes])


def fake(a: Tensor, b: Tensor, scales: Sequence[Tensor], dtypes: Sequence[str]) -> Tensor:
    _check(a, b, scales, dtypes)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=DTYPES[dtypes[-1]])


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, scales, ctx.dtypes = inputs
    ctx.save_for_backward(a, b, *scales)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Integers have no gradient; scales have one, for which the product is recomputed with torch. Passes emit the
    operator after autograd, so this is only for users who call the operator directly."""
    a, b, *scales = ctx.saved_tensors
    wanted = [i for i, scale in enumerate(scales) if scale.requires_grad]

    def result(*scales: Any) -> Tensor:
        return anywhere(a, b, scales, ctx.dtypes)

    return None, None, gradients_of(result, scales, wanted, grad), None


def products(a: Tensor, b: Tensor, *others: Any) -> list[Product]:
    return [(a.shape[0], b.shape[1], a.shape[1])]


register(
    "int_mm_mul(Tensor a, Tensor b, Tensor[] scales, str[] dtypes) -> Tensor",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=products,
)  # fmt: skip
