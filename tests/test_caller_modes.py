"""What a caller has set while the package is imported or runs, such as a default device, changes nothing."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

import triptych
from triptych.attention.fuse import AttentionByHand
from triptych.cost.timing import apart_from_the_program
from triptych.explaining.demo import SmallTransformer
from triptych.joint.known_choices import WithinBounds
from triptych.pre_grad.relu_nan_to_num import ReluOfNanToNum
from triptych.testing import check

ENTRY_POINT, NAMES = "import triptych.entry_point", "triptych.compile_fx, triptych.list_passes"
MODES = {
    "default device": ("torch.set_default_device('meta')", ENTRY_POINT),
    "device": ("torch.device('meta').__enter__()", NAMES),
    "fake tensors": ("torch._subclasses.FakeTensorMode().__enter__()", ENTRY_POINT),
    "default dtype": ("torch.set_default_dtype(torch.bfloat16)", NAMES),
    "inference": ("torch.inference_mode().__enter__()", NAMES),
}


@pytest.mark.parametrize("mode, first", MODES.values(), ids=MODES.keys())
def test_the_first_import_may_come_at_any_time(mode, first):
    program = f"""
import torch, triptych
{mode}
{first}
from triptych.pipeline import STAGES
for stage in STAGES:
    STAGES[stage]
torch.set_default_device(None)
from triptych.joint import auto_chunker, keep_overwritten
for tensor in (auto_chunker.TARGETS, keep_overwritten.X):
    assert type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.is_inference()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("rule", [AttentionByHand, ReluOfNanToNum, WithinBounds])
def test_rules_compute_numbers_on_the_cpu(rule, monkeypatch):
    """Default devices are on while a backward is compiled, and in the functions for one stage."""

    def on_meta(*arguments):
        with torch.device("meta"):
            return apply_example(*arguments)

    apply_example = check.apply_example
    for example in [e for e in rule().examples if e.fires and "torch" in e.dialects][:8]:
        monkeypatch.setattr(check, "apply_example", apply_example)
        want = check.run_example(rule(), example, "torch")
        monkeypatch.setattr(check, "apply_example", on_meta)
        assert check.run_example(rule(), example, "torch").after == want.after


def test_a_training_step_under_a_default_device():
    model, tokens = SmallTransformer(layers=1), torch.randint(0, 64, (4, 16))
    again = copy.deepcopy(model)
    model(tokens).square().sum().backward()
    with torch.device("meta"), triptych.record() as explanation:
        compiled = torch.compile(again, backend=triptych.compile_fx, options={"on_error": "raise"})
        compiled(tokens).square().sum().backward()
    for want, got in zip(model.parameters(), again.parameters()):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-4)
    assert "_device.py" not in "".join(record.after for record in explanation.passes)


def test_an_exported_program_under_a_default_device():
    exported = torch.export.export(SmallTransformer().eval(), (torch.randint(0, 64, (4, 16)),))
    want = len(triptych.optimize(exported).graph.nodes)
    with torch.device("meta"):
        assert len(triptych.optimize(exported).graph.nodes) == want


def test_work_on_a_cpu_is_timed_there():
    with torch.device("meta"), apart_from_the_program(torch.device("cpu")):
        assert torch.randn(1).device.type == "cpu"
