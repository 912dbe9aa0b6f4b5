"""Looking for a rule in a graph without rewriting: where it matches, and where it nearly does and why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ..ir.program import Program
from ..ir.text import source_line
from ..match.matcher import Matcher
from ..passes.catalogue import all_rules, as_rule
from ..rewrite.edits import Edit
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import Rewriter
from ..rewrite.rule import CompiledRule, Match, Rule, compiled


@dataclass(frozen=True)
class NearMiss:
    """A place where a rule stopped: how much of its pattern had matched, and the reason."""

    rule: str
    graph: str
    node: str
    matched: int
    """Nodes of the pattern that had matched."""
    reason: str
    source: str
    complete: bool = False
    """The whole pattern was there; a check, or the rewriter, declined."""

    def __str__(self) -> str:
        how_far = "the whole pattern" if self.complete else f"{self.matched} of its nodes"
        where = f"  # {self.source}" if self.source else ""
        return f"{self.rule} at {self.node} ({self.graph}): matched {how_far}; {self.reason}{where}"


def find(rule: Rule | type[Rule] | str, gm: GraphModule) -> list[Match]:
    """Every place where the rule's pattern and checks hold; nothing is rewritten."""
    wanted = as_rule(rule)
    ready = compiled(wanted)
    found: dict[Node, Match] = {}
    for match in wanted.sites(Program(gm)):
        if match.root.node in found:
            continue  # another way to match there
        try:
            ready.check(match)
        except Refused:
            continue
        found[match.root.node] = match
    return list(found.values())


def why_not(rule: Rule | type[Rule] | str, model_or_gm: Callable[..., Any], *args: Any) -> list[NearMiss]:
    """Where the rule nearly matched, nearest first, with the user's source line.

    A model is captured and taken through the stages without this rule; a graph is looked at as it is.
    """
    wanted = as_rule(rule)
    if isinstance(model_or_gm, GraphModule) and not args:
        graphs = {"graph": model_or_gm}
    else:
        graphs = _graphs_of(model_or_gm, args, wanted)
    misses = [miss for name, gm in graphs.items() for miss in _misses(wanted, gm, name)]
    misses = list({(m.node, m.reason, m.source): m for m in misses}.values())
    return sorted(misses, key=lambda m: (not m.complete, -m.matched))


def _graphs_of(model: Callable[..., Any], args: tuple[Any, ...], rule: Rule) -> dict[str, GraphModule]:
    from .explain import explain

    removed = [rule.name] if rule.name in all_rules() else []
    seen = explain(model, *args, options={"codegen": "eager", "remove_passes": removed})
    looked_at = ("dynamo", "pre_grad", "joint")
    return {name: gm for name, gm in seen.graphs.items() if name.partition("#")[0] in looked_at}


def _candidates(program: Program, rule: CompiledRule) -> list[Node]:
    calls = [(n, call) for n in program.graph.nodes if (call := program.call(n)) is not None]
    return [n for n, call in calls if not rule.root_ops or call.op in rule.root_ops]


def _misses(rule: Rule, gm: GraphModule, graph: str) -> list[NearMiss]:
    program, ready = Program(gm), compiled(rule)
    found = []
    if ready.finds_itself:
        for match in rule.sites(program):
            at = match.root.node
            if reason := _refusal(program, ready, match):
                found.append(NearMiss(rule.name, graph, at.name, len(match.nodes), reason, source_line(at), True))
        return found
    for node in _candidates(program, ready):
        matcher = Matcher(program)
        ways = list(matcher.find(ready.roots, node))
        if not ways:
            miss = matcher.why_not(ready.roots, node)
            if miss is not None and miss.matched > 0:
                at = miss.node if miss.node is not None else node
                source = source_line(at) or source_line(node)
                found.append(NearMiss(rule.name, graph, at.name, miss.matched, miss.reason, source))
            continue
        reasons = [_refusal(program, ready, Match(program, way)) for way in ways]
        if all(reasons):
            size = len(ways[0].nodes)
            found.append(NearMiss(rule.name, graph, node.name, size, str(reasons[0]), source_line(node), True))
    return found


def _refusal(program: Program, rule: CompiledRule, match: Match) -> str | None:
    """Why a complete match is not rewritten: built, asked for, and taken back."""
    rewriter = Rewriter(program, rule.name)
    roots = [r.node for r in match.roots]
    op = rewriter.emitter(match.before or max(roots), rule.name)

    def require_sound(made: Any) -> None:
        if not isinstance(made, Edit):  # an edit is checked when it is made, which nobody wants here
            rewriter.require_sound(roots, made, op, match.nodes, rule.rule)

    try:
        rule.check(match)
        rule.rewrite(op, match, require_sound)
    except Refused as refused:
        return refused.reason
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    finally:
        op.discard()
    return None
