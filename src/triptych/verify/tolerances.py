"""Tolerances by dtype, and the comparator that the verifier and the tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of one element: relative * |element| + scaled * max|tensor| + group * max|all tensors|.

    - `relative` covers the rounding of one value.
    - `scaled` covers cancellation: an element near zero carries the rounding error of the large terms it was summed
      from. It is relative to the tensor's largest element: with an absolute limit, a tensor of small gradients would
      pass whatever it holds.
    - `group` covers a tensor that is zero except for rounding (a key's bias under softmax, a bias before a batch norm):
      its noise is relative to the other tensors that are compared together with it.
    """

    relative: float
    scaled: float = 0.0
    group: float = 0.0


EXACT = Tolerance(0.0)

PROGRAM = {
    torch.float64: Tolerance(1e-9, 1e-10, 1e-12),
    torch.float32: Tolerance(1e-4, 1e-5, 1e-6),
    torch.float16: Tolerance(5e-3, 5e-3, 1e-3),
    torch.bfloat16: Tolerance(2e-2, 2e-2, 1e-2),
    torch.complex64: Tolerance(1e-4, 1e-5, 1e-6),
    torch.complex128: Tolerance(1e-9, 1e-10, 1e-12),
}
"""A whole program, eager and compiled. float32 rounds at 6e-8. Sums taken in another order, through a few layers, were
seen to differ by 1e-6 of the largest element, and by 1e-5 in the gradients of a batch norm. An attention scale that is
5 % off changes the models of the tests by 2e-3 and more. The limits are between the two, closer to the rounding."""

VERIFIED = {
    torch.float64: Tolerance(1e-9, 1e-10, 1e-11),
    torch.float32: Tolerance(1e-4, 1e-5, 1e-6),
    torch.float16: Tolerance(1e-2, 1e-3, 1e-4),
    torch.bfloat16: Tolerance(4e-2, 4e-3, 4e-4),
}
"""A graph before and after a pass, on random inputs, where no float64 run shows how much error is due to rounding."""

REWRITE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
"""One rewrite of a rule that is not exact, on the small inputs of its examples: a sum in another order."""

GRADIENT = {
    torch.float64: Tolerance(1e-9, 1e-9),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(4e-3, 4e-3),
    torch.bfloat16: Tolerance(2e-2, 2e-2),
    torch.complex64: Tolerance(1e-5, 1e-5),
    torch.complex128: Tolerance(1e-9, 1e-9),
}
"""The gradients of one rewrite, exact or not: autograd adds them up in the order of the graph."""


def largest(value: Any) -> float:
    """The largest finite magnitude of a floating-point or complex tensor; 0 of anything else."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(magnitude(value).nan_to_num(0.0, 0.0, 0.0).max())


def difference(
    want: torch.Tensor, got: torch.Tensor, tolerance: Tolerance, scale: float | None = None, group: float = 0.0
) -> str:
    """Describes where two tensors of one dtype and shape differ by more than the tolerance; empty if nowhere.

    NaN equals NaN. `scale` takes the place of the tensor's largest element, `group` is that of all tensors compared.
    """
    if not want.numel():
        return ""
    size = magnitude(want).nan_to_num(nan=0.0, posinf=0.0)
    scale = largest(want) if scale is None else scale
    return beyond(want, got, tolerance.relative * size + tolerance.scaled * scale + tolerance.group * group)


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    return _wide(tensor).abs()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)


def beyond(want: torch.Tensor, got: torch.Tensor, allowed: Any, truth: torch.Tensor | None = None) -> str:
    """Describes where `got` differs from the truth (by default `want`) by more than allowed; empty if nowhere.

    Elements that are equal in both never differ: neither equal infinities nor NaN in the same place.
    """
    was, now = _wide(want), _wide(got)
    truth = was if truth is None else _wide(truth)
    error = (now - truth).abs()
    error[(now == was) | (now.isnan() & was.isnan())] = 0.0
    if truth is not was:  # where all three overflow, the kind of overflow does not matter
        error[~was.isfinite() & ~truth.isfinite() & ~now.isfinite()] = 0.0
    if not (want.is_floating_point() or want.is_complex()):
        error = (want != got).double()  # float64 cannot represent all int64 values
    excess = error.nan_to_num(nan=math.inf, posinf=math.inf) - allowed
    if not bool((excess > 0).any()):
        return ""
    worst = int(excess.flatten().argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    limit = allowed.expand_as(error).flatten()[worst].item() if isinstance(allowed, torch.Tensor) else allowed
    return (
        f"{now.flatten()[worst].item():.6g} at {place}, expected {was.flatten()[worst].item():.6g} "
        f"({int((excess > 0).sum())} of {want.numel()} elements are off by more than {limit:.2g})"
    )
