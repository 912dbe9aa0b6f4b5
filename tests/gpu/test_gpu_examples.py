"""Every example on which a pass of stage 1 fires, on a GPU: results, strides, sharing and gradients are eager's there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from triptych.cost.decision import Decision
from triptych.testing.check import run_example
from triptych.testing.subjects import subjects

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = [
    pytest.param(subject, example, id=f"{subject.name}-{number}")
    for subject in subjects()
    if subject.__module__.startswith("triptych.pre_grad")
    for number, example in enumerate(subject.examples)
    if example.fires and "torch" in example.dialects
]


@pytest.mark.parametrize("subject, example", CASES)
def test_example_on_the_gpu(subject, example, monkeypatch):
    monkeypatch.setattr(Decision, "pays", True)  # what a rewrite computes is asked here, not whether it is worth it
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # gradients of float32 are compared as such
    if "device" in example.settings:  # the rule for another kind of device, shown on the one that is there
        example = replace(example, settings={**example.settings, "device": "cuda"})
    try:
        run_example(subject, example, "torch", device="cuda")
    except AssertionError:
        raise
    except Exception as error:
        if "device" not in str(error) and "not implemented for" not in str(error):
            raise
        pytest.skip(f"the program makes tensors on the CPU, or has no kernel: {str(error).splitlines()[0][:80]}")
