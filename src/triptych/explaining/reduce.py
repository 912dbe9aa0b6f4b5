"""Reduces a captured graph to a small program that still fails in the same way, by removing part after part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ir.graph_copies import snapshot
from ..options import Options
from ..passes.culprit import Rewrite, first_bad
from ..passes.session import Session
from ..repro.input_source import inputs_like
from ..repro.python_source import NotPython
from ..repro.write import Repro, mark_weights, save
from .fresh_compiles import compiled_anew, forgotten
from .replay import Failure, Subject, run_model
from .subgraph import Part, Values, effects, extract, is_region, resized, stand_in, with_facts

MOST_CHECKS = 150
MOST_SECONDS = 600.0
NEAR = (0, 1, 2, 4, 8)
"""Which distances from the rewrite at fault, in operations, are tried first."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Symptom:
    """What must stay the same while a program shrinks: how it fails, and the rule that causes the failure."""

    kind: str
    rule: str = ""

    def shown_by(self, failure: Failure | None, sessions: list[Session]) -> bool:
        if failure is None or failure.kind != self.kind:
            return False
        fired = {name for session in sessions for record in session.records for name in record.fired}
        return not self.rule or not fired.isdisjoint(self.rule.split(", "))


class Reducer:
    """Makes a program smaller as long as it fails in the same way."""

    def __init__(self, repro: Repro, symptom: Symptom, tell: Tell = lambda message: None) -> None:
        self.repro, self.symptom, self.tell = repro, symptom, tell
        self.checks = 0
        self.started = time.monotonic()
        self._tried: set[str] = set()

    # ---- trying ----

    def fails(self, candidate: Repro) -> bool:
        """Does the candidate show the symptom? Also False if it was tried before, cannot be written as Python or raises
        in eager, or if the budget is spent."""
        try:
            source = candidate.source()
            key = f"{source.text()}\n{candidate.inputs}"
            if key in self._tried or self.spent:
                return False
            self._tried.add(key)
            function, inputs = candidate.subject()
            subject = Subject(function, inputs, train=candidate.train, dynamic=candidate.dynamic or None)
        except Exception:
            return False
        self.checks += 1
        self.tell(f"{self.repro.size} operations; trying {candidate.size}, {self.checks} compiles")
        return self.symptom.shown_by(*subject.check(candidate.options))

    @property
    def spent(self) -> bool:
        return self.checks >= MOST_CHECKS or time.monotonic() - self.started > MOST_SECONDS

    def accept(self, candidate: Repro | None) -> bool:
        if candidate is None or not self.fails(candidate):
            return False
        self.repro = candidate
        return True

    def part(self, part: Part, values: Values) -> Repro | None:
        try:
            gm, inputs = extract(self.repro.gm, self.repro.inputs, values, part)
        except (NotPython, KeyError, RuntimeError):
            return None
        train = self.repro.train and any(one.requires_grad for one in inputs)
        return replace(self.repro, gm=gm, inputs=inputs, train=train)

    def values(self) -> Values:
        with torch.set_grad_enabled(self.repro.train):
            return Values(self.repro.gm, self.repro.graph_inputs())

    # ---- removing parts ----

    def reduce(self, rewrite: Rewrite | None = None) -> Repro:
        if not self._keep_neighbourhood(rewrite):
            self._keep_window()
        size = -1
        while size != self.repro.size and not self.spent:
            size = self.repro.size
            self._drop_outputs()
            self._drop_effects()
            self._drop_nodes()
        self._shrink()
        return self.repro

    def _keep_neighbourhood(self, rewrite: Rewrite | None) -> bool:
        """Keep only the operations near the rewrite at fault, if its nodes can be found in the captured graph."""
        if rewrite is None:
            return False
        named = {line[2:].partition(":")[0].partition(" ")[0] for line in rewrite.changes if line[0] == "-"}
        nodes = [n for n in self.repro.gm.graph.nodes if n.name in named and n.op.startswith("call")]
        if not nodes:
            return False
        values = self.values()
        return any(self.accept(self.part(_around(self.repro.gm, nodes, d), values)) for d in NEAR)

    def _keep_window(self) -> None:
        """Keep the shortest prefix of the operations that fails, and of that prefix the shortest suffix."""
        values = self.values()
        nodes = _calls(self.repro.gm)
        beginnings = {n: self.part(_beginning(self.repro.gm, nodes[:n]), values) for n in range(1, len(nodes))}
        shortest = first_bad(lambda n: (part := beginnings.get(n)) is not None and self.fails(part), len(nodes))
        if shortest < len(nodes):
            self.repro = beginnings[shortest] or self.repro
        values = self.values()
        nodes = _calls(self.repro.gm)
        outputs = _outputs(self.repro.gm)
        ends = {n: self.part(_end(nodes[: len(nodes) - n], outputs), values) for n in range(1, len(nodes))}
        shortest = first_bad(lambda n: (part := ends.get(n)) is not None and self.fails(part), len(nodes))
        if shortest < len(nodes):
            self.repro = ends[shortest] or self.repro

    def _drop_outputs(self) -> None:
        outputs = _outputs(self.repro.gm)
        if len(outputs) < 2:
            return
        values = self.values()
        if any(self.accept(self.part(Part((one,)), values)) for one in outputs):
            return
        for one in list(outputs):
            left = tuple(o for o in _outputs(self.repro.gm) if o.name != one.name)
            if left:
                self.accept(self.part(Part(left), self.values()))

    def _drop_effects(self) -> None:
        for name in [n.name for n in effects(self.repro.gm)]:
            left = [n for n in effects(self.repro.gm) if n.name == name]
            ends = [u for n in left if is_region(n) for u in n.users]
            if left:
                outputs = _outputs(self.repro.gm)
                self.accept(self.part(Part(outputs, left_out=frozenset([*left, *ends])), self.values()))

    def _drop_nodes(self) -> None:
        """Try to turn each value into an input, or to replace it by one of its operands."""
        for name in [n.name for n in reversed(_calls(self.repro.gm))]:
            for way in ("cut", "stand in"):
                node = next((n for n in self.repro.gm.graph.nodes if n.name == name and n.op.startswith("call")), None)
                if node is None or self.spent:
                    break
                values, outputs = self.values(), _outputs(self.repro.gm)
                if way == "cut" and node not in outputs:
                    self.accept(self.part(Part(outputs, cut=frozenset([node])), values))
                elif way == "stand in" and (other := stand_in(node, values)) is not None:
                    self.accept(self.part(Part(outputs, stand_ins={node: other}), values))

    def _shrink(self) -> None:
        """Try smaller sizes: each size of the inputs in turn, wherever it occurs."""
        if self.repro.dynamic:
            return
        sizes = {size for one in self.repro.inputs for size in one.shape if size > 1}
        for old in sorted(sizes, reverse=True):
            for new in dict.fromkeys((1, 2, 3, 4, old // 2)):
                if new >= old or self.spent:
                    continue
                gm, inputs = resized(self.repro.gm, self.repro.inputs, old, new)
                if self.accept(replace(self.repro, gm=gm, inputs=inputs)):
                    break


def _calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op.startswith("call")]


def _outputs(gm: GraphModule) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(gm.graph.output_node().all_input_nodes))


