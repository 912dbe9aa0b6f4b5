"""Looking for a rule in a graph without rewriting: where it matches, and where it nearly does and why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ..ir.program import Program
from ..ir.text import source_line
from ..match.matcher import Matcher
from ..options import ADD_RULES, Options
from ..passes.catalogue import all_rules, rules_of
from ..rewrite.edits import Edit
from ..rewrite.passes import Pass
from ..rewrite.refusal import NotConcerned, Refused
from ..rewrite.rewriter import Rewriter
from ..rewrite.rule import CompiledRule, Match, Rule, compiled
from .explanation import Explanation

Wanted = Rule | type[Rule] | Pass | type[Pass] | str


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


@dataclass(frozen=True)
class Fired:
    """A place where a rule fires."""

    rule: str
    graph: str
    node: str
    source: str

    def __str__(self) -> str:
        where = f"  # {self.source}" if self.source else ""
        return f"{self.rule} at {self.node} ({self.graph}): fires{where}"


class WhyNot(list[NearMiss]):
    """The near misses, nearest first; `fires` are the places where the rule does fire."""

    def __init__(self, name: str, fires: Iterable[Fired], misses: Iterable[NearMiss], is_here: bool) -> None:
        super().__init__(misses)
        self.name, self.fires, self.is_here = name, list(fires), is_here

    def __str__(self) -> str:
        return "\n".join([*map(str, self.fires), *map(str, self), *self._summary()])

    def _summary(self) -> list[str]:
        if self:
            return []
        if self.fires:
            return [f"{self.name} fires everywhere it could"]
        if self.is_here:
            return [f"{self.name}: some of its operations are here, but nothing that comes near to what it looks for"]
        return [f"{self.name}: none of its operations is here, or none that it looks at"]


def find(rule: Wanted, gm: GraphModule, options: Mapping[str, Any] | Options | None = None) -> list[Match]:
    """Every place where the rule's sites and checks hold; nothing is rewritten. Of a pass: all its rules."""
    return [match for one in rules_of(rule) for match in _find(one, gm, Options.make(options))]


def _find(rule: Rule, gm: GraphModule, options: Options) -> list[Match]:
    ready = compiled(rule)
    found: dict[Node, Match] = {}
    for match in rule.sites(Program(gm, options=options)):
        if match.root.node in found or match.names == ():
            continue  # another way to match there, or a change of order that is no rewrite
        try:
            ready.check(match)
        except Refused:
            continue
        found[match.root.node] = match
    return list(found.values())


def why_not(
    rule: Wanted,
    model_or_gm: Callable[..., Any],
    *args: Any,
    train: bool = False,
    options: Mapping[str, Any] | Options | None = None,
    **kwargs: Any,
) -> WhyNot:
    """Where the rule fires, and where it nearly matched, nearest first, each with the user's source line.

    `rule` is a rule, a pass or the name of either. A model is compiled with all passes, which says where the rule
    fires and where it declined, and once more without this rule, to look for what nearly matched in the graphs that
    it would have seen; with `train` its backward too. A graph is looked at as it is.
    """
    rules, given = rules_of(rule), Options.make(options)
    fires: list[Fired] = []
    misses: list[NearMiss] = []
    if isinstance(model_or_gm, GraphModule) and not args and not kwargs:
        graphs: dict[str, GraphModule] = {"graph": model_or_gm}
        fires = [_fired(match, one) for one in rules for match in _find(one, model_or_gm, given)]
    else:
        known = all_rules()
        own = [one for one in rules if one.name not in known]
        seen = _explained(model_or_gm, args, kwargs, train, given, add_rules=[*given.custom_passes(ADD_RULES), *own])
        fires, misses = _seen(rules, seen)
        removed = (*given.remove_passes, *(one.name for one in rules if one.name in known))
        without = _explained(model_or_gm, args, kwargs, train, given, remove_passes=removed)
        graphs = {name: gm for name, gm in without.graphs.items() if name.partition("#")[0] in LOOKED_AT}
    misses += [miss for one in rules for at, gm in graphs.items() for miss in _misses(one, gm, at, given)]
    distinct = {(m.rule, m.node, m.reason, m.source): m for m in reversed(misses)}
    ranked = sorted(reversed(distinct.values()), key=lambda m: (not m.complete, -m.matched))
    is_here = any(_candidates(Program(gm), compiled(one)) for one in rules for gm in graphs.values())
    return WhyNot(rule if isinstance(rule, str) else rules[0].name, fires, ranked, is_here)


LOOKED_AT = ("dynamo", "pre_grad", "joint")
"""The graphs, as the stages left them, in which near misses are looked for."""


def _fired(match: Match, rule: Rule) -> Fired:
    return Fired(rule.name, "graph", match.node.name, source_line(match.node))


def _explained(
    model: Callable[..., Any], args: Any, kwargs: Any, train: bool, options: Options, **changed: Any
) -> Explanation:
    from .explain import explain

    options = dataclasses.replace(options, codegen="eager", **changed)
    return explain(model, *args, train=train, options=options, **kwargs)


def _seen(rules: Sequence[Rule], seen: Explanation) -> tuple[list[Fired], list[NearMiss]]:
    """Where the rules fired and where they declined in a compile."""

    def is_wanted(name: str) -> bool:
        return any(one.counts_as(name) for one in rules)

    fires = [Fired(s.rule, r.graph, s.node, s.source) for r in seen.passes for s in r.sites if is_wanted(s.rule)]
    declines = [(r.graph, d) for r in seen.passes for d in r.declines if is_wanted(d.rule)]
    return fires, [NearMiss(d.rule, graph, d.node, 1, d.reason, d.source, True) for graph, d in declines]


def _candidates(program: Program, rule: CompiledRule) -> list[Node]:
    if rule.finds_itself:
        return []
    calls = [(n, call) for n in program.graph.nodes if (call := program.call(n)) is not None]
    return [n for n, call in calls if not rule.root_ops or call.op in rule.root_ops]


def _misses(rule: Rule, gm: GraphModule, graph: str, options: Options) -> list[NearMiss]:
    program, ready = Program(gm, options=options), compiled(rule)
    if ready.finds_itself:
        return _refused_sites(rule, program, graph)
    found = []
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


def _refused_sites(rule: Rule, program: Program, graph: str) -> list[NearMiss]:
    """What the rule's own analysis found and refuses."""
    found = []
    for match in rule.sites(program):
        node = match.node
        if reason := _refusal(program, compiled(rule), match):
            found.append(NearMiss(rule.name, graph, node.name, len(match.nodes), reason, source_line(node), True))
    return found


def _refusal(program: Program, rule: CompiledRule, match: Match) -> str | None:
    """Why a complete match is not rewritten: built, asked for, and taken back."""
    rewriter = Rewriter(program, rule.name)
    roots = [r.node for r in match.roots]
    op = match.emitter(program, match.before or max(roots), rule.name)

    def require_sound(made: Any) -> None:
        if not isinstance(made, Edit):  # an edit is checked when it is made, which nobody wants here
            made = made if isinstance(made, (tuple, list)) else (made,)
            rewriter.require_sound(roots, made, op, match.nodes, rule.rule)

    try:
        rule.check(match)
        rule.rewrite(op, match, require_sound)
    except NotConcerned as passed:
        return None if rule.finds_itself else passed.reason
    except Refused as refused:
        return refused.reason
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    finally:
        op.discard()
    return None
