"""An explanation as one static page: no script, no network, readable in the dark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..ir.text import text
from ..passes.record import PassRecord
from .diff import aligned, folded
from .phrases import CHANGED, FAILED, count, duration, place, summary, title

if TYPE_CHECKING:
    from .explanation import Explanation

# Every selector starts with .triptych: a notebook shows the same fragment among other things.
STYLE = """
.triptych { --ink: #1d2330; --dim: #68707f; --line: #d9dde5; --soft: #f4f5f8; --page: #ffffff;
  --add: #dcf5e3; --cut: #fde3e1; --swap: #fdf2cf; --good: #17803d; --bad: #b42318;
  color: var(--ink); background: var(--page); font: 15px/1.5 system-ui, sans-serif; padding: 1.5rem; }
@media (prefers-color-scheme: dark) { .triptych { --ink: #e3e7ef; --dim: #949eb0; --line: #343b49;
  --soft: #1d222c; --page: #14181f; --add: #143d27; --cut: #4c2020; --swap: #463c14;
  --good: #57d98a; --bad: #ff8a7d; } }
.triptych h1 { font-size: 1.4rem; margin: 0 0 .3rem; }
.triptych h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.triptych p { margin: .3rem 0 1rem; color: var(--dim); }
.triptych table { border-collapse: collapse; } .triptych table.passes { width: 100%; }
.triptych th { text-align: left; font-weight: 600; }
.triptych th { border-bottom: 2px solid var(--line); padding: .3rem .7rem; }
.triptych td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; vertical-align: top; }
.triptych .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.triptych tr.same td { color: var(--dim); }
.triptych tr.changed .name { color: var(--good); font-weight: 600; }
.triptych tr.failed .name, .triptych .error { color: var(--bad); }
.triptych:has(input.hide:checked) tr.same { display: none; }
.triptych summary { cursor: pointer; color: var(--dim); }
.triptych pre, .triptych .listing { font: 12px/1.45 ui-monospace, monospace; }
.triptych pre { background: var(--soft); padding: .8rem; overflow-x: auto; max-height: 40rem; }
.triptych .scroll { overflow-x: auto; } .triptych .listing { width: 100%; background: var(--soft); }
.triptych .listing td { border: 0; padding: 0 .6rem; white-space: pre; width: 50%; }
.triptych .listing tr.add td:last-child { background: var(--add); }
.triptych .listing tr.cut td:first-child { background: var(--cut); }
.triptych .listing tr.swap td { background: var(--swap); }
.triptych .listing tr.fold td { color: var(--dim); }
"""

_ROW_CLASS = {"+": "add", "-": "cut", "~": "swap", "@": "fold", " ": ""}
_SIGN = {"+": "+", "-": "-", "~": "~", "@": "...", " ": " "}


def page(*explanations: Explanation) -> str:
    """One page, self-contained; several explanations stand one below the other."""
    name = escape(f"Triptych: {explanations[0].model or 'what each pass did'}")
    body = "\n".join(_report(explanation) for explanation in explanations)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}</title>\n<style>body {{ margin: 0; }}{STYLE}</style></head>\n"
        f"<body>\n{body}</body></html>\n"
    )


def fragment(explanation: Explanation) -> str:
    """The same for a place inside another page, a notebook."""
    return f"<style>{STYLE}</style>\n{_report(explanation)}"


def _report(explanation: Explanation) -> str:
    parts = [
        '<div class="triptych">',
        f"<h1>What each pass did: {escape(title(explanation))}</h1>",
        f"<p>{escape(summary(explanation))}</p>",
        *(f'<p class="error">! {escape(warning)}</p>' for warning in explanation.warnings),
        '<label><input type="checkbox" class="hide" checked> hide passes that changed nothing</label>',
        _passes(explanation),
        _refusals(explanation),
        "<h2>Graphs at the end of each stage</h2>",
        *(_folded(name, text(gm)) for name, gm in explanation.graphs.items()),
        "<h2>Kernels</h2>",
        *(_folded(name, source) for name, source in explanation.kernels.items()),
    ]
    if not explanation.kernels:
        parts.append("<p>No kernel source was recorded.</p>")
    return "\n".join([*parts, "</div>\n"])


def _passes(explanation: Explanation) -> str:
    counted = explanation.backend != "inductor"
    heads = ["rewrites", "declined"] if counted else []
    numbers = "".join(f'<th class="number">{h}</th>' for h in [*heads, "nodes", "time"])
    rows = [
        _row(record, number, counted)
        for number, session in enumerate(explanation.sessions, 1)
        for record in session.records
    ]
    head = f"<tr><th>stage</th><th>pass</th>{numbers}</tr>"
    return f'<table class="passes"><thead>{head}</thead><tbody>\n' + "\n".join(rows) + "\n</tbody></table>"


def _row(record: PassRecord, program: int, counted: bool) -> str:
    kind, sign = ("changed", CHANGED) if record.changed else ("same", "")
    if record.error:
        kind, sign = "failed", FAILED
    cells = [str(record.rewrites), str(record.declined or "")] if counted else []
    nodes = f"{record.nodes_before} &rarr; " * record.changed + str(record.nodes_after)
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in [*cells, nodes, duration(record.seconds)])
    return (
        f'<tr class="{kind}"><td>{escape(place(record, program))}</td>'
        f'<td><span class="name">{sign} {escape(record.name)}</span>{_details(record)}</td>{numbers}</tr>'
    )


def _details(record: PassRecord) -> str:
    parts = []
    if record.error:
        parts.append(f"<details><summary>error</summary><pre>{escape(record.error)}</pre></details>")
    if record.fired:
        fired = ", ".join(f"{rule} {times}x" for rule, times in record.fired.most_common())
        parts.append(f"<div>{escape(fired)}</div>")
    if record.note:
        parts.append(f"<div>{escape(record.note)}</div>")
    if record.changed and record.listing:
        parts.append(f"<details><summary>before and after</summary>{_listing(record)}</details>")
    for decision in record.decisions:
        parts.append(f"<div>{escape(f'{decision.rule} at {decision.node}: {decision}')}</div>")
    if record.declines:
        items = "".join(f"<li>{escape(str(decline))}</li>" for decline in record.declines)
        what = count(len(record.declines), "site")
        parts.append(f"<details><summary>{what} left alone</summary><ul>{items}</ul></details>")
    return "".join(parts)


def _listing(record: PassRecord) -> str:
    rows = [
        f'<tr class="{_ROW_CLASS[row.sign]}"><td>{_cell(row.sign, row.left, "-~ @")}</td>'
        f"<td>{_cell(row.sign, row.right, '+~ ')}</td></tr>"
        for row in folded(aligned(record.before, record.after))
    ]
    return f'<div class="scroll"><table class="listing">{"".join(rows)}</table></div>'


def _cell(sign: str, line: str, shown_for: str) -> str:
    return escape(f"{_SIGN[sign]} {line}") if sign in shown_for else ""


def _refusals(explanation: Explanation) -> str:
    refusals = explanation.refusals()
    if not refusals:
        return ""
    rows = "".join(
        f'<tr><td class="number">{r.count}</td><td>{escape(r.rule)}</td><td>{escape(r.reason)}</td>'
        f"<td>{escape(f'{r.node} {r.source}')}</td></tr>"
        for r in refusals
    )
    heads = ("rule", "why it was left alone", "first node at fault")
    head = '<tr><th class="number">times</th>' + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"
    return f"<h2>Left alone</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _folded(name: str, body: str) -> str:
    lines = count(body.count("\n") + 1, "line")
    return f"<details><summary>{escape(name)} ({lines})</summary><pre>{escape(body)}</pre></details>"
