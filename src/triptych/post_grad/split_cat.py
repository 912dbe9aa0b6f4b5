"""`splitwithsizes_cat_replace`, `cat_splitwithsizes_replace`, `cat_slice_cat`: splits and cats from autograd.

These are rules of stage 1, applied to the backward: the gradient of a cat is a split, and that of a split is a
cat.
"""

from __future__ import annotations

from typing import Any

import torch

from ..match.pattern import Tensor
from ..pieces.rule import PutTogether
from ..pre_grad.remove_split_ops_pass import PieceOfACat
from ..rewrite.examples import declines, fires

ATEN: dict[str, Any] = {"dialects": ("aten",)}


class SplitwithsizesCatReplace(PutTogether):
    """cat(split_with_sizes(x, sizes, d), d) -> x, or a copy of it"""

    joins = ("cat",)
    taken = frozenset(["split"])
    whole = True
    alone = True

    examples = [
        fires(lambda x: torch.cat(x.split([2, 3, 1], 1), 1) * 2, "f32[4, 6]", **ATEN),
        fires(lambda x: torch.cat(x.split([2, 3, 1], 1), 1), "f32[4, 6]", **ATEN),
        fires(lambda x: torch.cat(x.split([2, x.shape[1] - 2], -1), -1) * 2, "f32[4, 6]", dynamic=True, **ATEN),
        fires(lambda x: torch.cat(x.split([0, 4])) + 1, "bf16[4, 0]", **ATEN),
        declines(lambda x: torch.cat(x.split([2, 3, 1], 1)[:2], 1) * 2, "f32[4, 6]", **ATEN),
        declines(lambda x: (lambda a, b: torch.cat([b, a], 1) * 2)(*x.split([2, 4], 1)), "f32[4, 6]",
                 because="side by side", **ATEN),
        declines(lambda x, y: torch.cat([*x.split([2, 4], 1), y], 1) * 2, "f32[4, 6]", "f32[4, 1]", **ATEN),
    ]  # fmt: skip


class CatSplitwithsizesReplace(PieceOfACat):
    """split_with_sizes(cat([a, b], d), [size of a, size of b], d)[0] -> a"""

    def pattern(self, op, x: Tensor, sizes, dim, i):
        return op.split(x, sizes, dim=dim)[i]

    examples = [
        fires(lambda x, y: [p * 2 for p in torch.cat([x, y]).split([2, 3])], "f32[2, 4]", "f32[3, 4]", **ATEN),
        fires(lambda x, y: [p * 2 for p in torch.cat([x, y], 1).split([1, 1, 4], -1)], "f32[3, 2]", "f32[3, 4]",
              **ATEN),
        fires(lambda x, y: torch.cat([x, y]).split([x.shape[0], y.shape[0]])[1] * 2, "f32[2, 4]", "f32[3, 4]",
              dynamic=True, **ATEN),
        declines(lambda x, y: [p * 2 for p in torch.cat([x, y, x]).split([3, 3])], "f32[2, 4]", "f32[2, 4]", **ATEN),
        declines(lambda x, y, e: [p * 2 for p in torch.cat([x, y, e]).split([2, 3])], "f32[2, 4]", "f32[3, 4]",
                 "f64[0, 4]", **ATEN),
        declines(lambda x, y: torch.cat([x, y]).split([2, 3]), "f32[2, 4]", "f32[3, 4]", because="leaves the graph",
                 **ATEN),
    ]  # fmt: skip


class CatSliceCat(PieceOfACat):
    """cat([c, slice(c, n)]), where c = cat([a, b]) -> cat([c, slice(a, n)]), and `cat_of_cat` then drops c"""

    def pattern(self, op, x: Tensor, dim, start, end, step):
        return op.slice(x, dim=dim, start=start, end=end, step=step)

    def check(self, m, x):
        super().check(m, x)
        users = [user.call for user in m.root.users]
        joined = users and all(call is not None and call.op == "cat" for call in users)
        m.applies(joined, "its users do not all concatenate it")

    examples = [
        fires(lambda a, b: (lambda c: torch.cat([c, c[:, :2]], 1))(torch.cat([a, b], 1)), "f32[4, 3]", "f32[4, 5]",
              **ATEN),
        fires(lambda a, b: (lambda c: torch.cat([c, c[:, -2:], a], 1))(torch.cat([a, b], 1)), "i64[4, 3]", "i64[4, 5]",
              **ATEN),
        fires(lambda a, b: (lambda c: torch.cat([c, c[: a.shape[0]]]))(torch.cat([a, b])), "f32[4, 3]", "f32[2, 3]",
              dynamic=True, **ATEN),
        declines(lambda a, b: (lambda c: torch.cat([c, c[:, 2:5]], 1))(torch.cat([a, b], 1)), "f32[4, 3]", "f32[4, 5]",
                 **ATEN),
        declines(lambda a, b: torch.cat([a, b], 1)[:, :2] * 2, "f32[4, 3]", "f32[4, 5]", **ATEN),
        declines(lambda a, b: (lambda c: torch.cat([c, c[:, :2]], 1))(torch.cat([a, b], 1)), "f32[4, 3]", "f64[4, 5]",
                 **ATEN),
    ]  # fmt: skip
