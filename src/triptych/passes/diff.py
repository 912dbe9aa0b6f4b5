"""Two listings side by side: equal lines aligned, far-away equal lines folded."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from .record import Delta


@dataclass(frozen=True)
class Row:
    """One line: " " on both sides, "-" left only, "+" right only, "~" different on both, "@" folded."""

    sign: str
    left: str = ""
    right: str = ""


def aligned(before: str, after: str) -> list[Row]:
    """Every line of both listings, in order, the lines that correspond in one row."""
    old, new = before.splitlines(), after.splitlines()
    # most of a graph is the same before and after a pass: only the middle needs a search
    delta = Delta.between(old, new)
    rows = [Row(" ", line, line) for line in old[: delta.head]]
    left, right = list(delta.removed), list(delta.added)
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            rows += [Row(" ", line, line) for line in left[i:i_end]]
        else:
            rows += _changed(left[i:i_end], right[j:j_end])
    rows += [Row(" ", line, line) for line in old[len(old) - delta.tail :]]
    return rows


def _changed(left: list[str], right: list[str]) -> Iterator[Row]:
    """Lines of one change; two that define the same name stand in one row."""
    position = {_name(line): number for number, line in enumerate(right)}
    done = 0
    for line in left:
        number = position.get(_name(line), -1)
        if number < done:
            yield Row("-", line, "")
            continue
        for added in right[done:number]:
            yield Row("+", "", added)
        yield Row("~", line, right[number])
        done = number + 1
    for added in right[done:]:
        yield Row("+", "", added)


def _name(line: str) -> str:
    """What a line of a listing defines; a line that defines nothing stands for itself."""
    head = line.split(" = ", 1)[0]
    return head.split(":", 1)[0].strip() if head != line else line


def folded(rows: list[Row], context: int = 3) -> list[Row]:
    """The changed rows and a few lines around; what is left out becomes an "@" row that says how much."""
    keep: set[int] = set()
    for number, row in enumerate(rows):
        if row.sign != " ":
            keep.update(range(number - context, number + context + 1))
    result: list[Row] = []
    skipped = 0
    for number, row in enumerate(rows):
        # a fold that hides one line only takes as much room as the line
        if number in keep or (not skipped and number + 1 in keep):
            if skipped:
                result.append(Row("@", f"{skipped} lines"))
            skipped = 0
            result.append(row)
        else:
            skipped += 1
    if skipped:
        result.append(Row("@", f"{skipped} lines"))
    return result


def unified(before: str, after: str, context: int = 3) -> list[str]:
    """The same as text, one column: lines start with their sign."""
    lines = []
    for row in folded(aligned(before, after), context):
        if row.sign == "~":
            lines += ["- " + row.left, "+ " + row.right]
        elif row.sign == "@":
            lines.append(f"  ... {row.left}")
        else:
            lines.append(f"{row.sign} {row.left or row.right}")
    return lines
