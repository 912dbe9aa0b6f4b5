"""Random draws become the backend's counter-based generator: fused, reproducible, alike both ways."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from ..ir.calls import Call
from ..ir.facts import set_fact
from ..ir.program import Value
from ..passes.base import PassRun
from ..rewrite.checks import PlainTerms
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from .random_draws import Draws

bf16, f16 = torch.bfloat16, torch.float16

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
    """Draws of rand, randn, randint, uniform, normal, exponential, bernoulli and dropout come from the backend's own
    generator, which torch.manual_seed governs: one load of seeds for each device, one seed for each draw, in order.

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
        _draw(lambda x: torch.empty_like(x).uniform_(-1, 2), "f32[4, 8]", dialects=("aten",)),
        _draw(lambda x: x.clone().uniform_(2, 2) + torch.empty_like(x).uniform_(), "bf16[4]", dialects=("aten",)),
        _draw(lambda x: torch.empty_like(x.t()).normal_(1, 2), "f32[4, 8]", dialects=("aten",), dynamic=True),
        _draw(lambda x: torch.empty_like(x).exponential_(2.0), "f16[4, 8]", dialects=("aten",)),
        _draw(lambda x: torch.normal(x, 2.0) + torch.normal(1.0, x.exp()) + torch.normal(x, x.exp()), "f32[4, 8]"),
        _draw(lambda x: torch.normal(0.0, 1.0, (4, 8)), "f32[1]"),
        _draw(lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()), "f32[4, 8]", dialects=("aten",)),
        declines(lambda x: torch.empty_like(x).uniform_(0, 1), "f64[4]", because="resolution", dialects=("aten",)),
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


class _Replacer(Draws):
    """Replaces the draws of one graph; seeds are loaded once for each device, before the first draw there."""

    def __init__(self, run: PassRun, draws: int) -> None:
        self.run = run
        self.draws = draws
        super().__init__()
        self.seeds: dict[Any, tuple[Value, Any]] = {}
        self.taken: dict[Any, int] = {}

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

    def seed(self, op: Emitter, like: Any) -> Value:
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


def _dropout_module(node: Node) -> Call | None:
    owner = node.graph.owning_module
    if node.op != "call_module" or not isinstance(owner, GraphModule) or len(node.args) != 1:
        return None
    module = owner.get_submodule(str(node.target))
    if type(module) is not torch.nn.Dropout or module.inplace:
        return None
    return Call("dropout", {"input": node.args[0], "p": module.p, "train": module.training})
