"""The kernel launches of a program: what each computes, where that comes from, and what it costs by estimate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from ..cost.estimate import OperationCost, group_cost, operation_cost
from ..ir.facts import fact
from ..ir.text import RULE, call_text, rule_of, source_line, target_name
from ..ir.work import is_launch
from ..passes.session import Session
from .kernels import kernel_calls, kernels

ROOT = re.compile(r"^[LG]\['(\w+)'\]")
STEP = re.compile(r"_modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|(\w+)")
THE_MODEL = ("self", "fn")
"""The names that Dynamo gives the model itself; a module of another name keeps it."""


@dataclass(frozen=True)
class Launch:
    """One launch: of a generated kernel, of a library's, of an operator; without code generation, one node."""

    graph: str
    """"forward" or "backward"."""
    number: int
    """Its place among the launches of its graph, from 0."""
    name: str
    text: str
    line: int = 0
    """Where it stands in the generated file."""
    generated: bool = False
    nodes: tuple[str, ...] = ()
    cost: OperationCost | None = None
    """None: the nodes that it computes are not known, or nothing is known of their values."""
    rules: tuple[str, ...] = ()
    """The rules that made its nodes."""
    passes: tuple[str, ...] = ()
    """The passes in which these rules fired."""
    module: str = ""
    """The innermost module to which all of it belongs; empty: the model itself, or not known."""
    sources: tuple[str, ...] = ()
    """The user's lines that it comes from, as `model.py:31`."""

    @property
    def on_host(self) -> bool:
        """Is it a C++ kernel, which the host itself computes?"""
        return self.generated and self.name.startswith("cpp_")

    @property
    def region(self) -> str:
        """The passes and rules that made what it computes; empty: nothing of it was rewritten."""
        passes = " + ".join(self.passes)
        rules = " + ".join(self.rules)
        return rules if not passes or passes == rules else f"{passes}: {rules}"


@dataclass(frozen=True)
class SavedLaunches:
    """The launches of a graph, in the place of the graph itself in an explanation that was pickled."""

    launches: tuple[Launch, ...] = field(default=())


def launches(session: Session, graph: str) -> list[Launch]:
    """The launches of one graph in the order of the generated code."""
    gm: Any = session.lowered.get(graph) or session.graphs.get(graph)
    if isinstance(gm, SavedLaunches):
        return list(gm.launches)
    source = session.kernels[graph]
    generated = {kernel.name for kernel in kernels(source)}
    calls = kernel_calls(source, session.kernel_nodes.get(graph))
    # a fused kernel also lists values that it only reads through views: do not count what a library computes twice
    of_libraries = {(call.function, name) for call in calls if call.name not in generated for name in call.nodes}
    find = _Nodes(gm if isinstance(gm, GraphModule) else None)
    result = []
    for number, call in enumerate(calls):
        is_generated = call.name in generated
        own = [n for n in call.nodes if not is_generated or (call.function, n) not in of_libraries]
        computed = find.nodes(own, call.function)
        cost = group_cost(computed, set(computed)) if any(map(_is_known, computed)) else None
        # a kernel that only prepares what a library reads has all its nodes in common with the library's call
        origin = provenance(session, computed or find.nodes(call.nodes, call.function))
        result.append(
            Launch(graph, number, call.name, call.text, call.line, is_generated, call.nodes, cost, **origin)
        )
    return result


def all_launches(sessions: Iterable[Session]) -> Iterator[Launch]:
    """Those of all graphs of all programs."""
    for session in sessions:
        for graph in list(session.kernels):
            yield from launches(session, graph)


def node_launches(session: Session, graph: str, gm: GraphModule) -> list[Launch]:
    """What a graph that runs node by node calls."""
    called = [node for node in gm.graph.nodes if is_call(node)]
    return [
        Launch(
            graph, number, target_name(node), f"{node.name} = {call_text(node)}", nodes=(node.name,),
            cost=operation_cost(node) if _is_known(node) else None, **provenance(session, [node]),
        )
        for number, node in enumerate(called)
    ]  # fmt: skip


def is_call(node: Node) -> bool:
    """Does a node call an operator, and not only take an element of a list?"""
    return node.op in ("call_function", "call_method", "call_module") and target_name(node) != "getitem"


def _is_known(node: Node) -> bool:
    """Is anything known of its value? A launch of a Triton kernel has none, only operands."""
    return fact(node) is not None or is_launch(node)


class _Nodes:
    """Finds nodes by name in a graph and in the graphs inside it, in which names repeat."""

    def __init__(self, gm: GraphModule | None) -> None:
        modules = {} if gm is None else {name: m for name, m in gm.named_modules() if isinstance(m, GraphModule)}
        self.tables = {name: {node.name: node for node in m.graph.nodes} for name, m in modules.items()}

    def nodes(self, names: Iterable[str], function: str) -> list[Node]:
        """Those that are there. First the graph that became the function is asked, then the outermost."""
        inner = next((table for name, table in self.tables.items() if name and name.split(".")[-1] == function), {})
        tables = [inner, self.tables.get("", {})]
        found = [next((table[name] for table in tables if name in table), None) for name in names]
        return [node for node in found if node is not None and node.op != "get_attr"]


# ---- where it comes from ----


def provenance(session: Session, nodes: Sequence[Node]) -> dict[str, Any]:
    """Rules, passes, module and source lines of what computes something; views have no say."""
    working = [node for node in nodes if operation_cost(node).bytes or is_launch(node)] or list(nodes)
    rules = sorted({rule for node in working if (rule := rule_of(node))})
    passes = {name for node in working if (name := _pass_of(session, node))}
    sources = dict.fromkeys(line for node in working if (line := source_line(node)))
    modules = [path for node in working if (path := module_path(node)) is not None]
    return {
        "rules": tuple(rules), "passes": tuple(sorted(passes)), "module": ".".join(_common(modules)),
        "sources": tuple(sources),
    }  # fmt: skip


def _pass_of(session: Session, node: Node) -> str:
    """The pass in which the rule of a node fired: the one that created it, or else the last."""
    rule = rule_of(node)
    if not rule:
        return ""
    # a node that is named after an earlier rule was traced from one that the rule wrote in stage 1
    records = [r for r in session.records if RULE in node.meta or r.stage == "pre_grad"]
    fired = [record for record in records if record.fired.get(rule) or record.name == rule]
    creators = [r for r in fired if any(node.name in site.created for site in r.sites)]
    return (creators or fired)[-1].name if fired else ""


def module_path(node: Node) -> tuple[str, ...] | None:
    """The module whose call computes a node, or the forward of it: `("blocks", "0", "attn")`."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    root = ROOT.match(path)
    steps = [next(part for part in parts if part) for parts in STEP.findall(path[root.end() if root else 0 :])]
    steps = [step for step in steps if step not in ("_modules", "__dict__")]
    return (*([] if root is None or root[1] in THE_MODEL else [root[1]]), *steps)


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest path with which all of them begin."""
    if not paths:
        return ()
    length = 0
    for steps in zip(*paths):
        if len(set(steps)) > 1:
            break
        length += 1
    return paths[0][:length]
