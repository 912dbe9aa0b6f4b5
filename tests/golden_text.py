"""Golden texts: what every firing example looks like before and after, in `tests/goldens/<rule or pass>.txt`.

A file has one section for each firing example and dialect. Its title is the example as it is written, with its inputs,
so that a new example in the middle renumbers nothing. `pytest tests/test_examples.py --accept` rewrites the sections
of the examples that run.
"""

from __future__ import annotations

import difflib
import fcntl
import functools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych.rewrite.examples import Example
from triptych.rewrite.passes import Pass
from triptych.rewrite.rule import Rule
from triptych.testing.check import Outcome

FOLDER = Path(__file__).parent / "goldens"
HOW_TO_ACCEPT = "If the new text is right, accept it: pytest tests/test_examples.py --accept"
TITLE = "=== "


@functools.cache  # read once: an example's source is looked up in its file, which may be edited while tests run
def sections_of(subject: Rule | type[Pass]) -> list[tuple[Example, str, str]]:
    """Firing example, dialect and title of each section, in the order of the examples."""
    seen: Counter[str] = Counter()
    sections = []
    for example in subject.examples:
        if not example.fires:
            continue
        title = _title(example)
        seen[title] += 1
        number = f" | no. {seen[title]}" if seen[title] > 1 else ""
        sections += [(example, dialect, f"{title}{number} | {dialect}") for dialect in example.dialects]
    return sections


def _title(example: Example) -> str:
    """The program on one line (of a function only its first line), its inputs and how it is run."""
    source = example.source
    program = source.split("\n")[0] if source.startswith("def ") else " ".join(source.split())
    return " | ".join(part for part in (program, example.conditions) if part)


def section(outcome: Outcome) -> str:
    """The body of one section: how often each rule fired, the graph before and the graph after.

    Line numbers of the source change with every edit of the example's file, and the number in the name of a symbolic
    size with the release of torch: the first are left out, and sizes are numbered by their first appearance.
    """
    fired = ", ".join(f"{rule} {times}" for rule, times in sorted(outcome.tally.fired.items()))
    body = f"fired: {fired}\n--- before\n{outcome.before}\n--- after\n{outcome.after}"
    body = re.sub(r"  # [^\s:]+:\d+(?=$|  <- )", "", body, flags=re.MULTILINE)
    numbers: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda found: numbers.setdefault(found[0], f"s{len(numbers)}"), body)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def read(name: str) -> dict[str, str]:
    """Sections by title; none where there is no file."""
    path = path_of(name)
    parts = f"\n{path.read_text()}".split(f"\n{TITLE}")[1:] if path.exists() else []
    split = (part.split("\n", 1) for part in parts)
    return {title: body.strip("\n") for title, body in split}


def write(name: str, sections: Mapping[str, str]) -> None:
    path = path_of(name)
    if not sections:
        path.unlink(missing_ok=True)
        return
    FOLDER.mkdir(exist_ok=True)
    path.write_text("\n".join(f"{TITLE}{title}\n{body}\n" for title, body in sections.items()))


def accept(subject: Rule | type[Pass], changes: Mapping[str, str]) -> None:
    """Replace these sections of the subject's file, and drop those that no example has any more."""
    lock = Path(tempfile.gettempdir()) / "triptych-goldens.lock"
    with lock.open("w") as handle:  # processes of pytest-xdist write sections of the same file
        fcntl.flock(handle, fcntl.LOCK_EX)
        sections = {**read(subject.name), **changes}
        titles = [title for _, _, title in sections_of(subject)]
        write(subject.name, {title: sections[title] for title in titles if title in sections})


def stale(subjects: Sequence[Rule | type[Pass]]) -> list[str]:
    """Files without a rule or pass, and sections without an example."""
    shown = [s for s in subjects if s.examples]  # a pass may have the name of one of its rules, which has the examples
    titles = {subject.name: {title for _, _, title in sections_of(subject)} for subject in shown}
    return [
        f"{path.name}: {title}"
        for path in sorted(FOLDER.glob("*.txt"))
        for title in read(path.stem)
        if title not in titles.get(path.stem, ())
    ]


def drop_stale(subjects: Sequence[Rule | type[Pass]]) -> None:
    shown = [s for s in subjects if s.examples]
    names = {subject.name for subject in shown}
    for path in FOLDER.glob("*.txt"):
        if path.stem not in names:
            path.unlink()
    for subject in shown:
        accept(subject, {})


def difference(expected: str, actual: str, name: str) -> str:
    return "\n".join(
        difflib.unified_diff(expected.split("\n"), actual.split("\n"), f"goldens/{name}.txt", "now", n=100, lineterm="")
    )
