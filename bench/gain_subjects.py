"""What the gain of each pass and rule is measured on.

A name in `gain_workloads.py` has its workload there. Any other is measured on one of its own firing examples, made
larger by the first rule that keeps the program valid and the pass firing in the whole pipeline:

- every size above 1 of every input, by the largest power of two with which no input has more than `ELEMENTS`,
- the first size of every input that has the first size of the first input, likewise,
- not at all. Then the time is that of the launches, and the figure says so.

The program is valid if it runs, and computes the same operations as on the declared sizes: an `unbind` of a larger
tensor is another program. Values keep their dtype.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gain_workloads import WORKLOADS, Machine, Work
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from triptych.passes.catalogue import all_passes, all_rules
from triptych.pipeline import required_names
from triptych.rewrite.examples import DTYPE_OF, Example, make_input, make_inputs, others_are_weights
from triptych.rewrite.passes import Pass
from triptych.testing.gallery import firing_examples

ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 18}
"""An input that was made larger has at most this many elements."""
EXAMPLES = 4
"""How many examples of a pass are tried."""
TIMES_LARGER = 4
"""No value may have more than this many times `ELEMENTS`: the outer product of two long vectors is not computed."""
MOST_PIECES = 1024
"""A split into more pieces makes it another program, and is not computed either."""
TINY = "as declared, so mostly launches"


def names() -> list[str]:
    """Everything to measure, the most telling first: workloads, passes, then the rules of passes that have several,
    those of passes with few rules before the many that each remove a no-op. Required passes, which cannot be removed,
    have no gain."""
    passes = {name: classes for name, classes in all_passes().items() if any(map(firing_examples, classes))}
    families = sorted((c().rules() for classes in passes.values() for c in classes), key=len)
    rules = [rule.name for family in families if len(family) > 1 for rule in family]
    known = [name for name in dict.fromkeys([*WORKLOADS, *passes, *rules]) if name not in required_names()]
    return [name for name in known if name in WORKLOADS or examples_of(name)]


def switch(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options with the pass or rule on, and off; the rest of the pipeline is the default one."""
    classes = all_passes().get(name, ())
    if classes and not any(c.default for c in classes):
        return {"add_passes": [name]}, {}
    return {}, {"remove_passes": [name]}


def examples_of(name: str) -> list[Example]:
    """Firing examples that can be compiled: a pass may also have examples of graphs that no program leads to."""
    classes: Sequence[type[Pass]] = all_passes().get(name, ())
    firing = [e for c in classes for e in firing_examples(c)]
    if not classes and (rule := all_rules().get(name)) is not None:
        firing = [e for e in rule.examples if e.fires]
    return [e for e in firing if _can_be_compiled(e)][:EXAMPLES]


def _can_be_compiled(example: Example) -> bool:
    """Not if its graph is changed first, if it calls whole modules, or if an input has no data."""
    has_data = not any(isinstance(i, torch.Tensor) and i.is_meta for i in example.inputs)
    return has_data and example.prepare in (None, others_are_weights) and "modules" not in example.dialects


def candidates(name: str, device: str) -> Iterator[Work]:
    """Programs that may show the gain, the best first. Examples as they are declared come last."""
    if name in WORKLOADS:
        torch.manual_seed(0)
        yield WORKLOADS[name](Machine(device))
        return
    examples = examples_of(name)
    for sizes in (every_size, first_size):
        for number, example in enumerate(examples):
            with contextlib.suppress(Exception):  # sizes that do not fit the program
                larger, what = sizes(example.inputs, ELEMENTS[device])
                if same_operations(example, larger, TIMES_LARGER * ELEMENTS[device]):
                    work = _work(example, larger, f"example {number + 1}, {what}", device)
                    _run(work)  # some sizes are refused only when there is data
                    yield work
    for number, example in enumerate(examples):
        yield _work(example, example.inputs, f"example {number + 1}, {TINY}", device)


SPEC = re.compile(r"(\w+)\[([\d, ]+)\]")


class NotLarger(Exception):
    """The inputs have no sizes that could be changed."""


def every_size(inputs: Sequence[Any], most: int) -> tuple[list[Any], str]:
    def resize(shape: list[int], by: int) -> list[int]:
        return [size * by if size > 1 else size for size in shape]

    factor = _largest_factor(inputs, most, resize)
    return [_resized(i, lambda shape: resize(shape, factor)) for i in inputs], f"every size x {factor}"


def first_size(inputs: Sequence[Any], most: int) -> tuple[list[Any], str]:
    first = next((shape[0] for i in inputs if (shape := _shape(i))), 0)

    def resize(shape: list[int], by: int) -> list[int]:
        return [shape[0] * by, *shape[1:]] if shape[0] == first else shape

    factor = _largest_factor(inputs, most, resize)
    return [_resized(i, lambda shape: resize(shape, factor)) for i in inputs], f"first size x {factor}"


