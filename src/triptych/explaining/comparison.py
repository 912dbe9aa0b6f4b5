"""Two compiles of one model side by side: Triptych's, and that of Inductor with its own passes.

The data of the page's comparison, beside those of the two reports:
    backends: [ours, the other one]
    figures: [[what, unit, ours, theirs, [launches unknown to ours, to theirs], is comparable]], of all programs
        together; unit is "", "bytes" or "seconds". A value is null if nothing of it is known; with launches unknown, it
        is the least that it can be. Estimated times are not comparable: one program is not faster by an estimate.
    programs: by captured program: {stages: [[label, side, ours or null, theirs or null]], each a box of the flow,
        graphs: [{graph, rows: [[sign, our line, their line]]}], the graphs that code generation got}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..passes.diff import Row
from ..passes.node_lines import NodeLine
from ..passes.session import Session
from .kernels import kernels
from .launches import all_launches
from .phrases import data_size, duration
from .totals import Total, cost_total

if TYPE_CHECKING:
    from .explanation import Explanation

VIEW = re.compile(r"^aten\.(?:view|reshape|_unsafe_view)(?:\.default)?\(")
LAST_STAGES = ("post_grad", "before_codegen")
FINAL = {"inference": "forward", "forward": "forward", "backward": "backward"}
"""Without a gradient the one graph that runs is the forward graph."""
SIZE = ("nodes", "gemms", "bytes", "seconds", "unknown", "measured")
"""What of a box of the flow is compared."""
EXACT = 2000
"""Up to this many nodes, all lines take part in the search for common sequences."""


class Figure(NamedTuple):
    """One figure of both compiles."""

    what: str
    unit: str
    ours: float | None
    """None: nothing of it is known."""
    theirs: float | None
    unknown: tuple[int, int] = (0, 0)
    """Launches on each side that the figure leaves out, because nothing is known of them."""
    comparable: bool = True
    """Does it say which of the two is faster? An estimated time does not."""

    def texts(self) -> list[str]:
        """Both values as text: "at least 9.1 MB, 3 launches unknown"."""
        shown = {"": lambda value: f"{value:,}", "bytes": data_size, "seconds": duration}[self.unit]
        totals = (Total(value, unknown) for value, unknown in zip((self.ours, self.theirs), self.unknown))
        return [total.text(shown) for total in totals]


def figures(ours: Explanation, theirs: Explanation) -> list[Figure]:
    """Figures of the two compiles, summed over all programs."""
    rows = []
    for (what, unit, mine), (_, _, other) in zip(_totals(ours), _totals(theirs)):
        is_estimate = "estimated" in what
        unknown = (mine.unknown, other.unknown)
        comparable = not is_estimate or (unit != "seconds" and not any(unknown))
        rows.append(Figure(what, unit, mine.value, other.value, unknown, comparable))
    return [*rows, *_measured(ours, theirs)]


def _measured(ours: Explanation, theirs: Explanation) -> list[Figure]:
    """What the profiles of both say; nothing if one of them was not profiled."""
    mine, other = ours.profile, theirs.profile
    if mine is None or other is None:
        return []
    rows = [
        Figure("time in kernels (measured)", "seconds", mine.kernel_seconds, other.kernel_seconds),
        Figure("time of a step (measured)", "seconds", mine.wall_seconds, other.wall_seconds),
    ]
    if mine.waiting_seconds is not None and other.waiting_seconds is not None:
        what = "time in which the GPU waits for the host (measured)"
        rows.insert(1, Figure(what, "seconds", mine.waiting_seconds, other.waiting_seconds))
    return rows


def _totals(explanation: Explanation) -> list[tuple[str, str, Total]]:
    sessions = explanation.sessions
    final = [lines for session in sessions for lines in _final_graphs(session).values()]
    sources = [source for session in sessions for source in session.kernels.values()]
    calls = list(all_launches(sessions))
    frames = explanation.frames
    exact: list[tuple[str, str, float]] = [
        ("kernel launches", "", len(calls)),
        ("of generated kernels", "", sum(call.generated for call in calls)),
        ("of libraries and operators", "", sum(not call.generated for call in calls)),
        ("different generated kernels", "", sum(len(kernels(source)) for source in sources)),
    ]
    others: list[tuple[str, str, float]] = [
        ("nodes of the final graphs", "", sum(map(len, final))),
        ("GEMMs in the final graphs", "", sum(line.cost.gemms for lines in final for line in lines)),
        ("passes that changed something", "", sum(record.changed for record in explanation.passes)),
        ("passes", "", len(explanation.passes)),
        ("time in passes", "seconds", explanation.seconds),
        ("time to compile", "seconds", sum(frame.seconds + frame.backward_seconds for frame in frames)),
    ]
    return [
        *((what, unit, Total(value)) for what, unit, value in exact),
        ("read and written by kernels (estimated)", "bytes", cost_total(calls, "bytes")),
        ("time in kernels (estimated)", "seconds", cost_total(calls, "seconds")),
        *((what, unit, Total(value)) for what, unit, value in others),
    ]


def _final_graphs(session: Session) -> dict[str, list[NodeLine]]:
    """The listings of the graphs that code generation got."""
    final = {}
    for key, listing in list(session.listings.items()):
        stage, _, graph = key.partition("#")[0].partition("/")
        if stage in LAST_STAGES and graph in FINAL:
            final[FINAL[graph]] = [line for line in listing.latest if isinstance(line, NodeLine)]
    return final


def comparison_data(ours: Explanation, theirs: Explanation, cores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The data of the comparison; `cores` are those of the two reports, which have the flow of each program."""
    programs = []
    for mine, other, own_flow, other_flow in zip(
        ours.sessions, theirs.sessions, *([program["flow"] for program in core["programs"]] for core in cores)
    ):
        graphs = _final_graphs(mine)
        rows = {
            name: same_operations(graphs[name], graph)
            for name, graph in _final_graphs(other).items()
            if name in graphs
        }
        programs.append(
            {
                "stages": _stages(own_flow, other_flow),
                "graphs": [
                    {"graph": name, "rows": [[row.sign, row.left, row.right] for row in shown]}
                    for name, shown in rows.items()
                ],
            }
        )
    return {"backends": [ours.backend, theirs.backend], "figures": figures(ours, theirs), "programs": programs}


