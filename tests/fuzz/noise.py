"""Eager with rounding noise in every operation: a result that this changes says nothing about a compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NOISE = 16.0
"""Roundings added per operation: another order of a sum, or a wider intermediate, costs a few."""
EXACT = {
    "clone", "copy_", "cat", "stack", "index", "index_select", "gather", "where", "fill_", "zero_", "zeros", "ones", "full", "arange",
    "eye", "zeros_like", "ones_like", "full_like", "empty", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "rand", "randn",
    "rand_like", "randn_like", "relu", "relu_", "neg", "abs", "flip", "roll", "masked_fill", "masked_fill_", "maximum", "minimum", "amax",
    "amin", "sign", "lift_fresh", "lift_fresh_copy", "scalar_tensor", "repeat", "constant_pad_nd", "select_scatter", "slice_scatter",
    "index_put", "index_put_", "scatter", "scatter_", "set_", "resize_", "max", "min", "sort", "topk", "clamp", "clamp_", "bernoulli", "bernoulli_",
    "slice_backward", "select_backward", "threshold_backward", "new_empty_strided", "empty_strided", "linspace",
}  # fmt: skip
"""Operations that move or choose numbers."""


class Noise(TorchDispatchMode):
    def __init__(self, seed: int, roundings: float = NOISE) -> None:
        super().__init__()
        self.roundings = roundings
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] in EXACT:
            return result
        results = result if isinstance(result, (tuple, list)) else [result]
        for value, declared in zip(results, func._schema.returns):
            alias = declared.alias_info
            if isinstance(value, Tensor) and value.is_floating_point() and (alias is None or alias.is_write):
                self.disturb(value)
        return result

    def disturb(self, value: Tensor) -> None:
        if not value.numel():
            return
        # where one element stands for many, all of them get the same noise
        places = [slice(0, 1) if step == 0 else slice(None) for step in value.stride()]
        elements = value[tuple(places)] if places else value
        noise = torch.randn(elements.shape, generator=self.generator, dtype=torch.float64)
        elements.copy_(elements.double() * (1 + self.roundings * torch.finfo(value.dtype).eps * noise))
