"""Random attention, fused and not: the same numbers. And what such programs have found."""

from __future__ import annotations

import pytest
import torch

from .attention_fuzz import Program, check, random_attention
from .fuzzing import COUNT

SEEDS = range(int(COUNT or 50))
QKV = {name: ("float", (2, 1, 3, 4), True) for name in "qkv"}
FULL, DEAD, FACTOR = ("float", (3, 3), False), ("dead", (3, 3), False), ("factor", (3,), False)
LOWEST = "torch.finfo(s.dtype).min"


@pytest.mark.filterwarnings("ignore")
def test_random_attention():
    """`FUZZ_PROGRAMS=5000` tries more."""
    found = 0
    for seed in SEEDS:
        program = random_attention(seed)
        try:
            found += bool(check(program))
        except Exception as error:
            raise AssertionError(f"{error}\n{program}") from error
    assert found > len(SEEDS) // 5


FOUND = {
    "shifted, then a factor of each key": (0, ["s = s + 3.0", "s = s * b"], {"b": FACTOR}),
    "its highest taken off, then a factor of each key": (0, ["s = s - s.amax(-1, True)", "s = s * b"], {"b": FACTOR}),
    "shifted, then a factor of each query": (1, ["s = s + 3.0", "s = s / b[:, None]"], {"b": FACTOR}),
    "-inf less -inf, then filled": (
        0, ["s = s + b", "s = s - s.amax(-1, True)", f"s = s.masked_fill(m, {LOWEST})"],
        {"b": ("low_inf_dead", (3, 3), False), "m": ("mask", (3, 3), False)},
    ),
    "filled, then a factor": (1, ["s = s.masked_fill(m, -1e9)", "s = s * b.sum()"], {"m": DEAD, "b": FACTOR}),
    "-inf cut off": (1, ["s = s + torch.where(m, -math.inf, 0.0)", f"s = s.clamp(min={LOWEST})"], {"m": DEAD}),
    "-inf added beside finite fills": (
        1, ["s = s + b", "s = s.masked_fill(m, -3e38)"], {"b": ("low_inf_dead", (3, 3), False), "m": DEAD},
    ),
    "widened, then cut off": (1, ["s = s + b", "s = s.float()", f"s = s.clamp(min={LOWEST})"], {"b": FULL}),
    "widened, then filled": (
        1, ["s = s + b", "s = s.float()", f"s = s.masked_fill(m, {LOWEST})", "s = s * b.abs().sum()"],
        {"b": FULL, "m": DEAD},
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_found(name, dtype, seed):
    fuses, between, inputs = FOUND[name]
    lines = ("s = q @ k.mT", *between, "p = s.softmax(-1)", "p = p.to(v.dtype)", "o = p @ v")
    assert check(Program(seed, lines, {**QKV, **inputs}, dtype, True, False, False, False)) == fuses


def test_a_product_that_something_low_was_added_to_is_not_bare():
    """exp of it may be zero in all of a row, and divided by its sum NaN."""
    lines = ("s = torch.baddbmm(b, q, k.mT)", "e = torch.exp(s)", "p = e / e.sum(-1, True)", "o = p @ v")
    inputs = {name: ("float", (2, 3, 4), True) for name in "qkv"}
    check(Program(0, lines, {**inputs, "b": ("low_-1e4_dead", (2, 3, 3), False)}, torch.float32, False, False, False, False))


def test_what_is_added_times_zero_has_a_gradient():
    lines = ("s = torch.baddbmm(b, q, k.mT, beta=0)", "o = s.softmax(-1) @ v")
    inputs = {name: ("float", (2, 3, 4), True) for name in "qkv"}
    program = Program(0, lines, {**inputs, "b": ("float", (2, 3, 3), True)}, torch.float32, True, False, False, False)
    assert check(program) == 0
