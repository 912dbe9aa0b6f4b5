"""`products_by_onednn`: oneDNN's products have eager's values up to rounding, and are used only where they are quicker."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych import _private
from triptych.codegen.fallbacks import own_lowerings
from triptych.cost import Operand, Work, clock, decision
from triptych.cost.clock import Clocked
from triptych.kernels.onednn import linear_arguments, linear_operator
from triptych.post_grad import products_by_onednn
from triptych.post_grad.products_by_onednn import (
    LARGEST_TIMED,
    USUAL,
    ProductBy,
    ProductsByOnednnPass,
    by_both_libraries,
)

pytestmark = pytest.mark.skipif(linear_operator() is None, reason="torch without oneDNN")

PASS = "products_by_onednn"
SIZE = 160
"""The product of three of these sizes is large enough to be considered."""


@pytest.fixture
def times(monkeypatch):
    """Fixes the times of both libraries, as `times(blas, onednn)`; returns the list of the products that are timed."""
    timed = []

    def fix(blas, onednn, usual=None):
        def clocked(old, new):
            (product,), (by_onednn,) = old.parts, new.parts
            assert isinstance(product, ProductBy) and by_onednn == replace(product, library="oneDNN")
            timed.append(product)
            return tuple(map(Clocked, usual or (blas, onednn) if product == USUAL[0] else (blas, onednn)))

        monkeypatch.setattr(decision, "clocked", clocked)
        return timed

    return fix


def matrix(*shape, **how):
    return torch.randn(shape or (SIZE, SIZE), **how)


def record(explanation, graph="inference"):
    return next(r for r in explanation.passes if r.name == PASS and r.graph == graph)


# ---- what oneDNN computes ----

OPERANDS = {
    "contiguous": lambda: (matrix(5, 40), matrix(7, 40), matrix(7)),
    "without a bias": lambda: (matrix(5, 40), matrix(7, 40), None),
    "transposed": lambda: (matrix(40, 5).t(), matrix(40, 7).t(), matrix(7)),
    "strided": lambda: (matrix(5, 80)[:, ::2], matrix(14, 80)[::2, ::2], matrix(14)[::2]),
    "offset": lambda: (matrix(6, 41)[1:, 1:], matrix(8, 41)[1:, 1:], matrix(8)[1:]),
    "expanded": lambda: (matrix(1, 40).expand(5, 40), matrix(7, 1).expand(7, 40), matrix(1).expand(7)),
    "one row": lambda: (matrix(1, 40), matrix(1, 40), matrix(1)),
    "no rows": lambda: (matrix(0, 40), matrix(7, 40), matrix(7)),
    "no columns": lambda: (matrix(5, 40), matrix(0, 40), matrix(0)),
    "one term": lambda: (matrix(5, 1), matrix(7, 1), matrix(7)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_the_operator_computes_a_linear_layer(name):
    x, weight, bias = OPERANDS[name]()
    result = linear_operator()(*linear_arguments(x, weight, bias))
    torch.testing.assert_close(result, F.linear(x, weight, bias))
    assert result.is_contiguous()


def test_nan_and_infinity():
    x, weight = matrix(4, 20), matrix(6, 20)
    x[0, 3], x[1, 2], x[2, 1], weight[5, 2] = torch.nan, torch.inf, -torch.inf, 0.0
    result = linear_operator()(*linear_arguments(x, weight, None))
    torch.testing.assert_close(result, x @ weight.t(), equal_nan=True)


# ---- when it is used ----


def test_used_where_it_is_quicker(times):
    timed = times(2e-4, 1e-4)
    explanation = triptych.explain(torch.mm, matrix(), matrix())
    (made,) = record(explanation).decisions
    assert made.measured and (made.before, made.after) == (2e-4, 1e-4)
    assert timed == [USUAL[0], by_both_libraries((SIZE, SIZE, SIZE), (False, False), has_bias=False)[0]]
    assert "mkldnn._linear_pointwise" in explanation.kernels["forward"]


def test_left_alone_where_it_is_slower(times):
    times(1e-4, 1e-4, usual=(2e-4, 1e-4))
    (decline,) = record(triptych.explain(torch.mm, matrix(), matrix())).declines
    assert "would cost" in decline.reason and "measured" in decline.reason


def test_where_the_libraries_are_alike_only_the_usual_sizes_are_timed(times):
    timed = times(1e-4, 1e-5, usual=(1e-4, 0.98e-4))
    (decline,) = record(triptych.explain(torch.mm, matrix(), matrix())).declines
    assert decline.reason == "oneDNN is not quicker than BLAS on this machine: 98.0 us instead of 100.0 us, measured"
    assert set(timed) == {USUAL[0]}


def test_large_sizes_are_cut():
    large = (8 * LARGEST_TIMED, LARGEST_TIMED, 2 * LARGEST_TIMED)
    for turned in ((False, True), (True, False)):
        for part, cut in zip(*(by_both_libraries(sizes, turned, True) for sizes in (large, [LARGEST_TIMED] * 3))):
            assert part.like() == cut != part
            assert cut.like() == cut


def test_the_times_of_large_sizes_are_scaled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
    monkeypatch.setattr(clock, "_known", {})
    monkeypatch.setattr(clock, "rounds_in_turns", lambda runs: [[3e-3] * 5, [2e-3] * 5])
    sizes = 8 * LARGEST_TIMED, LARGEST_TIMED, 2 * LARGEST_TIMED
    works = [Work.of(torch.device("cpu"), part) for part in by_both_libraries(sizes, (False, True), has_bias=True)]
    assert [time.seconds for time in clock.clocked(*works)] == pytest.approx([48e-3, 32e-3], rel=0.01)


@pytest.mark.parametrize("off", ["tune", "deterministic algorithms"])
def test_nothing_is_assumed_without_a_measurement(off, monkeypatch):
    options = {"tune": "off"} if off == "tune" else {}
    if off == "deterministic algorithms":
        monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)
        monkeypatch.setattr(clock, "rounds_in_turns", lambda runs: pytest.fail("measured"))
        monkeypatch.setattr(clock, "measuring_allowed", lambda: False)
    assert record(triptych.explain(torch.mm, matrix(), matrix(), options=options)).rewrites == 0


def test_both_libraries_are_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "HOST_BYTES", 1 << 30)  # the tests let nothing be timed on a CPU
    monkeypatch.setattr(clock, "SPREAD", 100.0)  # other programs may run beside the test
    monkeypatch.setattr(clock, "_known", {})
    times = clock.clocked(*(Work.of(torch.device("cpu"), part) for part in USUAL))
    assert all(1e-6 < time.seconds < 1 for time in times)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_timed_is_float32_whatever_the_default_dtype_is(dtype):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        both = by_both_libraries((2, 3, 4), (False, True), has_bias=True)
        results = [part.prepare(torch.device("cpu"))() for part in both]
    finally:
        torch.set_default_dtype(usual)
    assert [Operand.of(result) for result in results] == [Operand.contiguous((2, 4), torch.float32)] * 2


def test_both_libraries_multiply_the_same_operands():
    for part in by_both_libraries((5, 7, 3), (True, False), has_bias=True):
        torch.manual_seed(0)
        a, b, bias = (one.random(torch.device("cpu")) for one in (part.left, part.right, part.added))
        torch.manual_seed(0)
        torch.testing.assert_close(part.prepare(torch.device("cpu"))(), a @ b + bias)


def test_small_products_stay_without_a_reason(times):
    timed = times(2e-4, 1e-4)
    made = record(triptych.explain(torch.mm, matrix(64, 64), matrix(64, 64)))
    assert (made.rewrites, made.declined, timed) == (0, 0, [])


@pytest.fixture
def precision():
    """Sets what torch may round the operands of float32 products to."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    yield functools.partial(setattr, settings, "fp32_precision")
    settings.fp32_precision = before


