"""Asking eager about a call with made-up operands must not disturb the GPU: an index out of range would end its use."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.worker import provide_expecttest
from triptych import _private, compile_fx
from triptych.codegen.refused_calls import refused_by_eager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PARTS = 8


class AskAboutEachCall(TorchDispatchMode):
    def __torch_dispatch__(self, overload, types, args=(), kwargs=None):
        with _private.without_dispatch_modes():
            refused_by_eager(overload, args, kwargs or {})
        return overload(*args, **(kwargs or {}))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_can_be_asked_about(part):
    provide_expecttest()
    database = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    for op in database[part::PARTS]:
        for dtype in {torch.float32, torch.int64, torch.bool} & op.supported_dtypes("cuda"):
            for sample in list(op.sample_inputs("cuda", dtype))[:6]:
                try:
                    with AskAboutEachCall():
                        op(sample.input, *sample.args, **sample.kwargs)
                    torch.cuda.synchronize()
                except torch.AcceleratorError as error:
                    pytest.exit(f"{op.name} of {dtype}: {error}", returncode=1)  # the GPU is of no more use
                except Exception:  # this sample needs something that is not here
                    continue


def test_repeats_that_add_up_to_a_size():
    repeats = torch.tensor([2, 4, 6], device="cuda")
    program = lambda x: torch.ops.aten.repeat_interleave.Tensor(x, output_size=12) + 1  # noqa: E731
    assert torch.equal(torch.compile(program, backend=compile_fx)(repeats), program(repeats))