def _around(gm: GraphModule, nodes: list[Node], distance: int) -> Part:
    """The nodes with the operations up to `distance` steps before and after them."""
    inside = set(nodes)
    for _ in range(distance):
        inside |= {near for n in inside for near in (*n.all_input_nodes, *n.users) if near.op.startswith("call")}
    inside |= {o for n in inside if _takes_piece(n) for o in n.all_input_nodes if _is_tuple(o)}  # no tuple inputs
    outputs = tuple(n for n in gm.graph.nodes if n in inside and (any(u not in inside for u in n.users) or not n.users))
    outside = frozenset(o for n in inside for o in n.all_input_nodes if o not in inside and o.op != "placeholder")
    left_out = frozenset(n for n in effects(gm) if n not in inside)
    return Part(tuple(o for o in outputs if not _is_tuple(o)), cut=outside, left_out=left_out)


def _beginning(gm: GraphModule, nodes: list[Node]) -> Part:
    inside = set(nodes)
    ends = [n for n in nodes if not _is_tuple(n) and not is_region(n) and any(u not in inside for u in n.users)]
    left_out = frozenset(n for n in effects(gm) if n not in inside and not is_region(n))
    return Part(tuple(ends), left_out=left_out)


def _end(dropped: list[Node], outputs: tuple[Node, ...]) -> Part:
    """The graph without the operations in `dropped`; their results that other operations need become inputs."""
    all_dropped = set(dropped)
    needed = [n for n in dropped if any(u not in all_dropped for u in n.users) and not is_region(n)]
    cut = {n for n in needed if not _is_tuple(n)}
    cut |= {u for n in needed if _is_tuple(n) for u in n.users}
    left_out = frozenset(n for n in dropped if not is_region(n))
    return Part(outputs, cut=frozenset(cut), left_out=left_out)


