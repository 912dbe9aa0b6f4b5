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


def nan_rows(result: Tensor, query: Tensor, key: Tensor, hides_later: bool = False) -> Tensor:
    """`hides_later`: a row does not see the keys after its own, not even NaN in them.

    The scores are not computed. Each score of a query q lies between two sums over the width: of the lower and of the
    higher of q times the lowest and q times the highest number of all keys. Unless it overflows, the higher sum is NaN
    or +inf exactly where a score is, and -inf only where all are. The lower sum is -inf where a score is.
    """
    query, key = query.to(result.dtype), key.to(result.dtype)  # as autocast rounds them for the kernel
    wide = torch.promote_types(result.dtype, torch.float32)  # products of float16 would overflow
    ends = [query * end.to(wide) for end in (key.amin(-2, keepdim=True), key.amax(-2, keepdim=True))]
    lowest, highest = (pick(*ends).sum(-1, keepdim=True) for pick in (torch.minimum, torch.maximum))
    is_nan = ~(highest.abs() < math.inf)
    if hides_later:
        finite_query, finite_key = (x.abs().amax(-1) < math.inf for x in (query, key))
        count = key.shape[-2]
        place = torch.arange(count, device=key.device)
        first = torch.where(finite_key, count, place).amin(-1, keepdim=True)
        is_nan = is_nan & ((place >= first) | ~finite_query).unsqueeze(-1)
    # where all scores of a row are -inf, a kernel gives 0
    is_empty = (lowest == -math.inf) & (result.abs().sum(-1, keepdim=True) == 0)
    # a factor instead of a `where`, so that gradients are NaN too
    return result * torch.where(is_nan | is_empty, math.nan, 1.0).to(result.dtype)


LIBRARY.define(
    "nan_rows(Tensor result, Tensor query, Tensor key, bool hides_later=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl(LIBRARY, "nan_rows", "CompositeImplicitAutograd")(nan_rows)
