"""An explanation as the data of its report page, in three parts that the page decodes when it first needs them.

`core`, which the page opens with:
    title, model, backend, train, torch; summary (one line) and parts of it: mattered, rest, launches; warnings
    frames: what Dynamo compiled: {id, what, thread, reason (of a recompile), breaks: [[reason, source, explanation]],
        failure, seconds, backward (seconds), programs: [numbers], times and backwardTimes: [[phase, title, seconds]]};
        a direct call of a stage function is one, too
    programs: one for each captured program: {label, flow: [box]}
        box: {key, label, side, listing, version, passes: [numbers], nodes, gemms, bytes, seconds}; kernels instead of
        listing and version for generated code, and unknown: how many launches the estimates leave out, and measured:
        seconds by the profile, or null. After the partition, a point of the flow is two boxes.
    passes: {program, stage, graph, place, name, purpose, effect, changed, error, note, rewrites, tried, matched,
        before, after (node counts), seconds, stop, fired: [[rule, count, formula, effect]],
        declines: [{rule, reason, count, sites: [[node, source line]]}],
        decisions: [{rule, node, before, after (seconds), source}], those that matter, listing, versions: [from, to],
        change: {gemms, bytes, seconds}, what it changed in the estimates}
    timelines: of graphs that communicate: {program, graph, before, after}
        before, after: {seconds, computation, communication, exposed, collectives: {kind: count},
        intervals: [{lane, start, seconds, what, node, nodes, bytes}]}
    profile: null, or measured times: {device, wall, kernels, waiting (null on a CPU), notAttributed, rounds, launches:
        [{program, graph, name, seconds, estimate, calls, nodes, madeBy, module, sources}], regions, modules:
        [{name, seconds, estimate, launches, total}]}
`graphs`:
    names, types, rules: strings by number; stacks: [[file, line, function]] by number, innermost frame last
    files: {path, installed, numbers, lines}: the source lines that the report has, and whether a package has them
    columns: name, type, call, inputs, stack, rule, origin, sequence, gemms, bytes, nanoseconds of every line
    listings: {program, stage, graph, first: [lines], deltas: [[[where, how many go, [lines that come]]]]}
    firings: {pass number: [[rule, node, [removed names], [created names]]]}
`kernels`:
    sources: {name, language, source}; calls: {program, graph, name, text, source (number or -1), nodes, gemms, bytes,
    seconds (null: not known), measured (seconds by the profile, or null)}, in the order in which they run
All estimates are those of `cost/estimate.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..passes.catalogue import all_rules
from ..passes.effects import effect_of, main_effect
from ..passes.record import Listing, PassRecord
from ..passes.session import Session
from ..pipeline import STAGES
from .compile_times import TITLES, CompileTimes
from .frames import in_order
from .kernels import kernels
from .labels import input_labels
from .launches import launches
from .line_table import LineTable, splices
from .phrases import kernel_phrase, place, summary, the_rest, title, what_mattered
from .profile import Profile, estimate_of

if TYPE_CHECKING:
    from .explanation import Explanation

ESTIMATES = ("gemms", "bytes", "seconds")
SITES = 12
"""How many sites of one reason to decline are named."""


def report_data(explanation: Explanation) -> dict[str, dict[str, Any]]:
    """The parts of the page's data by name."""
    return _Report(explanation).parts()


def _frames(explanation: Explanation, sessions: list[Session]) -> Iterator[dict[str, Any]]:
    for compiled, programs in in_order(sessions, explanation.frames):
        if isinstance(compiled, Session):
            seconds = sum(record.seconds for record in compiled.records)
            yield {
                "id": "", "what": compiled.caller, "thread": compiled.thread, "reason": "", "breaks": [], "failure": "",
                "seconds": seconds, "backward": 0, "programs": programs, "times": [], "backwardTimes": [],
            }  # fmt: skip
            continue
        yield {
            "id": compiled.compile_id, "what": str(compiled), "thread": compiled.thread, "reason": compiled.reason,
            "breaks": [[one.reason, one.source, one.explanation] for one in compiled.breaks],
            "failure": compiled.failure, "seconds": compiled.seconds, "backward": compiled.backward_seconds,
            "programs": programs, "times": _times(compiled.times), "backwardTimes": _times(compiled.backward_times),
        }  # fmt: skip