def _takes_piece(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and _is_tuple(node.args[0])


def _is_tuple(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), (tuple, list))


# ---- from a model to a file ----


@dataclass(frozen=True)
class Written:
    """The outcome of writing a reproduction."""

    failure: Failure | None = None
    path: Path | None = None
    size: int = 0
    """How many operations the reproduction has."""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        failure = None if self.failure is None else {"kind": self.failure.kind, "message": str(self.failure)}
        path = None if self.path is None else str(self.path)
        return {"failure": failure, "repro": path, "size": self.size, "note": self.note}

    def __str__(self) -> str:
        if self.failure is None:
            return "no difference: compiled and eager agree, nothing is written"
        lines = [str(self.failure)]
        if self.path is not None:
            lines.append(f"reproduction: {self.path}, {self.size} operation{'s' * (self.size != 1)}")
        return "\n".join(lines + ([f"note: {self.note}"] if self.note else []))


def write_smallest(
    subject: Subject, options: Options, path: Path, reduce: bool = True, tell: Tell = lambda message: None
) -> Written:
    """Compile a model; if it fails or differs from eager, write the smallest program that does so too."""
    failure, _ = subject.check(options)
    if failure is None:
        return Written()
    symptom = Symptom(failure.kind)
    return replace(smallest_repro(subject, options, symptom, path, None, str(failure), reduce, tell), failure=failure)


def captured(subject: Subject) -> Iterator[tuple[GraphModule, list[Any]]]:
    """The graphs that Dynamo captures from a model, each with the inputs of its first call."""
    seen: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        captured = snapshot(gm)

        def run(*args: Any) -> Any:
            if all(graph is not captured for graph, _ in seen):
                copies = [a.detach().clone().requires_grad_(a.requires_grad) if _is_tensor(a) else a for a in args]
                seen.append((captured, copies))
            return gm(*args)

        return run

    with compiled_anew(), forgotten(backend):
        compiled = torch.compile(subject.model, backend=backend, dynamic=subject.dynamic)
        run_model(compiled, subject.model, subject.args, subject.kwargs, subject.train)
    yield from seen


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def smallest_repro(
    subject: Subject,
    options: Options,
    symptom: Symptom,
    path: Path,
    rewrite: Rewrite | None = None,
    message: str = "",
    reduce: bool = True,
    tell: Tell = lambda message: None,
) -> Written:
    """Write the smallest program found that shows the symptom. A note says if none was found or can be written."""
    graphs = list(captured(subject))
    repros = []
    for gm, inputs in graphs:
        try:
            wants = subject.train and any(_is_tensor(i) and i.requires_grad for i in inputs)
            repros.append(Repro(gm, mark_weights(gm, inputs_like(inputs)), options, wants, bool(subject.dynamic)))
        except NotPython:
            continue
    for repro in repros:
        quick = _quick(repro, symptom)
        if quick is None:
            continue
        if not reduce:
            return Written(None, save(path, repro.text(message, path.name)), repro.size)
        reducer = Reducer(quick, symptom, tell)
        small = replace(reducer.reduce(rewrite), options=options)
        if quick.options != options and not Reducer(small, symptom).fails(small):
            small = replace(small, options=quick.options)
        with torch.set_grad_enabled(small.train):
            with_facts(small.gm, small.graph_inputs())
        return Written(None, save(path, small.text(message, path.name)), small.size)
    for repro in repros[:1]:
        note = "the program does not fail on random inputs like yours: the file holds it whole"
        return Written(None, save(path, repro.text(f"{message}\n{note}", path.name)), repro.size, note)
    return Written(note="the program cannot be written as Python")


def _quick(repro: Repro, symptom: Symptom) -> Repro | None:
    """The program with `codegen="eager"`, which is quick to try, if it shows the symptom too; else the program as it
    is; None if that does not show the symptom either."""
    ways = [repro.options]
    if repro.options.codegen != "eager" and symptom.kind == "differs":
        ways.insert(0, replace(repro.options, codegen="eager"))
    for options in ways:
        candidate = replace(repro, options=options)
        if Reducer(candidate, symptom).fails(candidate):
            return candidate
    return None
