"""The report page: one file with script, style and data in it, which opens from disk without a network.

The script and the style are built from `report/` into `assets/`; see CONTRIBUTING.md.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .comparison import comparison_data
from .page_data import report_data
from .phrases import summary, title

if TYPE_CHECKING:
    from .explanation import Explanation

ASSETS = files(__package__) / "assets"


def page(*explanations: Explanation) -> str:
    """One page, self-contained; where there are several explanations, it has a switch between them.

    If the second one is that of stock Inductor for the model of the first, the page opens with a comparison.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(_asset("report.html.j2"))
    reports = [report_data(explanation) for explanation in explanations]
    if len(explanations) == 2 and explanations[0].stock is explanations[1]:
        cores = [report["core"] for report in reports]
        reports[0]["comparison"] = comparison_data(*explanations, cores)
    return template.render(
        title=f"Triptych: {explanations[0].model or 'what each pass did'}",
        heads=[(title(explanation), summary(explanation)) for explanation in explanations],
        script=_asset("report.js"),
        style=_asset("report.css"),
        parts=list(_parts(reports)),
    )


def _parts(reports: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Every part of the data: its identifier, the title of its report, and the data themselves."""
    for number, report in enumerate(reports):
        for name, part in report.items():
            yield f"data-{number}-{name}", report["core"]["title"], encoded(part)


def encoded(part: Mapping[str, Any]) -> str:
    """Compressed JSON in base64, so that no data can end the script element that contains it."""
    text = json.dumps(part, separators=(",", ":"), ensure_ascii=False)
    # the time of compression is left out: the same data give the same page
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text("utf-8")
