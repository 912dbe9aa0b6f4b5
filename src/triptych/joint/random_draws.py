"""Rewrites random draws to use 32-bit numbers of the backend's counter-based generator.

Each kind of draw has a rule with the name of its operation. The rules are applied in the order of the graph, so that
the first draw takes the first seed; each rewrite enlarges the load of seeds by one.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import fact, known, number, tensor_fact
from ..options import Options
from ..rewrite.edits import ReplaceAll, Together
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Rule
from .random_numbers import Source

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

DTYPES = (f32, f16, bf16)
"""Dtypes that can be drawn from 32-bit numbers without losing resolution."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}
UNKNOWN = "shape and dtype are not known"


def _draw(program: Callable[..., Any], *inputs: Any, **how: Any) -> Any:
    return fires(program, *inputs, same_values=False, **how)


def _kept(program: Callable[..., Any], *inputs: Any, **how: Any) -> Any:
    """An example that declines because the options ask for eager's stream of random numbers."""
    return declines(program, *inputs, because="eager's stream", options={"fallback_random": True}, **how)


def why_eager(options: Options) -> str | None:
    """Why the options leave draws to torch's own generator; None if they do not."""
    if options.fallback_random:
        return "fallback_random keeps eager's stream"
    return None if options.codegen == "inductor" else "the code generator has no random generator"


class Draw(Rule, ABC):
    """A random draw, by the name of its operation."""

    takes_random = True
    without_facts = True
    drawn: ClassVar[str] = ""
    """The name of the operation, where the rule has another name."""

    def pattern(self, op):
        op_name = self.drawn or self.name
        return op.call_of(op_name, f"{op_name}_", writes=True)

    def check(self, m):
        m.applies(m.program.aliasing.effects(m.root.node).random)
        reason = why_eager(m.program.options)
        m.require(reason is None, str(reason))
        m.require(not m.root.call.mutates, "the draw writes in place")

    def rewrite(self, op, m):
        source, node = Source(op), m.root.node
        replaced = self.replacement(op, node, self.draw(op, source, node, m.root.call))
        return Together([ReplaceAll([replaced]), *source.edits])

    def replacement(self, op: Emitter, node: Node, value: Any) -> Replacement:
        return Replacement((node,), value, op, (node,), self)

    @abstractmethod
    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        """The draw from the source; raises Refused where the source has no such draw."""


# ---- uniform and normal floats ----


def _floats_without_facts(op: Emitter, source: Source, call: Call, mode: str) -> Any:
    like, dtype = call.args.get("self"), call.args.get("dtype")
    if not isinstance(like, Node) or "device" in call.args:
        raise Refused(UNKNOWN)
    if dtype is not None:
        _require_dtype(dtype)
    value = source.floats(like, mode)
    if dtype == f32:
        return value
    value = op.to(value, dtype=dtype or op.call(getattr, like, "dtype"))
    # the dtype is not known: a draw that was rounded up to 1 can only be replaced (by 0) afterwards
    return op.remainder(value, 1) if mode == "rand" else value


class Rand(Draw):
    """rand(size) -> inductor_random(size, seed, "rand")"""

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        _require_plain(call)
        mode = call.op.removesuffix("_like")
        like = tensor_fact(node)
        if like is None:
            return _floats_without_facts(op, source, call, mode)
        _require_dtype(like.dtype)
        value = source.floats(like, mode)
        if mode == "rand" and like.dtype != f32:
            # the largest draws would round up to 1: they become the greatest number below 1
            value = op.clamp(value, max=1 - torch.finfo(like.dtype).eps / 2)
        return value if like.dtype == f32 else op.to(value, dtype=like.dtype)

    examples = [
        _draw(lambda x: x + torch.rand(x.shape[0], 8, dtype=bf16), "bf16[4, 8]", dynamic=True),
        declines(lambda x: torch.rand(4, dtype=f64) + x, "f32[4]", because="resolution"),
        _kept(lambda x: x + torch.rand(4), "f32[4]"),
    ]


class RandLike(Rand):
    """rand_like(x) -> inductor_random(shape of x, seed, "rand")"""

    examples = [
        _draw(lambda x: x + torch.rand_like(x), "f32[4, 8]"),
        _draw(lambda x: torch.rand_like(x.permute(1, 0)), "f32[4, 8]"),
        declines(lambda x: x + torch.rand_like(x), "f64[4]", because="resolution"),
        declines(lambda x: x + torch.rand_like(x), "f32[4]", because="generator", options={"codegen": "eager"}),
        _kept(lambda x: x + torch.rand_like(x), "f32[4]"),
    ]


class Randn(Rand):
    """randn(size) -> inductor_random(size, seed, "randn")"""

    examples = [
        _draw(lambda x: (torch.randn(4, 8), torch.randn(2, dtype=bf16)), "f32[4, 8]"),
        _kept(lambda x: x + torch.randn(4), "f32[4]"),
    ]