def _sums(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all launches of a graph, without those of which nothing is known: those are counted."""
    known = [call for call in calls if call["bytes"] is not None]
    measured = [call["measured"] for call in calls if call["measured"] is not None]
    return {
        **{what: sum(call[what] for call in known) if known or not calls else None for what in ESTIMATES},
        "unknown": len(calls) - len(known),
        "measured": sum(measured) if measured else None,
    }


def profile_data(profile: Profile) -> dict[str, Any]:
    """The measured times of the page."""
    launches = [
        {
            "program": one.program, "graph": one.launch.graph, "name": one.launch.name, "seconds": one.seconds,
            "estimate": estimate_of([one.launch]), "calls": one.calls, "nodes": list(one.launch.nodes),
            "madeBy": one.launch.region, "module": one.launch.module, "sources": list(one.launch.sources),
        }
        for one in profile.launches
    ]  # fmt: skip
    return {
        "device": profile.device,
        "wall": profile.wall_seconds,
        "kernels": profile.kernel_seconds,
        "waiting": profile.waiting_seconds,
        "notAttributed": profile.not_attributed,
        "rounds": profile.rounds,
        "launches": launches,
        "regions": [part.to_dict() for part in profile.regions],
        "modules": [part.to_dict() for part in profile.modules],
    }


def _times(times: CompileTimes) -> list[tuple[str, str, float]]:
    """The phases of a compile that took any time: name, title, seconds."""
    return [(name, TITLES[name], seconds) for name, seconds in times.phases().items() if seconds]


class _Report:
    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation
        self.table = LineTable()
        self.listings: list[dict[str, Any]] = []
        self.totals: list[list[dict[str, Any]]] = []
        """Totals of every version of every listing."""
        self.listing_number: dict[int, int] = {}
        self.passes: list[dict[str, Any]] = []
        self.firings: dict[int, list[Any]] = {}
        self.sources: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.measured = {} if explanation.profile is None else explanation.profile.by_place()
        # Inductor has passes of the same names
        stages = {} if explanation.backend == "inductor" else STAGES
        self.purposes = {
            (stage, entry.name): entry.purpose() for stage, entries in stages.items() for entry in entries
        }
        self.formulas = {name: rule.formula() for name, rule in all_rules().items()}

    def parts(self) -> dict[str, dict[str, Any]]:
        explanation = self.explanation
        sessions, labels = explanation.sessions, explanation.program_labels()
        programs = [
            {"label": label, **self._program(session, number)}
            for number, (session, label) in enumerate(zip(sessions, labels), 1)
        ]
        core = {
            "title": title(explanation),
            "model": explanation.model,
            "backend": explanation.backend,
            "train": explanation.train,
            "torch": torch.__version__,
            "summary": summary(explanation),
            "mattered": what_mattered(explanation),
            "rest": the_rest(explanation),
            "launches": kernel_phrase(explanation) if explanation.kernel_launches else "",
            "warnings": explanation.warnings,
            "recorded": explanation.recorded,
            "frames": list(_frames(explanation, sessions)),
            "programs": programs,
            "passes": self.passes,
            "timelines": [both.to_dict() for both in explanation.timelines],
            "profile": None if explanation.profile is None else profile_data(explanation.profile),
        }
        graphs = {**self.table.data(), "listings": self.listings, "firings": self.firings}
        return {"core": core, "graphs": graphs, "kernels": {"sources": self.sources, "calls": self.calls}}

    def _program(self, session: Session, number: int) -> dict[str, Any]:
        labels = input_labels(session.graphs)
        for key, listing in list(session.listings.items()):
            self._add_listing(listing, number, key.partition("#")[0], labels)
        first = len(self.passes)
        for record in list(session.records):
            if record.sites:
                self.firings[len(self.passes)] = [
                    [site.rule, site.node, list(site.removed), list(site.created)] for site in record.sites
                ]
            self.passes.append(self._pass(record, number))
        for graph, source in list(session.kernels.items()):
            self._kernels(session, number, graph, source)
        return {"flow": list(self._flow(session, number, first))}

    def _add_listing(self, listing: Listing, program: int, place: str, labels: Mapping[str, str]) -> None:
        self.listing_number[id(listing)] = len(self.listings)
        stage, _, graph = place.partition("/")
        versions = [[self.table.number(line, program, labels) for line in lines] for lines in listing.versions()]
        deltas = [splices(before, after) for before, after in itertools.pairwise(versions)]
        self.totals.append([self.table.total(version) for version in versions])
        self.listings.append(
            {"program": program, "stage": stage, "graph": graph, "first": versions[0], "deltas": deltas}
        )

    # ---- the flow ----

    def _flow(self, session: Session, program: int, first_pass: int) -> Iterator[dict[str, Any]]:
        """The points of the flow in order, each with the size of its graph."""
        by_place: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number in range(first_pass, len(self.passes)):
            shown = self.passes[number]
            by_place[shown["stage"], shown["graph"].partition(".")[0]].append(number)  # with the graphs inside a graph
        listings: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, shown in enumerate(self.listings):
            if shown["program"] == program:
                listings[shown["stage"], shown["graph"]].append(number)
        has_backward = any(graph == "backward" for _, graph in by_place)

        def box(key: str, label: str, places: list[tuple[str, str]], last: bool, side: str = "") -> Iterator[Any]:
            there = [number for where in places for number in listings[where]]
            if not there:
                return
            listing = there[-1 if last else 0]
            version = len(self.totals[listing]) - 1 if last else 0
            ran = places if last else [where for where in places if where[0] == "after_partition"]
            passes = [number for where in ran for number in by_place[where]]
            yield {
                "key": key, "label": label, "side": side, "listing": listing, "version": version, "passes": passes,
                **self.totals[listing][version],
            }  # fmt: skip

        joint = [("freeze", "joint"), ("joint", "joint"), ("before_partition", "joint")]
        yield from box("dynamo", "Dynamo", [("pre_grad", "pre_grad")], last=False)
        yield from box("pre_grad", "pre-grad", [("pre_grad", "pre_grad")], last=True)
        yield from box("autograd", "AOTAutograd", joint, last=False)
        yield from box("joint", "joint", joint, last=True)
        sides = ("forward", "backward") if has_backward else ("inference", "forward")
        for last, key, label in ((False, "partition", "partition"), (True, "post_grad", "post-grad")):
            if key == "partition" and not has_backward:
                continue
            for side in sides:
                stages = ["after_partition"] * (not last) + ["post_grad", "before_codegen"]
                yield from box(key, label, [(stage, side) for stage in stages], last, side if has_backward else "")
        for graph in list(session.kernels):
            calls = [call for call in self.calls if call["program"] == program and call["graph"] == graph]
            yield {
                "key": "kernels", "label": "code generation", "side": graph if has_backward else "",
                "kernels": graph, "passes": [], "nodes": len(calls), **_sums(calls),
            }  # fmt: skip

    # ---- passes ----

    def _pass(self, record: PassRecord, program: int) -> dict[str, Any]:
        reasons: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
        for decline in record.declines:
            reasons[decline.rule, decline.reason].append([decline.fault, decline.source])
        listing = self._listing_of(record, program)
        return {
            "program": program,
            "stage": record.stage,
            "graph": record.graph,
            "place": place(record, program),
            "name": record.name,
            "purpose": self.purposes.get((record.stage, record.name), ""),
            "effect": effect.name if (effect := main_effect(record)) is not None else "",
            "changed": record.changed,
            "error": record.error,
            "note": record.note,
            "rewrites": record.rewrites,
            "tried": record.tried,
            "matched": record.matched,
            "before": record.nodes_before,
            "after": record.nodes_after,
            "seconds": record.seconds,
            "stop": record.stop,
            "fired": [
                [rule, times, self.formulas.get(rule, ""), effect_of(record.name, rule).name]
                for rule, times in record.fired.most_common()
                if times
            ],
            "declines": [
                {"rule": rule, "reason": reason, "count": len(sites), "sites": sites[:SITES]}
                for (rule, reason), sites in sorted(reasons.items(), key=lambda item: -len(item[1]))
            ],
            "decisions": [
                {
                    "rule": decision.rule, "node": decision.node, "before": decision.before, "after": decision.after,
                    "source": ", ".join([decision.source, *decision.reasons]),
                }
                for decision in record.decisions
                if decision.matters
            ],
            "listing": listing,
            "versions": list(record.versions),
            "change": self._change(listing, record.versions),
        }  # fmt: skip

    def _change(self, listing: int, versions: tuple[int, int]) -> dict[str, Any]:
        """What a pass changed in the estimates of its graph."""
        if listing < 0 or versions[0] == versions[1]:
            return {}
        before, after = (self.totals[listing][version] for version in versions)
        return {what: after[what] - before[what] for what in ESTIMATES}

    def _listing_of(self, record: PassRecord, program: int) -> int:
        """The number of a record's listing; -1 if it has none because the compile was not observed."""
        if record.listing is None:
            return -1
        if id(record.listing) not in self.listing_number:  # a record that no stage of the session wrote
            self._add_listing(record.listing, program, f"{record.stage}/{record.graph}", {})
        return self.listing_number[id(record.listing)]

    # ---- kernels ----

    def _kernels(self, session: Session, program: int, graph: str, source: str) -> None:
        numbers = {}
        for kernel in kernels(source):
            numbers[kernel.name] = len(self.sources)
            self.sources.append({"name": kernel.name, "language": kernel.language, "source": kernel.source})
        for launch in launches(session, graph):
            cost = launch.cost
            self.calls.append(
                {
                    "program": program, "graph": graph, "name": launch.name, "text": launch.text,
                    "source": numbers.get(launch.name, -1), "nodes": list(launch.nodes),
                    **{what: None if cost is None else getattr(cost, what) for what in ESTIMATES},
                    "measured": self.measured.get((program, graph, launch.number)),
                }  # fmt: skip
            )
