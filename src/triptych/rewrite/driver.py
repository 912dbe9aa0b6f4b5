"""Running rules over a graph: a worklist that revisits only what changed, with a limit and a named stop reason."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from ..cost.decision import Decision
from ..errors import RuleError, TriptychError
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.text import line, source_line
from ..match.matcher import Matcher
from .record import Decline, Firing
from .refusal import Declined, NotConcerned, Refused
from .rewriter import Rewriter
from .rule import CompiledRule, Match, OperandNeeds, Rule, compiled

log = logging.getLogger("triptych")


@dataclass
class Failure:
    """What a rule raised the first time, and how often it raised. Where it did, the declines say."""

    rule: str
    error: str
    where: str
    trace: str
    count: int = 1

    def __str__(self) -> str:
        again = "" if self.count == 1 else f", and {self.count - 1} more time{'s' if self.count > 2 else ''}"
        return f"rule {self.rule} raised {self.error}{self.where}{again}"


@dataclass
class Tally:
    """What a run of rules did."""

    graph: str = ""
    """Of which graph, for the log."""
    tried: int = 0
    matched: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    declines: dict[tuple[str, str], Decline] = field(default_factory=dict)
    """The latest reason for each rule and node: a site that is visited twice counts once."""
    decisions: list[Decision] = field(default_factory=list)
    sites: list[Firing] | None = None
    """Where rules fired; None if that is not recorded."""
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    """By rule and node: why the rewriter refused what a rule of the user's built."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """The rules that raised, by name."""
    stop: str = "nothing to do"
    endless: tuple[str, ...] = ()
    """The rules whose results were rewritten again and again, until the run was stopped."""


