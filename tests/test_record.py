"""The real run: what `record` collects while a program compiles, in all its threads."""

from __future__ import annotations

import gc
import json
import pickle
import threading
import time
import weakref

import torch
from torch import nn

import triptych
from triptych import _private
from triptych.explaining.explanation import Explanation
from triptych.explaining.frames import FrameLog, guard_failure, in_one_line, in_order
from triptych.explaining.fresh_compiles import another_thread_compiles
from triptych.options import Options
from triptych.passes.session import Session

EAGER = {"codegen": "eager"}


def compiled(model, **how):
    return torch.compile(model, backend="triptych", options=EAGER, **how)


class Broken(nn.Module):
    """Breaks the graph once, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break(msg="in the middle")
        return y.relu() + 1


BREAK_LINE = Broken.forward.__code__.co_firstlineno + 2


def in_threads(*functions) -> None:
    """Run them at once, and raise what one of them raised."""
    barrier, errors = threading.Barrier(len(functions)), []

    def run(function) -> None:
        barrier.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), name=f"worker {n}") for n, f in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ---- record ----


def test_a_training_loop_with_a_graph_break_and_a_shape_change():
    model = Broken()
    with triptych.record() as exp:
        assert "Nothing has been compiled yet" in str(exp)
        step = compiled(model)
        for rows in (3, 5, 7):
            step(torch.randn(rows, 4)).sum().backward()
    assert [frame.name for frame in exp.frames] == ["forward", "forward, resumed"] * 2
    first, _, again, _ = exp.frames
    assert not first.is_recompile and first.source == f"test_record.py:{BREAK_LINE - 2}"
    assert first.seconds > 0 and first.backward_seconds > 0
    assert again.reason == "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    assert [one.source for one in exp.graph_breaks] == [f"test_record.py:{BREAK_LINE}"] * 2
    assert "in the middle" in exp.graph_breaks[0].reason and "Hint" in exp.graph_breaks[0].explanation
    assert len(exp.recompiles) == 2 and len(exp.sessions) == 4
    assert exp.train and {"backward", "backward#4"} <= set(exp.graphs)
    text = str(exp)
    assert "4 compiles (2 recompiles), 2 graph breaks" in text
    assert "again: tensor 'x' size mismatch at index 0. expected 3, actual 5" in text
    assert f"graph break at test_record.py:{BREAK_LINE}: Call to `torch._dynamo.graph_break()`" in text


def test_it_fills_while_the_program_runs_and_after_for_a_later_backward():
    x = torch.randn(3, requires_grad=True)
    with triptych.record() as exp:
        y = compiled(lambda x: x.sin().sum())(x)
        assert len(exp.sessions) == 1 and not exp.train
        passes = len(exp.passes)
    y.backward()  # compiled here
    assert exp.train and len(exp.passes) > passes and "backward" in exp.graphs
    compiled(lambda x: x.cos().sum())(x)
    assert len(exp.sessions) == 1 and len(exp.frames) == 1


def test_drop_in_calls_are_programs_with_the_line_of_the_call():
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x * 1))
    with triptych.record() as exp:
        triptych.pre_grad_passes(gm, [torch.randn(3)])
        aten = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.relu().clone())(torch.randn(3))
        triptych.joint_graph_passes(aten)
        triptych.post_grad_passes(aten, True)
    line = test_drop_in_calls_are_programs_with_the_line_of_the_call.__code__.co_firstlineno
    labels = exp.program_labels()
    assert labels == [
        f"pre_grad_passes called at test_record.py:{line + 3}",
        f"joint_graph_passes called at test_record.py:{line + 5}",
        f"post_grad_passes called at test_record.py:{line + 6}",
    ]
    assert list(exp.graphs) == ["pre_grad", "joint#2", "forward#3"]
    assert labels[1] in str(exp) and not exp.frames
    assert any(record.changed for record in exp.passes)


def test_the_backend_called_without_dynamo_is_one_too_and_order_is_that_of_time():
    with triptych.record() as exp:
        compiled(lambda x: x.sin())(torch.randn(3))
        triptych.compile_fx(torch.fx.symbolic_trace(lambda x: (x.cos(),)), [torch.randn(3)], options=EAGER)
        compiled(lambda x: x.tan())(torch.randn(3))
    line = test_the_backend_called_without_dynamo_is_one_too_and_order_is_that_of_time.__code__.co_firstlineno + 3
    assert [numbers for _, numbers in in_order(exp.sessions, exp.frames)] == [[1], [2], [3]]
    assert exp.program_labels()[1] == f"compile_fx called at test_record.py:{line}"


def test_a_function_that_dynamo_gives_up_on_is_named():
    def program(x):
        for _ in range(3):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    with triptych.record() as exp:
        compiled(program)(torch.randn(3))
    (frame,) = exp.frames
    line = program.__code__.co_firstlineno + 3
    assert frame.failure.startswith(f"test_record.py:{line}: Call to `torch._dynamo.graph_break()`")
    assert not exp.sessions and "runs in Python" in str(exp)


def test_another_backend_is_seen_by_its_frames():
    with triptych.record() as exp:
        run = torch.compile(lambda x: x.sin(), backend="eager")
        run(torch.randn(3))
        run(torch.randn(3, dtype=torch.float64))
    assert [frame.reason for frame in exp.frames] == ["", "tensor 'x' dtype mismatch. expected Float, actual Double"]
    assert not exp.sessions


def test_what_is_only_explained_is_not_recorded():
    with triptych.record() as exp:
        explanation = triptych.explain(Broken(), torch.randn(3, 4), options=EAGER)
        compiled(lambda x: x.cos())(torch.randn(3))
    assert len(explanation.sessions) == 2 and len(explanation.graph_breaks) == 1
    assert len(exp.sessions) == 1 and [frame.name for frame in exp.frames] == ["<lambda>"]


def test_an_explanation_says_why_there_are_two_programs():
    explanation = triptych.explain(Broken(), torch.randn(3, 4), options=EAGER)
    assert [one.source for one in explanation.graph_breaks] == [f"test_record.py:{BREAK_LINE}"]
    assert explanation.program_labels()[1].startswith("forward, resumed, ")
    assert "1 graph break" in str(explanation)


def test_after_a_reset_of_dynamo_ids_begin_again():
    with triptych.record() as exp:
        for _ in range(2):
            torch._dynamo.reset()
            compiled(Broken())(torch.randn(3, 4))
    assert [frame.compile_id for frame in exp.frames] == ["0/0", "1/0"] * 2
    assert len(exp.sessions) == 4 and len(exp.graph_breaks) == 2
    assert not exp.recompiles and all(frame.seconds for frame in exp.frames)


def test_only_a_later_attempt_at_the_same_frame_replaces_it():
    def session(compile_id, attempt):
        return Session(Options(), compile_id, attempt)

    # Dynamo starts 0/0 over; after a reset another function has that id
    sessions = [session("0/0", 0), session("0/0", 1), session("1/0", 0), session("0/0", 0)]
    assert Explanation(sessions).sessions == sessions[1:]


def test_records_of_records():
    with triptych.record() as outer:
        compiled(lambda x: x.sin())(torch.randn(3))
        with triptych.record() as inner:
            compiled(lambda x: x.cos())(torch.randn(3))
    assert len(outer.sessions) == 2 and len(inner.sessions) == 1
    assert inner.sessions[0] is outer.sessions[1]


def test_a_snapshot_stays_as_it_is():
    with triptych.record() as exp:
        x = torch.randn(3, requires_grad=True)
        y = compiled(lambda x: x.sin().sum())(x)
        before = exp.snapshot()
        passes = len(before.passes)
        y.backward()
        compiled(lambda x: x.cos())(x)
    assert len(before.sessions) == len(before.frames) == 1 and len(before.passes) == passes
    assert before.recorded and not before.train and exp.train
    assert len(exp.sessions) == 2 and str(before) != str(exp)
    saved = pickle.loads(pickle.dumps(exp))
    assert str(saved) == str(exp) and saved.to_json() == exp.to_json() and saved.recorded


def test_data_and_page(tmp_path):
    with triptych.record() as exp:
        compiled(Broken())(torch.randn(3, 4))
    data = json.loads(exp.to_json())
    assert data["frames"][0]["breaks"][0]["source"] == f"test_record.py:{BREAK_LINE}"
    assert [program["label"] for program in data["programs"]] == exp.program_labels()
    assert "recorded run" in exp.to_html(tmp_path / "run.html").read_text()


def test_a_recorded_model_can_be_freed():
    """A recording keeps graphs, not the model: a program may make one model after the other."""
    with triptych.record() as exp:
        model = Broken()
        compiled(model)(torch.randn(3, 4))
        gone = weakref.ref(model.linear.weight)
        torch._dynamo.reset()
        del model
        gc.collect()
        assert gone() is None
    assert exp.sessions


def test_nothing_stays_behind():
    callbacks = list(_private.compile_callbacks.start_callbacks)
    with triptych.record():
        compiled(lambda x: x.sin())(torch.randn(3))
    assert _private.compile_callbacks.start_callbacks == callbacks
    assert not torch._dynamo.convert_frame._bytecode_hooks
    session = triptych.passes.session.open_session(Options())
    assert not session.observed and not session.recorders


# ---- threads ----


def chain(length: int, operation):
    def program(x):
        for _ in range(length):
            x = operation(x)
        return x.sum()

    return program


def test_record_sees_all_threads_and_keeps_their_programs_apart():
    def work(length):
        def run():
            x = torch.randn(3, requires_grad=True)
            compiled(chain(length, torch.sin))(x).backward()

        return run

    with triptych.record() as exp:
        in_threads(*(work(length) for length in (1, 2, 3, 4)))
    assert len(exp.sessions) == 4 == len(exp.frames)
    lengths = []
    for session in exp.sessions:
        length = str(session.graphs["dynamo"].code).count("sin(")
        lengths.append(length)
        assert str(session.graphs["forward"].code).count("sin.default") == length
        assert str(session.graphs["backward"].code).count("cos.default") == length
        assert {record.graph for record in session.records} == {"pre_grad", "joint", "forward", "backward"}
        assert session.thread == f"worker {length - 1}"
    assert sorted(lengths) == [1, 2, 3, 4]
    assert {frame.thread for frame in exp.frames} == {f"worker {n}" for n in range(4)}


def test_threads_that_explain_and_threads_that_compile():
    """An explanation has its own programs, frames and breaks; the recording has those of the others."""
    explanations = []

    def explain():
        for _ in range(3):
            explanations.append(triptych.explain(Broken(), torch.randn(3, 4), train=True, options=EAGER))

    def compile(*lengths):
        for length in lengths:
            compiled(chain(length, torch.cos))(torch.randn(5))

    with triptych.record() as exp:
        in_threads(explain, lambda: compile(1, 2, 3), lambda: compile(4, 5, 6))
    for explanation in explanations:
        assert [frame.name for frame in explanation.frames] == ["forward", "forward, resumed"]
        assert len(explanation.sessions) == 2 and len(explanation.graph_breaks) == 1
        assert not any("cos" in str(gm.code) for gm in explanation.graphs.values())
    assert len(exp.sessions) == 6 and {frame.name for frame in exp.frames} == {"program"}


def test_inductors_stages_are_watched_on_the_thread_that_explains():
    """Another thread compiles with Inductor in the middle of an explanation of Inductor."""
    gm = torch.fx.symbolic_trace(lambda x: (torch.cos(x) + 1,))

    def compile_elsewhere(graph) -> None:
        if threading.current_thread() is not explaining:
            return  # in torch 2.11, Inductor's settings are those of all threads: this pass runs there too
        thread = threading.Thread(target=_private.stock_compile_fx, args=(gm, [torch.randn(3)]))
        thread.start()
        thread.join()

    explaining = threading.current_thread()
    explanation = triptych.explain(
        lambda x: x.sin(), torch.randn(3), backend="inductor", options={"pre_grad_custom_pass": compile_elsewhere}
    )
    (session,) = explanation.sessions
    assert "sin" in session.kernels["forward"] and "cos" not in session.kernels["forward"]
    assert list(session.graphs) == ["dynamo", "pre_grad", "joint", "forward"]
    assert session.records and not any("cos" in record.before + record.after for record in session.records)


def test_code_is_not_dropped_while_another_thread_is_about_to_store_its_own():
    """Dynamo keeps compiled code with the user's function. There the other thread stores what it compiled."""

    def program(x):
        return x.sin() + 1

    compiles, threads = [], []

    def counting(gm, example_inputs):
        compiles.append(gm)
        return gm.forward

    mine, x = torch.compile(program, backend=counting), torch.randn(3)

    def compile_elsewhere(graph):
        """The other thread waits until this compile is done; until then nothing may be dropped."""
        threads.append(threading.Thread(target=mine, args=(x,)))
        threads[0].start()
        while not (waiting := another_thread_compiles()):
            time.sleep(0.001)
        seen.append(waiting)

    seen = [another_thread_compiles()]
    triptych.explain(program, x, options={**EAGER, "post_grad_custom_post_pass": compile_elsewhere})
    threads[0].join()
    mine(x)
    assert len(compiles) == 1 and seen == [False, True]


# ---- what Dynamo says ----


def test_the_words_of_dynamo():
    assert guard_failure("12/3_1: tensor 'x' rank mismatch\nmore") == "tensor 'x' rank mismatch"
    assert guard_failure("0/0: L['n'] == 2") == "L['n'] == 2"
    text = "Failed to trace builtin operator\n  Explanation: no `print` (has_kwargs False)\n  Hint: do not"
    assert in_one_line(text) == "Failed to trace builtin operator: no `print`"


def test_a_branch_on_data_is_called_so():
    def program(x):
        if x.sum() > 0:
            return x.sin()
        return x.cos()

    log = FrameLog()
    log.start()
    compiled(program)(torch.ones(3))
    log.stop()
    assert log.frames[0].breaks[0].reason.startswith("a branch")
    assert [frame.name for frame in log.frames] == ["program", "program, resumed"]


def test_reasons_that_are_words_of_dynamos_own_are_explained():
    from triptych.explaining.frames import graph_break

    assert "a branch" in graph_break("generic_jump TensorVariable()", []).reason
    assert "cannot trace what this line does" in graph_break("step_unsupported", []).reason
    assert graph_break("step_unsupported", []).explanation == "step_unsupported"
