"""A sample of the operator sweep, and the sweep's own judgement; `make sweep` runs all of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import click.testing
import pytest
import torch

from tests.models import Call
from tests.sweep.__main__ import PLAN, chosen_units, main
from tests.sweep.databases import DATABASES, DTYPES, Operator, Sample, copied, operators
from tests.sweep.judge import CRASHED, EQUAL, REFUSED, SKIPPED, WRONG, judge
from tests.sweep.programs import ALONE, BETWEEN, ERROR, Program, error_programs, programs, single, spread
from tests.sweep.report import Summary
from tests.sweep.workers import Finding, Settings, Unit, UnitResult, run_units

EVERY = 5
"""One operator in so many is in the sample."""
PARTS = 4
SAMPLED_DTYPES = [DTYPES[d] for d in ("float32", "complex64", "int64", "bfloat16", "float32", "bool", "float64")]


def sampled(part: int) -> Iterator[Program]:
    """One program each of many operators; forms, dtypes and sizes take turns."""
    chosen = operators(DATABASES)[::EVERY]
    for turn, operator in list(enumerate(chosen))[part::PARTS]:
        preferred = SAMPLED_DTYPES[turn % len(SAMPLED_DTYPES) :] + SAMPLED_DTYPES
        dtype = next((d for d in preferred if d in operator.dtypes), None)
        if dtype is None:
            continue
        steps = PLAN[turn % len(PLAN) :] + PLAN
        yield from itertools.islice((p for step in steps if (p := single(operator, dtype, *step)) is not None), 1)


@pytest.mark.parametrize("part", [pytest.param(p, marks=pytest.mark.slow if p else ()) for p in range(PARTS)])
def test_operators(part):
    verdicts = [(p.name, judge(p, "eager")) for p in sampled(part)]
    failures = [f"{name}: {v.detail}" for name, v in verdicts if v.status in (WRONG, CRASHED)]
    assert not failures, "\n".join(failures)
    counts = Counter(v.status for _, v in verdicts)
    assert counts[EQUAL] > 0.9 * len(verdicts), counts
    assert sum(v.captured for _, v in verdicts) > 0.7 * len(verdicts), "too little of it was captured to mean anything"


KERNELS = ["index_add", "softmax", "cumsum", "nn.functional.layer_norm"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "cumsum" else ()) for n in KERNELS])
def test_operators_through_kernels(name):
    operator = named(name)
    verdict = judge(single(operator, torch.float32, BETWEEN, True, False), "inductor")
    assert verdict.status == EQUAL, verdict.detail


@pytest.mark.parametrize("name", ["index_add", "gather", "cat", "nn.functional.gelu", "roll"])
def test_what_eager_refuses(name):
    verdicts = [(p.name, judge(p, "eager")) for p in error_programs(named(name))]
    assert [v for v in verdicts if v[1].status in (WRONG, CRASHED)] == []
    assert any(v.status == EQUAL for _, v in verdicts)


# ---- the sweep itself ----


def named(name: str) -> Operator:
    return next(o for o in operators(("op_db",)) if o.name == name)


class Entry:
    """A database entry made up for a test."""

    name = full_name = "made_up"
    supports_autograd = True
    error_inputs_func = None

    def __init__(self, op):
        self.op = op


def program_of(function, *args, form=ALONE, train=False, dynamic=False) -> Program:
    operator = Operator("op_db", "made_up", frozenset([torch.float32]), Entry(function))
    plain = Sample(function, Call(args))
    made = single(operator, torch.float32, ALONE if form == ERROR else form, train, dynamic, sample=plain)
    assert made is not None
    return Program(**{**vars(made), "form": form})


def test_equal_programs_are_equal():
    x = torch.randn(3, 4, requires_grad=True)
    for form in (ALONE, BETWEEN):
        for dynamic in (False, True):
            verdict = judge(program_of(lambda x: x.sin() @ x.T, x, form=form, train=True, dynamic=dynamic), "eager")
            assert (verdict.status, verdict.captured) == (EQUAL, True)


def unlike_in_compiles(in_eager, compiled):
    return lambda *args: (compiled if torch.compiler.is_compiling() else in_eager)(*args)


@pytest.mark.parametrize(
    "in_eager, compiled",
    [
        (torch.sin, torch.cos),
        (lambda x: x, torch.clone),
        (lambda x: x.t(), lambda x: x.t().contiguous()),
        (lambda x: x * 1.0, lambda x: (x * 1.0).double()),
    ],
    ids=["value", "sharing", "stride", "dtype"],
)
def test_a_difference_that_torch_has_too_is_torchs(in_eager, compiled):
    verdict = judge(program_of(unlike_in_compiles(in_eager, compiled), torch.randn(3, 4)), "eager")
    assert verdict.status == REFUSED


def test_a_difference_of_ours_is_ours(monkeypatch):
    import triptych.backend

    run_stage = triptych.backend.run_stage

    def spoiling(stage, gm, session, **facts):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default
        return run_stage(stage, gm, session, **facts)

    monkeypatch.setattr("triptych.backend.run_stage", spoiling)
    assert judge(program_of(torch.sin, torch.randn(3)), "eager").status == WRONG

    def failing(stage, gm, session, **facts):
        raise ValueError("spoilt")

    monkeypatch.setattr("triptych.backend.run_stage", failing)
    verdict = judge(program_of(torch.sin, torch.randn(3)), "eager")
    assert verdict.status == CRASHED and "spoilt" in verdict.detail


def test_a_rule_that_raises_is_a_crash(monkeypatch):
    from triptych.joint.remove_noop_ops import RemoveNoopOps

    def run(self, rewriter, **how):
        raise ValueError("spoilt")

    monkeypatch.setattr(RemoveNoopOps, "run", run)
    verdict = judge(program_of(torch.sin, torch.randn(3)), "eager")
    assert verdict.status == CRASHED and "spoilt" in verdict.detail


def test_what_eager_cannot_run_is_skipped():
    assert judge(program_of(lambda x: x @ x, torch.randn(2, 3)), "eager").status == SKIPPED


def test_errors_must_stay_errors():
    assert judge(program_of(lambda x: x @ x, torch.randn(2, 3), form=ERROR), "eager").status == EQUAL
    assert judge(program_of(lambda x: x + x, torch.randn(2, 3), form=ERROR), "eager").status == SKIPPED


def test_random_values_are_compared_where_the_stream_is_eagers():
    assert judge(program_of(torch.rand_like, torch.randn(8)), "eager").status == EQUAL


def test_copies_keep_strides_sharing_and_gradients():
    base = torch.randn(4, 6, requires_grad=True)
    call = copied(Call((base.t(), base, [base[1]]), {"x": torch.ones(3)}))
    transposed, whole, (row,) = call.args
    assert transposed.stride() == (1, 6) and torch.equal(transposed, base.t())
    assert transposed.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    assert whole.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert whole.is_leaf and whole.requires_grad and not call.kwargs["x"].requires_grad


def test_samples_are_spread():
    assert spread(3, 5) == [0, 1, 2]
    assert spread(100, 3) == [0, 50, 99]
    assert spread(100, 1) == [0]


def test_the_first_sample_runs_in_every_way():
    steps = [(p.number, p.form, p.train, p.dynamic) for p in programs(named("add"), torch.float32, 2, PLAN)]
    assert {s[1:] for s in steps if s[0] == 0} == set(PLAN)
    assert len({s[0] for s in steps}) == 2


def test_shards_are_disjoint_and_whole():
    whole = chosen_units(("op_db",), "s", ("float32",))
    parts = [chosen_units(("op_db",), "s", ("float32",), f"{i}/3") for i in range(3)]
    assert sorted(u.name for part in parts for u in part) == sorted(u.name for u in whole)


def test_an_operator_counts_as_its_worst_program():
    summary = Summary()
    unit = Unit("op_db", 0, "add", "float32")
    summary.add(UnitResult(unit, [Finding("a", EQUAL), Finding("b", WRONG, "other"), Finding("c", REFUSED)]))
    summary.add(UnitResult(Unit("op_db", 1, "sub", "float32"), [Finding("a", SKIPPED), Finding("b", EQUAL)]))
    assert summary.operators == {("op_db", "add"): WRONG, ("op_db", "sub"): EQUAL}
    assert summary.failed
    assert "2 tried, 1 equal, 0 refused by torch itself, 1 wrong, 0 crashed" in summary.lines()[0]


def test_the_command_line(tmp_path):
    output = tmp_path / "sweep.jsonl"
    args = ["--db", "custom_op_db", "--op", "NumpyCube", "--dtype", "float32", "--samples", "1", "--output", str(output)]
    result = click.testing.CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert "1 tried, 1 equal" in result.output
    assert len(output.read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_worker_that_dies_costs_one_verdict(monkeypatch):
    # the worker finds no such operator and dies; the next unit is run by a new one
    units = [Unit("custom_op_db", 10_000, "nothing", "float32"), Unit("custom_op_db", 0, "NumpyCube", "float32")]
    settings = Settings("eager", 1, ((ALONE, False, False),))
    results = list(run_units(units, settings, workers=1))
    assert [f.status for f in results[0].findings] == [CRASHED]
    assert [f.status for f in results[1].findings] == [EQUAL]
