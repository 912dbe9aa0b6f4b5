"""Whole models, compiled and eager: inference and training, both code generators, both kinds of shapes."""

from __future__ import annotations

from typing import Any

import pytest

import triptych
from tests import models
from tests.compare import check_inference, check_training

# Training with symbolic sizes through the C++ compiler takes half a minute for each of these. What our passes
# do with symbolic sizes shows with the eager code generator, on all models; the other five keep Inductor's
# side of it honest.
SLOW = {("inductor", "training", "dynamic", name) for name in ("decoder", "gpt2", "llama", "t5", "vit")}


def cases() -> list[Any]:
    return [
        pytest.param(
            name,
            codegen,
            kind,
            shapes,
            id=f"{name}-{codegen}-{kind}-{shapes}",
            marks=[pytest.mark.slow] if (codegen, kind, shapes, name) in SLOW else [],
        )
        for name in models.MODELS
        for codegen in ("eager", "inductor")
        for kind in ("inference", "training")
        for shapes in ("static", "dynamic")
    ]


@pytest.mark.parametrize("name, codegen, kind, shapes", cases())
def test_equal_to_eager(name: str, codegen: str, kind: str, shapes: str) -> None:
    case = models.build(name)
    check = {"inference": check_inference, "training": check_training}[kind]
    check(
        case.model,
        case.call.args,
        case.call.kwargs,
        backend=triptych.compile_fx,
        options={"codegen": codegen},
        dynamic=shapes == "dynamic",
        # a second call: with other sizes where they may change, else with what the first call left in weights
        # and buffers
        more=[case.other if shapes == "dynamic" else models.build(name).call],
        fullgraph=True,
    )
