"""What is known of values: whatever is said of a pattern must be what torch computes, for every size."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.fx import Interpreter

from triptych.ir.facts import fact, tensor_fact
from triptych.ir.program import Program
from triptych.ir.reshape import reshape_groups
from triptych.ir.values import knowledge
from triptych.ir.values.affine import Affine
from triptych.ir.values.choices import levels
from triptych.joint.constant_fold_uniform_value import ConstantFoldUniformValue
from triptych.testing.capture import capture
from triptych.testing.check import compare_graphs, run_pass
from triptych.verify.structure import verify

NEW_SIZES = ((5, 7), (2, 3), (6, 6), (9, 4))


class _Values(Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, gm):
        super().__init__(gm)
        self.seen = {}

    def run_node(self, n):
        value = self.seen[n] = super().run_node(n)
        return value


def _number(value, symbols):
    return int(value.node.expr.subs(symbols)) if isinstance(value, torch.SymInt) else value


def _affine(pattern, shape, symbols):
    grids = torch.meshgrid(*(torch.arange(s) for s in shape), indexing="ij") if shape else ()
    total = torch.full(tuple(shape), _number(pattern.start, symbols), dtype=torch.int64)
    for step, grid in zip(pattern.steps, grids):
        total = total + grid * _number(step, symbols)
    return total


def _materialised(elements, actual, symbols):
    shape = actual.shape
    made = torch.zeros(shape, dtype=actual.dtype)
    covered = torch.zeros(shape, dtype=torch.int64)
    for where, leaf in elements.pieces:
        holds = torch.zeros(shape, dtype=torch.bool)
        for clause in where.clauses:
            here = torch.ones(shape, dtype=torch.bool)
            for pattern in clause:
                here &= _affine(pattern, shape, symbols) >= 0
            holds |= here
        value = _affine(leaf, shape, symbols) if isinstance(leaf, Affine) else leaf
        made = torch.where(holds, value.to(actual.dtype), made)
        covered += holds
    assert (covered == 1).all(), "pieces do not cover each index once"
    return made


def check_program(program, inputs, dialect, dynamic, others=()):
    """Every pattern, interval and answer against what the graph computes; how many patterns there were."""
    gm, args = capture(program, inputs, dialect, dynamic)
    about = knowledge(Program(gm))
    found = 0
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for sizes in [None, *others] if dynamic else [None]:
        given = list(args) if sizes is None else _resized(placeholders, inputs, sizes)
        if given is None:
            continue
        symbols = _symbols(placeholders, given)
        run = _Values(gm)
        run.run(*given)
        for node, actual in run.seen.items():
            if node.op == "output" or tensor_fact(node) is None or not isinstance(actual, torch.Tensor):
                continue
            found += _check_node(about, node, actual, symbols)
    return found


def _symbols(placeholders, given):
    symbols = {}
    for node, value in zip(placeholders, given):
        known = fact(node)
        if isinstance(known, torch.SymInt):
            symbols[known.node.expr] = int(value)
        elif isinstance(known, torch.Tensor):
            symbols.update({
                s.node.expr: n for s, n in zip(known.shape, value.shape) if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol
            })
    return symbols


def _resized(placeholders, inputs, sizes):
    """The inputs anew with other sizes, the first dims of x being (n, m)."""
    values = []
    for node in placeholders:
        known = fact(node)
        if isinstance(known, torch.SymInt):
            values.append({int(inputs[0].shape[0]): sizes[0], int(inputs[0].shape[1]): sizes[1]}.get(known.node.hint))
        else:
            values.append(torch.randn(*sizes))
    return None if None in [v if v is None else 0 for v in values] else values


def _check_node(about, node, actual, symbols):
    elements = about.elements(node)
    where = f"{node.name} = {node.target}{node.args} {dict(node.kwargs)}"
    if elements is not None and actual.numel():
        made = _materialised(elements, actual, symbols)
        assert torch.equal(made.nan_to_num(12345), actual.nan_to_num(12345)), f"{where}: {made} for {actual}"
    low, high = about.interval(node).low, about.interval(node).high
    numbers = actual[~actual.isnan()] if actual.is_floating_point() else actual
    assert numbers.numel() == 0 or low <= numbers.min().item() and numbers.max().item() <= high, f"{where}: {low}..{high}"
    if about.interval(node).nan is False and actual.is_floating_point():
        assert not actual.isnan().any(), where
    answers = {
        "is_all_true": lambda: actual.dtype == torch.bool and bool(actual.all()),
        "is_all_false": lambda: actual.dtype == torch.bool and not bool(actual.any()),
        "is_zero": lambda: actual.is_floating_point() and bool((actual == 0).all()),
        "is_causal": lambda: actual.dtype == torch.bool and _lower(actual),
        "is_causal_bias": lambda: actual.is_floating_point() and _lower_bias(actual),
        "every_row_keeps_one": lambda: actual.dtype == torch.bool and bool(actual.any(-1).all()),
        "never_negative": lambda: not bool((actual < 0).any()),
    }
    for name, truth in answers.items():
        if getattr(about, name)(node):
            assert truth(), f"{name} of {where}: {actual}"
    value = about.evaluate(node)
    if value is not None:
        assert torch.equal(value.nan_to_num(12345), actual.nan_to_num(12345)), where
    return elements is not None


def _lower(actual):
    rows, keys = actual.shape[-2:]
    return rows == keys and torch.equal(actual, torch.ones(rows, keys, dtype=torch.bool).tril().expand(actual.shape))


def _lower_bias(actual):
    rows, keys = actual.shape[-2:]
    wanted = torch.zeros(rows, keys, dtype=actual.dtype).masked_fill(~torch.ones(rows, keys).tril().bool(), -torch.inf)
    return rows == keys and bool((actual == wanted).all())


# ---- new memory that is written ----

INF = float("inf")


def _filled_in_place(x):
    n = x.shape[1]
    bias, keep = torch.zeros(n, n), torch.ones(n, n, dtype=torch.bool).tril(diagonal=0)
    bias.masked_fill_(keep.logical_not(), -INF)
    return bias[None] + 0.0


def _result_of_the_write(x):
    bias, at = torch.full((x.shape[1], x.shape[1]), -INF), torch.arange(x.shape[1])
    return bias.masked_fill_(at < (at + 1).view(-1, 1), 0).expand(2, 1, -1, -1) * 1.0


def _read_before(x):
    bias = torch.zeros(x.shape[1], x.shape[1])
    before = bias + 0.0
    bias.fill_(1.0)
    return before, bias + 0.0


def _written_twice(x):
    bias = torch.triu(torch.full((x.shape[1], x.shape[1]), -INF), diagonal=1)
    bias.masked_fill_(torch.arange(x.shape[1]) < 2, 0.0)
    bias.add_(1)
    return bias * 2


def _written_through_a_view(x):
    bias = torch.zeros(x.shape[1], x.shape[1])
    bias[0].add_(1)
    return bias + 0.0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program, causal", [
    (_filled_in_place, True), (_result_of_the_write, True), (_read_before, False), (_written_twice, False),
    (_written_through_a_view, False),
])  # fmt: skip
def test_new_memory_written_once(program, causal, dynamic):
    check_program(program, [torch.randn(4, 5)], "torch", dynamic)
    gm, _ = capture(program, [torch.randn(4, 5)], "torch", dynamic)
    about = knowledge(Program(gm))
    (result, *_) = next(iter(reversed(gm.graph.nodes))).args[0]
    assert about.is_causal_bias(result) == causal


# ---- programs at random ----


def _random_program(seed):
    """A function of x whose values are built from its sizes, alone or not."""
    rng = random.Random(seed)
    choices = [rng.randrange(10**6) for _ in range(80)]

    def program(x):
        draw = iter(choices)
        n, m = x.shape[0], x.shape[1]
        ints = [torch.arange(n)[:, None], torch.arange(m)[None, :], torch.arange(1, n + 1)[:, None], torch.full((n, m), 3)]
        bools, floats = [torch.ones(n, m, dtype=torch.bool)], [torch.zeros(n, m)]
        if choices[-1] % 2:  # and from what comes in
            ints.append((x * 3).round().clamp(-4, 4).to(torch.int64))
            bools.append(x > 0)
            floats.append(x)

        def pick(values):
            return values[next(draw) % len(values)]

        for _ in range(9):
            kind = next(draw) % 26
            a, b = pick(ints), pick(ints)
            p, q = pick(bools), pick(bools)
            f = pick(floats)
            number = next(draw) % 5 - 1
            if kind == 0:
                ints.append(a + b)
            elif kind == 1:
                ints.append(a - b)
            elif kind == 2:
                ints.append(a * number)
            elif kind == 3:
                bools.append(a <= b)
            elif kind == 4:
                bools.append(a > b + number)
            elif kind == 5:
                bools.append(a == b)
            elif kind == 6:
                bools.append(a != number)
            elif kind == 7:
                bools.append(p & q)
            elif kind == 8:
                bools.append(p | q)
            elif kind == 9:
                bools.append(~p)
            elif kind == 10:
                ints.append(torch.where(p, a, b))
            elif kind == 11:
                floats.append(torch.where(p, 0.0, float("-inf")))
            elif kind == 12:
                floats.append(f.masked_fill(p, float(number)))
            elif kind == 13:
                bools.append(p.expand(n, m).tril(number))
            elif kind == 14:
                floats.append(f.expand(n, m).triu(number))
            elif kind == 15:
                ints.append(p.to(torch.int64))
            elif kind == 16:
                floats.append(p.float() * 2 - 1)
            elif kind == 17:
                ints.append(a.abs())
            elif kind == 18:
                ints.append(torch.minimum(a, b) if number > 0 else torch.maximum(a, b))
            elif kind == 19:
                ints.append(a.clamp(min=number, max=number + 2) if number else a.clamp(min=1))
            elif kind == 20:
                ints.append(torch.cat([a.expand(n, m)[:, :1], b.expand(n, m)[:, 1:]], 1))
            elif kind == 21:
                ints.append(torch.diff(a.expand(n, m), prepend=b.expand(n, m)[:, :1], dim=-1))
            elif kind == 22:
                ints.append(a.flip(0) if number else a.expand(n, m).reshape(-1).reshape(n, m))
            elif kind == 23:
                ints.append((p.expand(n, m)).cumsum(1) if number else torch.ones_like(a.expand(n, m)).cumsum(1))
            elif kind == 24:
                ints.append(a % 3 if number else a // 2)
            elif kind == 25:
                bools.append(f > number)
        return [*ints, *bools, *floats]

    return program


@pytest.mark.parametrize("seed", range(25))
def test_patterns_of_random_programs(seed):
    dialect = ("aten", "torch")[seed % 8 == 0]  # capturing with Dynamo takes longer
    for dynamic in (False, True):
        assert check_program(_random_program(seed), [torch.randn(4, 5)], dialect, dynamic, NEW_SIZES)


def folding(seed, dialect, dynamic):
    """Fold a random program and compare; how many rewrites there were."""
    program = _random_program(seed)
    gm, inputs = capture(lambda x: [v.clone() for v in program(x)], [torch.randn(4, 5)], dialect, dynamic)
    before = copy.deepcopy(gm)
    tally = run_pass(ConstantFoldUniformValue, gm)
    gm.graph.lint()
    verify(gm)
    compare_graphs(before, gm, inputs)
    return tally.fired.total()


@pytest.mark.parametrize("seed", range(40, 60))
def test_folding_random_programs(seed):
    dialect = ("aten", "torch")[seed % 8 == 0]
    for dynamic in (False, True):
        folding(seed, dialect, dynamic)


@pytest.mark.parametrize("name, program, wanted", [
    ("relu", lambda x: x.relu().t(), True),
    ("clamp", lambda x: x.clamp(0, 3).to(torch.float64), True),
    ("softmax", lambda x: x.softmax(-1)[:1], True),
    ("negative", lambda x: x.clamp(-1, 3), False),
    ("written", lambda x: x.relu().sub_(1), False),
    ("infinite, then an integer", lambda x: (1 / x.relu()).relu().to(torch.int64), False),
    ("an integer that wraps around", lambda x: x.to(torch.int64).relu().to(torch.int8), False),
    ("an integer in a wider dtype", lambda x: x.to(torch.int64).clamp(0, 300).to(torch.int16).float(), True),
    ("beyond the operand", lambda x: torch.as_strided(torch.arange(-4, 4)[4:], (8,), (1,), 0) + x[0, 0].long(), False),
])  # fmt: skip
def test_never_negative(name, program, wanted):
    """What is said of the value that the graph returns, or of the first operand of a sum."""
    gm, _ = capture(program, [torch.randn(3, 3)], "torch", False)
    (result,) = gm.graph.output_node().args[0]
    asked = result.args[0] if "add" in str(result.target) else result
    assert knowledge(Program(gm)).never_negative(asked) is wanted


def returned(program, *inputs, dynamic=False):
    gm, args = capture(program, inputs, "torch", dynamic)
    (result,) = gm.graph.output_node().args[0]
    return Program(gm, args), result


INF = float("inf")


@pytest.mark.parametrize("program, wanted", [
    (lambda m: torch.where(m, 0.0, -INF), {0.0, -INF}),
    (lambda m: (1.0 - m.float()) * -1e4, {0.0, -1e4}),
    (lambda m: m.half() * -1e5, {0.0, -INF}),
    (lambda m: torch.where(m, 0.0, -1e9) - torch.where(m.t(), 0.0, 2.0).view(4, 4), {0.0, -2.0, -1e9}),
    (lambda m: torch.zeros(4, 4).masked_fill(m, -1e9).flip(0)[1:], {0.0, -1e9}),
    (lambda m: m.long().neg().clone(), {0.0, -1.0}),
    (lambda m: torch.full((4,), 3) / 2 + m, {1.5, 2.5}),
    (lambda m: ~m.long(), None),  # -1 and -2
    (lambda m: m.float() * INF, None),  # 0 * inf
    (lambda m: 1 / m.float(), None),
    (lambda m: torch.add(m.float(), 1.0, alpha=3), None),
    (lambda m: torch.where(m, 0.0, 1.0).add_(1), None),
    (lambda m: m.float().softmax(-1), None),
])  # fmt: skip
def test_levels(program, wanted):
    mask = torch.rand(4, 4) > 0.5
    levels_of = levels(*returned(program, mask))
    assert levels_of is None if wanted is None else levels_of is not None and wanted <= levels_of
    seen = {float(x) for x in program(mask).flatten()}
    assert levels_of is None or seen <= levels_of


@pytest.mark.parametrize("program, wanted", [
    (lambda x: torch.full((2, 3), -1e9).half(), -INF),
    (lambda x: torch.full_like(x, 2).expand(5, 3, 3)[0].t(), 2.0),
    (lambda x: torch.tensor([7, 7]), 7),
    (lambda x: torch.ones(4, dtype=torch.bool), True),
    (lambda x: torch.tensor([7, 8]), None),
    (lambda x: torch.full((3,), float("nan")), "nan"),
    (lambda x: x * 0, None),
    (lambda x: torch.full((3,), 1.0).mul_(2), 2.0),
])  # fmt: skip
def test_number(program, wanted):
    graph, node = returned(program, torch.randn(3, 3))
    number = knowledge(graph).number(node)
    assert str(number) == wanted if wanted == "nan" else (number == wanted and type(number) is type(wanted))
    assert knowledge(graph).number(5) == 5 and knowledge(graph).number("5") is None


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program, causal, keeps", [
    (lambda x: torch.where(torch.ones_like(x, dtype=torch.bool).tril(), 0.0, -1e9), True, True),
    (lambda x: torch.full_like(x, -INF).triu(1), True, True),
    (lambda x: torch.where(torch.ones_like(x, dtype=torch.bool).tril(1), 0.0, -1e9), False, True),
    (lambda x: torch.where(torch.ones_like(x, dtype=torch.bool).tril(-1), 0.0, -1e9), False, False),
    (lambda x: torch.where(torch.ones_like(x, dtype=torch.bool).tril(), 0.0, -1e3), False, False),
    (lambda x: torch.where(torch.ones_like(x, dtype=torch.bool).tril(), 1.0, -1e9), False, False),
])  # fmt: skip
def test_biases_that_mask(program, causal, keeps, dynamic):
    graph, node = returned(lambda x: program(x @ x.t()), torch.randn(4, 3), dynamic=dynamic)
    about = knowledge(graph)
    assert (about.is_causal_bias(node, -1e8), about.bias_keeps_one(node, -1e8)) == (causal, keeps)


@pytest.mark.parametrize("old, new, wanted", [
    ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
    ((6, 4), (2, 3, 2, 2), [([0], [0, 1]), ([1], [2, 3])]),
    ((4, 1), (1, 4), [([0, 1], [0, 1])]),
    ((2, 1, 3), (2, 3), [([0], [0]), ([1, 2], [1])]),
    ((4, 3), (4, 3, 1, 1), [([0], [0]), ([1], [1, 2, 3])]),
    ((), (1,), [([], [0])]),
    ((2, 3), (2, 4), None),
    ((1, 4, 3), (4, 4, 3), None),
])  # fmt: skip
def test_reshape_groups(old, new, wanted):
    assert reshape_groups(old, new) == wanted
