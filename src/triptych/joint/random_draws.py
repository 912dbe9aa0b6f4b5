"""What a random draw becomes: 32-bit numbers of the backend's counter-based generator, brought into shape."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.calls import Call
from ..ir.facts import fact, known, known_equal, number, tensor_fact
from ..ir.program import Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

DTYPES = (f32, f16, bf16)
"""What 32-bit draws can make without losing resolution."""

Form = Callable[[Emitter, Node, Call], Any]


class Draws(ABC):
    """The draws by the name of their operation; where seeds come from is for others to say."""

    def __init__(self) -> None:
        self.prims = _private.generator_prims
        self.forms: dict[str, Form] = {
            "rand": self._floats, "rand_like": self._floats,
            "randn": self._floats, "randn_like": self._floats,
            "randint": self._integers, "randint_like": self._integers,
            "uniform": self._uniform, "exponential": self._exponential,
            "normal": self._normal, "normal_functional": self._normal, "prims.normal": self._normal,
            "bernoulli": self._bernoulli, "dropout": self._dropout, "native_dropout": self._dropout,
        }  # fmt: skip

    @abstractmethod
    def seed(self, op: Emitter, like: Any) -> Value:
        """The next seed on the device of `like`: a known value, or a node of which nothing is known."""

    def _raw(self, op: Emitter, like: Any, mode: str) -> Value:
        """32-bit floats in the shape of `like`, lying in memory as it does."""
        seed = self.seed(op, like)
        if not isinstance(like, torch.Tensor):
            return op.call(self.prims.random, op.call(getattr, like, "shape"), seed, mode)
        order = memory_order(like)
        if order is None:
            return op.call(self.prims.random, list(like.shape), seed, mode)
        laid = op.call(self.prims.random, [like.shape[d] for d in order], seed, mode)
        return op.permute(laid, [order.index(d) for d in range(len(order))])

    def _floats(self, op: Emitter, node: Node, call: Call) -> Any:
        _check_plain(call)
        mode = call.op.removesuffix("_like")
        like = tensor_fact(node)
        if like is None:
            return self._floats_without_facts(op, call, mode)
        _check_dtype(like.dtype)
        value = self._raw(op, like, mode)
        if mode == "rand" and like.dtype != f32:
            # the largest draws would round up to 1: the greatest number below 1 takes them
            value = op.clamp(value, max=1 - torch.finfo(like.dtype).eps / 2)
        return value if like.dtype == f32 else op.to(value, dtype=like.dtype)

    def _floats_without_facts(self, op: Emitter, call: Call, mode: str) -> Any:
        like, dtype = call.args.get("self"), call.args.get("dtype")
        if not isinstance(like, Node) or "device" in call.args:
            raise Refused("shape and dtype are not known")
        if dtype is not None:
            _check_dtype(dtype)
        value = self._raw(op, like, mode)
        if dtype == f32:
            return value
        value = op.to(value, dtype=dtype or op.call(getattr, like, "dtype"))
        # in a dtype that is not known, what rounded up to 1 can only be found afterwards
        return op.remainder(value, 1) if mode == "rand" else value

    def _integers(self, op: Emitter, node: Node, call: Call) -> Any:
        _check_plain(call)
        like = tensor_fact(node)
        low, high = call.args.get("low", 0), call.args.get("high")
        if like is None:
            raise Refused("shape and dtype are not known")
        if isinstance(fact(high) if isinstance(high, Node) else high, torch.Tensor):
            raise Refused("the bound is a tensor")
        if not known(number(low) < number(high)):
            raise Refused("the range may be empty")
        order = memory_order(like) or list(range(like.dim()))
        seed = self.seed(op, like)
        value = op.call(self.prims.randint, low, high, [like.shape[d] for d in order], seed)
        if order != sorted(order):
            value = op.permute(value, [order.index(d) for d in range(len(order))])
        return value if like.dtype == torch.int64 else op.to(value, dtype=like.dtype)

    def _bernoulli(self, op: Emitter, node: Node, call: Call) -> Any:
        _check_plain(call)
        chance, like = call.args.get("p"), tensor_fact(node)
        if like is None:
            raise Refused("shape and dtype are not known")
        if like.dtype == f64:
            _check_dtype(like.dtype)
        if chance is not None and not _is_probability(chance) and tensor_fact(chance) is None:
            raise Refused(f"{chance} is no probability")
        drawn = self._raw(op, like, "rand")
        return op.to(op.lt(drawn, call.args["self"] if chance is None else chance), dtype=like.dtype)

    def _dropout(self, op: Emitter, node: Node, call: Call) -> Any:
        """Kept with probability 1 - p and scaled by its inverse; the ATen form gives the mask as well."""
        operand, p = call.args["input"], call.args.get("p", 0.5)
        if not _is_probability(p):
            raise Refused(f"{p} is no probability")
        if p == 0 and call.op == "dropout":
            raise Refused("nothing is dropped")
        like = tensor_fact(operand)
        if like is not None:
            _check_dtype(like.dtype)
        keep = op.lt(self._raw(op, operand if like is None else like, "rand"), 1.0 - p)
        value = op.mul(op.mul(operand, keep), 0.0 if p == 1 else 1.0 / (1.0 - p))
        return (value, keep) if call.op == "native_dropout" else value

    def _uniform(self, op: Emitter, node: Node, call: Call) -> Any:
        """Numbers from `from` up to, not including, `to`: what rounds up to the end becomes the beginning."""
        like = self._plain_floats(node, call)
        low, high = call.args.get("from", 0.0), call.args.get("to", 1.0)
        if not (_is_number(low) and _is_number(high) and low <= high):
            raise Refused(f"{low} to {high} is no known range")
        value = op.add(op.mul(self._raw(op, like, "rand"), high - low), low)
        value = value if like.dtype == f32 else op.to(value, dtype=like.dtype)
        first = op.full([], low, dtype=like.dtype, device=like.device)
        return op.where(op.lt(value, high), value, first) if low < high else op.expand(first, list(like.shape))

    def _normal(self, op: Emitter, node: Node, call: Call) -> Any:
        """Mean and deviation may be numbers or tensors."""
        like = self._plain_floats(node, call)
        mean, std = call.args.get("mean", 0.0), call.args.get("std", 1.0)
        if _is_number(std) and std < 0:
            raise Refused("a negative deviation")
        value = op.add(op.mul(self._raw(op, like, "randn"), std), mean)
        return value if value.dtype == like.dtype else op.to(value, dtype=like.dtype)

    def _exponential(self, op: Emitter, node: Node, call: Call) -> Any:
        """-log(1 - u) / rate, for u in [0, 1): never infinite; the least positive number takes the place of 0."""
        like = self._plain_floats(node, call)
        rate = call.args.get("lambd", 1.0)
        if not _is_number(rate) or rate <= 0:
            raise Refused(f"{rate} is no known rate")
        value = op.div(op.neg(op.log1p(op.neg(self._raw(op, like, "rand")))), rate)
        value = value if like.dtype == f32 else op.to(value, dtype=like.dtype)
        return op.clamp(value, min=torch.finfo(like.dtype).tiny)

    def _plain_floats(self, node: Node, call: Call) -> torch.Tensor:
        _check_plain(call)
        like = tensor_fact(node)
        if like is None:
            raise Refused("shape and dtype are not known")
        _check_dtype(like.dtype)
        return like


def _check_plain(call: Call) -> None:
    if call.args.get("generator") is not None:
        raise Refused("it has a generator of its own")
    if call.args.get("pin_memory"):
        raise Refused("it is made in pinned memory")
    if call.args.get("layout") not in (None, torch.strided):
        raise Refused(f"its layout is {call.args['layout']}")


def _check_dtype(dtype: Any) -> None:
    if dtype == f64:
        raise Refused("32-bit draws would lose resolution in float64")
    if dtype not in DTYPES:
        raise Refused(f"no such draw in {dtype}")


def _is_probability(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def memory_order(value: torch.Tensor) -> list[int] | None:
    """Dims from the widest stride to the narrowest, if dense so; None if they lie in their own order."""
    left, order = list(range(value.dim())), list[int]()
    expected: Any = 1
    while left:
        fits = (d for d in reversed(left) if known(value.shape[d] == 1) or known_equal(value.stride(d), expected))
        if (found := next(fits, None)) is None:
            return None
        left.remove(found)
        order.insert(0, found)
        expected = expected * value.shape[found]
    return None if order == sorted(order) else order
