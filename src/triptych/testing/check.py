"""Running an example: does the rule fire or decline as declared, and is the program's meaning kept?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from .. import _private, joint, post_grad
from ..ir.facts import storage
from ..ir.partitioned import backward_of, returns_gradients
from ..ir.program import Program
from ..ir.text import text
from ..options import Options
from ..rewrite.driver import Tally, run_rules
from ..rewrite.examples import Example, make_inputs
from ..rewrite.passes import Pass, pass_with_options
from ..rewrite.rewriter import Rewriter
from ..rewrite.rule import Rule
from ..verify.structure import verify
from ..verify.tolerances import EXACT, GRADIENT, REWRITE, difference, largest
from .capture import capture, runnable


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


def run_example(
    subject: Rule | type[Pass],
    example: Example,
    dialect: str,
    device: str = "cpu",
    compile: Callable[[GraphModule, list[Any]], Callable[..., Any]] | None = None,
) -> Outcome:
    """Captures the example, runs the rule or pass, and compares the graph with the one before; raises AssertionError if
    anything is not as declared.

    `compile` turns the graph after the rewrite into the function that is compared; without it the graph itself runs,
    operation by operation.
    """
    given = [v.to(device) if isinstance(v, torch.Tensor) and not v.is_meta else v for v in make_inputs(example)]
    gm, inputs = capture(example.program, given, dialect, example.dynamic)
    original = copy.deepcopy(gm)
    if example.prepare is not None:
        example.prepare(gm.graph)
    before = _text(gm)
    tally = apply_example(subject, gm, example)
    gm.graph.lint()
    gm.recompile()
    verify(gm)
    outcome = Outcome(tally, before, _text(gm), len(original.graph.nodes), len(gm.graph.nodes))
    _check_outcome(subject, example, outcome)
    if compile is not None and runnable(gm) is gm:
        compare_graphs(runnable(original), compile(gm, inputs), inputs, exact=False, values=example.same_values)
        return outcome
    compare_graphs(runnable(original), runnable(gm), inputs, subject.exact, example.same_values)
    if outcome.rewrites and example.same_values and _keeps_gradients(subject, tally, dialect):
        if dialect == "torch" and not isinstance(example.program, torch.nn.Module):
            _check_training(subject, example, given)
        else:
            compare_gradients(original, gm, inputs, none_is_zero=True)
    return outcome


def _text(gm: GraphModule) -> str:
    """A graph as text; of a forward, its backward too."""
    backward = backward_of(gm)
    return text(gm) if backward is None else f"{text(gm)}\nbackward:\n{text(backward.gm)}"


def _check_training(subject: Rule | type[Pass], example: Example, inputs: Sequence[Any]) -> None:
    """Compares gradients on a second capture, as Dynamo makes it when gradients are asked for: a rule may decide
    differently there."""

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        if example.prepare is not None:
            example.prepare(gm.graph)
        apply_example(subject, gm, example)
        gm.recompile()
        return gm

    with _private.unlimited_recompiles():
        compiled = torch.compile(example.program, backend=backend, fullgraph=True, dynamic=example.dynamic)
        compare_gradients(example.program, compiled, inputs)


def _keeps_gradients(subject: Rule | type[Pass], tally: Tally, dialect: str) -> bool:
    """Must gradients be compared? Only if autograd runs after the rewrite, so not for an ATen graph or a rule of stages
    2 and 3, and not if a rule fired that is only for graphs without gradients."""
    where = subject.__module__
    if dialect == "aten" or where.startswith((joint.__name__, post_grad.__name__)):
        return False
    rules = [subject] if isinstance(subject, Rule) else subject().rules()
    return not any(rule.without_gradient for rule in rules if any(map(rule.counts_as, tally.fired)))


def apply_example(subject: Rule | type[Pass], gm: GraphModule, example: Example) -> Tally:
    """Run a rule or a pass over the graph of its example, in place. The cost model decides, without a measurement, so
    that the example shows the same on every machine."""
    options = {"tune": "off", **(example.options or {})}
    if isinstance(subject, Rule):
        subject = type(subject)(**example.settings) if example.settings else subject
        program = Program(gm, options=Options.make(options), is_inference=example.is_inference)
        return run_rules(Rewriter(program, subject.name), [subject], strict=True)
    return run_pass(subject, gm, options=options, is_inference=example.is_inference)


def run_pass(
    subject: type[Pass],
    gm: GraphModule,
    example_inputs: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
    is_inference: bool = True,
) -> Tally:
    """Run one pass over a graph, in place; an error in it is raised."""
    made = Options.make(options)
    rewriter = Rewriter(Program(gm, example_inputs, made, is_inference), subject.name)
    tally = pass_with_options(subject, made).run(rewriter, strict=True)
    gm.recompile()
    return tally


def _check_outcome(subject: Any, example: Example, outcome: Outcome) -> None:
    listing = f"\n{outcome.before}\n->\n{outcome.after}"
    if example.fires:
        assert outcome.rewrites, f"{subject.name} did not fire; declined: {outcome.reasons}{listing}"
        return
    assert not outcome.rewrites, f"{subject.name} fired {dict(outcome.tally.fired)}{listing}"
    if not example.because:
        looked_at = outcome.tally.matched or outcome.reasons
        assert not looked_at, (
            f"{subject.name} declined with a reason that the example does not name (`because=`): "
            f"{outcome.reasons}{listing}"
        )
    else:
        assert any(example.because in r for r in outcome.reasons), (
            f"{subject.name} declined, but not because of {example.because!r}: {outcome.reasons}{listing}"
        )


def compare_graphs(
    before: Callable[..., Any],
    after: Callable[..., Any],
    inputs: Sequence[Any],
    exact: bool = True,
    values: bool = True,
) -> None:
    """Same outputs, mutated inputs and memory sharing; bit for bit unless `exact` is off."""
    first, second = _clone(inputs), _clone(inputs)
    torch.manual_seed(0)
    expected = before(*first)
    torch.manual_seed(0)
    actual = after(*second)
    strides = not (isinstance(after, GraphModule) and returns_gradients(after.graph))
    compare(list(_tensors(expected)), list(_tensors(actual)), exact, values, strides)
    compare(list(_tensors(first)), list(_tensors(second)), exact, values)
    want, got = _sharing(first, expected), _sharing(second, actual)
    assert want == got, f"memory is shared otherwise: {want} became {got}"


def compare_gradients(
    before: Callable[..., Any], after: Callable[..., Any], inputs: Sequence[Any], none_is_zero: bool = False
) -> bool:
    """Asserts that a random projection of all outputs has the same gradients with respect to all float inputs.

    None is not the same as a gradient of zeros, with which an optimizer still decays the weight; `none_is_zero` is for
    graphs that were captured, and rewritten, with inputs that require no gradient.

    Returns False where there is nothing to compare: no float, or a write that autograd forbids.
    """
    by = differentiable(before, inputs)
    expected = gradients(before, inputs, by)
    if not expected:
        return False
    actual = gradients(after, inputs, by)
    assert actual is not None, "autograd forbids what it allowed before"
    for place, want, got in zip(by, expected, actual):
        if want is None or got is None:
            present = next((g for g in (want, got) if g is not None), None)
            same = present is None or (none_is_zero and not present.any())
            assert same, f"gradients differ: input {place} has {_kind(got)}, expected {_kind(want)}"
            continue
        _check_kind(want, got)
        problem = difference(want, got, GRADIENT[want.dtype], scale=max(1.0, largest(want)))
        assert not problem, f"gradients differ: {problem}"
    return True


def _kind(gradient: torch.Tensor | None) -> str:
    return "None" if gradient is None else "zeros" if not gradient.any() else "a gradient"


def gradients(
    program: Callable[..., Any], inputs: Sequence[Any], by: Sequence[int] | None = None
) -> list[torch.Tensor | None] | None:
    """The gradients with respect to the inputs at these positions, by default all float inputs; empty where no output
    requires a gradient, None where autograd forbids a write."""
    try:
        return _gradients(program, inputs, differentiable(program, inputs) if by is None else by)
    except RuntimeError as error:
        if "in-place" in str(error) or "inplace" in str(error):
            return None
        raise


def differentiable(program: Callable[..., Any], inputs: Sequence[Any]) -> list[int]:
    """The positions of float inputs, without those that cannot have a gradient, such as running statistics."""
    floats = [i for i, value in enumerate(inputs) if _is_float(value)]

    def allowed(places: list[int]) -> bool:
        try:
            _gradients(program, inputs, places)
        except RuntimeError as error:
            return "not differentiable with respect to" not in str(error)
        return True

    return floats if allowed(floats) else [i for i in floats if allowed([i])]


def _gradients(program: Callable[..., Any], inputs: Sequence[Any], places: Sequence[int]) -> list[torch.Tensor | None]:
    leaves = {i: inputs[i].detach().clone().requires_grad_() for i in places}
    # the program gets copies, which it may write in place: autograd forbids that for a leaf
    given = [leaves[i].clone() if i in leaves else _clone([value])[0] for i, value in enumerate(inputs)]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a gradient of their own
        outputs = program(*given)
        if not any(t.requires_grad for t in _tensors(outputs)):
            return []
        written = [given[i] for i in leaves if given[i]._version]
        made = [t for t in _tensors([outputs, written]) if t.requires_grad]
        seeds = [torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(made)]
        directions = [s.to(t.dtype).to(t.device) for s, t in zip(seeds, made)]
        return list(torch.autograd.grad(made, list(leaves.values()), directions, allow_unused=True))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _clone(values: Sequence[Any]) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _sharing(inputs: Any, outputs: Any) -> list[int]:
    """For each tensor, the index of the first one with the same memory; a tensor without elements shares none."""
    tensors = (*_tensors(inputs), *_tensors(outputs))
    ids = [storage(t) if t.numel() else -i - 1 for i, t in enumerate(tensors)]
    return [ids.index(i) for i in ids]


def compare(
    expected: list[torch.Tensor],
    actual: list[torch.Tensor],
    exact: bool = True,
    values: bool = True,
    strides: bool = True,
) -> None:
    assert len(expected) == len(actual), f"{len(expected)} results became {len(actual)}"
    for want, got in zip(expected, actual):
        _check_kind(want, got)
        # of a tensor without elements torch's own fake and real kernels report different strides
        dims = [(s, g) for s, g, n in zip(want.stride(), got.stride(), want.shape) if n > 1 and want.numel()]
        assert not strides or all(s == g for s, g in dims), f"strides {want.stride()} became {got.stride()}"
        freed = [is_freed(tensor) for tensor in (want, got)]
        assert freed[0] == freed[1], "memory that was freed is there" if freed[0] else "memory is freed"
        if not values or freed[0]:
            continue
        if exact:
            assert torch.equal(_bits(want), _bits(got)), f"values differ by {_gap(want, got)}"
        else:
            problem = difference(want, got, REWRITE.get(want.dtype, EXACT))
            assert not problem, f"values differ: {problem}"


def is_freed(tensor: torch.Tensor) -> bool:
    """Has the program freed the memory of a tensor, as FSDP does with parameters between their uses?"""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() == 0


def _check_kind(want: torch.Tensor, got: torch.Tensor) -> None:
    assert want.dtype == got.dtype and want.shape == got.shape and want.device == got.device, (
        f"{want.dtype}{list(want.shape)} on {want.device} became {got.dtype}{list(got.shape)} on {got.device}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, the same for all NaNs: in a comparison of bits NaN equals NaN and -0.0 differs from 0.0."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.dtype.is_floating_point:
        return tensor
    tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, float("nan")), tensor).contiguous()
    return tensor.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _gap(want: torch.Tensor, got: torch.Tensor) -> float:
    return (want.double() - got.double()).abs().max().item() if want.numel() else 0.0
