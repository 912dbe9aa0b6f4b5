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
    """Replaces attention that is written out, softmax(scale * Q K^T + bias) V, by `scaled_dot_product_attention`. Up to
    rounding.

    It reads the many ways in which attention is written. It runs before autograd, so that one rewrite serves training
    and inference, and the choice of kernel is still open. A softmax written with logsumexp or with a bare exp is
    replaced too, although the original is less accurate and may overflow.

    Rows whose keys are all masked give what eager gives: NaN where -inf was filled in or added, equal weights where a
    finite number was, and the gradients of eager, with three exceptions. First, if *different* finite numbers that
    absorb the scores, such as -1e9 and -2e9, are added to the keys of one row, the gradient of the keys differs; if
    the scores are also filled and scaled, or cut off from below, so does the gradient of the queries. Second, if a
    number from -1e5 to -8e7 is added to all keys of a row in float32, eager rounds the scores to the spacing of floats
    of that size, and the backward of the kernel rounds their sum as coarsely: the gradients of that row differ from
    those of eager by about as much as those of eager differ from float64. Third, where a result is NaN and masks of
    several kinds are combined, other gradients may be NaN than in eager.

    A mask fills scores with -inf, with the lowest number of the dtype, or with another low number. The first two have
    no weight beside any score. Another number has weight if the scores that are not masked are as low.
    `fuse_attention.lowest_score` is a lower bound for those, -1e8 by default, and a fill of twice the bound or less,
    such as -1e9, is treated as a plain mask. A higher fill, such as -1e4, keeps its exact weight: if a key is masked
    for all queries, the key is set to zero and the fill is added as a bias; if the queries have different masks, the
    kernel gets each key twice, unchanged and as zero. With `lowest_score` = -4e3, -1e4 is a plain mask too, which is
    faster; with -inf nothing is assumed.

    A row that is NaN in eager because of NaN or infinity in queries or keys is NaN here too, and so are its gradients.
    The kernels of a CPU give zero for some of these rows, so `triptych::nan_rows` sets them to NaN there. Those of a
    GPU give zero only where all scores of a row are -inf because of infinite queries or keys, and are left as they are.
    Scores under a mask are assumed to be finite: NaN and infinity that a mask hides in eager may show here, and the
    other way round for a product with zeros and ones (docs/attention.md says which). Scores are also assumed not to be
    divided by zero or multiplied by infinity.

    If probabilities are masked after the softmax and divided by the sum of the others, the scores are masked before
    the softmax instead, which keeps probabilities that would underflow beside the masked ones. A sink beside the scores
    becomes the bias of one more key; this key and its value are zero. Where NaN is set to zero after the softmax, NaN
    in queries or keys gives zero as in eager, but the gradient of the values is NaN.

    Under autocast, a bias of a wider dtype is rounded to the dtype of the kernel's operands after the highest number
    of its row is subtracted. So the numbers that have weight, which are near the highest, are hardly rounded.
    """

    name: ClassVar[str] = "fuse_attention"

    lowest_score: float = -1e8
    """Assumed lower bound of the scores that are not masked: a fill value of twice this number or less, such as -1e9,
    then has no weight. For a model whose scores are known to be small, -4e3 makes -1e4 a plain mask as
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
