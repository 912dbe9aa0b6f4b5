"""Looking for a rule in a graph without rewriting: where it matches, and where it nearly does and why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from html import escape
from typing import Any

from torch.fx import GraphModule, Node

from ..arguments import require_graph, require_keywords, require_model, require_switches
from ..ir.facts import fact
from ..ir.graph_copies import snapshot
from ..ir.program import Program
from ..ir.text import source_line
from ..match.matcher import Matcher
from ..options import ADD_RULES, HOOKS, Options
from ..passes.catalogue import all_rules, own_rules, rules_of
from ..passes.custom_passes import instance_of
from ..pipeline import required_names
from ..rewrite.passes import Pass
from ..rewrite.record import Decline, Firing
from ..rewrite.refusal import NotConcerned, Refused
from ..rewrite.rule import CompiledRule, Match, Rule, compiled
from .explanation import Explanation
from .would_fire import refusal_of, runs_on, taken_sites

SHOWN = 3
"""How many sites of a rule are listed in a graph in which the rule was stopped because it found no end."""


@dataclasses.dataclass(frozen=True)
class Stopped:
    """A run of rules over a graph that was stopped, because the results of these rules were rewritten endlessly."""

    rules: tuple[str, ...]
    graph: str
    reason: str

    def covers(self, site: Firing | Decline) -> bool:
        return site.graph == self.graph and site.rule in self.rules


PASSED_ON = frozenset(("stock", "dynamic", "fullgraph", "mode", "backend"))
"""Keywords that `why_not` passes on to `explain`."""

Wanted = Rule | type[Rule] | Pass | type[Pass] | str


class WhyNot(list[Decline]):
    """Where the rule stopped, nearest first; `fires` are the places where it does fire.

    `stopped` are the graphs in which it found no end, because its own result, or that of a rule that undoes it, was
    rewritten again and again. The text shows only the first of its sites there.
    """

    def __init__(
        self,
        name: str,
        fires: Iterable[Firing],
        misses: Iterable[Decline],
        is_here: bool,
        has_shapes: bool = True,
        stopped: Iterable[Stopped] = (),
    ) -> None:
        super().__init__(misses)
        self.name, self.fires, self.is_here, self.has_shapes = name, list(fires), is_here, has_shapes
        self.stopped = list(stopped)

    def __str__(self) -> str:
        endless: list[str] = []
        for one in self.stopped:
            there = [site for site in self.fires if one.covers(site)]
            refused = sum(map(one.covers, self))
            endless += [*map(str, there[:SHOWN]), f"  {self._count(one, len(there), refused)}"]
        return "\n".join([*endless, *self._listed(self.fires), *self._listed(self), *self._summary()])

    def _listed(self, sites: Sequence[Firing | Decline]) -> list[str]:
        """The sites in the graphs in which the rule came to an end."""
        return [str(site) for site in sites if not any(one.covers(site) for one in self.stopped)]

    def _count(self, stopped: Stopped, fired: int, refused: int) -> str:
        declined = f" and declined at {refused} sites" if refused else ""
        return f"in all it fired {fired} times in {stopped.graph}{declined}, and was stopped: {stopped.reason}"

    def __repr__(self) -> str:
        return f"<WhyNot {self.name}: fires at {len(self.fires)} places, nearly at {len(self)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _summary(self) -> list[str]:
        if self:
            return []
        if self.stopped:
            return []
        if self.fires:
            return [f"{self.name} fires everywhere it could"]
        if not self.has_shapes:
            return [f"{self.name}: the graph has no shapes, which most rules need; give its inputs after it"]
        if self.is_here:
            return [f"{self.name}: some of its operations are here, but nothing that comes near to what it looks for"]
        return [f"{self.name}: none of its operations is here, or none that it looks at"]


def find(rule: Wanted, gm: GraphModule, options: Mapping[str, Any] | Options | None = None) -> list[Match]:
    """Every place where the rule matches and its checks hold; nothing is rewritten. For a pass: of all its rules."""
    require_graph(gm, "find", of_a_model="why_not takes a model")
    made = Options.make(options)
    return [match for one in rules_of(rule, made) for match in _find(one, gm, made)]


def _find(rule: Rule, gm: GraphModule, options: Options) -> list[Match]:
    ready = compiled(rule)
    matches: dict[Node, Match] = {}
    for match in rule.sites(Program(gm, options=options)):
        if match.root.node in matches or match.names == ():
            continue  # another way to match there, or a change of order that is no rewrite
        try:
            ready.check(match)
        except Refused:
            continue
        matches[match.root.node] = match
    return list(matches.values())


def why_not(
    rule: Wanted,
    model_or_gm: Callable[..., Any],
    *args: Any,
    train: bool = False,
    options: Mapping[str, Any] | Options | None = None,
    **kwargs: Any,
) -> WhyNot:
    """Where the rule fires, and where it nearly matched, nearest first, each with the user's source line.

    `rule` is a rule, a pass or the name of either, also of a rule of yours that the options bring. A model is compiled
    with all passes, which says where the rule fires and where it declined, and once more without this rule, to look for
    what nearly matched in the graphs that it would have seen; with `train` its backward too. A graph is looked at as it
    is.
    """
    user_options = Options.make(options)
    rules = rules_of(rule, user_options)
    require_model(model_or_gm, "why_not")
    require_switches("why_not", train=train)
    require_keywords(why_not, model_or_gm, {name: kwargs[name] for name in kwargs.keys() - PASSED_ON})
    fires: list[Firing] = []
    misses: list[Decline] = []
    stopped: list[Stopped] = []
    is_graph = isinstance(model_or_gm, GraphModule) and not args and not kwargs
    if is_graph:
        graphs: dict[str, Any] = {"graph": model_or_gm}
    else:
        known = all_rules()
        given = {one.name for hook in HOOKS for one in own_rules(user_options, hook)}
        own = [one for one in rules if one.name not in known and one.name not in given]
        added = [*user_options.custom_passes(ADD_RULES), *own]
        seen = _explained(model_or_gm, args, kwargs, train, user_options, add_rules=added)
        fires, misses = _seen(rules, seen)
        stopped = _stopped(rules, seen)
        traced: list[GraphModule] = []
        options_without = _without(rules, user_options, known.keys() - required_names(), traced)
        without = _explained(model_or_gm, args, kwargs, train, options_without)
        graphs = {name: gm for name, gm in without.graphs.items() if name.partition("#")[0] in LOOKED_AT}
        misses += taken_sites(rules, seen, without, traced, user_options)
    for one in rules:
        for name, gm in graphs.items():
            if not is_graph and not runs_on(one, name):
                continue
            would_fire, refused = _look(one, Program(gm, options=user_options, is_inference=not train), name)
            fires += would_fire if is_graph else []
            misses += refused
    distinct = {(m.rule, m.node, m.at, m.reason, m.source): m for m in reversed(misses)}
    ranked = sorted(reversed(distinct.values()), key=lambda m: (not m.complete, -m.matched))
    is_here = any(_candidates(Program(gm), compiled(one)) for one in rules for gm in graphs.values())
    inputs = [fact(n) for gm in graphs.values() for n in gm.graph.find_nodes(op="placeholder")]
    has_shapes = not inputs or any(value is not None for value in inputs)
    return WhyNot(rule if isinstance(rule, str) else rules[0].name, fires, ranked, is_here, has_shapes, stopped)


FIRST_OF_JOINT = "joint_custom_pre_pass"
LOOKED_AT = ("dynamo", "pre_grad", "joint")
"""The graphs, as the stages left them, in which near misses are looked for."""


def _explained(
    model: Callable[..., Any], args: Any, kwargs: Any, train: bool, options: Options, **changed: Any
) -> Explanation:
    from .explain import explain

    options = dataclasses.replace(options, codegen="eager", **changed)
    return explain(model, *args, train=train, options=options, **kwargs)


def _without(rules: Sequence[Rule], options: Options, removable: Set[str], traced: list[GraphModule]) -> Options:
    """The options that leave the rules out, wherever the user has given them. The joint graphs are noted in `traced` as
    they are before other passes rewrite them."""
    names = {one.name for one in rules}

    def is_left(custom: Any) -> bool:
        one = instance_of(custom)
        given = one.rules() if isinstance(one, Pass) else [one] if isinstance(one, Rule) else []
        return names.isdisjoint(rule.name for rule in given)

    def note(graph: GraphModule) -> None:
        traced.append(snapshot(graph))

    hooks: dict[str, Any] = {hook: tuple(filter(is_left, options.custom_passes(hook))) for hook in HOOKS}
    hooks[FIRST_OF_JOINT] = (note, *hooks[FIRST_OF_JOINT])
    removed = (*options.remove_passes, *(names & removable))
    return dataclasses.replace(options, remove_passes=removed, **hooks)


def _seen(rules: Sequence[Rule], seen: Explanation) -> tuple[list[Firing], list[Decline]]:
    """Where the rules fired and where they declined in a compile."""

    def is_wanted(name: str) -> bool:
        return any(one.counts_as(name) for one in rules)

    fires = [dataclasses.replace(s, graph=r.graph) for r in seen.passes for s in r.sites if is_wanted(s.rule)]
    declines = [dataclasses.replace(d, graph=r.graph) for r in seen.passes for d in r.declines if is_wanted(d.rule)]
    return fires, declines


def _stopped(rules: Sequence[Rule], seen: Explanation) -> list[Stopped]:
    """The graphs of a compile in which one of the rules was stopped because its result was rewritten endlessly."""
    runs = {
        (record.endless, record.graph): Stopped(record.endless, record.graph, record.stop)
        for record in seen.passes
        if any(one.counts_as(name) for one in rules for name in record.endless)
    }
    return list(runs.values())


def _candidates(program: Program, rule: CompiledRule) -> list[Node]:
    if rule.finds_itself:
        return []
    calls = [(n, call) for n in program.graph.nodes if (call := program.call(n)) is not None]
    return [n for n, call in calls if not rule.root_ops or call.op in rule.root_ops]


def _look(rule: Rule, program: Program, graph: str) -> tuple[list[Firing], list[Decline]]:
    """Where the rule would fire in a graph, and where it would not although it nearly matched."""
    ready = compiled(rule)
    if ready.finds_itself:
        return _look_at_sites(ready, program, graph)
    fires, misses = [], []
    for node in _candidates(program, ready):
        matcher = Matcher(program)
        matches = [Match(program, way) for way in matcher.find(ready.roots, node)]
        if not matches:
            miss = matcher.why_not(ready.roots, node)
            if miss is not None and miss.matched:
                misses.append(Decline.of(miss, rule.name, node, graph=graph))
            continue
        refusals = [refusal_of(program, ready, match) for match in matches]
        if None in refusals:
            fires.append(Firing(rule.name, node.name, source_line(node), graph))
        elif refused := _worth_telling(refusals):
            misses.append(Decline.of(refused.refusal, rule.name, node, len(matches[0].nodes), graph=graph))
    return fires, misses


def _worth_telling(refusals: Sequence[Refused | None]) -> Refused | None:
    """Of the refusals of all ways in which a pattern matches, the first that has a reason; a `NotConcerned` only if
    there is no other."""
    told = [refused for refused in refusals if refused is not None and refused.reason]
    return min(told, key=lambda refused: isinstance(refused, NotConcerned), default=None)


def _look_at_sites(rule: CompiledRule, program: Program, graph: str) -> tuple[list[Firing], list[Decline]]:
    """Where a rule that finds its own sites would fire, and which of its sites it refuses."""
    fires: dict[Node, Firing] = {}
    misses = []
    for match in rule.rule.sites(program):
        firings = match.firings(rule.name)
        refused = refusal_of(program, rule, match)
        if refused is None:  # without a name it changes the order and is no rewrite
            for name, node in firings:
                fires.setdefault(node, Firing(name, node.name, source_line(node), graph))
        elif not isinstance(refused, NotConcerned):
            name = firings[0][0] if firings else rule.name
            misses.append(Decline.of(refused.refusal, name, match.node, len(match.nodes), graph=graph))
    return list(fires.values()), misses
