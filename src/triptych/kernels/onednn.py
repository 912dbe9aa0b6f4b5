"""The operator by which torch calls oneDNN for a linear layer of any dtype; `linear` itself does so only in 16 bits."""

from __future__ import annotations

import functools
from typing import Any

import torch

Tensor = torch.Tensor


@functools.cache
def linear_operator() -> Any:
    """`mkldnn::_linear_pointwise`, of matrices of any strides; None in a build of torch without oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def linear_arguments(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    """The operator's arguments for x @ weight.t() + bias, without a function applied to the result."""
    return x, weight, bias, "none", [], ""
