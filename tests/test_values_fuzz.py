"""What is known of values, in programs at random: reductions, other ranks, numbers, no elements, narrow dtypes.

Reading never raises, and whatever is said is what torch computes, for other sizes too.
"""

from __future__ import annotations

import random

import pytest
import torch

from triptych.ir.facts import fact, tensor_fact
from triptych.ir.program import Program
from triptych.ir.values import knowledge
from triptych.testing.capture import capture

from .test_values import NEW_SIZES, _check_node, _resized, _symbols, _Values

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16]
NUMBERS = [0, 1, -1, 2, 3, 0.5, -2.5, True]
STEPS, MOST_ELEMENTS = 10, 5000

STARTS = [
    lambda n, m, dtype: torch.arange(n),
    lambda n, m, dtype: torch.arange(m, dtype=torch.int32 if dtype == torch.bool else dtype),
    lambda n, m, dtype: torch.full((n, m), 3, dtype=dtype),
    lambda n, m, dtype: torch.ones((), dtype=dtype),
    lambda n, m, dtype: torch.zeros(n, 0, dtype=dtype),
    lambda n, m, dtype: torch.eye(n, m, dtype=dtype),
    lambda n, m, dtype: torch.ones(n, 1, m, dtype=dtype).tril(-1),
    lambda n, m, dtype: torch.arange(3, 11, 2),
    lambda n, m, dtype: torch.full((m,), n),
    lambda n, m, dtype: torch.scalar_tensor(-1.5),
    lambda n, m, dtype: torch.arange(n)[:, None] - torch.arange(m),
]
OPERATIONS = [
    lambda a, b, d, k, number, dtype: a + b,
    lambda a, b, d, k, number, dtype: a - b,
    lambda a, b, d, k, number, dtype: a * b,
    lambda a, b, d, k, number, dtype: a * number,
    lambda a, b, d, k, number, dtype: number - a,
    lambda a, b, d, k, number, dtype: a.max() if k else a.min(),
    lambda a, b, d, k, number, dtype: a.amax(d, keepdim=k),
    lambda a, b, d, k, number, dtype: a.amin(d, keepdim=k),
    lambda a, b, d, k, number, dtype: a.sum(d, keepdim=k),
    lambda a, b, d, k, number, dtype: a.sum() if k else a.prod(),
    lambda a, b, d, k, number, dtype: a.any(d, keepdim=k),
    lambda a, b, d, k, number, dtype: a.all() if k else a.any(),
    lambda a, b, d, k, number, dtype: a.max(d, keepdim=k)[number == 1],
    lambda a, b, d, k, number, dtype: a.argmax(d, keepdim=k) if number else a.argmin(),
    lambda a, b, d, k, number, dtype: a.cumsum(d),
    lambda a, b, d, k, number, dtype: a.to(dtype),
    lambda a, b, d, k, number, dtype: a.unsqueeze(d) if k else a.squeeze(),
    lambda a, b, d, k, number, dtype: a.reshape(-1),
    lambda a, b, d, k, number, dtype: a.select(d, -1 if k else 0),
    lambda a, b, d, k, number, dtype: a[1:],
    lambda a, b, d, k, number, dtype: a.flip(d),
    lambda a, b, d, k, number, dtype: a.expand(2, *a.shape),
    lambda a, b, d, k, number, dtype: a.transpose(0, -1),
    lambda a, b, d, k, number, dtype: torch.where(a != 0, a, b),
    lambda a, b, d, k, number, dtype: a <= b if k else a == number,
    lambda a, b, d, k, number, dtype: a.clamp(min=number) if k else a.clamp(number, number + 1),
    lambda a, b, d, k, number, dtype: torch.maximum(a, b) if k else torch.minimum(a, b),
    lambda a, b, d, k, number, dtype: a // b if k else a % number,
    lambda a, b, d, k, number, dtype: a / b,
    lambda a, b, d, k, number, dtype: a.abs() if k else -a,
    lambda a, b, d, k, number, dtype: a.masked_fill(b > 0, number),
    lambda a, b, d, k, number, dtype: torch.cat([a, b], d) if k else torch.stack([a, a], d),
    lambda a, b, d, k, number, dtype: a.logical_not() if k else ~a,
    lambda a, b, d, k, number, dtype: a.tril() if k else a.triu(1),
    lambda a, b, d, k, number, dtype: a & b if k else a | b,
    lambda a, b, d, k, number, dtype: a.count_nonzero() if k else a.repeat(2, *[1] * a.dim()),
    lambda a, b, d, k, number, dtype: a.index_select(d, b.reshape(-1)) if k else a.gather(d, b),
    lambda a, b, d, k, number, dtype: torch.full_like(a, number) if k else torch.diff(a, dim=d),
]


class _Program:
    """A function of x. The steps that raise for one of the sizes are left out of it."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.starts = [(chance.choice(STARTS), chance.choice(DTYPES)) for _ in range(4)]
        self.with_input = chance.random() < 0.5
        self.steps = [[chance.choice(OPERATIONS), *(chance.randrange(1 << 20) for _ in range(3)), chance.random() < 0.5,
                       chance.choice(NUMBERS), chance.choice(DTYPES)] for _ in range(STEPS)]  # fmt: skip
        for size in [(4, 5), *NEW_SIZES] * 2:  # a step that is left out may be the operand of a later one
            self(torch.randn(*size), strict=False)

    def __call__(self, x, strict=True):
        values = [start(*x.shape, dtype) for start, dtype in self.starts]
        values += [x, x > 0] if self.with_input else []
        for step in self.steps:
            operation, first, second, dim, keep, number, dtype = step
            a, b = values[first % len(values)], values[second % len(values)]
            try:
                value = operation(a, b, dim % max(a.dim(), 1), keep, number, dtype)
            except (RuntimeError, IndexError, TypeError, NotImplementedError):
                if strict:
                    raise
                value = None
            if value is None or value.numel() > MOST_ELEMENTS:
                step[0], value = (lambda *_: torch.zeros(())), torch.zeros(())
            values.append(value)
        return [value.clone() for value in values]


def check(seed, dynamic):
    """How many patterns are known."""
    inputs = [torch.randn(4, 5)]
    gm, args = capture(_Program(seed), inputs, "aten", dynamic)
    about, found = knowledge(Program(gm)), 0
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for sizes in [None, *NEW_SIZES] if dynamic else [None]:
        given = list(args) if sizes is None else _resized(placeholders, inputs, sizes)
        symbol = next((s for s in fact(placeholders[0]).shape if isinstance(s, torch.SymInt)), None)
        facts = [fact(n) for n in placeholders]
        if sizes is not None and symbol is not None and not symbol.node.shape_env.evaluate_guards_for_args(facts, given):
            continue  # the graph is of other sizes
        run = _Values(gm)
        run.run(*given)
        for node, actual in run.seen.items():
            if node.op != "output" and tensor_fact(node) is not None and isinstance(actual, torch.Tensor):
                found += _check_node(about, node, actual, _symbols(placeholders, given))
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 100, 20)], ids=str)
def test_what_is_known_of_random_values(seeds, dynamic):
    assert sum(check(seed, dynamic) for seed in seeds) > 100


def test_reading_the_values_of_a_reduction():
    """Its operand has a higher rank than its result, which nothing of lower rank broadcasts to."""

    def program(x):
        return x * (torch.arange(6).max() + 1), torch.ones((), dtype=torch.int64).flip(0) + x.long()

    for dialect in ("aten", "torch"):
        gm, _ = capture(program, [torch.randn(3)], dialect, False)
        about = knowledge(Program(gm))
        for node in gm.graph.nodes:
            about.elements(node)
