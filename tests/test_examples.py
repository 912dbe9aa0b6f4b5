"""Every declared example of every rule and pass: fires or declines as said, and keeps the program's meaning."""

from __future__ import annotations

import pytest

from triptych.rewrite.rule import Rule
from triptych.testing.check import run_example
from triptych.testing.subjects import subjects

CASES = [
    pytest.param(subject, example, dialect, id=f"{subject.name}-{number}-{dialect}")
    for subject in subjects()
    for number, example in enumerate(subject.examples)
    for dialect in example.dialects
]


@pytest.mark.parametrize("subject, example, dialect", CASES)
def test_example(subject, example, dialect):
    run_example(subject, example, dialect)


@pytest.mark.parametrize("subject", [pytest.param(s, id=s.name) for s in subjects() if isinstance(s, Rule)])
def test_rule_is_documented(subject):
    """A rule says its formula, and shows where it fires and where it does not."""
    assert "->" in subject.formula(), f"{subject.name}: the docstring's first line is the formula"
    assert any(e.fires for e in subject.examples), f"{subject.name} shows no place where it fires"
    assert any(not e.fires for e in subject.examples), f"{subject.name} shows no place where it declines"
