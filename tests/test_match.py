"""The pattern language: spellings, defaults, operand order, captures, alternatives, lists, several roots."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych import Rule
from triptych.match.pattern import Int, Is, Number, Tensor
from triptych.testing.capture import capture, capture_torch

pytestmark = pytest.mark.fast

X, Y = torch.randn(4, 6), torch.randn(4, 6)


def rule_of(pattern_function):
    class Anonymous(Rule):
        """x -> x"""

        pattern = pattern_function
        interior_may_be_used = True
        mixed_dtypes = True

    return Anonymous()


def found(pattern_function, program, *inputs, dialect="torch"):
    gm, _ = capture(program, inputs, dialect)
    return triptych.find(rule_of(pattern_function), gm)


def relu_plus(self, op, x, y):
    return op.add(op.relu(x), y)


@pytest.mark.parametrize("dialect", ["torch", "aten"])
@pytest.mark.parametrize("program", [
    lambda x, y: x.relu() + y, lambda x, y: y + F.relu(x), lambda x, y: torch.add(y, torch.relu(x)),
    lambda x, y: torch.relu(input=x).add(other=y), lambda x, y: torch.add(x.relu(), y, alpha=1),
])  # fmt: skip
def test_one_pattern_every_spelling(program, dialect):
    (match,) = found(relu_plus, program, X, Y, dialect=dialect)
    assert match["x"].node.op == "placeholder" and match["y"].node.op == "placeholder"
    assert match["x"] != match["y"]


@pytest.mark.parametrize("program", [
    lambda x, y: torch.add(x.relu(), y, alpha=3), lambda x, y: x.relu() - y, lambda x, y: x.relu().add_(y),
])  # fmt: skip
def test_an_argument_not_mentioned_is_no_match(program):
    assert not found(relu_plus, program, X, Y)


def test_the_same_capture_is_the_same_value():
    def pattern(self, op, x):
        return op.mul(x, x)

    assert found(pattern, lambda x, y: x * x, X, Y)
    assert not found(pattern, lambda x, y: x * y, X, Y)


def test_captures_are_typed():
    def pattern(self, op, x: Tensor, n: Number):
        return op.mul(x, n)

    assert found(pattern, lambda x: 2 * x, X)[0]["n"] == 2
    assert not found(pattern, lambda x, y: x * y, X, Y)

    def even(self, op, x, dim: Is("an even dim", lambda d: d % 2 == 0)):
        return op.unsqueeze(x, dim)

    assert found(even, lambda x: x.unsqueeze(-1), X)
    assert not found(even, lambda x: x.unsqueeze(1), X)


def test_defaults_bind_to_captures():
    def pattern(self, op, x, dim: Int):
        return op.cat(x, dim)

    assert found(pattern, lambda x: torch.cat([x, x]), X)[0]["dim"] == 0
    assert found(pattern, lambda x: torch.cat([x, x], -1), X)[0]["dim"] == 1


def test_constants_tell_zero_from_minus_zero_and_true_from_one():
    def zero(self, op, x):
        return op.add(x, 0)

    assert found(zero, lambda x: x + 0.0, X)
    assert not found(zero, lambda x: x + -0.0, X)

    def keep(self, op, x, dim):
        return op.sum(x, dim=dim, keepdim=True)

    assert found(keep, lambda x: x.sum(1, True), X)
    assert not found(keep, lambda x: x.sum(1), X)


def test_alternatives_and_optional_steps():
    def pattern(self, op, x, dtype):
        return op.one_of(["relu", "gelu"], op.optional("to", x, dtype=dtype))

    assert found(pattern, lambda x: F.gelu(x), X)[0]["dtype"] is None
    assert found(pattern, lambda x: F.relu(x.double()), X)[0]["dtype"] == torch.float64
    assert not found(pattern, lambda x: torch.tanh(x), X)

    def either(self, op, x):
        return op.relu(op.neg(x)) | op.neg(op.relu(x))

    assert found(either, lambda x: -x.relu(), X) and found(either, lambda x: (-x).relu(), X)


def test_through_views_and_casts():
    def pattern(self, op, x, way):
        return op.sum(op.through(["reshape", "permute", "to"], op.relu(x), steps="way"))

    (match,) = found(pattern, lambda x: x.relu().t().double().reshape(-1).sum(), X)
    assert [v.op for v in match["way"]] == ["reshape", "to", "permute"]
    assert found(pattern, lambda x: x.relu().sum(), X)[0]["way"] == ()
    assert not found(pattern, lambda x: x.relu().tanh().sum(), X)


def test_repeated_elements():
    def pattern(self, op, x, i):
        return op.cat(op.each(op.getitem(x, i), same=["x"]), dim=1)

    (match,) = found(pattern, lambda x: torch.cat([*x.chunk(3, 1)][::-1], dim=1), X)
    assert match["i"] == (2, 1, 0) and match["x"].op == "split"
    assert not found(pattern, lambda x, y: torch.cat([x.chunk(2, 1)[0], y.chunk(2, 1)[1]], 1), X, Y)


def test_multi_output_by_index():
    def pattern(self, op, x):
        return op.split(x, [3, 3], dim=1)[1]

    assert found(pattern, lambda x: x.chunk(2, -1)[1].relu(), X)
    assert not found(pattern, lambda x: x.chunk(2, -1)[0].relu(), X)


def test_several_roots():
    def pattern(self, op, x, a, b):
        return op.linear(x, a), op.linear(x, b)

    gm, _ = capture_torch(lambda x, a, b: (F.linear(x, a), F.linear(x, b)), [X, torch.randn(2, 6), torch.randn(2, 6)])
    match = triptych.find(rule_of(pattern), gm)[0]
    assert len(match.roots) == 2 and match["a"] != match["b"]


def test_a_wrong_name_is_an_error_with_the_near_ones():
    with pytest.raises(triptych.UnknownName, match="pattern of rule wrong: .*relu"):

        class Wrong(Rule):
            """x -> x"""

            def pattern(self, op, x):
                return op.rellu(x)

    with pytest.raises(triptych.TriptychError, match="'y', which the pattern does not capture; known: x"):

        class WrongCapture(Rule):
            """x -> x"""

            def pattern(self, op, x):
                return op.relu(x)

            def rewrite(self, op, y):
                return y


def test_why_not_ranks_the_nearest_first():
    def pattern(self, op, x, y):
        return op.add(op.relu(op.neg(x)), y)

    def program(x, y):
        a = torch.relu(x) + y
        b = torch.tanh(x) + y
        return a, b

    gm, _ = capture_torch(program, [X, Y])
    misses = triptych.why_not(rule_of(pattern), gm)
    assert misses[0].matched == 2 and "wanted neg" in misses[0].reason
    assert "test_match.py" in misses[0].source
    assert any("wanted relu, found tanh" in m.reason for m in misses) or len(misses) == 2
