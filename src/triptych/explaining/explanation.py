"""What happened to a program on its way to kernels, as one value: to print, to read, to write as a page."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.fx import GraphModule

from ..arguments import require_file
from ..communication.timeline import Timeline
from ..errors import TriptychError, UnknownName
from ..passes.record import PassRecord
from ..passes.session import Session
from ..pipeline import pass_names
from ..rewrite.record import Decline
from .frames import Frame, GraphBreak, frames_of, program_label
from .kernels import kernel_calls
from .launches import all_launches
from .phrases import count
from .saved import listing, saved_session

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from .profile import Profile

VERSION = 1
"""Version of the format that `to_json` writes, described in docs/json.md. It changes whenever a name in the format, or
the meaning of a name, changes."""

PRINTED_WIDTH = 120


@dataclass(frozen=True)
class RefusalCount:
    """A reason to leave sites alone: how often it was met, and the first site."""

    count: int
    rule: str
    reason: str
    node: str
    """The node at fault at the first site."""
    source: str


@dataclass(frozen=True)
class GraphTimelines:
    """When a graph computes and when it communicates, before and after stage 3."""

    program: int
    """Which captured program, from 1."""
    graph: str
    before: Timeline
    after: Timeline

    def to_dict(self) -> dict[str, Any]:
        sides = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        return {"program": self.program, "graph": self.graph, **sides}


class Explanation:
    """Every pass that ran over a model, the graph at the end of every stage, and the kernels."""

    recorded = False
    """Does it describe a recorded run, which may still be going on?"""

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        backend: str = "triptych",
        train: bool = False,
        model: str = "",
        frames: Sequence[Frame] = (),
    ) -> None:
        self._collected = sessions
        self._frames = frames
        self.backend = backend
        self._train = train
        self.model = model
        """The name of the model, for titles."""
        self.stock: Explanation | None = None
        """The same model compiled by Inductor with its own passes, to compare with; only on request."""
        self.profile: Profile | None = None
        """Measured times of a step; only on request."""

    @property
    def train(self) -> bool:
        """Does it describe a training step, with a backward?"""
        return self._train

    @property
    def sessions(self) -> list[Session]:
        """The captured programs, each with all that was recorded of its compile."""
        return _last_attempts(list(self._collected))

    @property
    def frames(self) -> list[Frame]:
        """What Dynamo compiled: functions, and the rest of a function after a graph break."""
        return list(self._frames)

    @property
    def recompiles(self) -> list[Frame]:
        """Functions that were compiled again, each with the guard that failed as its `reason`."""
        return [frame for frame in self.frames if frame.is_recompile]

    @property
    def graph_breaks(self) -> list[GraphBreak]:
        """Where Dynamo ended a graph, in order; a function that is compiled again breaks again."""
        return [one for frame in self.frames for one in frame.breaks]

    @property
    def passes(self) -> list[PassRecord]:
        """All records in the order in which the passes ran, one captured program after the other."""
        return [record for session in self.sessions for record in session.records]

    @property
    def changed(self) -> list[PassRecord]:
        """The records of the passes that changed something: `exp.changed[0].diff` is the first change."""
        return [record for record in self.passes if record.changed]

    @property
    def graphs(self) -> dict[str, GraphModule]:
        """The graph at the end of each stage; those of a second captured program have names such as "dynamo#2". In an
        explanation that was pickled, graphs are of type `SavedGraph`, which has only the listing."""
        return dict(self._named(lambda session: session.graphs))

    @property
    def kernels(self) -> dict[str, str]:
        """Generated source by graph."""
        return dict(self._named(lambda session: session.kernels))

    @property
    def kernel_launches(self) -> int:
        """How many kernels one call of the model launches, forward and backward together; 0 if none were generated."""
        return sum(len(kernel_calls(source)) for source in self.kernels.values())

    @property
    def kernel_bytes(self) -> int:
        """How many bytes all kernels together read and write: an estimate from the nodes that each computes. It leaves
        out the launches that `kernels_unknown` counts."""
        return sum(launch.cost.bytes for launch in all_launches(self.sessions) if launch.cost is not None)

    @property
    def kernels_unknown(self) -> int:
        """Of how many kernel launches it is not known what they compute."""
        return sum(launch.cost is None for launch in all_launches(self.sessions))

    @property
    def timelines(self) -> list[GraphTimelines]:
        """For every graph that communicates with other ranks: when it computes and when it communicates, by the cost
        model, before and after stage 3."""
        return [
            GraphTimelines(number, graph, *both)
            for number, session in enumerate(self.sessions, 1)
            for graph, both in list(session.timelines.items())
        ]

    @property
    def warnings(self) -> list[str]:
        return [warning for session in self.sessions for warning in session.warnings]

    @property
    def rewrites(self) -> int:
        return sum(record.rewrites for record in self.passes)

    @property
    def declined(self) -> int:
        return sum(record.declined for record in self.passes)

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.passes)

    def runs_of(self, name: str) -> list[PassRecord]:
        """The records of one pass. The error for a name that is not known names similar ones."""
        records = [record for record in self.passes if record.name == name]
        if not records and name in pass_names():
            raise TriptychError(f"{name} did not run in this compile")
        if not records:
            raise UnknownName("pass", name, {record.name for record in self.passes})
        return records

    def refusals(self) -> list[RefusalCount]:
        """Why sites were left alone, the most frequent reason first."""
        counts: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], Decline] = {}
        for record in self.passes:
            for decline in record.declines:
                key = (decline.rule, decline.reason)
                counts[key] += 1
                first.setdefault(key, decline)
        return [
            RefusalCount(count, *key, first[key].fault, first[key].source) for key, count in counts.most_common()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; before and after of a pass as the lines that changed."""
        sessions = self.sessions
        return {
            "version": VERSION,
            "backend": self.backend,
            "model": self.model,
            "train": self.train,
            "torch": torch.__version__,
            "rewrites": self.rewrites,
            "declined": self.declined,
            "seconds": self.seconds,
            "kernel_launches": self.kernel_launches,
            "kernel_bytes": self.kernel_bytes,
            "kernels_unknown": self.kernels_unknown,
            "passes": [
                _record(record, number)
                for number, session in enumerate(sessions, 1)
                for record in session.records
            ],
            "graphs": {name: listing(gm) for name, gm in self.graphs.items()},
            "kernels": self.kernels,
            "timelines": [both.to_dict() for both in self.timelines],
            "warnings": self.warnings,
            "stock": None if self.stock is None else self.stock.to_dict(),
            "programs": [
                {
                    "program": number, "label": label, "compile_id": session.compile_id, "thread": session.thread,
                    "replays": dict(session.replays),
                }
                for number, (session, label) in enumerate(zip(sessions, self.program_labels()), 1)
            ],  # fmt: skip
            "frames": [frame.to_dict() for frame in self.frames],
            "comparison": None if self.stock is None else self._figures(self.stock),
            "profile": None if self.profile is None else self.profile.to_dict(),
        }

    def _figures(self, stock: Explanation) -> list[dict[str, Any]]:
        """Kernels, launches, bytes, nodes and times of this compile and of stock Inductor's."""
        from .comparison import figures

        return [
            {
                "what": one.what, "unit": one.unit, "ours": one.ours, "stock": one.theirs,
                "ours_unknown": one.unknown[0], "stock_unknown": one.unknown[1],
            }
            for one in figures(self, stock)
        ]  # fmt: skip

    def program_labels(self) -> list[str]:
        """For each captured program: the function that it comes from, and whether it is a recompile."""
        sessions = self.sessions
        return [
            program_label(session, frame) for session, frame in zip(sessions, frames_of(sessions, self.frames))
        ]

    @overload
    def to_json(self, path: None = None, *, indent: int | None = 2) -> str: ...

    @overload
    def to_json(self, path: str | os.PathLike[str], *, indent: int | None = 2) -> Path: ...

    def to_json(self, path: str | os.PathLike[str] | None = None, *, indent: int | None = 2) -> str | Path:
        """Everything as JSON (docs/json.md says what is where): written to `path`, which comes back, or as a string."""
        written = json.dumps(self.to_dict(), indent=indent)
        return written if path is None else write_file(path, written)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report, one self-contained page. Returns its path."""
        from .page import page

        reports = (self,) if self.stock is None else (self, self.stock)
        return write_file(path, page(*reports))

    def to_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the profiled step as a trace that perfetto (https://ui.perfetto.dev) opens. Returns its path."""
        from .trace import trace_data

        return write_file(path, json.dumps(trace_data(self)))

    def __getstate__(self) -> dict[str, Any]:
        """A pickle leaves out the graph modules with their weights, and the user's own passes."""
        return {**vars(self), "_collected": [saved_session(session) for session in self.sessions]}

    def __str__(self) -> str:
        # imported here because a compile does not need it
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=PRINTED_WIDTH, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    def __repr__(self) -> str:
        did = f"{count(len(self.passes), 'pass', 'passes')}, {count(self.rewrites, 'rewrite')}"
        return f"<Explanation: {did}, backend {self.backend}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .table import render

        yield from render(self)

    def _repr_html_(self) -> str:
        from .notebook import fragment

        return fragment(self)

    def _named(self, part: Any) -> Iterator[tuple[str, Any]]:
        for number, session in enumerate(self.sessions, 1):
            suffix = "" if number == 1 else f"#{number}"
            entries: Mapping[str, Any] = part(session)
            for name, value in list(entries.items()):  # another thread may be adding a backward
                # without a gradient the one graph that runs is the forward graph
                yield ("forward" if name == "inference" else name) + suffix, value