def _stages(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[list[Any]]:
    """The points of both flows, including those that only one of them has."""
    by_place = [{(box["key"], box["side"]): box for box in flow} for flow in (ours, theirs)]
    places = {(box["key"], box["side"]): box["label"] for box in (*ours, *theirs)}
    order = ["dynamo", "pre_grad", "autograd", "joint", "partition", "post_grad", "kernels"]
    return [
        [label, side, *(_size(boxes.get((key, side))) for boxes in by_place)]
        for (key, side), label in sorted(places.items(), key=lambda item: order.index(item[0][0]))
    ]


def _size(box: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if box is None else {what: box[what] for what in SIZE if what in box}


def same_operations(left: Sequence[NodeLine], right: Sequence[NodeLine]) -> list[Row]:
    """Aligns two graphs of one program: lines that call the same operation on values of the same types share a row.

    Names of nodes say nothing here: the two compilers number them differently.
    """
    ours_keys, theirs_keys = ([_operation(line) for line in side] for side in (left, right))
    # in a large graph, very frequent operations are not used as anchors: the search would become quadratic
    matcher = difflib.SequenceMatcher(None, ours_keys, theirs_keys, autojunk=len(theirs_keys) > EXACT)
    rows: list[Row] = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            rows += [Row(" ", mine, other) for mine, other in zip(left[i:i_end], right[j:j_end])]
        else:
            rows += [Row("-", line, "") for line in left[i:i_end]]
            rows += [Row("+", "", line) for line in right[j:j_end]]
    return rows


def _operation(line: NodeLine) -> str:
    """A line without the names of nodes. Before code generation Inductor writes every view as a reshape."""
    names = "|".join(re.escape(name) for name in sorted(line.inputs, key=len, reverse=True))
    call = re.sub(rf"\b(?:{names})\b", "_", line.call) if names else line.call
    return f"{line.type} = {VIEW.sub('view(', call)}"
