"""Whole models, compiled and eager: inference and training, both code generators, both kinds of shapes."""

from __future__ import annotations

import pytest

import triptych
from tests import models
from tests.compare import check_inference, check_training


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["inference", "training"])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("name", models.MODELS)
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
