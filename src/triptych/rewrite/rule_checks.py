"""What can be said of a rule before it runs: a missing method, an operation that does not exist, a capture that nothing
binds. It is an error where the class is defined, or, if only an instance can tell, where that is created."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..errors import TriptychError, UnknownName
from ..match.pattern import Pattern, build_pattern
from ..options import STAGES_OF_RULES
from .examples import Example

if TYPE_CHECKING:
    from .rule import Rule

LIKE_A_FLAG = 0.85
"""How much like the name of a flag that of another attribute must be, as difflib has it, to be taken for a slip."""


def check_class(cls: type[Rule]) -> None:
    """Check what a class says by itself. A base class for other rules need not be complete, and a pattern that reads
    its instance is checked when there is one."""
    _require_stages(cls.rule_name(), cls.stages)
    if not cls.of_user:
        return  # the tests of our rules do the rest
    _require_examples(cls)
    _require_known_flags(cls)
    for name, first in (("pattern", "op"), ("check", "m"), ("rewrite", "op")):
        _require_self(cls, name, first)
    if cls.sites is _base(cls).sites and cls.pattern is not _base(cls).pattern:
        try:
            roots = pattern_of(_without_instance(cls, "pattern"), cls.rule_name())
        except TriptychError:
            raise
        except Exception:  # it reads its instance, or what is not defined yet
            return
        for name in ("check", "rewrite"):
            require_captures(_without_instance(cls, name), captures_of(roots))


def check_instance(rule: Rule, prepare: Callable[[Rule], Any]) -> None:
    """Check that the rule has a pattern and that it can be built; `prepare` builds it."""
    require_pattern(type(rule))
    try:
        prepare(rule)
    except AttributeError as error:
        if getattr(error, "obj", None) is not rule:  # else it may be set later
            raise


def require_pattern(cls: type[Rule]) -> None:
    base = _base(cls)
    if cls.sites is base.sites and cls.pattern is base.pattern:
        wanted = "`def pattern(self, op, x, ...)`, or `sites` if no pattern can express it"
        raise TriptychError(f"{cls.__name__} has no pattern: define {wanted}{_misspelt('pattern', cls)}")


def require_rewrite(cls: type[Rule]) -> None:
    if cls.rewrite is _base(cls).rewrite and not cls.only_explains:
        wanted = "`def rewrite(self, op, x, ...)`, which returns the replacement"
        raise TriptychError(f"{cls.__name__} has no rewrite: define {wanted}{_misspelt('rewrite', cls)}")


def pattern_of(method: Callable[..., Any], rule: str) -> tuple[Pattern, ...]:
    """The pattern that the method of a rule builds; an unknown name in it is an error that names the rule."""
    try:
        return build_pattern(method)
    except UnknownName as error:
        error.args = (f"pattern of rule {rule}: {error}",)
        raise


def require_captures(method: Callable[..., Any], known: Iterable[str] | None) -> frozenset[str]:
    """The captures that a method takes as parameters. A parameter that is no capture of the pattern is an error.

    `known` is None for a rule that overrides `sites`: the names that its sites provide are not known in advance.
    """
    names = list(inspect.signature(method).parameters)[1:]
    for name in names if known is not None else ():
        if name not in (known or ()) and name != "m":
            raise not_given(method, name, known or (), "the pattern does not capture")
    return frozenset(names)


def not_given(method: Callable[..., Any], name: str, given: Iterable[str], what: str) -> TriptychError:
    """The error for a parameter of `check` or `rewrite` that nothing gives a value."""
    listed = sorted(given)
    near = UnknownName("capture", name, listed).near
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        hint = f"known: {', '.join(listed)}" if listed else "it has no captures"
    return TriptychError(f"{method.__qualname__} asks for {name!r}, which {what}; {hint}")


def captures_of(roots: Iterable[Pattern]) -> set[str]:
    return set().union(*(root.captures() for root in roots))


def _base(cls: type[Rule]) -> type[Rule]:
    """`Rule` itself, which this module cannot import."""
    return next(c for c in reversed(cls.__mro__) if "of_user" in vars(c))


def _without_instance(cls: type[Rule], name: str) -> Callable[..., Any]:
    """A method bound to an empty object: what it reads of `self` raises an AttributeError."""
    method: Any = inspect.getattr_static(cls, name)
    return method.__get__(object(), cls) if hasattr(method, "__get__") else method


def _require_self(cls: type[Rule], name: str, first: str) -> None:
    method = inspect.getattr_static(cls, name)
    if inspect.isfunction(method) and next(iter(inspect.signature(method).parameters), first) == first:
        raise TriptychError(f"{method.__qualname__} is a method: write def {name}(self, {first}, ...)")


def _require_stages(name: str, stages: Any) -> None:
    if isinstance(stages, str) or not isinstance(stages, Iterable):
        hint = f": write ({stages!r},)" if isinstance(stages, str) else ""
        raise TriptychError(f"stages of the rule {name} are a tuple of names, not {stages!r}{hint}")
    for stage in stages:
        if stage not in STAGES_OF_RULES:
            raise UnknownName(f"stage for the rule {name}", stage, STAGES_OF_RULES)


def _require_known_flags(cls: type[Rule]) -> None:
    """A rule may have attributes of its own, but not one whose name is nearly that of a flag."""
    base = _base(cls)
    flags = [name for name in base.__annotations__ if name != "of_user"]
    for name, value in vars(cls).items():
        if name.startswith("_") or hasattr(base, name) or callable(value) or hasattr(value, "__get__"):
            continue
        if near := difflib.get_close_matches(name, flags, n=1, cutoff=LIKE_A_FLAG):
            raise TriptychError(f"{cls.__name__} sets {name!r}, which no rule has; did you mean {near[0]!r}?")


def _require_examples(cls: type[Rule]) -> None:
    examples = inspect.getattr_static(cls, "examples")
    if hasattr(examples, "__get__"):
        return  # created on first access
    wanted = f"examples of the rule {cls.rule_name()} are a list of fires(...) and declines(...) of triptych.testing"
    if not isinstance(examples, (list, tuple)):
        raise TriptychError(f"{wanted}, not of type {type(examples).__name__}")
    for one in examples:
        if not isinstance(one, Example):
            raise TriptychError(f"{wanted}; one of them is of type {type(one).__name__}")


def _misspelt(name: str, cls: type[Rule]) -> str:
    near = difflib.get_close_matches(name, [own for own in vars(cls) if own != name], n=1, cutoff=0.75)
    return f" (it defines {near[0]!r})" if near else ""
