"""fuse_attention: attention written by hand becomes scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..attention.fuse import AttentionByHand
from ..attention.layer import LayerApart, WithoutWeights
from ..attention.off_by_one import SoftmaxOffByOne
from ..attention.pointwise_products import ContractionByHand, PointwiseAgain
from ..attention.preparation import IdleRegion, ShapeOfScores, Unread, ZeroForNan
from ..attention.renormalised import MaskBeforeSoftmax
from ..attention.softmax import SoftmaxByHand
from ..attention.split_axes import BiasOfSplitAxes
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


@dataclass(frozen=True)
class FuseAttention(Pass):
    """softmax(scale * Q K^T + bias) V -> scaled_dot_product_attention, whatever it is written with: before autograd,
    so that training and inference are one problem and the choice of kernel is still open. Up to rounding.

    Rows of which all keys are masked keep what eager gives them: NaN where -inf was filled in or added, equal weights
    where a finite number was, with the gradients of eager. One gradient is not kept: where *different* finite numbers
    that swallow the scores were added to the keys of one row, as -1e9 and -2e9, that of the keys; and if scores were
    filled and scaled, or cut off below, besides, that of the queries. Where a number from -1e5 to -8e7 was added to all
    keys of a row in float32, eager rounds its scores to the spacing of such numbers, and the backward of the kernel
    rounds their sum as coarsely: the gradients of that row are off from eager's by about as much as eager's are off
    from those of float64. Where a result is NaN, which of the gradients are NaN may differ if masks of several kinds
    meet. A softmax written with logsumexp or with a bare exp is the one that rounding and overflow would have spoilt.

    A mask fills with -inf, with the lowest number of the dtype, or with another low number. The first two have no
    weight beside any score. The others have, if the scores are as low: `fuse_attention.lowest_score` says how low
    those may be that no mask covers, -1e8 by default, and a fill of twice that or less (-1e9) is a plain mask. A fill
    above it (-1e4) keeps its exact weight: a key that is masked for all queries becomes zero and its fill is added;
    where queries differ in their masks, each key is there twice. With `lowest_score` = -4e3 the latter is a plain
    mask too, which is quicker; with -inf nothing is taken for granted.

    A row that is NaN in eager because of NaN or infinity in queries or keys is NaN here too, and so are its gradients.
    The kernels of a CPU give zero for some of these rows, so `triptych::nan_rows` follows them there. Those of a GPU
    give zero only where all scores of a row are -inf because of infinite queries or keys, and are left as they are.
    Scores are taken to be finite where a mask is: NaN and infinity that a mask hides in eager may show here, and the
    other way round for a product with zeros and ones (docs/attention.md says which). Nothing divides masked scores by
    zero or multiplies them by infinity. Where NaN is set to zero after the softmax, NaN in queries or keys gives zero
    as in eager, but the gradient of the values is NaN.

    What is masked after the softmax and divided by the sum of the rest is masked before it: so the rest is not lost
    where it is too small beside what is masked. A sink beside the scores is the bias of one more key, and that and its
    value are zero.

    Under autocast a wider bias is rounded as the kernel's operands are, each by its distance from the highest of its
    row: so nothing is lost that has weight.
    """

    name: ClassVar[str] = "fuse_attention"

    lowest_score: float = -1e8
    """Assumed lower bound of the scores that no mask covers: a fill value of twice this number or less, such as -1e9,
    is then certain to have no weight. For a model whose scores are known to be small, -4e3 makes -1e4 a plain mask as
    well; -inf assumes nothing."""

    def rules(self) -> Sequence[Rule]:
        return (
            IdleRegion(),
            Unread(),
            LayerApart(),
            SoftmaxByHand(),  # the rules after it look for a softmax
            MaskBeforeSoftmax(),
            SoftmaxOffByOne(),
            ZeroForNan(),
            BiasOfSplitAxes(),
            ContractionByHand(),  # like the two rules before it, normalises the operations around a softmax
            ShapeOfScores(),
            AttentionByHand(self.lowest_score),
            PointwiseAgain(),
            WithoutWeights(),  # for the layers that LayerApart has left
        )