def _last_attempts(sessions: list[Session]) -> list[Session]:
    """The sessions without those of earlier attempts: Dynamo can restart a frame, and what it had compiled never ran.

    Ids repeat after a reset of Dynamo, so two sessions with one id are attempts at the same frame only if the later one
    has a higher attempt number.
    """
    latest: dict[str, int] = {}
    final = []
    for session in reversed(sessions):
        following = latest.get(session.compile_id, -1)
        if not session.compile_id or session.attempt >= following:
            final.append(session)
        latest[session.compile_id] = session.attempt
    return final[::-1]


def write_file(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file, and the folders it is in."""
    file = require_file(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TriptychError(f"{file} cannot be written: {error}") from error
    return file


def _record(record: PassRecord, program: int) -> dict[str, Any]:
    return {
        "program": program,
        "stage": record.stage,
        "name": record.name,
        "graph": record.graph,
        "changed": record.changed,
        "rewrites": record.rewrites,
        "declined": record.declined,
        "tried": record.tried,
        "matched": record.matched,
        "nodes_before": record.nodes_before,
        "nodes_after": record.nodes_after,
        "seconds": record.seconds,
        "ordinal": record.ordinal,
        "stop": record.stop,
        "note": record.note,
        "error": record.error,
        "fired": dict(record.fired),
        "sites": [vars(site) for site in record.sites],
        "declines": [vars(decline) for decline in record.declines],
        "decisions": [vars(decision) for decision in record.decisions],
        "diff": record.diff.splitlines(),
    }
