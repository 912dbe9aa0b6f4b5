"""Random draws become the backend's counter-based generator: fused, reproducible, alike both ways."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .. import _private
from ..ir.calls import Call
from ..ir.facts import fact, is_static, known, number, set_fact, tensor_fact
from ..ir.program import Value
from ..passes.base import Pass, PassRun
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import PlainTerms
from ..testing.examples import declines, fires

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

DTYPES = (f32, f16, bf16)
"""What 32-bit draws can make without losing resolution."""

TERMS = PlainTerms(takes_random=True, without_facts=True)


def _draw(program: Callable[..., Any], *inputs: Any, **how: Any) -> Any:
    return fires(program, *inputs, same_values=False, **how)


def _in_place(x):
    y = torch.empty_like(x).bernoulli_(0.5)
    return x * y


CHECKPOINT_TAGS = ("recompute", "ac_graph_id")
"""A checkpointed region is computed again in the backward; its seeds are the forward's, not loaded anew."""


@dataclass(frozen=True)
class ReplaceRandomPasses(Pass):
    """Draws of rand, randn, randint, bernoulli and dropout come from the backend's own generator, which
    torch.manual_seed governs: one load of seeds for each device, one seed for each draw, in their order.

    The stream is another than eager's, the distribution the same; `fallback_random` keeps eager's stream.
    """

    name = "replace_random_passes"

    def run(self, run: PassRun) -> None:
        sites = [n for n in run.program.graph.nodes if _is_draw(run, n)]
        why_not = None
        if run.options.fallback_random:
            why_not = "fallback_random keeps eager's stream"
        elif run.options.codegen != "inductor":
            why_not = "the code generator has no generator of its own"
        if why_not:
            for node in sites:
                run.declined(_name(run, node), node, why_not)
        elif sites:
            replacer = _Replacer(run, len(sites))
            for node in sites:
                replacer.replace(node)
            replacer.finish()

    examples = [
        _draw(lambda x: x + torch.rand_like(x), "f32[4, 8]"),
        _draw(lambda x: x + torch.rand(x.shape[0], 8, dtype=bf16), "bf16[4, 8]", dynamic=True),
        _draw(lambda x: (torch.randn(4, 8), torch.randn_like(x, dtype=f16)), "f32[4, 8]"),
        _draw(lambda x: torch.rand_like(x.permute(1, 0)), "f32[4, 8]"),
        _draw(lambda x: torch.randint(-3, 10, (4, 8)) + torch.randint_like(x, 7), "f32[4, 8]"),
        _draw(lambda x: torch.bernoulli(x.sigmoid()) + x.bernoulli(0.3), "f32[4, 8]"),
        _draw(lambda x: F.dropout(x, 0.5, training=True), "f32[4, 8]"),
        _draw(lambda x: torch.native_dropout(x.t(), 0.25, True), "bf16[4, 8]"),
        declines(lambda x: x + torch.rand_like(x), "f64[4]", because="resolution"),
        declines(
            lambda x: x + torch.rand_like(x),
            "f32[4]",
            because="eager's stream",
            options={"fallback_random": True},
        ),
        declines(
            lambda x: x + torch.rand_like(x), "f32[4]", because="generator", options={"codegen": "eager"}
        ),
        declines(_in_place, "f32[4]", because="in place", dialects=("torch",)),
        declines(lambda x: x + torch.randperm(4), "f32[4]", because="no such draw"),
        declines(
            lambda x: F.dropout(x, 0.0, training=True) + 1,
            "f32[4]",
            because="nothing is dropped",
            dialects=("torch",),
        ),
        declines(lambda x: F.dropout(x, 0.5, training=False) + 1, "f32[4]"),
    ]


def _is_draw(run: PassRun, node: Node) -> bool:
    return (
        node.op in ("call_function", "call_method", "call_module")
        and run.program.aliasing.effects(node).random
    )


def _name(run: PassRun, node: Node) -> str:
    call = run.program.call(node)
    return call.op if call is not None else node.name


