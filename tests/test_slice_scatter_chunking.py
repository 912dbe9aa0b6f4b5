"""slice_scatter_chunking: tensors that people fill slice by slice."""

from __future__ import annotations

import pytest
import torch

import triptych
from tests.compare import check_inference
from triptych.passes.session import watching


def halves(a, b):
    y = torch.empty(a.shape[0], 8)
    y[:, :4] = a
    y[:, 4:] = b
    return y


def rows(a, b):
    y = a.new_zeros(6, 4)
    for i in range(4):
        y[i] = a[i] * i + b[i]
    return y.sin()


def interleaved(a, b):
    y = torch.empty(a.shape[0], 8)
    y[:, ::2] = a
    y[:, 1::2] = b
    return y


def written_twice(a, b):
    y = torch.ones(4, 8)
    y[:, 1:5] = a
    y[:, 3:7] = b
    return y, y.sum(0)


def of_another_dtype(a, b):
    y = torch.empty(a.shape[0], 8, dtype=torch.float64)
    y[:, :4] = a
    y[:, 4:] = b
    return y


def looked_at_between(a, b):
    y = torch.zeros(4, 8)
    y[:, :4] = a
    total = y.sum()
    y[:, 4:] = b
    return y, total


def from_itself(a, b):
    y = torch.zeros(4, 8)
    y[:, :4] = a
    y[:, 4:] = y[:, :4] + b
    return y


FIRES = (halves, rows, written_twice)


@pytest.mark.parametrize(
    "codegen, dynamic", [("eager", False), ("eager", True), ("inductor", False),
                         pytest.param("inductor", True, marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.parametrize("program", [*FIRES, of_another_dtype, from_itself, interleaved, looked_at_between], ids=lambda p: p.__name__)
def test_equal_to_eager(program, dynamic, codegen):
    with watching() as sessions:
        check_inference(
            program, (torch.randn(4, 4), torch.randn(4, 4)), backend=triptych.compile_fx, dynamic=dynamic,
            options={"codegen": codegen},
        )  # fmt: skip
    fired = sum(r.fired["filled_slice_by_slice"] for s in sessions for r in s.records)
    assert fired == (program in FIRES) or dynamic
