"""fuse_conv_bn: folds batch norms with fixed statistics into the weights before them, where the folded weights are
computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn

from ..ir.program import Value
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .conv_norm import fold, normed, operands, require_foldable, stirred

FROZEN: dict[str, Any] = {"dialects": ["torch"], "options": {"freeze": True}}


class _Twice(nn.Sequential):
    """For examples: one convolution, before two norms."""

    def __init__(self) -> None:
        super().__init__(*stirred(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)))

    def forward(self, x: Any) -> Any:
        conv, one, two = self
        return two(conv(one(conv(x))))


class FoldBatchNorm(Rule):
    """norm(conv(x, w, b)) -> conv(x, w * s, (b - mean) * s + beta), where s = gamma / sqrt(var + eps); up to
    rounding"""

    exact = False
    mixed_dtypes = True

    def pattern(self, op, y: Tensor, mean, var, gamma, beta, training, eps, momentum, cudnn):
        return normed(op, y, mean, var, gamma, beta, training, eps, (momentum, cudnn))

    def check(self, m):
        require_foldable(m)
        m.require(m.program.options.freeze, "the weights are not promised to be constant: see the option freeze")
        m.require(not m.program.is_training, "autograd records gradients")
        twice = "{at} is used elsewhere, by {found}, so that both it and the folded weight would be stored"
        m.require_no_other_user(m["y"].call.args["weight"], m["y"].node, twice)
        nodes = [v.node for v in operands(m) if isinstance(v, Value)]
        dependent = next((n for n in nodes if not m.program.computed_once(n)), None)
        m.require(dependent is None, "not computed from weights alone: it would be folded on every call", at=dependent)

    def rewrite(self, op, m):
        return fold(op, m)

    examples = lazily(lambda: [
        fires(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "f32[2, 3, 6, 6]", **FROZEN),
        fires(stirred(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), "f32[2, 3, 6, 6]", **FROZEN),
        fires(stirred(nn.Conv2d(4, 4, 3, groups=2, padding=1), nn.BatchNorm2d(4, affine=False)), "f32[2, 4, 6, 6]",
              **FROZEN),
        fires(stirred(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)), "f32[2, 4, 6, 6]", **FROZEN),
        fires(stirred(nn.Conv1d(3, 4, 3, stride=2), nn.BatchNorm1d(4, eps=0.1)), "f32[2, 3, 9]", **FROZEN),
        fires(stirred(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)).double(), "f64[2, 3, 4, 4, 4]", **FROZEN),
        fires(stirred(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)), "f32[2, 3, 6, 6]", **FROZEN),
        fires(stirred(nn.ConvTranspose1d(4, 6, 3, groups=2), nn.BatchNorm1d(6)), "f32[2, 4, 6]", **FROZEN),
        fires(stirred(nn.Conv2d(3, 4, 3, padding="same"), nn.Identity(), nn.BatchNorm2d(4), nn.ReLU()),
              "f32[2, 3, 6, 6]", dynamic=True, **FROZEN),
        fires(stirred(nn.Linear(3, 4), nn.BatchNorm1d(4)), "f32[5, 3]", **FROZEN),
        declines(stirred(nn.Linear(3, 4), nn.BatchNorm1d(5)), "f32[2, 5, 3]", because="channels", **FROZEN),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "f32[2, 3, 6, 6]", because="promised",
                 dialects=["torch"]),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), trained=True), "f32[2, 3, 6, 6]", because="gradients",
                 **FROZEN),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), "f32[2, 3, 6, 6]",
                 because="statistics of the batch", **FROZEN),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(), "f32[2, 3, 6, 6]",
                 because="statistics of the batch", **FROZEN),
        declines(stirred(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), "f32[2, 3, 6, 6]", **FROZEN),
        declines(lambda x, w, m: (lambda y: F.batch_norm(y, m, m * m + 1) + y)(F.conv2d(x, w)), "f32[2, 3, 6, 6]",
                 "f32[4, 3, 3, 3]", "f32[4]", because="used elsewhere", **FROZEN),
        declines(lambda x, w, m: F.batch_norm(F.conv2d(x, w), m, m * m + 1), "f32[2, 3, 6, 6]", "f32[4, 3, 3, 3]",
                 "f32[4]", because="every call", **FROZEN),
        declines(_Twice(), "f32[2, 4, 6, 6]", because="both it and the folded weight would be stored", **FROZEN),
    ])  # fmt: skip


RULES: Sequence[Rule] = (FoldBatchNorm(),)


@dataclass(frozen=True)
class FuseConvBn(Pass):
    """Folds batch norms in eval mode into the weights of the convolution or linear layer before them, if the option
    `freeze` promises that the weights stay constant. Up to rounding.

    The weights are folded once, so that a call computes nothing of the norm. The pass declines where autograd records
    gradients, and where the weight is used elsewhere too.
    """

    name: ClassVar[str] = "fuse_conv_bn"

    def rules(self) -> Sequence[Rule]:
        return RULES
