"""A compile that fails with us and not without us is not the user's problem: it falls back, with one warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

import triptych.backend
from triptych import _private
from triptych.fallback import _same_failure, require_eager_draws
from triptych.passes.manager import _StageRunner

FALL_BACK = {"on_error": "fallback"}


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x + 0]).relu() * 2


def fail(*args, **kwargs):
    raise ValueError("broken on purpose")


run_pass = _StageRunner.run_pass


def fail_in_a_pass(runner, pass_, *args, **kwargs):
    """What is required runs in every compile, and does not fail."""
    return run_pass(runner, pass_, *args, **kwargs) if pass_.required else fail()


def run(function=model, train=False, **options) -> tuple[list[str], torch.Tensor, torch.Tensor | None]:
    """The warnings of compiling and calling the function, its result and its gradient."""
    x = torch.linspace(-1, 1, 8).requires_grad_(train)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = torch.compile(function, backend=triptych.compile_fx, options={**FALL_BACK, **options})(x)
        if train:
            y.sum().backward()
    texts = [str(w.message) for w in caught if "Triptych failed" in str(w.message)]
    return texts, y.detach(), x.grad


def assert_right(y: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    x = torch.linspace(-1, 1, 8).requires_grad_()
    wanted = model(x)
    torch.testing.assert_close(y, wanted.detach())
    if gradient is not None:
        wanted.sum().backward()
        torch.testing.assert_close(gradient, x.grad)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("train", [False, True])
def test_a_stage_that_raises(monkeypatch, codegen, train):
    monkeypatch.setattr(_StageRunner, "run_pass", fail_in_a_pass)
    texts, y, gradient = run(train=train, codegen=codegen)
    assert_right(y, gradient)
    (text,) = texts
    assert "was compiled without Triptych's passes" in text and "ValueError: broken on purpose" in text
    assert "while running pass normalization_pass_aten of stage pre_grad" in text
    assert "in the same way" not in text


def test_partition_that_raises(monkeypatch):
    monkeypatch.setattr("triptych.backend.partition", fail)
    (text,), y, gradient = run(train=True)
    assert_right(y, gradient)
    assert "was compiled by Inductor itself" in text and "while partitioning the joint graph" in text


@pytest.mark.parametrize(
    ("codegen", "where"),
    [("inductor", "in PyTorch's own compiler"), ("eager", "without Triptych's passes")],
)
def test_what_fails_without_us_too_is_said_to(codegen, where):
    def refused(x):
        with torch.inference_mode():
            y = x * 2
        return y * x

    with warnings.catch_warnings(record=True) as caught, pytest.raises(RuntimeError, match="Inference tensors"):
        warnings.simplefilter("always")
        x = torch.ones(3, requires_grad=True)
        torch.compile(refused, backend=triptych.compile_fx, options={**FALL_BACK, "codegen": codegen})(x)
    (text,) = [str(w.message) for w in caught if "Triptych failed" in str(w.message)]
    assert f". It fails in the same way {where}. To reproduce it" in text


@pytest.mark.parametrize(
    ("first", "other", "is_same"),
    [
        (KeyError(0), KeyError(0), True),
        (KeyError(0), RuntimeError("KeyError: 0\ntarget: aten.mm"), True),
        (KeyError(0), RuntimeError("LoweringException: KeyError: 0"), True),
        (KeyError(0), RuntimeError("shape 10 is invalid"), False),
        (AssertionError("x"), ValueError("expected a tensor"), False),
        (AssertionError(), AssertionError(), True),
        (AssertionError(), ValueError(), False),
    ],
)
def test_errors_that_say_the_same(first, other, is_same):
    assert _same_failure(first, other) == is_same


def test_code_generation_that_raises(monkeypatch):
    monkeypatch.setattr("triptych.codegen.inductor.InductorCodegen.emit", fail)
    (text,), y, _ = run()
    assert_right(y)
    assert "was compiled by Inductor itself" in text and "while generating code for the inference graph" in text


def test_when_inductor_fails_too_the_program_runs_eagerly(monkeypatch):
    monkeypatch.setattr("triptych.codegen.inductor.InductorCodegen.emit", fail)
    monkeypatch.setattr(_private, "stock_compile_fx", fail, raising=False)
    (text,), y, gradient = run(train=True)
    assert_right(y, gradient)
    assert "which runs eagerly instead" in text


def test_inductor_replaced_by_us_does_not_lead_back_here(monkeypatch):
    monkeypatch.setattr("triptych.codegen.inductor.InductorCodegen.emit", fail)
    monkeypatch.setattr(_private, "stock_compile_fx", triptych.compile_fx, raising=False)
    (text,), y, _ = run()
    assert_right(y)
    assert "which runs eagerly instead" in text


@pytest.mark.parametrize("broken", ["stage", "codegen"])
def test_a_backward_that_fails_after_the_forward_has_run(monkeypatch, broken):
    emit = triptych.backend.InductorCodegen.emit

    def emit_forward(self, gm, inputs, graph):
        return fail() if graph == "backward" else emit(self, gm, inputs, graph)

    stage = triptych.backend.run_stage

    def run_forward(name, gm, session, *, graph, **facts):
        return fail() if (name, graph) == ("post_grad", "backward") else stage(name, gm, session, graph=graph, **facts)

    if broken == "codegen":
        monkeypatch.setattr("triptych.codegen.inductor.InductorCodegen.emit", emit_forward)
    else:
        monkeypatch.setattr("triptych.backend.run_stage", run_forward)
    (text,), y, gradient = run(train=True)
    assert_right(y, gradient)
    assert ("runs eagerly" if broken == "codegen" else "without the post-grad passes") in text


def test_a_backward_that_only_a_kernel_can_draw_for_is_not_run_eagerly():
    graph = torch.fx.Graph()
    seed = graph.placeholder("seed")
    graph.output((graph.call_function(_private.generator_prims.random, ([4], seed, "rand")),))
    with pytest.raises(RuntimeError, match="only a kernel can"):
        require_eager_draws(torch.fx.GraphModule(torch.nn.Module(), graph))


def test_dropout_without_passes(monkeypatch):
    monkeypatch.setattr(_StageRunner, "run_pass", fail_in_a_pass)
    x = torch.ones(4096, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="without Triptych's passes"):
        y = torch.compile(lambda x: F.dropout(x, 0.25) * 3, backend=triptych.compile_fx, options=FALL_BACK)(x)
        y.sum().backward()
    assert 0.2 < (y == 0).float().mean() < 0.3
    torch.testing.assert_close(x.grad, y.detach())


def test_raise_raises(monkeypatch):
    monkeypatch.setattr("triptych.codegen.inductor.InductorCodegen.emit", fail)
    with pytest.raises(Exception, match="broken on purpose"):
        run(on_error="raise")


def test_a_users_own_error_is_not_ours():
    def wrong(x):
        return x @ torch.ones(3, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match="mat|size"):
            run(wrong)


def test_what_dynamo_answers_with_a_graph_break_is_left_to_it():
    """The gradient of `y[mask] = z` has a size that depends on data: AOTAutograd refuses, and the frame runs eagerly."""

    def writes_some(x):
        y = x * 2
        y[y > 0] *= 0
        return y * 2

    texts, y, gradient = run(writes_some, train=True)
    assert not texts
    x = torch.linspace(-1, 1, 8).requires_grad_()
    wanted = writes_some(x)
    wanted.sum().backward()
    torch.testing.assert_close((y, gradient), (wanted.detach(), x.grad))


def test_wrong_options_are_still_said():
    with pytest.raises(Exception, match="did you mean 'codegen'"):
        run(codgen="eager")


def test_a_stage_run_alone_leaves_the_graph_as_it_came(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_ON_ERROR", "fallback")
    monkeypatch.setattr(_StageRunner, "run_pass", fail_in_a_pass)
    gm = torch.fx.symbolic_trace(model)
    before = [str(n) for n in gm.graph.nodes]
    with pytest.warns(RuntimeWarning, match="stays as it came"):
        assert triptych.pre_grad_passes(gm, (torch.ones(3),)) is gm
    assert [str(n) for n in gm.graph.nodes] == before
    torch.testing.assert_close(gm(torch.ones(3)), model(torch.ones(3)))


def test_a_code_generator_of_ones_own_that_raises():
    with pytest.raises(Exception, match="broken on purpose"):
        torch.compile(model, backend=triptych.make_backend(fail), options=FALL_BACK)(torch.ones(3))


def crash_code_generation(gm: torch.fx.GraphModule):
    """A user's pass after which the graph calls a function of Python's that Inductor cannot lower."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.nn.functional.selu
    gm.recompile()


def test_a_users_pass_that_makes_code_generation_crash():
    (text,), y, _ = run(post_grad_custom_post_pass=crash_code_generation)
    assert_right(y)
    path = re.search(r"python (\S+\.py)", text)[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    outcome = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment)
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
