"""Replaces the call of a torch.nn module by the function call of its forward, where that is a single one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.proxy import GraphAppendingTracer, Proxy

from .. import _private
from ..ir.facts import fact
from ..ir.program import Program
from ..rewrite.edits import Respell
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule
from ..rewrite.spelling import Spelling
from .spellings import torch_level_nodes


class ModuleToFunction(Rule):
    """a call of nn.Linear(8, 4) -> linear(x, weight, bias), and so for every torch.nn module whose forward is a single
    call"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            if node.op == "call_module":
                module = program.gm.get_submodule(str(node.target))
                if type(module).__module__.startswith("torch.nn.modules."):
                    yield Match.at(program, node, module=module)

    def check(self, m, module):
        m.require(
            not _private.has_hooks(module) and "forward" not in vars(module),
            "the module has hooks, or its instance overrides forward",
        )
        statistics = module.training and next(module.buffers(), None) is not None
        m.require(not statistics, "the module updates statistics in training")

    def rewrite(self, op, m, module):
        recorder = _Recorder(module, m.root.node)
        result = recorder.forward()
        m.require(isinstance(result, Proxy), "the module's forward is not a single call")
        m.applies(result.node.op != "placeholder", "the module returns its input")
        return Respell(m.root.node, recorder.spelling(result.node, op))

    examples = lazily(lambda: [
        fires(torch.nn.Sequential(torch.nn.Linear(8, 4)), "f32[2, 8]", dialects=["modules"]),
        fires(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU()), "f32[2, 8]", dialects=["modules"]),
        declines(torch.nn.Sequential(torch.nn.Identity()), "f32[2, 8]", dialects=["modules"]),
        declines(torch.nn.Sequential(torch.nn.BatchNorm1d(8)), "f32[2, 8]", dialects=["modules"],
                 because="statistics"),
        declines(torch.nn.Sequential(torch.nn.Conv1d(4, 2, 3, padding=1, padding_mode="circular")), "f32[2, 4, 8]",
                 dialects=["modules"], because="not a single call"),
    ])  # fmt: skip


class _Recorder(GraphAppendingTracer):
    """Traces a module's forward on proxies. Where the forward branches on its input, the condition is evaluated on the
    input's fact."""

    def __init__(self, module: torch.nn.Module, call: Node) -> None:
        super().__init__(Graph())
        self.module, self.call = module, call
        self.asked: set[Node] = set()
        tensors = (*module.named_parameters(), *module.named_buffers())
        self.paths = {id(t): f"{call.target}.{name}" for name, t in tensors}
        self.inputs = {n: self.graph.placeholder(n.name) for n in call.all_input_nodes}
        self.given = {inside: n for n, inside in self.inputs.items()}

    def forward(self) -> Any:
        def proxy(n: Node) -> Any:
            return Proxy(self.inputs[n], self)

        args, kwargs = torch.fx.map_arg((self.call.args, self.call.kwargs), proxy)
        try:
            return self.module.forward(*args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"the module's forward cannot be traced: {type(error).__name__}") from error

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if id(a) not in self.paths:
                raise Refused("the module's forward creates tensors")
            return self.graph.get_attr(self.paths[id(a)])
        return super().create_arg(a)

    def to_bool(self, obj: Proxy) -> bool:
        answer = self._value(obj.node)
        if not isinstance(answer, bool):
            raise Refused("the module's forward branches on values of its input")
        return answer

    def _value(self, node: Node) -> Any:
        self.asked.add(node)
        if node in self.given:
            if fact(self.given[node]) is None:
                raise Refused("shape and dtype are not known")
            return fact(self.given[node])
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def spelling(self, result: Node, op: Emitter) -> Spelling:
        """The recorded call, with the operands that it has in the graph that calls the module."""
        for node in self.graph.nodes:
            if node is not result and node not in self.asked and node.op not in ("placeholder", "get_attr"):
                raise Refused("the module's forward is not a single call")

        def outside(n: Node) -> Node:
            return op.attribute(str(n.target)) if n.op == "get_attr" else self.given[n]

        args, kwargs = torch.fx.map_arg((result.args, result.kwargs), outside)
        return Spelling(result.op, result.target, args, kwargs)