class RuleSet:
    """Rules by the operation at the root of their pattern."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.by_op: dict[str, list[CompiledRule]] = {}
        self.anywhere: list[CompiledRule] = []
        self.reach = 1
        self._at: dict[str, list[tuple[CompiledRule, OperandNeeds | None]]] = {}
        for rule in rules:
            ready = compiled(rule)
            self.reach = max(self.reach, ready.depth)
            for op in ready.root_ops:
                self.by_op.setdefault(op, []).append(ready)
            if not ready.root_ops:
                self.anywhere.append(ready)

    def at(self, op: str) -> list[tuple[CompiledRule, OperandNeeds | None]]:
        """The rules that can match a call of this operation, each with what it needs of the operands."""
        if op not in self._at:
            rules = [*self.by_op.get(op, ()), *self.anywhere]
            self._at[op] = [(rule, rule.operand_needs(op)) for rule in rules]
        return self._at[op]


def run_rules(rewriter: Rewriter, rules: Sequence[Rule], *, strict: bool = False, tally: Tally | None = None) -> Tally:
    """Apply rules in the order given. Consecutive rules with patterns run together until none of them fires; a rule
    that overrides `sites` runs alone, once over its sites. `strict`: a rule that raises is an error, not a skipped
    rewrite."""
    tally = tally or Tally()
    try:
        _run_all(rewriter, rules, strict, tally)
    finally:
        for failure in tally.failures.values():
            left_out = "that rewrite was" if failure.count == 1 else "those rewrites were"
            graph = f" in the {tally.graph} graph" if tally.graph else ""
            log.warning("%s: %s%s; %s left out", rewriter.pass_name, failure, graph, left_out)
    if rewriter.stopped:
        tally.stop = "limit of rewrites"
    return tally


def _run_all(rewriter: Rewriter, rules: Sequence[Rule], strict: bool, tally: Tally) -> None:
    ready = [rule for rule in rules if _can_be_compiled(rewriter, rule, strict, tally)]
    for alone, group in itertools.groupby(ready, lambda rule: compiled(rule).finds_itself):
        if not alone:
            _run_patterns(rewriter, list(group), strict, tally)
            continue
        for rule in group:
            _run_sites(rewriter, compiled(rule), strict, tally)


def _can_be_compiled(rewriter: Rewriter, rule: Rule, strict: bool, tally: Tally) -> bool:
    """A rule whose pattern cannot be built, such as one that names an unknown operation, is left out by itself."""
    try:
        compiled(rule)
    except Exception as error:
        if strict or is_wrong_use(rule, error):
            message = f"{type(error).__name__}: {error}"
            raise RuleError(f"pass {rewriter.pass_name}, pattern of rule {rule.name}: {message}") from error
        _note_failure(rule, " while its pattern was built", error, tally)
        return False
    return True


def _run_sites(rewriter: Rewriter, rule: CompiledRule, strict: bool, tally: Tally) -> None:
    sites = iter(() if rewriter.stopped else rule.rule.sites(rewriter.program))
    while True:
        try:
            match = next(sites, None)
        except Exception as error:
            if strict or is_wrong_use(rule.rule, error):
                message = f"{type(error).__name__}: {error}"
                raise RuleError(f"pass {rewriter.pass_name}, sites of rule {rule.name}: {message}") from error
            _note_failure(rule, " while it looked for sites", error, tally)
            return
        if match is None:
            break
        if rewriter.stopped and match.names != ():  # an uncounted rewrite may undo a reordering
            continue
        tally.tried += len(match.roots) if match.one_each else 1
        at = match.node
        outcome = _try(rewriter, rule, match, at, tally, strict)
        if isinstance(outcome, Decline):
            tally.declines[outcome.rule, at.name] = outcome
    if tally.fired and not tally.endless:
        tally.stop = "fixpoint"


def _run_patterns(rewriter: Rewriter, rules: Sequence[Rule], strict: bool, tally: Tally) -> None:
    ruleset = RuleSet(rules)
    program = rewriter.program
    work = deque(program.graph.nodes if ruleset.anywhere else program.calls_of(*ruleset.by_op))
    if not work:
        return  # no rule could fire
    matcher = Matcher(program)
    waiting = set(work)
    captured = set(program.graph.nodes)
    limit = 10 * len(captured) + 1000
    visits = 0
    of_results: Counter[str] = Counter()  # by rule: rewrites of nodes that a rule of this run has added
    while work and not rewriter.stopped:
        node = work.popleft()
        waiting.discard(node)
        if node._erased:
            continue
        visits += 1
        if visits > limit:
            endless = _endless(of_results or tally.fired)
            tally.endless += endless
            tally.stop = f"limit of {limit} visits: {_what_is_endless(endless)}"
            log.warning("%s: %s", rewriter.pass_name, tally.stop)
            return
        call = program.call(node)
        ready = () if call is None else ruleset.at(call.op)
        if call is None or not ready:
            continue
        operand_ops: list[str] | None = None
        for rule, needs in ready:
            tally.tried += 1
            if needs is not None:
                if operand_ops is None:
                    operand_ops = _operand_ops(program, node)
                if not _are_met(needs, operand_ops):
                    continue
            if rule.looks_first and not rule.concerns(program, node, call):
                continue
            if _apply(rewriter, matcher, rule, node, tally, strict):
                if node not in captured:
                    of_results[rule.name] += 1
                for again in _neighbourhood(rewriter.touched, ruleset.reach):
                    if again not in waiting:
                        waiting.add(again)
                        work.append(again)
                break
    if tally.fired and not tally.endless:
        tally.stop = "fixpoint"


def _operand_ops(program: Program, node: Node) -> list[str]:
    """The operations that compute the operands of a node."""
    return [call.op for operand in node.all_input_nodes if (call := program.call(operand)) is not None]


def _are_met(needs: OperandNeeds, operand_ops: list[str]) -> bool:
    """Can a pattern match where operands are computed by these operations? Most often it cannot, and the matcher need
    not be asked."""
    for way in needs:
        if not any(ops.isdisjoint(operand_ops) for ops in way):
            return True
    return False


def _endless(of_results: Counter[str]) -> tuple[str, ...]:
    """The rules that keep a run going: they rewrote results of rules about as often as the one that did most often."""
    most = max(of_results.values(), default=0)
    return tuple(name for name, count in of_results.most_common() if 10 * count >= most)


def _what_is_endless(rules: tuple[str, ...]) -> str:
    if len(rules) == 1:
        return f"{rules[0]} rewrites its own result again and again"
    return f"the results of {', '.join(rules)} are rewritten again and again"


MOST_USERS = 100
"""The users of a value with more users than this are not revisited after a change, which keeps runs linear."""


def _neighbourhood(touched: list[Node], reach: int) -> list[Node]:
    """Nodes at which a pattern could match now: the changed nodes and their users, as far as patterns reach."""
    seen = dict.fromkeys(n for n in touched if not n._erased)
    edge = list(seen)
    for _ in range(reach - 1):
        edge = [u for n in edge if len(n.users) <= MOST_USERS for u in n.users if u not in seen]
        seen.update(dict.fromkeys(edge))
    return list(seen)


def _apply(rewriter: Rewriter, matcher: Matcher, rule: CompiledRule, node: Node, tally: Tally, strict: bool) -> bool:
    """Try every way in which the pattern matches at a node, until one is rewritten."""
    declined: Decline | None = None
    for pattern_match in matcher.find(rule.roots, node):
        outcome = _try(rewriter, rule, Match(rewriter.program, pattern_match), node, tally, strict)
        if outcome is True:
            return True
        if isinstance(outcome, Decline):
            declined = declined or outcome
            if outcome.raised:
                break
    if declined is not None:
        tally.declines[rule.name, node.name] = declined
    return False


def _try(
    rewriter: Rewriter, rule: CompiledRule, match: Match, node: Node, tally: Tally, strict: bool
) -> bool | Decline:
    """Check and rewrite one site: True if it was rewritten, False if the rule does not apply, else why it declined."""
    firings = match.firings(rule.name)
    sites = len(firings) if match.one_each else 1
    tally.matched += sites
    what = firings[0][0] if firings else rule.name
    before = rewriter.rewrites
    checked = False
    try:
        rule.check(match)
        checked = True
        created = _rewrite(rewriter, rule, match)
    except NotConcerned:
        tally.matched -= sites
        return False
    except Refused as refused:
        if checked and rule.rule.of_user and not isinstance(refused, Declined):
            tally.refused[what, node.name] = refused.reason
        return Decline.of(refused.refusal, what, node, len(match.nodes))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if strict or is_wrong_use(rule.rule, error):
            raise RuleError(f"pass {rewriter.pass_name}, rule {rule.name}: {message}\n  at {line(node)}") from error
        _note_failure(rule, f" at {node.name}", error, tally)
        return Decline.of(Refusal(f"raised {message}"), what, node, len(match.nodes), raised=True)
    if match.one_each:
        firings = firings[: rewriter.rewrites - before]
    else:
        rewriter.counted(len(firings))
    for name, _ in firings:
        tally.fired[name] += 1
    if tally.sites is not None:
        removed = tuple(n.name for n in match.nodes if n._erased)
        added = tuple(n.name for n in created if not n._erased)
        tally.sites += [Firing(name, at.name, source_line(at), "", removed, added) for name, at in firings]
    if match.decision is not None:
        tally.decisions.append(replace(match.decision, rule=what, node=node.name))
    tally.declines.pop((what, node.name), None)
    tally.refused.pop((what, node.name), None)
    return True


def is_wrong_use(rule: Rule, error: Exception) -> bool:
    """A user's rule that names what does not exist will never do what it should: the compile does not go on."""
    return rule.of_user and isinstance(error, TriptychError)


