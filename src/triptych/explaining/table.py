"""An explanation as a table for the terminal: what changed, a line for what did not, and why sites were left alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..cost.decision import Decision
from ..passes.record import PassRecord
from ..passes.session import Session
from .comparison import figures
from .compile_times import compile_lines
from .frames import in_order
from .phrases import CHANGED, FAILED, count, duration, nothing, place, summary, title
from .profile_table import render_profile

if TYPE_CHECKING:
    from .explanation import Explanation

SHOWN = 8


def render(explanation: Explanation) -> Iterator[RenderableType]:
    frames = explanation.frames
    if not explanation.sessions and not frames:
        yield Text(nothing(explanation))
        return
    yield Text(title(explanation), style="bold")
    yield Text(summary(explanation))
    if explanation.recorded or any(frame.is_recompile or frame.breaks or frame.failure for frame in frames):
        yield _frames(explanation)
    if explanation.sessions:
        yield _table(explanation)
    for line in compile_lines(frames):
        yield Text(line, style="dim")
    for session, label in zip(explanation.sessions, explanation.program_labels()):
        for graph, verdict in session.replays.items():
            of = f"{label}, {graph}" if len(explanation.sessions) > 1 else graph
            yield Text(f"CUDA graphs: {of}: {verdict}", style="dim")
    if explanation.profile is not None:
        yield from render_profile(explanation.profile)
    if explanation.stock is not None:
        yield _comparison(explanation, explanation.stock)
    if explanation.timelines:
        yield Text("\nCommunication with other ranks, modelled", style="bold")
        yield _communication(explanation)
    for warning in explanation.warnings:
        yield Text(f"! {warning}", style="yellow")
    decided = [decision for record in explanation.passes for decision in record.decisions if decision.matters]
    if decided:
        yield Text("\nCosts of what was done", style="bold")
        yield _decisions(decided)
    refusals = explanation.refusals()
    if refusals:
        yield Text("\nLeft alone, the most frequent reason first", style="bold")
        yield _refusals(explanation)
        if len(refusals) > SHOWN:
            yield Text(f"  and {count(len(refusals) - SHOWN, 'more reason')}", style="dim")


def _frames(explanation: Explanation) -> Table:
    """What Dynamo compiled, and why: one row per compile, with one line for each reason."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("compiled", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("programs", justify="right")
    table.add_column("time", justify="right", no_wrap=True)
    threads = {frame.thread for frame in explanation.frames}
    for frame, numbers in in_order(explanation.sessions, explanation.frames):
        programs = ", ".join(map(str, numbers))
        if isinstance(frame, Session):
            table.add_row("", frame.caller, programs, duration(sum(record.seconds for record in frame.records)))
            continue
        what = Text(str(frame) + (f" (thread {frame.thread})" if len(threads) > 1 else ""))
        if frame.reason:
            what.append(f"\nagain: {frame.reason}", style="yellow")
        for one in frame.breaks:
            what.append(f"\ngraph break at {one}", style="yellow")
        if frame.failure:
            what.append(f"\nruns in Python: {frame.failure}", style="red")
        time = duration(frame.seconds)
        if frame.backward_seconds:
            time += f" + {duration(frame.backward_seconds)}"
        table.add_row(frame.compile_id, what, programs, time)
    return table


def _comparison(explanation: Explanation, stock: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("compared")
    for backend in (explanation.backend, stock.backend):
        table.add_column(backend, justify="right")
    for figure in figures(explanation, stock):
        table.add_row(figure.what, *figure.texts())
    return table


def _table(explanation: Explanation) -> Table:
    counted = explanation.backend != "inductor"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("stage", "total", no_wrap=True)
    table.add_column("pass", overflow="fold")
    if counted:
        table.add_column("rewrites", str(explanation.rewrites), justify="right")
        table.add_column("declined", str(explanation.declined), justify="right")
    else:
        # Inductor does not say how many rewrites a pass made, only the graphs do
        table.add_column("changed", str(len(explanation.changed)), justify="right")
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("time", duration(explanation.seconds), justify="right", no_wrap=True)

    for number, (session, label) in enumerate(zip(explanation.sessions, explanation.program_labels()), 1):
        if explanation.recorded:  # many programs: only what changed
            table.add_row(f"program {number}", Text(label, style="bold"))
            _section(table, [place(record, number) for record in session.records], list(session.records), counted)
            continue
        for _, run in itertools.groupby(session.records, key=lambda r: (r.stage, r.graph)):
            records = list(run)
            _section(table, [place(record, number) for record in records], records, counted)
    return table


def _section(table: Table, places: list[str], records: list[PassRecord], counted: bool) -> None:
    """What changed, each place named once, and the rest in one line."""
    quiet = [r for r in records if not (r.changed or r.error)]
    shown = [(where, r) for where, r in zip(places, records) if r.changed or r.error]
    last = ""
    for where, record in shown:
        label, last = ("" if where == last else where), where
        sign = FAILED if record.error else CHANGED
        counts = [str(record.rewrites), str(record.declined or "")] if counted else ["changed"]
        rules = ", ".join(f"{rule} {times}" for rule, times in record.fired.most_common() if times)
        name = Text(f"{sign} {record.name}")
        if rules and rules != f"{record.name} {record.rewrites}":
            name.append(f"  {rules}", style="dim")
        if record.note:
            name.append(f"  {record.note}", style="dim")
        table.add_row(
            label,
            name,
            *counts,
            f"{record.nodes_before} -> {record.nodes_after}",
            duration(record.seconds),
            style="red" if record.error else "green",
        )
    if quiet:
        declined = sum(r.declined for r in quiet)
        counts = ["", str(declined or "")] if counted else [""]
        word = "more pass" if shown else "pass"
        table.add_row(
            places[0] if not shown and len(set(places)) == 1 else "",
            f"  {count(len(quiet), word, word + 'es')} changed nothing",
            *counts,
            "" if shown else str(quiet[-1].nodes_after),
            duration(sum(r.seconds for r in quiet)),
            style="dim",
        )
    table.add_section()


def _communication(explanation: Explanation) -> Table:
    """How many collectives each graph has, and how long nothing is computed while they are under way."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("graph")
    table.add_column("collectives", overflow="fold")
    for name in ("exposed", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for both in explanation.timelines:
        graph = both.graph if both.program == 1 else f"{both.graph}#{both.program}"
        for side, timeline in (("before", both.before), ("after", both.after)):
            kinds = ", ".join(f"{times} {kind}" for kind, times in timeline.collectives.items())
            times = [f"{seconds * 1e6:.1f} us" for seconds in (timeline.exposed, timeline.seconds)]
            table.add_row(f"{graph} {side}", kinds, *times)
    return table


def _decisions(decided: Sequence[Decision]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for decision in sorted(decided, key=lambda d: d.after - d.before)[:SHOWN]:
        table.add_row(decision.rule, str(decision), decision.node)
    return table


def _refusals(explanation: Explanation) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for refusal in explanation.refusals()[:SHOWN]:
        where = refusal.node + (f"  {refusal.source}" if refusal.source else "")
        table.add_row(f"{refusal.count}x", refusal.rule, refusal.reason, where)
    return table