class RandnLike(Rand):
    """randn_like(x) -> inductor_random(shape of x, seed, "randn")"""

    examples = [
        _draw(lambda x: torch.randn_like(x, dtype=f16), "f32[4, 8]"),
        _kept(lambda x: x + torch.randn_like(x), "f32[4]"),
    ]


# ---- integers ----


class Randint(Draw):
    """randint(low, high, size) -> inductor_randint(low, high, size, seed)"""

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        _require_plain(call)
        like = tensor_fact(node)
        low, high = call.args.get("low", 0), call.args.get("high")
        if like is None:
            raise Refused(UNKNOWN)
        if isinstance(fact(high) if isinstance(high, Node) else high, torch.Tensor):
            raise Refused("the bound is a tensor")
        if not known(number(low) < number(high)):
            raise Refused("the range may be empty")
        value = source.integers(like, low, high)
        return value if like.dtype == torch.int64 else op.to(value, dtype=like.dtype)

    examples = [
        _draw(lambda x: torch.randint(-3, 10, (4, 8)), "f32[4, 8]"),
        _kept(lambda x: x + torch.randint(0, 3, (4,)), "f32[4]"),
    ]


class RandintLike(Randint):
    """randint_like(x, low, high) -> inductor_randint(low, high, shape of x, seed)"""

    examples = [
        _draw(lambda x: torch.randint_like(x, 7), "f32[4, 8]"),
        _kept(lambda x: x + torch.randint_like(x, 7), "f32[4]"),
    ]


# ---- elements kept or dropped at random ----


def _bernoulli_in_place(x):
    y = torch.empty_like(x).bernoulli_(0.5)
    return x * y


class Bernoulli(Draw):
    """bernoulli(p) -> inductor_random(shape of p, seed, "rand") < p"""

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        _require_plain(call)
        chance, like = call.args.get("p"), tensor_fact(node)
        if like is None:
            raise Refused(UNKNOWN)
        if like.dtype == f64:
            _require_dtype(like.dtype)
        if chance is not None and not _is_probability(chance) and tensor_fact(chance) is None:
            raise Refused("{found} is not a probability", found=chance)
        uniform = source.floats(like, "rand")
        return op.to(op.lt(uniform, call.args["self"] if chance is None else chance), dtype=like.dtype)

    examples = [
        _draw(lambda x: torch.bernoulli(x.sigmoid()) + x.bernoulli(0.3), "f32[4, 8]"),
        _draw(lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()), "f32[4, 8]", **ATEN),
        declines(_bernoulli_in_place, "f32[4]", because="in place", dialects=("torch",)),
        _kept(lambda x: torch.bernoulli(x.sigmoid()), "f32[4]"),
    ]


