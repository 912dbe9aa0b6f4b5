"""Golden texts and declined examples: what the checks of `test_examples.py` compare, and that they can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from triptych.rewrite.driver import Tally
from triptych.rewrite.rule import Rule
from triptych.testing import declines, fires
from triptych.testing.check import Outcome, run_example

from . import golden_text

pytestmark = pytest.mark.fast


class ReluOfAbs(Rule):
    """relu(abs(x)) -> abs(x), of floats of one dimension"""

    def pattern(self, op, x):
        return op.relu(op.abs(x))

    def check(self, m, x):
        m.require(len(x.shape) == 1, "has more than one dimension")

    def rewrite(self, op, x):
        return op.abs(x)

    examples = [
        fires(lambda x: x.abs().relu() + 1, "f32[4]"),
        fires(lambda x: x.abs().relu() + 1, "f32[4]", dynamic=True),
        fires(lambda x: x.abs().relu() + 1, "f32[4]", dynamic=True),
        declines(lambda x: x.abs().relu() + 1, "f32[2, 4]", because="more than one dimension"),
        declines(lambda x: x.relu() + 1, "f32[4]"),
    ]


def outcome_of(before: str, after: str) -> Outcome:
    return Outcome(Tally(fired=Counter({"second": 1, "first": 2})), before, after, 0, 0)


def test_a_decline_without_a_reason_is_no_match():
    *_, declined, unmatched = ReluOfAbs.examples
    run_example(ReluOfAbs(), declined, "torch")
    run_example(ReluOfAbs(), unmatched, "torch")
    with pytest.raises(AssertionError, match="more than one dimension"):
        run_example(ReluOfAbs(), declines(declined.program, "f32[2, 4]"), "torch")


def test_titles_tell_examples_apart_and_keep_their_order():
    program = "lambda x: x.abs().relu() + 1 | f32[4]"
    titles = [f"{program}", f"{program} | dynamic", f"{program} | dynamic | no. 2"]
    expected = [f"{title} | {dialect}" for title in titles for dialect in ("torch", "aten")]
    assert [title for _, _, title in golden_text.sections_of(ReluOfAbs())] == expected


def test_a_section_has_no_line_numbers_and_its_own_numbers_of_sizes():
    before = "s77: SymInt(s77) = input\nx: f32[s77, s3] = input  # model.py:31\nreturn (x,)"
    after = "y: f32[s3] = relu(x)  # model.py:31  <- first\nreturn (y,)"
    assert golden_text.section(outcome_of(before, after)) == (
        "fired: first 2, second 1\n--- before\ns0: SymInt(s0) = input\nx: f32[s0, s1] = input\nreturn (x,)\n"
        "--- after\ny: f32[s1] = relu(x)  <- first\nreturn (y,)"
    )


def test_another_program_after_the_rewrite_is_another_section():
    example, dialect, _ = golden_text.sections_of(ReluOfAbs())[0]
    outcome = run_example(ReluOfAbs(), example, dialect)
    golden = golden_text.section(outcome)
    assert "abs_2: f32[4] = abs(l_x_)  <- relu_of_abs" in golden
    changed = golden_text.section(outcome_of(outcome.before, outcome.after.replace("= abs(l_x_)", "= relu(l_x_)")))
    assert "-abs_2: f32[4] = abs(l_x_)" in golden_text.difference(golden, changed, "relu_of_abs")


def test_accepting_rewrites_what_ran_and_drops_what_no_example_has(tmp_path, monkeypatch):
    monkeypatch.setattr(golden_text, "FOLDER", tmp_path / "goldens")
    rule = ReluOfAbs()
    first, second, *_ = [title for _, _, title in golden_text.sections_of(rule)]
    golden_text.write(rule.name, {"of an example that was removed": "b", second: "old"})
    golden_text.accept(rule, {first: "one\ntwo"})
    assert list(golden_text.read(rule.name).items()) == [(first, "one\ntwo"), (second, "old")]
    golden_text.accept(rule, {second: "new"})
    assert golden_text.read(rule.name)[second] == "new"
    golden_text.write(rule.name, {})
    assert golden_text.read(rule.name) == {} and not golden_text.path_of(rule.name).exists()


def test_a_section_without_an_example_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(golden_text, "FOLDER", tmp_path)
    rule = ReluOfAbs()
    first = golden_text.sections_of(rule)[0][2]
    golden_text.write(rule.name, {first: "a", "gone": "b"})
    golden_text.write("renamed_rule", {"of another rule": "c"})
    assert golden_text.stale([rule]) == ["relu_of_abs.txt: gone", "renamed_rule.txt: of another rule"]
    golden_text.drop_stale([rule])
    assert golden_text.stale([rule]) == [] and list(golden_text.read(rule.name)) == [first]
