"""The order of all passes, as data: `pre_grad.py`, `joint.py` and `post_grad.py` list them, to be read top to bottom.

The lists of a stage, with the modules of its passes, are imported when the stage is first asked for: a program that is
loaded from a cache needs those of stage 1 alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from .. import _private
from ..errors import UnknownName
from ..options import NAMES, Options
from .entries import Entry, Hook

if TYPE_CHECKING:
    from .joint import AFTER_PARTITION, BEFORE_PARTITION, FREEZE, JOINT
    from .post_grad import BEFORE_CODEGEN, COMMUNICATION, FAMILIES, POST_GRAD, POST_GRAD_FUSIONS
    from .pre_grad import PRE_GRAD, PRE_GRAD_OPTIONAL

__all__ = [
    "AFTER_PARTITION", "BEFORE_CODEGEN", "BEFORE_PARTITION", "COMMUNICATION", "FAMILIES", "FREEZE", "JOINT",
    "POST_GRAD", "POST_GRAD_FUSIONS", "PRE_GRAD", "PRE_GRAD_OPTIONAL", "STAGES", "Entry", "Hook", "Options",
    "default_rule_names", "families_of", "inductor_settings", "option_defaults", "pass_names", "required_names",
    "rule_names", "stage_entries", "steps",
]  # fmt: skip

_LISTS = {
    "pre_grad": ("PRE_GRAD", "PRE_GRAD_OPTIONAL"),
    "joint": ("FREEZE", "JOINT", "BEFORE_PARTITION", "AFTER_PARTITION"),
    "post_grad": ("FAMILIES", "POST_GRAD_FUSIONS", "COMMUNICATION", "POST_GRAD", "BEFORE_CODEGEN"),
}
"""The lists in each module beside this one."""
_MODULE_OF = {name: module for module, names in _LISTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _private.plain_torch():  # modules make tensors, for examples among others, and a compile may be under way
        module = importlib.import_module(f".{_MODULE_OF[name]}", __name__)
    value = globals()[name] = getattr(module, name)
    return value


class Stages(MutableMapping[str, tuple[Entry, ...]]):
    """The entries of each stage by its name. Each list is imported when it is first asked for."""

    def __init__(self, *names: str) -> None:
        self._entries: dict[str, tuple[Entry, ...] | None] = dict.fromkeys(names)

    def __getitem__(self, stage: str) -> tuple[Entry, ...]:
        entries = self._entries[stage]
        if entries is None:
            entries = self._entries[stage] = tuple(__getattr__(stage.upper()))
        return entries

    def __contains__(self, stage: object) -> bool:
        return stage in self._entries

    def __setitem__(self, stage: str, entries: tuple[Entry, ...]) -> None:
        self._entries[stage] = entries

    def __delitem__(self, stage: str) -> None:
        del self._entries[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


STAGES = Stages(
    "pre_grad", "freeze", "joint", "before_partition", "after_partition", "post_grad", "before_codegen"
)  # fmt: skip
"""In the order of the flow. The three that are public functions too are `pre_grad`, `joint` and `post_grad`."""


def stage_entries(stage: str) -> tuple[Entry, ...]:
    if stage not in STAGES:
        raise UnknownName("stage", stage, STAGES)
    return STAGES[stage]


def steps(stage: str, options: Options) -> list[Entry]:
    """What runs in a stage: the default passes and the added ones, without those that are removed by exact name."""
    return [entry for entry in stage_entries(stage) if _runs(entry, options)]


def _runs(entry: Entry, options: Options) -> bool:
    if not (options.add_passes or options.remove_passes):  # the families are in a list of stage 3
        return isinstance(entry, Hook) or entry.default
    names = {entry.name, *families_of(entry)}
    if not names.isdisjoint(options.remove_passes):
        return False
    return isinstance(entry, Hook) or entry.default or not names.union(entry.parts).isdisjoint(options.add_passes)


def families_of(entry: Entry) -> list[str]:
    return [name for name, members in __getattr__("FAMILIES").items() if entry in members]


@functools.cache
def pass_names() -> frozenset[str]:
    """What can be added or removed: passes, parts of passes, and families of them."""
    entries = [entry for entries in STAGES.values() for entry in entries]
    names = (name for e in entries for name in (e.name, *(() if isinstance(e, Hook) else e.parts)))
    return frozenset([*__getattr__("FAMILIES"), *names])


@functools.cache
def rule_names() -> frozenset[str]:
    """Rules can be removed by name as passes can."""
    return frozenset(
        rule.name
        for entries in STAGES.values()
        for entry in entries
        if not isinstance(entry, Hook)
        for rule in entry().rules()
    )


@functools.cache
def default_rule_names() -> frozenset[str]:
    """Rules that run without being added: naming one of them in `add_passes` changes nothing."""
    passes = [e for entries in STAGES.values() for e in entries if not isinstance(e, Hook) and e.default]
    return frozenset(rule.name for entry in passes for rule in entry().rules())


@functools.cache
def option_defaults() -> dict[str, Any]:
    """Every pass's own options, as `pass_name.option`, with their defaults."""
    return {
        f"{entry.name}.{option}": default
        for entries in STAGES.values()
        for entry in entries
        if not isinstance(entry, Hook)
        for option, default in entry.option_fields().items()
    }


@functools.cache
def required_names() -> frozenset[str]:
    """Passes that cannot be removed, and their rules."""
    passes = [e for entries in STAGES.values() for e in entries if not isinstance(e, Hook) and e.required]
    return frozenset(name for entry in passes for name in (entry.name, *(rule.name for rule in entry().rules())))


@functools.cache
def inductor_settings() -> dict[str, Any]:
    """The settings of Inductor's code generator, with the types that they are declared with."""
    config = _private.inductor_config
    return {name: config.get_type(name) for name in config.get_config_copy()}


NAMES.update(
    {
        "passes": pass_names,
        "rules": rule_names,
        "rules that run": default_rule_names,
        "pass options": option_defaults,
        "required": required_names,
        "Inductor's settings": inductor_settings,
    }
)