def refusals(tally: Tally, graph: str) -> list[str]:
    """For each rule of the user's whose rewrites the rewriter refused: how many sites of the graph, and why."""
    by_rule: dict[str, list[str]] = {}
    for (rule, _), reason in tally.refused.items():
        by_rule.setdefault(rule, []).append(reason)
    lines = []
    for rule, reasons in by_rule.items():
        matched = tally.fired[rule] + len(reasons)
        some = f" at {len(reasons)} of them" if tally.fired[rule] else ""
        sites = f"{matched} site{'s' * (matched != 1)} of the {graph} graph"
        lines.append(f"{rule} matched {sites}, refused{some}: {reasons[0]}; see triptych.why_not")
    return lines


def _rewrite(rewriter: Rewriter, rule: CompiledRule, match: Match) -> list[Node]:
    """Rewrite one site; returns the nodes that the rule emitted for it."""
    roots = [root.node for root in match.roots]
    op = match.emitter(rewriter.program, match.before or max(roots), rule.name)
    try:
        rule.rewrite(op, match, lambda result: rewriter.install(result, roots, op, match.nodes, rule.rule))
    except Exception:
        op.discard()
        raise
    rewriter.erase_unused(match.leftovers)
    return op.made


def _note_failure(rule: CompiledRule | Rule, where: str, error: Exception, tally: Tally) -> None:
    if (failure := tally.failures.get(rule.name)) is not None:
        failure.count += 1
        return
    trace = traceback.format_exc()
    tally.failures[rule.name] = Failure(rule.name, f"{type(error).__name__}: {error}", where, trace)
    log.debug("%s", trace)