def _largest_factor(inputs: Sequence[Any], most: int, resize: Callable[[list[int], int], list[int]]) -> int:
    shapes = [shape for i in inputs if (shape := _shape(i))]
    if not shapes or any(isinstance(i, torch.Tensor) for i in inputs):
        raise NotLarger
    factor = 1
    while factor < most and max(torch.Size(resize(s, 2 * factor)).numel() for s in shapes) <= most:
        factor *= 2
    if factor == 1:
        raise NotLarger
    return factor


def _shape(spec: Any) -> list[int]:
    parsed = SPEC.fullmatch(spec) if isinstance(spec, str) else None
    return [int(s) for s in parsed.group(2).split(",")] if parsed else []


def _resized(spec: Any, resize: Callable[[list[int]], list[int]]) -> Any:
    return f"{spec.partition('[')[0]}{resize(_shape(spec))}" if _shape(spec) else spec


class WithWeights(nn.Module):
    """An example's program whose inputs after the first are parameters."""

    def __init__(self, program: Callable[..., Any], weights: Sequence[Any]) -> None:
        super().__init__()
        self.program = program
        self.places = [isinstance(w, torch.Tensor) and w.is_floating_point() for w in weights]
        self.weights = nn.ParameterList(w for w, is_float in zip(weights, self.places) if is_float)
        self.others = [w for w, is_float in zip(weights, self.places) if not is_float]

    def forward(self, x: Any) -> Any:
        weights, others = iter(self.weights), iter(self.others)
        return self.program(x, *(next(weights if is_float else others) for is_float in self.places))


def _work(example: Example, specs: Sequence[Any], what: str, device: str) -> Work:
    training = not example.is_inference or not {"joint", "partitioned"}.isdisjoint(example.dialects)
    if device == "meta":
        inputs = [_without_data(spec) for spec in specs]
    else:
        inputs = [_placed(value, device) for value in make_inputs(_with_inputs(example, specs))]
    program = example.program
    if isinstance(program, nn.Module):
        program = copy.deepcopy(program).to(device)
    if example.prepare is others_are_weights:
        program, inputs = WithWeights(program, inputs[1:]).to(device), inputs[:1]
    if training and not any(isinstance(i, torch.Tensor) and i.requires_grad for i in inputs):
        inputs = [i.requires_grad_() if isinstance(i, torch.Tensor) and i.is_floating_point() else i for i in inputs]
    options = {name: value for name, value in example.options.items() if name != "codegen"}
    return Work(program, inputs, what, training, options, example.dynamic, not example.same_values)


def _with_inputs(example: Example, specs: Sequence[Any]) -> Example:
    return Example(example.program, tuple(specs), True)


def _without_data(spec: Any) -> Any:
    """What `make_input` makes of it, on the meta device."""
    if not _shape(spec):
        return _placed(make_input(spec, torch.Generator()), "meta")
    return torch.empty(_shape(spec), dtype=DTYPE_OF[spec.partition("[")[0]], device="meta")


def _placed(value: Any, device: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


class OtherProgram(Exception):
    """On these inputs the program has other operations, or larger values than should be computed."""


class Operations(TorchDispatchMode):
    """The names of the operations of a program, each with the number of its results."""

    def __init__(self, most_elements: float) -> None:
        super().__init__()
        self.most_elements, self.names = most_elements, list[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _pieces(func, args) > MOST_PIECES:
            raise OtherProgram
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        if any(isinstance(t, torch.Tensor) and t.numel() > self.most_elements for t in results):
            raise OtherProgram
        self.names.append((str(func), len(results)))
        return result


def same_operations(example: Example, larger: Sequence[Any], most_elements: float) -> bool:
    """Does the program run the same operations on larger inputs? Tried without data; raises what the program raises."""
    names = []
    for specs in (example.inputs, larger):
        work = _work(example, specs, "", "meta")
        with torch.device("meta"), torch.no_grad(), Operations(most_elements) as seen:
            work.program(*work.inputs)
        names.append(seen.names)
    return names[0] == names[1]


def _run(work: Work) -> None:
    with torch.no_grad():
        work.program(*[i.detach().clone() if isinstance(i, torch.Tensor) else i for i in work.inputs])


def _pieces(func: Any, args: Any) -> int:
    """How many tensors a split into pieces of a given size would give: millions, if a tensor was made larger."""
    if func is torch.ops.aten.unbind.int:
        return int(args[0].shape[args[1] if len(args) > 1 else 0])
    if func is torch.ops.aten.split.Tensor:
        return int(args[0].shape[args[2] if len(args) > 2 else 0]) // max(1, args[1])
    return 0


def fired(passes: Sequence[Any], name: str) -> int:
    """How often the pass or rule of this name fired in a compile."""
    if name in all_passes():
        return sum(record.rewrites for record in passes if record.name == name)
    rule = _rule(name)
    counts_as = rule.counts_as if rule is not None else name.__eq__
    return sum(count for record in passes for rule_name, count in record.fired.items() if counts_as(rule_name))


@functools.cache
def _rule(name: str) -> Any:
    return all_rules().get(name)
