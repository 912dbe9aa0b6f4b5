"""Running an example: does the rule fire or decline as declared, and is the program's meaning kept?"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..ir.facts import storage
from ..ir.program import Program
from ..ir.text import text
from ..ir.verify import verify
from ..options import Options
from ..passes.base import Pass, PassRun, pass_with_options
from ..rewrite.driver import Tally, run_rules
from ..rewrite.rewriter import Rewriter
from ..rewrite.rule import Rule
from .capture import capture
from .examples import Example, make_inputs


@dataclass(frozen=True)
class Outcome:
    """What an example did in one dialect."""

    tally: Tally
    before: str
    after: str
    nodes_before: int
    nodes_after: int

    @property
    def rewrites(self) -> int:
        return self.tally.fired.total()

    @property
    def reasons(self) -> list[str]:
        return [d.reason for d in self.tally.declines.values()]


def run_example(subject: Rule | type[Pass], example: Example, dialect: str) -> Outcome:
    """Capture, run, compare with the graph before; raises AssertionError if anything is not as declared."""
    gm, inputs = capture(example.program, make_inputs(example), dialect, example.dynamic)
    original = copy.deepcopy(gm)
    before = text(gm)
    tally = _apply(subject, gm, example)
    gm.graph.lint()
    gm.recompile()
    verify(gm)
    outcome = Outcome(tally, before, text(gm), len(original.graph.nodes), len(gm.graph.nodes))
    _check_outcome(subject, example, outcome)
    compare_graphs(original, gm, inputs, subject.exact, example.same_values)
    return outcome


def _apply(subject: Rule | type[Pass], gm: GraphModule, example: Example) -> Tally:
    if isinstance(subject, Rule):
        subject = type(subject)(**example.settings) if example.settings else subject
        program = Program(gm, freeze=example.options.get("freeze", False))
        return run_rules(Rewriter(program, subject.name), [subject], strict=True)
    return run_pass(subject, gm, options=example.options, is_inference=example.is_inference)


def run_pass(
    subject: type[Pass],
    gm: GraphModule,
    example_inputs: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
    is_inference: bool = True,
) -> Tally:
    """Run one pass over a graph, in place; an error in it is raised."""
    made = Options.make(options)
    rewriter = Rewriter(Program(gm, example_inputs, made.freeze), subject.name)
    run = PassRun(rewriter, made, is_inference=is_inference, strict=True)
    pass_with_options(subject, made).run(run)
    gm.recompile()
    return run.tally


def _check_outcome(subject: Any, example: Example, outcome: Outcome) -> None:
    listing = f"\n{outcome.before}\n->\n{outcome.after}"
    if example.fires:
        assert outcome.rewrites, f"{subject.name} did not fire; declined: {outcome.reasons}{listing}"
        return
    assert not outcome.rewrites, f"{subject.name} fired {dict(outcome.tally.fired)}{listing}"
    if example.because:
        assert any(example.because in r for r in outcome.reasons), (
            f"{subject.name} declined, but not because of {example.because!r}: {outcome.reasons}{listing}"
        )


def compare_graphs(
    before: GraphModule, after: GraphModule, inputs: Sequence[Any], exact: bool = True, values: bool = True
) -> None:
    """Same outputs, mutated inputs and memory sharing; bit for bit unless `exact` is off."""
    first, second = _clone(inputs), _clone(inputs)
    torch.manual_seed(0)
    expected = before(*first)
    torch.manual_seed(0)
    actual = after(*second)
    compare(list(_tensors(expected)), list(_tensors(actual)), exact, values)
    compare(list(_tensors(first)), list(_tensors(second)), exact, values)
    want, got = _sharing(first, expected), _sharing(second, actual)
    assert want == got, f"memory is shared otherwise: {want} became {got}"


def _clone(values: Sequence[Any]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _sharing(inputs: Any, outputs: Any) -> list[int]:
    """For each tensor, the first one with the same memory; one without elements has none to share."""
    tensors = (*_tensors(inputs), *_tensors(outputs))
    ids = [storage(t) if t.numel() else -i - 1 for i, t in enumerate(tensors)]
    return [ids.index(i) for i in ids]


def compare(
    expected: list[torch.Tensor], actual: list[torch.Tensor], exact: bool = True, values: bool = True
) -> None:
    assert len(expected) == len(actual), f"{len(expected)} results became {len(actual)}"
    for want, got in zip(expected, actual):
        assert want.dtype == got.dtype and want.shape == got.shape and want.device == got.device, (
            f"{want.dtype}{list(want.shape)} became {got.dtype}{list(got.shape)}"
        )
        # of a tensor without elements torch's own fake and real kernels report different strides
        strides = [(s, g) for s, g, n in zip(want.stride(), got.stride(), want.shape) if n > 1 and want.numel()]
        assert all(s == g for s, g in strides), f"strides {want.stride()} became {got.stride()}"
        if not values:
            continue
        if exact:
            assert torch.equal(_bits(want), _bits(got)), f"values differ by {_gap(want, got)}"
        else:
            torch.testing.assert_close(got, want, equal_nan=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals NaN and -0.0 differs from 0.0: compare the bits, all NaNs made one."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.dtype.is_floating_point:
        return tensor
    tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, float("nan")), tensor).contiguous()
    return tensor.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _gap(want: torch.Tensor, got: torch.Tensor) -> float:
    return (want.double() - got.double()).abs().max().item() if want.numel() else 0.0
