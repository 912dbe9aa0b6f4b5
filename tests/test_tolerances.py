"""The comparator of verification and tests: what it lets pass, and what it does not."""

from __future__ import annotations

import math

import pytest
import torch

from triptych.verify.tolerances import (
    EXACT,
    GRADIENT,
    PROGRAM,
    REWRITE,
    VERIFIED,
    Tolerance,
    beyond,
    difference,
    largest,
)

pytestmark = pytest.mark.fast

INFINITY = math.inf


def test_what_is_the_same_is_never_off():
    want = torch.tensor([math.nan, INFINITY, -INFINITY, -0.0, 1.0])
    assert not difference(want, want.clone(), EXACT)
    assert not difference(torch.empty(0), torch.empty(0), EXACT)


@pytest.mark.parametrize("got", [[math.nan, 1.0], [INFINITY, math.nan], [INFINITY, 2.0], [-INFINITY, 1.0]])
def test_other_values_are(got):
    assert difference(torch.tensor([INFINITY, 1.0]), torch.tensor(got), Tolerance(0.1, 0.1, 0.1), group=1.0)


def test_integers_are_compared_exactly():
    """Two that float64 does not tell apart."""
    want = torch.tensor([2**53, 5])
    assert "1 of 2 elements" in difference(want, want + torch.tensor([1, 0]), EXACT)
    assert difference(torch.tensor([True]), torch.tensor([False]), EXACT)


def test_the_three_parts_of_a_tolerance():
    want, got = torch.tensor([100.0, 0.0]), torch.tensor([100.0, 0.5])
    assert difference(want, got, Tolerance(0.1))
    assert not difference(want, got, Tolerance(0.0, scaled=0.01))
    assert difference(want, got, Tolerance(0.0, scaled=0.01), scale=1.0)
    assert difference(want, got, Tolerance(0.0, group=0.01)) and not difference(want, got, Tolerance(0, 0, 0.01), group=60)
    assert "0.5 at (1,), expected 0" in difference(want, got, EXACT)


def test_an_error_is_measured_from_the_truth():
    want, got, truth = torch.tensor([1.0]), torch.tensor([1.2]), torch.tensor([1.1], dtype=torch.float64)
    assert beyond(want, got, 0.15) and not beyond(want, got, 0.15, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_no_set_of_tolerances_is_below_rounding_or_lax(dtype):
    """Each allows a few roundings, and none a tenth of the value."""
    for limits in (PROGRAM, VERIFIED, REWRITE, GRADIENT):
        assert 2 * torch.finfo(dtype).eps < limits[dtype].relative + limits[dtype].scaled < 0.1
        assert limits[dtype].group <= limits[dtype].relative


def test_the_largest_finite_magnitude():
    assert largest(torch.tensor([1.0, -3.0, INFINITY, math.nan])) == 3.0
    assert largest(torch.tensor([3 + 4j])) == 5.0
    assert largest(torch.tensor([7])) == largest(None) == largest(torch.empty(0)) == 0.0
