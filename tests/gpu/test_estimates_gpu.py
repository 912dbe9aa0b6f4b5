"""Estimates of single operators beside the clock of a GPU."""

from __future__ import annotations

import pytest
import torch
from estimates import OPERATORS, estimated, measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_estimates_are_within_three_times_of_the_clock(operator):
    operands = operator.operands("cuda", torch.bfloat16)
    cost, _ = estimated(operator, operands)
    seconds = measured(operator, operands, "cuda")
    assert seconds / 3 < cost.seconds < 3 * seconds