def test_torch_computes_float32_products_in_less_itself(times, precision):
    times(2e-4, 1e-4)
    precision("bf16")
    (decline,) = record(triptych.explain(torch.mm, matrix(), matrix())).declines
    assert "float32 products in bf16" in decline.reason


def test_a_program_may_allow_tf32(times, precision):
    """As `torch.set_float32_matmul_precision("high")` does, which changes nothing on most CPUs."""
    times(2e-4, 1e-4)
    precision("tf32")
    assert record(triptych.explain(torch.mm, matrix(), matrix())).rewrites == 1


def test_times_depend_on_the_precision(precision):
    asked = set()
    for one in ("ieee", "tf32"):
        precision(one)
        asked.add(USUAL[0].question(torch.device("cpu")))
    assert len(asked) == 2


def test_left_alone_where_onednn_is_disabled(times):
    times(2e-4, 1e-4)
    with torch.backends.mkldnn.flags(enabled=False):
        (decline,) = record(triptych.explain(torch.mm, matrix(), matrix())).declines
    assert "not to use oneDNN" in decline.reason


def test_other_code_generators_get_products(times):
    times(2e-4, 1e-4)
    graphs = []

    def compile_fn(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(torch.mm, backend=triptych.make_backend(compile_fn))(matrix(), matrix())
    assert any(node.target is torch.ops.aten.mm.default for node in graphs[0].graph.nodes)


# ---- whole programs, through kernels ----


def through_kernels(function, *args, dynamic=False, options=None):
    torch._dynamo.reset()
    options = {"on_error": "raise", **(options or {})}
    compiled = torch.compile(function, backend=triptych.compile_fx, dynamic=dynamic, options=options)
    leaves = [[a.detach().clone().requires_grad_(a.requires_grad) for a in args] for _ in range(2)]
    for run, given in zip((compiled, function), leaves):
        result = run(*given)
        if result.requires_grad:
            result.square().mean().backward()
        given.append(result)
    (*ours, got), (*theirs, want) = leaves
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert got.stride() == want.stride()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    return compiled


def mlp(x, w, b, v):
    return F.linear(F.gelu(F.linear(x, w, b)), v).softmax(-1)


def test_training(times):
    times(2e-4, 1e-4)
    args = [matrix(requires_grad=True) for _ in range(2)] + [matrix(SIZE, requires_grad=True), matrix(requires_grad=True)]
    through_kernels(mlp, *args)
    explanation = triptych.explain(mlp, *args, train=True)
    assert record(explanation, "forward").rewrites == 2 and record(explanation, "backward").rewrites == 4


def test_any_number_of_rows(times):
    times(2e-4, 1e-4)
    w, b, v = matrix(), matrix(SIZE), matrix()
    compiled = through_kernels(mlp, matrix(), w, b, v, dynamic=True)
    for rows in (2, 3, SIZE + 1):
        x = matrix(rows, SIZE)
        torch.testing.assert_close(compiled(x, w, b, v), mlp(x, w, b, v), rtol=1e-4, atol=1e-4)


def test_inside_a_branch(times):
    times(2e-4, 1e-4)

    def program(x, y):
        return torch.cond(x.sum() > 0, lambda x, y: x @ y, lambda x, y: (x @ y.t()).relu(), (x, y))

    through_kernels(program, matrix().abs(), matrix())
    through_kernels(program, -matrix().abs(), matrix())


def test_operands_that_are_written_in_place(times):
    times(2e-4, 1e-4)

    def program(x, y):
        x = x.clone()
        first = x @ y
        x[0] = first[1]
        y.mul_(2)
        return first + x @ y

    x, y = matrix(), matrix()
    want = program(x, again := y.clone())
    torch.testing.assert_close(torch.compile(program, backend=triptych.compile_fx)(x, y), want, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(y, again)


@pytest.mark.parametrize("settings", [{"freeze": True}, {"verify": "each"}, {"inductor.cpp_wrapper": True}])
def test_settings(settings, times):
    times(2e-4, 1e-4)
    layer = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, SIZE)).eval()
    with torch.no_grad():
        through_kernels(layer, matrix(), options=settings)


