"""The runner of PyTorch's own tests: outcomes, crashes, time-outs, the list, and taking up an interrupted run."""

from __future__ import annotations

import pytest

from tests.conformance.journal import Journal
from tests.conformance.listing import LISTED, read_listing
from tests.conformance.run import HOW_TO_GET, Run, find_tests, main, report

PROGRAM = """
import os, time, unittest
import torch
from torch.nn import no_such_decorator, no_such_function

class Small(unittest.TestCase):
    def test_passes(self):
        pass

    def test_fails(self):
        self.assertEqual(1, 2)

    @unittest.skip("not here")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected_to_fail(self):
        self.assertEqual(1, 2)

    @no_such_decorator("reason")
    def test_decorated(self):
        pass

    def test_calls_what_torch_dropped(self):
        no_such_function(1)

    def test_crashes(self):
        os._exit(7)

    def test_hangs(self):
        time.sleep(600)

    def test_who_compiles(self):
        compiled = torch.compile(lambda x: x + torch.ones(2) * 1)
        self.assertEqual(compiled(torch.zeros(2)).tolist(), [1, 1])
        from torch._inductor.compile_fx import compile_fx
        self.assertNotIn("torch", compile_fx.__module__)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "test_small.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.slow
def test_outcomes_are_told_apart_and_a_crash_or_a_hang_costs_one_test(program, tmp_path):
    run = Run(program, "stock", tmp_path / "results", workers=1, timeout=10)
    outcomes = run.all([n for n in run.tests if not n.endswith("who_compiles")])
    assert {name: o["outcome"] for name, o in outcomes.items()} == {
        "Small.test_passes": "passed",
        "Small.test_fails": "failed",
        "Small.test_skipped": "skipped",
        "Small.test_expected_to_fail": "passed",
        "Small.test_decorated": "passed",
        "Small.test_calls_what_torch_dropped": "skipped",
        "Small.test_crashes": "crashed",
        "Small.test_hangs": "timed out",
    }
    assert "1 != 2" in outcomes["Small.test_fails"]["why"]
    assert "no_such_function" in outcomes["Small.test_calls_what_torch_dropped"]["why"]
    assert outcomes["Small.test_crashes"]["why"] == "exit 7"
    assert len(run.journal.path.read_text().splitlines()) == 1 + len(outcomes)


def test_triptych_stands_where_the_tests_say_inductor(program, tmp_path):
    run = Run(program, "eager", tmp_path / "results", workers=1, timeout=120)
    outcome = run.all(["Small.test_who_compiles"])["Small.test_who_compiles"]
    assert outcome["outcome"] == "passed", outcome["why"]


def test_what_cannot_be_loaded_says_why(tmp_path):
    path = tmp_path / "test_broken.py"
    path.write_text("raise ValueError('of no use')")
    with pytest.raises(RuntimeError, match="could not be loaded"):
        Run(path, "stock", tmp_path, workers=1, timeout=10)
    assert "of no use" in (tmp_path / "worker-0.log").read_text()


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    Journal(path, "sources").add(outcome("A.a", "passed"))
    with path.open("a") as file:
        file.write('{"test": "A.b", "outco')  # killed while it wrote
    again = Journal(path, "sources")
    assert list(again.outcomes) == ["A.a"]
    again.add(outcome("A.b", "failed"))
    assert list(Journal(path, "sources").outcomes) == ["A.a", "A.b"]
    assert not Journal(path, "sources", anew=True).outcomes
    again.add(outcome("A.b", "failed"))
    assert not Journal(path, "other sources").outcomes


def test_without_a_path_it_says_how_to_get_the_tests(capsys, tmp_path):
    assert main([]) == 2
    assert "git clone" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert HOW_TO_GET in capsys.readouterr().err


def test_the_file_is_found_in_a_checkout(tmp_path):
    folder = tmp_path / "test" / "inductor"
    folder.mkdir(parents=True)
    file = folder / "test_torchinductor.py"
    file.write_text("")
    assert find_tests(str(tmp_path)) == find_tests(str(folder)) == find_tests(str(file)) == file


def outcome(name: str, result: str) -> dict[str, object]:
    return {"test": name, "outcome": result, "seconds": 0, "why": ""}


def test_a_failure_counts_unless_it_is_listed_or_the_judge_has_it_too(capsys):
    ours = {n: outcome(n, r) for n, r in [("A.a", "passed"), ("A.b", "failed"), ("A.c", "crashed"), ("A.d", "failed")]}
    stock = {n: outcome(n, r) for n, r in [("A.b", "passed"), ("A.c", "failed")]}
    assert report(ours, "stock", stock, {"A.d": "reads code", "A.a": "reads code"}) == 1
    said = capsys.readouterr().out
    assert "4 tests: 1 passed, 1 failed, 1 listed, 1 fail with stock too, 0 skipped" in said
    assert "A.a is listed and passes" in said
    assert "failed: A.b" in said
    assert report({n: o for n, o in ours.items() if n != "A.b"}, "stock", {"A.c": stock["A.c"]}, {"A.d": "reads code"}) == 0


def test_the_list_is_read_by_mode(tmp_path):
    path = tmp_path / "listed.txt"
    path.write_text(
        "# about the list\n\n[kernels, eager] reads code\nCommonTemplate.test_x  # a kernel's name\n"
        "\n[eager] needs kernels\nTestFull.test_y\n"
    )
    both = {"CpuTests.test_x_cpu": "reads code", "GPUTests.test_x_cuda": "reads code"}
    assert read_listing(path, "kernels") == both
    assert read_listing(path, "eager") == {**both, "TestFull.test_y": "needs kernels"}
    for wrong in ("CommonTemplate.test_x\n", "[kernel] typo\n", "[eager] reason\nnot a test\n"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"listed\.txt:\d"):
            read_listing(path, "eager")


def test_the_list_that_is_checked_in_can_be_read():
    assert read_listing(LISTED, "kernels")
    assert read_listing(LISTED, "eager")
