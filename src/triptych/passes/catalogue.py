"""The passes as data: what `list_passes`, the command line and the documentation show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ALL_PASSES, TriptychError, UnknownName
from ..options import HOOKS, Options
from ..pipeline import FAMILIES, STAGES, Entry, Hook
from ..rewrite.examples import Example
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .custom_passes import instance_of


@dataclass(frozen=True)
class ExampleInfo:
    """A program on which a rule fires, or which it leaves alone."""

    program: str
    conditions: str
    """What it is run on, and how: `2 x f32[4, 8] | dynamic`."""
    because: str = ""
    """Why it is left alone."""


@dataclass(frozen=True)
class RuleInfo:
    """A rule as it is shown."""

    name: str
    formula: str
    exact: bool
    fires: tuple[ExampleInfo, ...]
    declines: tuple[ExampleInfo, ...]


@dataclass(frozen=True)
class PassInfo:
    """A step of the pipeline as it is shown."""

    name: str
    stage: str
    step: int
    default: bool
    purpose: str
    example: str = ""
    """A program on which the pass fires."""
    options: dict[str, Any] = field(default_factory=dict)
    rules: tuple[RuleInfo, ...] = ()
    details: str = ""
    """What else the pass says of itself."""


def list_passes(stage: str | None = None) -> list[PassInfo]:
    """Every pass in the order in which it runs, those that run only when added after the others."""
    if stage is not None and stage not in STAGES:
        raise UnknownName("stage", stage, STAGES)
    return [
        info
        for name, entries in STAGES.items()
        if stage in (None, name)
        for step, entry in enumerate(entries, 1)
        for info in (*_family_of(entry, name, step), _info(entry, name, step), *_parts(entry, name, step))
    ]


def _family_of(entry: Entry, stage: str, step: int) -> list[PassInfo]:
    """The family whose first member this is."""
    return [
        PassInfo(family, stage, step, False, f"all of {', '.join(f'`{member.name}`' for member in members)}")
        for family, members in FAMILIES.items()
        if entry is members[0]
    ]


def _parts(entry: Entry, stage: str, step: int) -> list[PassInfo]:
    """The names under which parts of a pass can be added."""
    if isinstance(entry, Hook):
        return []
    infos = []
    for part in entry.parts:
        example: Example = entry.part_examples[part]
        rules = tuple(_rule_info(rule, [example]) for rule in entry.rules_of_part(part))
        purpose = f"that part of `{entry.name}` alone"
        infos.append(PassInfo(part, stage, step, False, purpose, example.source, rules=rules))
    return infos


def _info(entry: Entry, stage: str, step: int) -> PassInfo:
    if isinstance(entry, Hook):
        return PassInfo(entry.name, stage, step, True, entry.purpose())
    rules = entry().rules()
    examples = [e for shown in (entry.examples, *(r.examples for r in rules)) for e in shown if e.fires]
    example = examples[0].source if examples else ""
    shown = tuple(_rule_info(r, r.examples) for r in rules)
    return PassInfo(
        entry.name, stage, step, entry.default, entry.purpose(), example, entry.option_fields(), shown, entry.details()
    )


def _rule_info(rule: Rule, examples: Sequence[Example]) -> RuleInfo:
    fires, declines = (
        tuple(ExampleInfo(e.source, e.conditions, e.because) for e in examples if e.fires is fired)
        for fired in (True, False)
    )
    return RuleInfo(rule.name, rule.formula(), rule.exact, fires, declines)


def all_rules() -> dict[str, Rule]:
    """Every rule of the pipeline by name."""
    return {
        rule.name: rule
        for entries in STAGES.values()
        for entry in entries
        if not isinstance(entry, Hook)
        for rule in entry().rules()
    }


def stages_of(rule: str) -> list[str]:
    """The stages in which a rule of the pipeline runs; none for a rule of the user's."""
    passes = {stage: [entry() for entry in entries if not isinstance(entry, Hook)] for stage, entries in STAGES.items()}
    return [stage for stage, several in passes.items() if any(one.name == rule for p in several for one in p.rules())]


def all_passes() -> dict[str, list[type[Pass]]]:
    """Every pass of the pipeline by name. A step that has a separate form in each of two stages is one name."""
    passes: dict[str, list[type[Pass]]] = {}
    for entry in (entry for entries in STAGES.values() for entry in entries):
        if not isinstance(entry, Hook) and entry not in passes.setdefault(entry.name, []):
            passes[entry.name].append(entry)
    return passes


def _asks_for_a_hook(hook: str, options: Options | None) -> TriptychError:
    message = f"{hook!r} is a hook, which has no rules of its own: ask for one of your rules in it"
    names = [] if options is None else [rule.name for rule in own_rules(options, hook)]
    return TriptychError(f"{message} ({', '.join(names)})" if names else f"{message}, by its class or its name")


def _passes_of(name: str) -> list[type[Pass]]:
    """The passes that a name stands for: one, one in each of two stages, or a family."""
    members = FAMILIES.get(name)
    return all_passes().get(name, []) if members is None else [m for m in members if not isinstance(m, Hook)]


def own_rules(options: Options, hook: str) -> list[Rule]:
    """The user's own rules in one hook, those of their own passes too."""
    given = map(instance_of, options.custom_passes(hook))
    rules = [one.rules() if isinstance(one, Pass) else [one] for one in given if isinstance(one, (Rule, Pass))]
    return [rule for some in rules for rule in some]


def rules_of(wanted: Rule | type[Rule] | Pass | type[Pass] | str, options: Options | None = None) -> list[Rule]:
    """The rule itself, or the rules of a pass; both may be given as a class or by any name that `explain` prints.

    The `options` may have rules of the user's own, which can be named too.
    """
    if isinstance(wanted, str):
        if wanted in HOOKS:
            raise _asks_for_a_hook(wanted, options)
        own = {} if options is None else {rule.name: rule for hook in HOOKS for rule in own_rules(options, hook)}
        rules = all_rules() | own
        if wanted in rules:
            return [rules[wanted]]
        if passes := _passes_of(wanted):
            return [rule for pass_ in passes for rule in pass_().rules()]
        counted = [rule for rule in rules.values() if rule.counts_as(wanted)]  # parts of passes too
        if not counted:
            raise UnknownName("rule or pass", wanted, [*rules, *all_passes(), *FAMILIES], lister=ALL_PASSES)
        return counted
    kind = wanted if isinstance(wanted, type) else type(wanted)
    if not issubclass(kind, (Rule, Pass)):
        raise TriptychError(f"a rule, a pass or the name of one is wanted, not {kind.__name__}")
    one = instance_of(wanted)
    return [one] if isinstance(one, Rule) else list(one.rules())