def test_stock_inductor_still_packs_its_weights(times):
    """Inductor's own lowering of the operator is only replaced while we compile."""
    times(2e-4, 1e-4)
    through_kernels(torch.mm, matrix(), matrix())
    layer, x = torch.nn.Linear(SIZE, SIZE).bfloat16().eval(), matrix().bfloat16()
    torch._dynamo.reset()
    with torch.no_grad():
        frozen = torch.compile(layer, options={"freezing": True})
        torch.testing.assert_close(frozen(x), layer(x), rtol=2e-2, atol=2e-2)


def test_programs_that_two_threads_compile_at_once_have_their_own_lowering():
    """One that finishes first takes nothing away from the other, and leaves nothing behind."""

    def lowered():
        with pytest.raises(Exception) as error:  # without a graph, no lowering gets far
            _private.lowerings[linear_operator()](*linear_arguments(None, None, None))
        return error.traceback[-1].path.name

    def of_ours():
        with own_lowerings():
            begun.set()
            assert ended.wait(60)
            return lowered()

    begun, ended = Event(), Event()
    usual = lowered()
    with ThreadPoolExecutor(1) as pool:
        with own_lowerings():
            other = pool.submit(of_ours)
            assert begun.wait(60)
            ours = lowered()
        ended.set()
        assert other.result() == ours != usual
    assert lowered() == usual


def test_the_pass_runs_last_of_those_that_change_products():
    names = [entry.name for entry in triptych.pipeline.BEFORE_CODEGEN]
    assert names.index("reinplace") < names.index(ProductsByOnednnPass.name)
    assert products_by_onednn.LEAST_WORK <= SIZE**3
