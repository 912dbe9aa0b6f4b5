"""Every declared example of every rule and pass: fires or declines as said, keeps the program's meaning, and has the
golden text of `tests/goldens`."""

from __future__ import annotations

import pytest
import torch

from triptych.rewrite.rule import Rule
from triptych.testing.check import run_example
from triptych.testing.subjects import subjects

from . import golden_text

SUBJECTS = list(subjects())
FIRST = {id(next(e for e in s.examples if e.fires is fires)) for s in SUBJECTS for fires in {e.fires for e in s.examples}}
"""The first example of each rule and pass that fires, and the first that declines: the sample of `make test-fast`."""

ALWAYS_IN_BOTH = 1
"""How many examples of each rule run by default in both dialects; each of the others runs in one, in turn."""


def is_repeated(example, number, dialect):
    return number >= ALWAYS_IN_BOTH and len(example.dialects) == 2 and example.dialects[number % 2] != dialect


CASES = [
    pytest.param(
        subject,
        example,
        dialect,
        id=f"{subject.name}-{number}-{dialect}",
        marks=pytest.mark.fast if id(example) in FIRST else pytest.mark.slow if is_repeated(example, number, dialect) else (),
    )
    for subject in SUBJECTS
    for number, example in enumerate(subject.examples)
    for dialect in example.dialects
]
TITLES = {
    (subject.name, id(example), dialect): title
    for subject in SUBJECTS
    for example, dialect, title in golden_text.sections_of(subject)
}
GOLDEN_RELEASE = "2.13"
"""Other releases of torch trace some operations to other ATen calls, and print modules, which stand in titles, with other
arguments: there, only the meaning is compared."""
HAS_GOLDENS = torch.__version__.startswith(GOLDEN_RELEASE + ".")


@pytest.mark.parametrize("subject, example, dialect", CASES)
def test_example(subject, example, dialect, pytestconfig):
    outcome = run_example(subject, example, dialect)
    if not example.fires or not HAS_GOLDENS:
        return
    title, text = TITLES[subject.name, id(example), dialect], golden_text.section(outcome)
    if pytestconfig.getoption("accept"):
        golden_text.accept(subject, {title: text})
        return
    golden = golden_text.read(subject.name).get(title, "")
    if text != golden:
        diff = golden_text.difference(golden, text, subject.name)
        pytest.fail(f"{title}\n{diff}\n{golden_text.HOW_TO_ACCEPT}", pytrace=False)


@pytest.mark.skipif(not HAS_GOLDENS, reason=f"goldens are those of torch {GOLDEN_RELEASE}")
def test_no_golden_is_stale(pytestconfig):
    """Each section has its example, and each file its rule or pass."""
    if pytestconfig.getoption("accept"):
        golden_text.drop_stale(SUBJECTS)
    stale = golden_text.stale(SUBJECTS)
    assert not stale, "\n".join(["goldens without an example:", *stale, golden_text.HOW_TO_ACCEPT])


@pytest.mark.parametrize("subject", [pytest.param(s, id=s.name) for s in SUBJECTS if isinstance(s, Rule)])
def test_rule_is_documented(subject):
    """A rule says its formula, and shows where it fires and where it does not."""
    assert subject.only_explains or "->" in subject.formula(), f"{subject.name}: the docstring's first paragraph is the formula"
    assert subject.only_explains or any(e.fires for e in subject.examples), f"{subject.name} shows no place where it fires"
    assert any(not e.fires for e in subject.examples), f"{subject.name} shows no place where it declines"