class _Replacer:
    """Replaces the draws of one graph; seeds are loaded once for each device, before the first draw there."""

    def __init__(self, run: PassRun, draws: int) -> None:
        self.run = run
        self.draws = draws
        self.prims = _private.generator_prims
        self.seeds: dict[Any, tuple[Value, Any]] = {}
        self.taken: dict[Any, int] = {}
        self.forms: dict[str, Callable[[Emitter, Node, Call], Any]] = {
            "rand": self._floats, "rand_like": self._floats,
            "randn": self._floats, "randn_like": self._floats,
            "randint": self._integers, "randint_like": self._integers,
            "bernoulli": self._bernoulli, "dropout": self._dropout, "native_dropout": self._dropout,
        }  # fmt: skip

    def replace(self, node: Node) -> None:
        call = self.run.program.call(node) or _dropout_module(node)
        form = self.forms.get(call.op) if call is not None else None
        if call is not None and call.mutates and call.op.removesuffix("_") in self.forms:
            self.run.declined(call.op, node, "the draw is written in place")
        elif form is None or call is None:
            self.run.declined(_name(self.run, node), node, "the backend's generator has no such draw")
        else:
            before = dict(self.taken)
            if not self._replace(node, call, form):
                self.taken = before

    def _replace(self, node: Node, call: Call, form: Callable[[Emitter, Node, Call], Any]) -> bool:
        if call.op != "native_dropout":
            return self.run.replace(call.op, node, lambda op: form(op, node, call), terms=TERMS)
        pieces = [u for u in node.users if u.target is operator.getitem]
        if not pieces or len(pieces) != len(node.users):
            self.run.declined(call.op, node, "its results are not taken apart")
            return False

        def all_pieces(op: Emitter) -> Any:
            made = form(op, node, call)
            return tuple(made[piece.args[1]] for piece in pieces)

        return self.run.replace(call.op, pieces, all_pieces, node, (node,), TERMS)

    def finish(self) -> None:
        """The number of seeds is known once every draw had its turn."""
        program, rewriter = self.run.program, self.run.rewriter
        for key, (seeds, device) in self.seeds.items():
            count = self.taken.get(key, 0)
            if not count:
                rewriter.erase(seeds.node)
                continue
            rewriter.set_arguments(seeds.node, (count, device), {})
            if seeds.known:
                with program.computing(seeds.node):
                    set_fact(seeds.node, self.prims.seeds(count, device), program.fact_key)

    # ---- what a draw becomes ----

    def _seed(self, op: Emitter, like: Any) -> Value:
        """The next seed on the device of `like`: a known value, or a node of which nothing is known."""
        key = like.device if isinstance(like, torch.Tensor) else like
        if key not in self.seeds:
            at = self.run.rewriter.emitter(op.anchor, "load_seeds")
            device = key if isinstance(key, torch.device) else at.call(getattr, key, "device").node
            loaded = at.call(self.prims.seeds, self.draws, device)
            for tag in CHECKPOINT_TAGS:
                loaded.node.meta.pop(tag, None)
            self.seeds[key] = loaded, device
        index = self.taken.get(key, 0)
        self.taken[key] = index + 1
        return op.call(self.prims.lookup_seed, self.seeds[key][0], index)

    def _raw(self, op: Emitter, like: Any, mode: str) -> Value:
        """32-bit floats in the shape of `like`, lying in memory as it does."""
        seed = self._seed(op, like)
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
        seed = self._seed(op, like)
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
        if chance is not None and not _is_probability(chance):
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


def memory_order(value: torch.Tensor) -> list[int] | None:
    """Dims from the widest stride to the narrowest, if dense so; None if they lie in their own order."""
    strides, shape = value.stride(), value.shape
    if not is_static((*strides, *shape)) or value.is_contiguous():
        return None
    order = sorted(range(value.dim()), key=lambda d: -strides[d])
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= shape[dim]
    return order


def _dropout_module(node: Node) -> Call | None:
    owner = node.graph.owning_module
    if node.op != "call_module" or not isinstance(owner, GraphModule) or len(node.args) != 1:
        return None
    module = owner.get_submodule(str(node.target))
    if type(module) is not torch.nn.Dropout or module.inplace:
        return None
    return Call("dropout", {"input": node.args[0], "p": module.p, "train": module.training})
