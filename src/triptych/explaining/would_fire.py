"""Would a rule fire at a site, and if it would have, which earlier pass rewrote the site first?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import GraphModule

from ..errors import RuleError
from ..ir.program import TORCH, Program
from ..ir.text import source_line
from ..options import Options
from ..passes.catalogue import stages_of
from ..passes.record import PassRecord
from ..rewrite.driver import is_wrong_use
from ..rewrite.record import Decline
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import Rewriter
from ..rewrite.rule import CompiledRule, Match, Rule, compiled
from .explanation import Explanation


def runs_on(rule: Rule, graph: str) -> bool:
    """Does a rule run on such a graph? The user's rules may run on any; those of later stages are looked for in the
    joint graph."""
    stages = stages_of(rule.name)
    if not stages:
        return True
    if graph.startswith(("dynamo", "pre_grad")):
        return "pre_grad" in stages
    return stages != ["pre_grad"]


def refusal_of(program: Program, rule: CompiledRule, match: Match) -> Refused | None:
    """Why a complete match is not rewritten: the rewrite is built, checked, and undone."""
    rewriter = Rewriter(program, rule.name)
    roots = [r.node for r in match.roots]
    op = match.emitter(program, match.before or max(roots), rule.name)
    try:
        rule.check(match)
        rule.rewrite(op, match, lambda result: rewriter.require_sound(result, roots, op, match.nodes, rule.rule))
    except Refused as refused:
        return refused
    except Exception as error:
        if is_wrong_use(rule.rule, error):
            raise RuleError(f"rule {rule.name}: {error}") from error
        return Refused(f"raised {type(error).__name__}: {error}")
    finally:
        op.discard()
    return None


def taken_sites(
    rules: Sequence[Rule], seen: Explanation, without: Explanation, traced: Sequence[GraphModule], options: Options
) -> Iterator[Decline]:
    """The sites at which a rule would have fired if an earlier pass had not rewritten one of their nodes.

    `seen` is the compile with the rules, `without` the one without them, and `traced` the joint graphs of the latter as
    AOTAutograd traced them. Names of nodes tell what became of the nodes of one graph in the other compile.
    """
    for session, other in zip(seen.sessions, without.sessions):
        records = session.records
        graphs = [("dynamo", other.graphs["dynamo"])] if "dynamo" in other.graphs else []
        in_stage_1 = any(_is_of(rule, rules) for r in records if r.stage == "pre_grad" for rule in +r.fired)
        if len(seen.sessions) == 1 and not in_stage_1:  # else names in the joint graphs may differ
            graphs += [("joint", gm) for gm in traced[:1]]
        for name, gm in graphs:
            early = name == "dynamo"
            program = Program(gm, options=options, is_inference=not seen.train)
            for rule in rules:
                if runs_on(rule, name):
                    yield from _taken(rule, program, rules, [r for r in records if (r.stage == "pre_grad") is early])


def _taken(rule: Rule, program: Program, rules: Sequence[Rule], records: Sequence[PassRecord]) -> Iterator[Decline]:
    own = [site for record in records for site in record.sites if _is_of(site.rule, rules)]
    looked_at = {name for site in own for name in (site.node, *site.removed)}
    looked_at |= {decline.node for record in records for decline in record.declines if _is_of(decline.rule, rules)}
    takers: dict[str, str] = {}
    """By node: the pass that erased it."""
    for record in records:
        for site in record.sites:
            named = record.name if site.rule == record.name else f"{record.name} ({site.rule})"
            takers |= {node: named for node in site.removed if node not in takers}
    ready = compiled(rule)
    for match in rule.sites(program):
        names = [match.node.name, *(node.name for node in match.nodes if node is not match.node)]
        taken = next((name for name in names if name in takers), None)
        if taken is None or not looked_at.isdisjoint(names) or refusal_of(program, ready, match) is not None:
            continue
        what = "this node" if taken == match.node.name else taken
        reason = f"an earlier pass, {takers[taken]}, rewrote {what} first"
        graph = "pre_grad" if program.dialect == TORCH else "joint"
        yield Decline(rule.name, match.node.name, reason, source_line(match.node), matched=len(names), graph=graph)


def _is_of(name: str, rules: Sequence[Rule]) -> bool:
    """Is a rewrite that is counted under this name one of these rules'?"""
    return any(rule.counts_as(name) for rule in rules)
