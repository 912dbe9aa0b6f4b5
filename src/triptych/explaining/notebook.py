"""An explanation as a small static table, for a notebook: the whole report is a page of its own."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..passes.record import PassRecord
from .phrases import CHANGED, FAILED, count, duration, place, summary, title

if TYPE_CHECKING:
    from .explanation import Explanation

# Every selector starts with .triptych: a notebook shows the fragment among other things.
STYLE = """
.triptych { font: 14px/1.5 system-ui, sans-serif; }
.triptych h1 { font-size: 1.2rem; margin: 0; }
.triptych table { border-collapse: collapse; }
.triptych th, .triptych td { text-align: left; padding: .15rem .7rem; vertical-align: top; }
.triptych .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.triptych summary { cursor: pointer; }
.triptych pre { font: 12px/1.45 ui-monospace, monospace; max-height: 30rem; overflow: auto; }
.triptych .error { color: #d13438; }
"""


def fragment(explanation: Explanation) -> str:
    """A table of what changed, each row with its difference; the full report is named below it."""
    counted = explanation.backend != "inductor"
    heads = [*(["rewrites", "declined"] if counted else []), "nodes", "time"]
    rows = [
        _row(record, number, counted)
        for number, session in enumerate(explanation.sessions, 1)
        for record in session.records
        if record.changed or record.error
    ]
    head = "<th>stage</th><th>pass</th>" + "".join(f'<th class="number">{h}</th>' for h in heads)
    quiet = len(explanation.passes) - len(rows)
    return "\n".join(
        [
            f'<style>{STYLE}</style>\n<div class="triptych">',
            f"<h1>{escape(title(explanation))}</h1>",
            f"<p>{escape(summary(explanation))}</p>",
            *(f'<p class="error">! {escape(warning)}</p>' for warning in explanation.warnings),
            f"<table><thead><tr>{head}</tr></thead><tbody>",
            *rows,
            "</tbody></table>",
            f"<p>{count(quiet, 'pass', 'passes')} changed nothing. "
            "<code>to_html(path)</code> writes the whole report.</p></div>",
        ]
    )


def _row(record: PassRecord, program: int, counted: bool) -> str:
    sign = FAILED if record.error else CHANGED
    cells = [str(record.rewrites), str(record.declined or "")] if counted else []
    cells += [f"{record.nodes_before} &rarr; {record.nodes_after}", duration(record.seconds)]
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    name = f"{sign} {escape(record.name)}"
    if record.error:
        name = f'<span class="error">{name}: {escape(record.error.partition(chr(10))[0])}</span>'
    elif record.listing is not None:
        name = f"<details><summary>{name}</summary><pre>{escape(record.diff)}</pre></details>"
    return f"<tr><td>{escape(place(record, program))}</td><td>{name}</td>{numbers}</tr>"
