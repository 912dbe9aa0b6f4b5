"""efficient_conv_bn_eval: folds batch norms with fixed statistics into the weights before them, on every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn

from ..cost import Moved, Work, read_and_written
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .conv_norm import fold, normed, operands, require_foldable, stirred

LARGE = "f32[8, 3, 64, 64]"


class AdaptWeightsToBatchNorm(Rule):
    """norm(conv(x, w, b)) -> conv(x, w * s, (b - mean) * s + beta), where s = gamma / sqrt(var + eps); up to
    rounding"""

    exact = False
    mixed_dtypes = True

    def pattern(self, op, y: Tensor, mean, var, gamma, beta, training, eps, momentum, cudnn):
        return normed(op, y, mean, var, gamma, beta, training, eps, (momentum, cudnn))

    def check(self, m):
        require_foldable(m)
        y, weight = m["y"], operands(m)[0]
        # the norm reads and writes the whole result; the folded form reads and writes the weight and computes a bias
        folded = read_and_written(weight.tensor, times=2), Moved(0.0)
        m.pays(Work.of(y.device, read_and_written(y.tensor, times=2)), Work.of(y.device, folded))

    def rewrite(self, op, m):
        return fold(op, m)

    examples = lazily(lambda: [
        fires(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), LARGE, dialects=["torch"]),
        fires(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), trained=True), LARGE, dialects=["torch"]),
        fires(lambda x, w, m: F.batch_norm(F.conv2d(x, w), m, m * m + 1), LARGE, "f32[4, 3, 3, 3]", "f32[4]",
              dialects=["torch"]),
        fires(lambda x, w, m: F.batch_norm(F.conv_transpose2d(x, w, groups=3), m, m * m + 1, m, m, eps=0.1), LARGE,
              "f32[3, 2, 3, 3]", "f32[6]", dialects=["torch"], dynamic=True),
        fires(lambda x, w, m: F.batch_norm(F.linear(x, w, m), m, m * m + 1, bias=m), "f32[4096, 8]", "f32[6, 8]",
              "f32[6]", dialects=["torch"]),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "f32[1, 3, 3, 3]", because="would cost",
                 dialects=["torch"]),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(), LARGE, because="statistics of the batch",
                 dialects=["torch"]),
        declines(lambda x, w, m: (lambda y: F.batch_norm(y, m, m * m + 1) + y)(F.conv2d(x, w)), LARGE,
                 "f32[4, 3, 3, 3]", "f32[4]", because="used elsewhere", dialects=["torch"]),
        declines(lambda x, w, m: _written(F.conv2d(x, w), w, m), LARGE, "f32[4, 3, 3, 3]", "f32[4]",
                 because="in between", dialects=["torch"]),
        declines(lambda x, w, m: F.batch_norm(F.conv2d(x, w), m, m * m + 1), "f32[3, 64, 64]", "f32[62, 3, 3, 3]",
                 "f32[62]", because="channels", dialects=["torch"]),
    ])  # fmt: skip


def _written(y: Any, w: Any, m: Any) -> Any:
    """For examples: a write that the convolution must not see."""
    w.add_(1)
    return F.batch_norm(y, m, m * m + 1)


RULES: Sequence[Rule] = (AdaptWeightsToBatchNorm(),)


@dataclass(frozen=True)
class EfficientConvBnEval(Pass):
    """Folds batch norms in eval mode into the weights of the convolution or linear layer before them, on every call. Up
    to rounding.

    The folding is part of the graph. So the pass also works in training, with gradients for all weights. It declines
    where the cost model expects no gain, which it does unless the result of the layer is larger than its weights.
    """

    name: ClassVar[str] = "efficient_conv_bn_eval"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return RULES
