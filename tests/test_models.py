"""Whole models, compiled and eager: inference and training, both code generators, both kinds of shapes.

By default each model runs with one layer and in three of the eight ways, which have both code generators, both kinds and
both kinds of shapes. The other five ways, with two layers, are marked slow; so are all but one for models whose layers are
much like those of another model.
"""

from __future__ import annotations

from itertools import product

import pytest

import triptych
from tests import models
from tests.compare import check_inference, check_training

QUICK = {
    ("eager", "inference", "dynamic"),
    ("eager", "training", "static"),
    ("inductor", "training", "dynamic"),
}
ALIKE = {"encoder": "gpt2", "decoder": "encoder", "bert": "encoder", "vit": "encoder", "llama": "gpt2", "t5": "gpt2", "resnet": "conv_batchnorm"}
"""Models that run in one way only beside the slow tests, and the model that stands for them in the others."""


def is_quick(name: str, way: tuple[str, str, str]) -> bool:
    return way in QUICK and (name not in ALIKE or way == ("eager", "training", "static"))


CASES = [
    pytest.param(
        name, 1 if way in QUICK else 2, *way, marks=() if is_quick(name, way) else pytest.mark.slow, id="-".join([name, *way])
    )
    for name in models.MODELS
    for way in product(["eager", "inductor"], ["inference", "training"], ["static", "dynamic"])
]


@pytest.mark.parametrize("name, layers, codegen, kind, shapes", CASES)
def test_equal_to_eager(name: str, layers: int, codegen: str, kind: str, shapes: str) -> None:
    case = models.build(name, layers=layers)
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
        more=[case.other if shapes == "dynamic" else models.build(name, layers=layers).call],
        fullgraph=True,
    )