class Dropout(Draw):
    """dropout(x, p) -> x * (inductor_random(shape of x, seed, "rand") < 1 - p) * 1 / (1 - p)"""

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        return self._value_and_mask(op, source, call)[0]

    def _value_and_mask(self, op: Emitter, source: Source, call: Call) -> tuple[Any, Any]:
        """The operand, each element kept with probability 1 - p and scaled by 1 / (1 - p), and the mask of the kept
        elements."""
        operand, p = call.args["input"], call.args.get("p", 0.5)
        if not _is_probability(p):
            raise Refused("{found} is not a probability", found=p)
        like = tensor_fact(operand)
        if like is not None:
            _require_dtype(like.dtype)
        keep = op.lt(source.floats(operand if like is None else like, "rand"), 1.0 - p)
        return op.mul(op.mul(operand, keep), 0.0 if p == 1 else 1.0 / (1.0 - p)), keep

    examples = [
        _draw(lambda x: F.dropout(x, 0.5, training=True), "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: F.dropout(x, 0.0, training=True) + 1, "f32[4]", dialects=("torch",)),  # it draws nothing
        declines(lambda x: F.dropout(x, 0.5, training=False) + 1, "f32[4]"),
    ]


class NativeDropout(Dropout):
    """native_dropout(x, p) -> x * mask / (1 - p), mask; where mask = inductor_random(...) < 1 - p"""

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        if not node.users or any(u.target is not operator.getitem for u in node.users):
            raise Refused("its results are used as a tuple")
        return self._value_and_mask(op, source, call)

    def replacement(self, op: Emitter, node: Node, value: Any) -> Replacement:
        results: tuple[Any, ...] = tuple(node.users)
        return Replacement(results, tuple(value[r.args[1]] for r in results), op, (node, *results), self)

    examples = [
        _draw(lambda x: torch.native_dropout(x.t(), 0.25, True), "bf16[4, 8]"),
        _kept(lambda x: torch.native_dropout(x, 0.25, True), "f32[4]"),
    ]


# ---- other distributions ----


class Uniform(Draw):
    """uniform(x, low, high) -> inductor_random(shape of x, seed, "rand") * (high - low) + low

    The numbers are in [low, high): a number that rounds up to high is replaced by low.
    """

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        like = _plain_floats(node, call)
        low, high = call.args.get("from", 0.0), call.args.get("to", 1.0)
        if not (_is_number(low) and _is_number(high) and low <= high):
            raise Refused("{found} is not a known range", found=f"{low} to {high}")
        value = op.add(op.mul(source.floats(like, "rand"), high - low), low)
        value = value if like.dtype == f32 else op.to(value, dtype=like.dtype)
        first = op.full([], low, dtype=like.dtype, device=like.device)
        return op.where(op.lt(value, high), value, first) if low < high else op.expand(first, list(like.shape))

    examples = [
        _draw(lambda x: torch.empty_like(x).uniform_(-1, 2), "f32[4, 8]", **ATEN),
        _draw(lambda x: x.clone().uniform_(2, 2) + torch.empty_like(x).uniform_(), "bf16[4]", **ATEN),
        declines(lambda x: torch.empty_like(x).uniform_(0, 1), "f64[4]", because="resolution", **ATEN),
    ]


class Normal(Draw):
    """normal(mean, std) -> inductor_random(shape, seed, "randn") * std + mean; they may be numbers or tensors"""

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        like = _plain_floats(node, call)
        mean, std = call.args.get("mean", 0.0), call.args.get("std", 1.0)
        if _is_number(std) and std < 0:
            raise Refused("the standard deviation is negative")
        value = op.add(op.mul(source.floats(like, "randn"), std), mean)
        return value if value.dtype == like.dtype else op.to(value, dtype=like.dtype)

    examples = [
        _draw(lambda x: torch.normal(x, 2.0) + torch.normal(1.0, x.exp()) + torch.normal(x, x.exp()), "f32[4, 8]"),
        _draw(lambda x: torch.normal(0.0, 1.0, (4, 8)), "f32[1]"),
        _kept(lambda x: torch.normal(x, 2.0), "f32[4]"),
    ]


class NormalFunctional(Normal):
    """normal_functional(x, mean, std) -> inductor_random(shape of x, seed, "randn") * std + mean"""

    examples = [
        _draw(lambda x: torch.empty_like(x.t()).normal_(1, 2), "f32[4, 8]", dynamic=True, **ATEN),
        _kept(lambda x: torch.empty_like(x).normal_(1, 2), "f32[4]", **ATEN),
    ]


def _normal_prim(x):
    how = {"dtype": x.dtype, "device": x.device, "requires_grad": False}
    return torch.ops.prims.normal.default(x.shape, mean=1.0, std=2.0, **how)


class PrimsNormal(Normal):
    """prims.normal(shape, mean, std) -> inductor_random(shape, seed, "randn") * std + mean"""

    drawn = "prims.normal"
    examples = [
        _draw(_normal_prim, "f32[4, 8]", **ATEN),
        _kept(_normal_prim, "f32[4, 8]", **ATEN),
    ]


class Exponential(Draw):
    """exponential(x, rate) -> -log(1 - inductor_random(shape of x, seed, "rand")) / rate

    The result is never infinite, since the draw is below 1. A result of 0 becomes the least positive normal number.
    """

    def draw(self, op: Emitter, source: Source, node: Node, call: Call) -> Any:
        like = _plain_floats(node, call)
        rate = call.args.get("lambd", 1.0)
        if not _is_number(rate) or rate <= 0:
            raise Refused("{found} is not a known positive rate", found=rate)
        value = op.div(op.neg(op.log1p(op.neg(source.floats(like, "rand")))), rate)
        value = value if like.dtype == f32 else op.to(value, dtype=like.dtype)
        return op.clamp(value, min=torch.finfo(like.dtype).tiny)

    examples = [
        _draw(lambda x: torch.empty_like(x).exponential_(2.0), "f16[4, 8]", **ATEN),
        declines(lambda x: torch.empty_like(x).exponential_(2.0), "f64[4, 8]", because="resolution", **ATEN),
    ]


def _plain_floats(node: Node, call: Call) -> torch.Tensor:
    _require_plain(call)
    like = tensor_fact(node)
    if like is None:
        raise Refused(UNKNOWN)
    _require_dtype(like.dtype)
    return like


def _require_plain(call: Call) -> None:
    if call.args.get("generator") is not None:
        raise Refused("it uses a generator of the user")
    if call.args.get("pin_memory"):
        raise Refused("its result is in pinned memory")
    if call.args.get("layout") not in (None, torch.strided):
        raise Refused("its layout is {found}", wanted=torch.strided, found=call.args["layout"])


def _require_dtype(dtype: Any) -> None:
    if dtype == f64:
        raise Refused("32-bit draws would lose resolution in float64")
    if dtype not in DTYPES:
        raise Refused("the backend's generator does not draw {found}", found=dtype)


def _is_probability(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


DRAWS: tuple[Draw, ...] = (
    Rand(), RandLike(), Randn(), RandnLike(), Randint(), RandintLike(), Bernoulli(), Dropout(), NativeDropout(),
    Uniform(), Normal(), NormalFunctional(), PrimsNormal(), Exponential(),
)  # fmt: skip
