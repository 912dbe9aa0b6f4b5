"""What the rules produce, through kernels: the rewritten graph of each firing example, compiled by Inductor.

`make test` runs a fixed sample, `make test-kernels` all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import triptych
from triptych.pipeline import pass_names, required_names
from triptych.testing.check import run_example
from triptych.testing.subjects import subjects

CASES = [
    pytest.param(subject, example, dialect, id=f"{subject.name}-{number}-{dialect}")
    for subject in subjects()
    for number, example in enumerate(subject.examples)
    for dialect in example.dialects[:1]
    if example.fires and dialect != "modules"
]
EVERY = 1 if os.environ.get("ALL_KERNELS") else 37
"""A prime: the sample does not follow the order in which rules and their examples are written."""


def with_kernels(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The graph as it is: no pass runs, so that what reaches Inductor is what the rule produced."""
    # Inductor's own draws, where a rule produces them, are lowered only if it does not fall back to eager's
    own_draws = any("inductor_" in str(node.target) for node in gm.graph.nodes)
    options = {"codegen": "inductor", "remove_passes": sorted(pass_names() - required_names()), "fallback_random": not own_draws}
    with torch.no_grad():
        compiled = triptych.compile_fx(gm, [i.detach() if isinstance(i, torch.Tensor) else i for i in inputs], options=options)

    def call(*arguments: Any) -> Any:
        with torch.no_grad():
            return compiled(*arguments)

    return call


@pytest.mark.parametrize("subject, example, dialect", CASES[::EVERY])
def test_example_through_kernels(subject, example, dialect):
    run_example(subject, example, dialect, compile=with_kernels)
