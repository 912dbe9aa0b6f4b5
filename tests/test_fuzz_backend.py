"""A bounded run of the fuzzer over the whole backend, always the same, and the programs it has found before.

`make fuzz` looks for new ones.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.fuzz.found import FOUND
from tests.fuzz.judge import FAULTS, WRONG, TooSlow, check, judge, limited
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.writer import write_program

PROGRAMS = {"stage": 200, "graph": 50, "compile": 50}
"""How many by each route (see `fuzz/routes.py`): about 40 s on one core in all."""
BLOCK = 25


@pytest.mark.parametrize(
    "route, first",
    [
        # of each kind, every other block of seeds
        pytest.param(route, first, marks=pytest.mark.slow if first // BLOCK % 2 else ())
        for route, count in PROGRAMS.items()
        for first in range(0, count, BLOCK)
    ],
)
def test_random_programs(route: str, first: int) -> None:
    for seed in range(first, first + BLOCK):
        program = write_program(seed, route=route)
        if program.route == route:
            verdict = judge(program)
            assert verdict.kind not in FAULTS, "\n".join([verdict.kind, *verdict.lines, "", str(program)])


def test_random_programs_through_kernels() -> None:
    for seed in range(3):
        check(write_program(seed, codegen="inductor"))


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    """Shrunk programs that were once different from eager."""
    check(FOUND[name])


def test_a_program_is_the_same_every_time() -> None:
    for seed in range(5):
        assert write_program(seed) == write_program(seed)


# ---- the fuzzer itself ----

WIDE = Program(
    seed=0,
    setup=("x0 = torch.randn(6, 4).requires_grad_()", "x1 = torch.randn(6, 4)", "x2 = torch.randn(3)"),
    body=("v0 = x0 * 2", "v1 = torch.cat([x1, v0], 1)", "v2 = v1[:, 4:]", "v3 = x2.sin()", "v4 = v2.relu() + 1"),
    returned=("v3", "v4", "v1"),
    train=True,
    route="stage",
)


@pytest.fixture
def unsound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of ours that is wrong: relu is dropped."""
    import triptych
    from triptych.pre_grad.remove_identity import RemoveIdentity

    class DropRelu(triptych.Rule):
        """relu(x) -> x"""

        def pattern(self, op, x):  # type: ignore[no-untyped-def]
            return op.relu(x)

        def rewrite(self, op, x):  # type: ignore[no-untyped-def]
            return op.clone(x)

    sound = RemoveIdentity.rules
    monkeypatch.setattr(RemoveIdentity, "rules", lambda self: [*sound(self), DropRelu()])


def test_a_wrong_rule_is_seen_and_the_program_shrunk(unsound: None) -> None:
    verdict = judge(WIDE)
    assert verdict.kind == WRONG
    small, said = shrink(WIDE, verdict)
    assert said.kind == WRONG and len(small.body) == 1 and "relu" in small.body[0]
    assert len(small.setup) == 1 and small.returned == ("v4",)


def test_what_rounding_decides_is_no_fault(unsound: None) -> None:
    """A comparison of values that differ by rounding alone: the sign of a sum that cancels."""
    program = replace(
        WIDE,
        train=False,
        setup=("x0 = torch.randn(50)",),
        body=("v0 = x0.abs()", "v1 = (v0.sum() / 3 * 3 - v0.sum()).sign() * v0"),
        returned=("v1",),
    )
    noisy = judge(program)
    assert not noisy.is_fault


def test_the_time_of_other_processes_is_no_fault() -> None:
    """A program waits for the C++ compiler as long as the machine takes; a limit ends what never comes."""
    with limited(0.05):
        time.sleep(0.2)
    with pytest.raises(TooSlow), limited(60, waiting=0.05):
        time.sleep(60)


def test_a_limit_is_no_error_of_the_compiler() -> None:
    with pytest.raises(TooSlow), limited(0.05):
        try:
            while True:
                pass
        except Exception as error:
            raise RuntimeError("the compiler's own") from error
