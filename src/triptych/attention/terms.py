"""The normal form of an attention: queries, keys and values, and the terms between their two products.

`read` returns it, `plan` folds the terms one after the other, `emit` never sees them. A term says what an operation
does to the scores, however it is written: `masked_fill(s, m, -1e9)` and `where(m, -1e9, s)` are the same `Mask`. Terms
refer to nodes that are in the graph already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from .contraction import Contraction
from .layout import BatchStep, Layout
from .sinks import Joined


@dataclass(frozen=True)
class ScoreType:
    """What is known of scores or probabilities at one place between the two products."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class Term:
    """One step between the two products."""

    before: ScoreType
    """The type of the scores or probabilities that the step is applied to."""
    node: Node
    """The operation it was read from, which a refusal names."""


# ---- on the scores, between the first product and the softmax; the first four on the probabilities too ----


@dataclass(frozen=True)
class Scale(Term):
    """Times one number."""

    number: float


@dataclass(frozen=True)
class Factor(Term):
    """Times a tensor, or a number known at run time; or divided by it."""

    factor: Node
    divide: bool = False


@dataclass(frozen=True)
class View(Term):
    """Axes in another order, or another shape."""

    call: Call
    shape: tuple[Any, ...]
    """The shape afterwards."""
    step: BatchStep | None
    """The change of the batch axes, which must be made to queries, keys and values too."""


@dataclass(frozen=True)
class Cast(Term):
    """Another dtype."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Bias(Term):
    """Plus `times` a tensor."""

    bias: Node
    times: float
    summed_in: torch.dtype
    """The dtype of the sum."""


@dataclass(frozen=True)
class Shift(Term):
    """One number added to all scores of a row, which does not change the softmax."""

    summed_in: torch.dtype
    is_own_maximum: bool = False
    """The highest score of the row is subtracted: a row that is -inf everywhere becomes NaN."""


@dataclass(frozen=True)
class Mask(Term):
    """One low number in place of some scores."""

    mask: Node
    masks_out: bool
    """The mask is true where a score is replaced, and not where it stays."""
    fill: float
    """The number, rounded to the dtype of the scores."""


@dataclass(frozen=True)
class CutOff(Term):
    """The scores are clamped at the lowest finite number of the dtype: -inf is raised to it."""

    lowest: float


@dataclass(frozen=True)
class Sink(Term):
    """A further column of scores, which has no key."""

    joined: Joined


# ---- on the probabilities alone, between the softmax and the second product ----


@dataclass(frozen=True)
class DropSink(Term):
    """A slice of the probabilities, which must keep all but the sink's."""

    call: Call
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class Dropout(Term):
    """Some probabilities are set to zero at random and the others scaled."""

    rate: float


@dataclass(frozen=True)
class ZeroWhere(Term):
    """Zero in place of some probabilities."""

    mask: Node
    masks_out: bool


@dataclass(frozen=True)
class NanToZero(Term):
    """Zero in place of NaN."""


# ---- the whole ----


@dataclass(frozen=True)
class Attention:
    """softmax(terms of Q K^T), and terms of that, times V."""

    softmax: Node
    product: Contraction
    """Queries left, keys right."""
    query: str | None
    """The label of the axis of queries in the product; None: there is one query, and no axis for it."""
    key: str
    """The label of the axis of keys."""
    values: Contraction
    """Probabilities left, values right."""
    result: Node
    """The node that the attention replaces: the product with the values, or a reshape of it."""
    score_terms: Sequence[Term]
    probability_terms: Sequence[Term]
    scores: ScoreType
    """The softmax's operand, in the dtype that the softmax computes in."""
    probabilities: ScoreType
    """The second product's operand."""
    covered: Sequence[Node]
    """The nodes whose work the attention does."""

    @property
    def layout(self) -> Layout:
        """The axes of the first product."""
        return product_layout(self.product, self.query, self.key)


def product_layout(product: Contraction, query: str | None, key: str) -> Layout:
    axes = product.result_axes
    batch = tuple(d for d, a in enumerate(axes) if a not in (query, key))
    return Layout(batch, None if query is None else axes.index(query), axes.index(key))
