"""triptych::nan_rows: the result of an attention kernel, with NaN where the softmax of a row is NaN.

A softmax is NaN in a whole row if one of its scores is NaN or +inf, and if all of them are -inf. Attention kernels
give 0 where all are -inf, and those of a CPU also for some rows with NaN or +inf: for which ones depends on the number
of keys, the dtype and the instruction set.

The operator is no kernel: autograd and every code generator see the operations that it is made of.
"""

from __future__ import annotations

import math

import torch

from .registry import LIBRARY

Tensor = torch.Tensor


def nan_rows(
    result: Tensor, query: Tensor, key: Tensor, hides_later: bool = False, may_be_empty: bool = True
) -> Tensor:
    """`hides_later`: a row does not see the keys after its own, not even NaN in them. `may_be_empty`: a row is NaN if
    all its scores are -inf, which it is not beside a sink.

    The scores are not computed. Each score of a query q is at most the sum, over the width, of the higher of q times
    the lowest and q times the highest number of all keys. Unless it overflows, this sum is NaN or +inf exactly where a
    score is, and -inf only where all are.
    """
    # (batch, rows, heads, width), the order in memory of the kernel's result and mostly of the others
    result, query, key = (x.transpose(1, 2) for x in (result, query, key))
    query, key = query.to(result.dtype), key.to(result.dtype)  # as autocast rounds them for the kernel
    wide = torch.promote_types(result.dtype, torch.float32)  # products of float16 would overflow
    lowest, highest = key.amin(1, keepdim=True).to(wide), key.amax(1, keepdim=True).to(wide)
    bound = torch.maximum(query * lowest, query * highest).sum(-1, keepdim=True)
    is_nan = ~(bound.abs() < math.inf)
    if hides_later:
        finite_query, finite_key = (x.abs().amax(-1, keepdim=True) < math.inf for x in (query, key))
        count = key.shape[1]
        place = torch.arange(count, device=key.device).view(count, 1, 1)
        first = torch.where(finite_key, count, place).amin(1, keepdim=True)
        is_nan = is_nan & ((place >= first) | ~finite_query)
    if may_be_empty:
        # infinite keys also make all scores -inf at different places of the width, where a kernel gives 0
        infinite_key = torch.maximum(-lowest, highest).amax(-1, keepdim=True) == math.inf
        is_nan = is_nan | (infinite_key & (result.abs().sum(-1, keepdim=True) == 0))
    # a factor instead of a `where`, so that gradients are NaN too
    return (result * torch.where(is_nan, math.nan, 1.0).to(result.dtype)).transpose(1, 2)


LIBRARY.define(
    "nan_rows(Tensor result, Tensor query, Tensor key, bool hides_later=False, bool may_be_empty=True) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl(LIBRARY, "nan_rows", "CompositeImplicitAutograd")(nan_rows)
