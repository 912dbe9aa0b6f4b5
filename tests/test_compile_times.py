"""Where the time of a compile goes: phases that do not overlap and are the whole together."""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest
import torch
from torch import nn

import triptych
from triptych.cost import Product, Work, clock
from triptych.explaining.compile_events import CompileEvents
from triptych.explaining.compile_times import (
    MOST_FRAMES,
    PHASE_OF_EVENT,
    TITLES,
    CompileTimes,
    PhaseClock,
    compile_line,
    compile_lines,
)
from triptych.explaining.frames import Frame
from triptych.explaining.page_data import report_data

EAGER = {"codegen": "eager"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(2, 8)


class Steps:
    """A clock of torch's steps on which time passes as the test says."""

    def __init__(self):
        self.now = 0.0
        self.clock = PhaseClock(lambda: self.now)

    def run(self, *steps):
        """`(3, "name")` begins a step after 3 seconds, `(2, None, "name")` ends it."""
        for seconds, *what in steps:
            self.now += seconds
            self.clock.event(what[-1], begins=what[0] is not None)


def times_of(*steps, backward=False):
    whole = "entire_backward_compile" if backward else "entire_frame_compile"
    run = Steps()
    run.run((5, whole), *steps, (1, None, whole))
    return run.clock.take("", backward)


def test_each_moment_is_counted_for_the_innermost_step():
    times = times_of(
        (1, "backend_compile"), (2, "triptych.joint"), (4, "triptych.tuning"), (8, None, "triptych.tuning"),
        (16, None, "triptych.joint"), (32, None, "backend_compile"),
    )  # fmt: skip
    assert {name: s for name, s in times.phases().items() if s} == {"dynamo": 2, "other": 34, "joint": 20, "tuning": 8}
    assert times.seconds == 64


def test_a_step_that_is_not_known_is_part_of_the_step_around_it():
    assert times_of((1, "triptych.joint"), (1, "of another release"), (1, None, "of another release"),
                    (1, None, "triptych.joint")).joint == 3  # fmt: skip
    assert times_of((1, "of another release"), (3, None, "of another release"), backward=True).other == 5


def test_a_step_that_an_error_ended_is_closed_with_the_step_around_it():
    times = times_of((1, "triptych.joint"), (1, "triptych.tuning"), (1, None, "triptych.joint"))
    assert (times.dynamo, times.joint, times.tuning) == (2, 1, 1)
    assert times_of((1, None, "never begun")).seconds == 2


def test_steps_outside_a_compile_are_not_counted():
    run = Steps()
    run.run((1, "triptych.joint"), (1, None, "triptych.joint"), (0, "entire_frame_compile"), (1, None, "entire_frame_compile"))
    assert run.clock.take("", backward=False) == CompileTimes(dynamo=1)
    assert run.clock.take("", backward=False) is None


def test_threads_are_counted_apart():
    run = Steps()
    run.run((0, "entire_frame_compile"))
    other = threading.Thread(target=lambda: run.run((1, "entire_frame_compile"), (2, None, "entire_frame_compile")))
    other.start()
    other.join()
    run.run((4, None, "entire_frame_compile"))
    assert [run.clock.take("", backward=False).dynamo for _ in range(2)] == [2, 7]


@pytest.mark.parametrize("backend", ["triptych", "inductor"])
def test_phases_of_a_training_step_are_its_whole_compile(backend):
    f, x = model()
    (frame,) = triptych.explain(f, x, train=True, backend=backend).frames
    assert frame.times.seconds == pytest.approx(frame.seconds, rel=0.05)
    assert frame.backward_times.seconds == pytest.approx(frame.backward_seconds, rel=0.05)
    forward, backward = (
        {name for name, seconds in times.phases().items() if seconds} for times in (frame.times, frame.backward_times)
    )
    assert forward >= {"dynamo", "pre_grad", "autograd", "joint", "partition", "post_grad", "lowering", "codegen"}
    assert backward >= {"post_grad", "lowering", "codegen"} and not backward & {"dynamo", "pre_grad", "autograd"}
    assert ("before_codegen" in forward) == (backend == "triptych")


def test_nothing_is_wrapped_once_nobody_listens():
    log = CompileEvents._log()
    methods = log.log_event_start, log.log_event_end
    f, x = model()
    with triptych.record():
        assert log.log_event_start is not methods[0]
        triptych.explain(f, x, options=EAGER)
        assert log.log_event_start is not methods[0]
    assert (log.log_event_start, log.log_event_end) == methods


def test_a_torch_without_such_a_log_gives_no_times(monkeypatch):
    monkeypatch.setattr(CompileEvents, "_log", staticmethod(lambda: None))
    f, x = model()
    explanation = triptych.explain(f, x, options=EAGER)
    (frame,) = explanation.frames
    assert frame.seconds > 0 and frame.times == CompileTimes()
    assert "compile: " not in str(explanation)


def test_what_is_measured_on_the_device_is_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_known", {})
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
    work = Work.of(torch.device("cpu"), Product.sized(64, 64, 64, torch.float32))

    def rule(gm):
        for _ in range(3):
            assert clock.clocked(work, work) is not None

    f, x = model()
    (frame,) = triptych.explain(f, x, options={**EAGER, "joint_custom_pre_pass": rule}).frames
    # the hook runs twice
    assert (frame.times.questions, frame.times.answered) == (6, 5)
    assert 1e-4 < frame.times.tuning < frame.times.seconds
    assert "6 questions to the device, 5 answered before" in compile_line(frame.times)


def test_the_text_names_the_longest_phases_first():
    times = CompileTimes(dynamo=0.5, kernels=1.5, lowering=0.0001, other=0.25)
    assert compile_line(times) == "2.25 s: kernels 1.50 s, Dynamo 500.0 ms, other 250.1 ms (lowering, imports and cache keys)"
    one = Frame("0/0", "f", "a.py:1", times=times)
    assert compile_lines([one]) == [f"compile: {compile_line(times)}"]
    both = Frame("1/0", "g", "a.py:2", times=times, backward_times=CompileTimes(codegen=1.0))
    assert [line.partition(":")[0] for line in compile_lines([one, both])] == [
        "compile of f", "compile of g", "compile of the backward of g",
    ]  # fmt: skip
    many = compile_lines([one] * (MOST_FRAMES + 1))
    assert len(many) == 1 and many[0].startswith(f"compile of {MOST_FRAMES + 1} compiles: 11.25 s: kernels 7.50 s")
    assert compile_lines([Frame("0/0", "f", "a.py:1")]) == []


def test_text_and_page_show_the_times():
    f, x = model()
    explanation = triptych.explain(f, x, train=True, options=EAGER)
    assert "\ncompile: " in str(explanation) and "\ncompile of the backward: " in str(explanation)
    (frame,) = report_data(explanation)["core"]["frames"]
    assert [name for name, _, _ in frame["times"]] == [name for name, s in explanation.frames[0].times.phases().items() if s]
    assert sum(seconds for *_, seconds in frame["backwardTimes"]) == explanation.frames[0].backward_times.seconds > 0


def test_every_phase_has_a_title_and_no_event_two_phases():
    assert list(TITLES) == [one.name for one in fields(CompileTimes) if one.name not in ("questions", "answered")]
    assert len(PHASE_OF_EVENT) == sum(len(one.metadata.get("events", ())) for one in fields(CompileTimes))
