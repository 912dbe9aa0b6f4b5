"""What a run of the suite writes: all figures as JSON, and tables in Markdown.

    python bench/tables.py   # what docs/benchmarks.md and the README show of bench/results/suite-cuda.json
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from variants import INDUCTOR, PAIRS, VARIANTS

Record = dict[str, Any]

SLOW = 0.98
"""Below this speed relative to Inductor a model is listed."""
COMPARED = [
    *((title, pair, "ms") for title, pair in PAIRS.items()),
    ("default, kernels alone", PAIRS["default"], "gpu_ms"),
]
"""The means of a summary: a title, ours and Inductor's counterpart, and the figure that is compared. The time
of the kernels alone does not depend on how quickly the host launches them."""
TIMES_EAGER = 3
"""An error is suspicious if it is larger than this multiple of eager's error plus the rounding."""


def save(path: Path, header: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Write path.json and path.md, each as a whole: an interruption leaves the previous files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path.with_suffix(".json"), json.dumps({**header, "cases": records}, indent=1) + "\n")
    _replace(path.with_suffix(".md"), markdown(header, records))


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    os.replace(aside, path)


def load(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """The header and the records of an earlier run; empty if there is none."""
    file = path.with_suffix(".json")
    if not file.exists():
        return {}, []
    header = json.loads(file.read_text())
    return header, header.pop("cases")


def speed(record: Record, ours: str, theirs: str = INDUCTOR, figure: str = "ms") -> float | None:
    """How many times as fast `ours` is as `theirs`: the time of `theirs` over that of `ours`."""
    times = [record["variants"].get(name, {}).get(figure) for name in (ours, theirs)]
    return times[1] / times[0] if all(times) else None


def wrong(record: Record, variant: str) -> bool:
    """Is the variant's error beyond what eager's own and rounding explain?"""
    error = record["variants"].get(variant, {}).get("error")
    return error is not None and error > TIMES_EAGER * record["eager_error"] + record["rounding"]


def means(records: Sequence[Record]) -> Iterator[tuple[str, str, float, int]]:
    """Mode, what is compared, geometric mean of the speeds, number of models."""
    for mode in dict.fromkeys(record["mode"] for record in records):
        for title, pair, figure in COMPARED:
            speeds = [s for r in records if r["mode"] == mode and (s := speed(r, *pair, figure)) is not None]
            if speeds:
                yield mode, title, math.exp(sum(map(math.log, speeds)) / len(speeds)), len(speeds)


def summary(records: Sequence[Record]) -> str:
    """Geometric means, what is slower than Inductor, what is wrong, what has no figures."""
    lines = ["Speed of Triptych relative to Inductor (geometric mean; above 1 is faster):", ""]
    compared = [f"- {mode}, {title}: {mean:.2f}x over {count}" for mode, title, mean, count in means(records)]
    lines += compared or ["- nothing was measured with both"]
    lines += ["", f"Below {SLOW}x:", "", *([f"- {line}" for line in slower(records)] or ["- none"])]
    off = [
        f"- {_case(record)}, {name}: error {figures['error']:.1e}, of eager {record['eager_error']:.1e}"
        for record in records
        for name, figures in record["variants"].items()
        if wrong(record, name)
    ]
    lines += ["", f"Error more than {TIMES_EAGER} times eager's:", "", *(off or ["- none"])]
    lines += ["", "Without figures:", "", *(list(_reasons(records)) or ["- none"])]
    return "\n".join(lines) + "\n"


def slower(records: Sequence[Record]) -> list[str]:
    """Every model that Triptych makes slower than Inductor, and by how much."""
    return [
        f"{_case(record)}, {title}: {ratio:.2f}x"
        for record in records
        for title, pair in PAIRS.items()
        if (ratio := speed(record, *pair)) is not None and ratio < SLOW
    ]


def _case(record: Record) -> str:
    return f"{record['model']} {record['mode']}"


def _reasons(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record["reason"]:
            yield f"- {_case(record)}: {record['status']}, {record['reason']}"
        for name, figures in record["variants"].items():
            if "failure" in figures:
                yield f"- {_case(record)}, {name}: {figures['failure']}"


def markdown(header: Mapping[str, Any], records: Sequence[Record]) -> str:
    facts = [f"- {name}: {value}" for name, value in header.items()]
    text = ["# Benchmark", "", *facts, "", "## Summary", "", summary(records)]
    for mode in dict.fromkeys(record["mode"] for record in records):
        of_mode = [record for record in records if record["mode"] == mode]
        text += [f"## {mode.capitalize()}", "", *speeds_table(of_mode), "", *figures_table(of_mode), ""]
    return "\n".join(text)


def headline(header: Mapping[str, Any], records: Sequence[Record]) -> str:
    """A run in one line, for the README: the geometric means by default and with CUDA graphs."""
    machine, figures = header["machine"].partition(";")[0], list(means(records))
    modes = []
    for mode in dict.fromkeys(mode for mode, *_ in figures):
        of_mode = {title: (mean, count) for other, title, mean, count in figures if other == mode}
        (default, count), (graphs, _) = of_mode["default"], of_mode["CUDA graphs"]
        modes.append(f"{mode} {default:.2f}x over {count} models ({graphs:.2f}x with CUDA graphs)")
    return f"Speed relative to Inductor on one {machine}, geometric means: {', '.join(modes)}."


def for_docs(header: Mapping[str, Any], records: Sequence[Record]) -> str:
    """What docs/benchmarks.md shows of a run: machine, means, the speed of every model, and every loss."""
    text = [f"{header['machine']}; {header['versions']}; sizes: {header['sizes']}; `{header['command']}`.", ""]
    text += [f"- {mode}, {title}: {mean:.2f}x over {count} models" for mode, title, mean, count in means(records)]
    slow = "; ".join(slower(records)) or "none"
    text += ["", f"Below {SLOW}x: {slow}."]
    for mode in dict.fromkeys(record["mode"] for record in records):
        of_mode = [record for record in records if record["mode"] == mode and record["status"] != "skipped"]
        text += ["", f"**{mode.capitalize()}.** " + next(rows := speeds_table(of_mode)), *rows]
    return "\n".join(text) + "\n"


def speeds_table(records: Sequence[Record]) -> Iterator[str]:
    """One row per model: Inductor's time, and how many times as fast the others are."""
    names = [name for name in VARIANTS if any(name in record["variants"] for record in records)]
    others = [name for name in names if name != INDUCTOR]
    yield f"Milliseconds of `{INDUCTOR}`; for the others, how many times as fast."
    yield ""
    yield from _table(
        ["model", INDUCTOR, *others],
        [[r["model"], _time(r), *(_speed(r, name) for name in others)] for r in records],
    )


def _time(record: Record) -> str:
    figures = record["variants"].get(INDUCTOR)
    if figures is None:
        return "" if record["variants"] else record["status"]
    return f"{figures['ms']:.3f}" if "ms" in figures else "failed"


def _speed(record: Record, name: str) -> str:
    figures = record["variants"].get(name)
    if not figures or "failure" in figures:
        return "failed" if figures else ""
    ratio = speed(record, name)
    return ("" if ratio is None else f"{ratio:.2f}x") + (" wrong" if wrong(record, name) else "")


def figures_table(records: Sequence[Record]) -> Iterator[str]:
    """One row per model and variant, with every figure."""
    rows = [
        [
            record["model"], name, _number(figures.get("ms"), ".3f"), _number(figures.get("error"), ".1e"),
            _number(_mebibytes(figures.get("bytes")), ".0f"), _number(figures.get("compile_s"), ".1f"),
            _number(figures.get("kernels"), "d"), _number(figures.get("gpu_ms"), ".3f"),
        ]
        for record in records
        for name, figures in record["variants"].items()
    ]  # fmt: skip
    yield from _table(["model", "variant", "ms", "error", "peak MiB", "compile s", "kernels", "kernels ms"], rows)


def _mebibytes(number: int | None) -> float | None:
    return None if number is None else number / 2**20


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


if __name__ == "__main__":
    run = load(Path(__file__).with_name("results") / "suite-cuda")
    print(for_docs(*run), headline(*run), sep="\n")
