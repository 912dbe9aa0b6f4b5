"""A rule: a formula, sites, a check, a rewrite, and examples of where it fires and where it declines.

    sites(program)  ->  check(site)  ->  rewrite(op, site)

`sites` says where the rule could fire: wherever its `pattern` matches, unless it is overridden. `check` refuses, or
asks the cost model. `rewrite` builds the replacement, which the rewriter installs if that is sound. The driver does
the rest for every rule alike: it counts, records refusals and decisions, keeps limits, takes failed rewrites back.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch.fx import Node

from ..errors import TriptychError
from ..ir.facts import tensor_fact
from ..ir.gradients import gradient_wanted
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..ir.text import line
from ..match.matcher import Matcher, PatternMatch
from ..match.pattern import Pattern, build_pattern
from .emit import Emitter
from .record import MODEL_ERROR, Decision
from .refusal import NotConcerned, Refused

_Accepted = TypeVar("_Accepted")


class Match:
    """A site of a rule, as `check` and `rewrite` see it: what a pattern found there, or the rule's own analysis."""

    leftovers: tuple[Node, ...] = ()
    """Nodes that are no part of what is rewritten, but go with it if nobody uses them any more."""
    decision: Decision | None = None
    before: Node | None = None
    """The node that new ones stand before; None: the last of the roots."""
    names: tuple[str, ...] | None = None
    """What a rewrite is counted as, where that is not the rule's own name, or more than one rewrite; with no name
    at all it only changes the order and is not counted."""
    problem: str | Refusal | None = None
    """Why nothing can be done here, if the analysis knows already."""
    about: Node | None = None
    """The node that a report names for this site; None: the first of the roots."""
    emitter: type[Emitter] | Callable[[Program, Node, str], Emitter] = Emitter
    """What makes the emitter of the rewrite, for a rule whose rewrites share nodes."""

    def __init__(self, program: Program, pattern_match: PatternMatch) -> None:
        self.program = program
        self.nodes = pattern_match.nodes
        """The nodes whose work the rewrite does; those that nobody uses any more are erased."""
        self.roots = tuple(Value(program, n) for n in pattern_match.roots)
        self.bindings = pattern_match.bindings
        """What the captures took, as it stands in the graph; `m["x"]` gives it as a value with its facts."""
        self._values: dict[str, Any] = {}

    @staticmethod
    def at(
        program: Program,
        *roots: Node,
        covers: Iterable[Node] = (),
        before: Node | None = None,
        names: Sequence[str] | None = None,
        problem: str | Refusal | None = None,
        about: Node | None = None,
        emitter: Callable[[Program, Node, str], Emitter] = Emitter,
        **found: Any,
    ) -> Match:
        """A site that `Rule.sites` has found: the values to replace, in order, and by name what is known of them.

        `check` and `rewrite` take by name what they want of `found`. A site with a `problem` is a refusal, with that
        reason: nothing more is asked.
        """
        match = Match(program, PatternMatch(roots, found, tuple(dict.fromkeys((*roots, *covers)))))
        match.before, match.names, match.problem = before, None if names is None else tuple(names), problem
        match.about, match.emitter = about, emitter
        return match

    def __repr__(self) -> str:
        return f"<match: {line(self.root.node)}>"

    @property
    def root(self) -> Value:
        """The value that the rewrite replaces."""
        return self.roots[0]

    @property
    def node(self) -> Node:
        """The node that reports name."""
        return self.about or self.roots[0].node

    def require(
        self,
        condition: Any,
        reason: str = "",
        *,
        at: Value | Node | None = None,
        wanted: Any = None,
        found: Any = None,
    ) -> None:
        """Leave this site alone, for that reason, unless the condition holds.

        `at` is the value at fault, if that is not the one to replace: reports name it and its source line. `wanted` and
        `found` are what was compared, of any type; `{at}`, `{wanted}` and `{found}` in the reason stand for the three.
        No text is made while the condition holds.
        """
        if not condition:
            raise Refused(reason, at=at, wanted=wanted, found=found)

    def require_no_other_user(
        self,
        value: Value | Node,
        user: Node | None = None,
        reason: str = "{at} is used elsewhere, by {found}",
    ) -> None:
        """Leave this site alone if anything but the root, or another node that is given, uses the value."""
        node = value.node if isinstance(value, Value) else value
        other = next((u for u in node.users if u is not (user or self.root.node)), None)
        self.require(other is None, reason, at=node, found=other)

    def applies(
        self,
        condition: Any,
        reason: str = "",
        *,
        at: Value | Node | None = None,
        wanted: Any = None,
        found: Any = None,
    ) -> None:
        """What the pattern cannot say by its form ("to the same shape"); without it this is no match."""
        if not condition:
            raise NotConcerned(reason, at=at, wanted=wanted, found=found)

    def pays(
        self,
        before: float,
        after: float,
        sure: bool = False,
        *,
        measure: Callable[[], tuple[float, float] | None] | None = None,
        error: float = MODEL_ERROR,
        saves: int = 0,
    ) -> None:
        """Leave this site alone unless the cost model says that the new way is quicker, both in seconds.

        `sure`: the new way is the old one with less to do, and nothing more, so any gain counts. `measure` times both
        on the device, or gives None where that is not possible; it is asked where the two are within `error` of each
        other, the factor by which the model may be off, or as the option `tune` says. `saves`: bytes of memory that the
        new way needs less, for which it may be a little slower.
        """
        self.decision = Decision(before, after, sure=sure, saves=saves)
        tune = self.program.options.tune
        is_unsure = not sure and before < error * after and after < error * before
        if measure is not None and (tune == "all" or (tune == "unsure" and is_unsure)):
            if (times := measure()) is not None:
                self.decision = Decision(*times, measured=True, saves=saves)
        if not self.decision.pays:
            raise Refused(self.decision.refusal)

    def cover(self, nodes: Iterable[Node]) -> None:
        """More nodes whose work the rewrite does: found by `check` itself, beyond the pattern."""
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))

    def leave_behind(self, nodes: Iterable[Node]) -> None:
        """Erase these after the rewrite, if nobody uses them any more."""
        self.leftovers = tuple(nodes)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:  # most matches end at the first condition: nothing is made before it is asked for
            self._values[name] = _as_value(self.program, self.bindings.get(name))
        return self._values[name]


def _as_value(program: Program, raw: Any) -> Any:
    if isinstance(raw, Node):
        return Value(program, raw)
    if isinstance(raw, (list, tuple)):
        return type(raw)(_as_value(program, r) for r in raw) if type(raw) in (list, tuple) else tuple(raw)
    return raw


class FirstOf:
    """What a rewrite returns that has several ways to write its result, best first: the first sound one is taken.

    A way may return `FirstOf` in turn. Where all are refused, the reason given is that of the last, or, with
    `first_reason`, of the first.
    """

    def __init__(self, *ways: Callable[[], Any], first_reason: bool = False) -> None:
        self.ways, self.first_reason = ways, first_reason


class Rule:
    """Subclass this, with a docstring whose first paragraph is the formula.

    `pattern(self, op, x, ...)` names operations; `check(self, m, x, ...)` says what must hold with `m.require`;
    `rewrite(self, op, x, ...)` builds what stands there instead and returns it, or an `Edit`, or `FirstOf` several
    ways. A rule that no pattern can express overrides `sites` instead of `pattern`.
    """

    exact: ClassVar[bool] = True
    """Bit for bit the same result; False where rounding may differ, and the formula says so."""
    interior_may_be_used: ClassVar[bool] = False
    """Fires although an inner value of the pattern is used elsewhere too (it then stays)."""
    mixed_dtypes: ClassVar[bool] = False
    """Captured tensors may be of several dtypes."""
    takes_random: ClassVar[bool] = False
    """The pattern covers random draws, and the rewrite keeps their meaning."""
    without_facts: ClassVar[bool] = False
    """Right even where shapes and dtypes are unknown: the rewrite keeps both by its form."""
    without_gradient: ClassVar[bool] = False
    """The values stay the same, and their gradient may not: the rule is refused wherever a gradient may be wanted."""
    stages: ClassVar[tuple[str, ...]] = ("pre_grad", "joint")
    """Where a rule runs that was given in the option `add_rules`."""
    only_explains: ClassVar[bool] = False
    """It rewrites nothing: it says of what looks like a site of the pass why nothing can be done there."""
    examples: ClassVar[list[Any]] = []

    @classmethod
    def rule_name(cls) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @property
    def name(self) -> str:
        return self.rule_name()

    def counts_as(self, name: str) -> bool:
        """Is this a name that rewrites of the rule are counted under? A rule that sets `Match.names` says which."""
        return name == self.name

    @classmethod
    def formula(cls) -> str:
        """The first paragraph of the docstring, in one line."""
        return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())

    def sites(self, program: Program) -> Iterator[Match]:
        """Where the rule could fire, one site after the other. It only reads the graph.

        Each site is rewritten, if it can be, before the next one is asked for. A rule that overrides this sees the
        graph as it is then: it must not return nodes that are erased.
        """
        ready, matcher = compiled(self), Matcher(program)
        for node in list(program.graph.nodes):
            call = None if node._erased else program.call(node)
            if call is not None and (not ready.root_ops or call.op in ready.root_ops):
                yield from (Match(program, pattern_match) for pattern_match in matcher.find(ready.roots, node))

    if TYPE_CHECKING:  # every rule has captures of its own
        pattern: Callable[..., Any]
        check: Callable[..., None]
        rewrite: Callable[..., Any]
    else:

        def pattern(self, op):
            raise TriptychError(f"{type(self).__name__} has no pattern")

        def check(self, m):
            """Nothing beyond the pattern, unless a rule says so."""

        def rewrite(self, op):
            raise TriptychError(f"{type(self).__name__} has no rewrite")


class CompiledRule:
    """A rule made ready once: its pattern, the operations it can end in, and who wants which capture."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name = rule.name
        self.finds_itself = type(rule).sites is not Rule.sites
        """It has no pattern, but an analysis of its own."""
        self.roots: tuple[Pattern, ...] = () if self.finds_itself else build_pattern(rule.pattern)
        self.root_ops = self.roots[0].root_ops() if self.roots else frozenset()
        self.depth = max((r.depth() for r in self.roots), default=1)
        known = None if self.finds_itself else set[str]().union(*(r.captures() for r in self.roots))
        self._check = _wanted(rule.check, known)
        self._rewrite = _wanted(rule.rewrite, known)

    def check(self, match: Match) -> None:
        if match.problem:
            raise Refused(match.problem)
        if not self.finds_itself:
            self._default_checks(match)
        self.rule.check(match, **{name: match[name] for name in self._check})
        if self.rule.without_gradient and gradient_wanted(match.program):
            raise Refused("a gradient may be wanted, and would not be the same")

    def rewrite(self, op: Any, match: Match, accept: Callable[[Any], _Accepted]) -> _Accepted:
        """Build what stands there instead and hand it to `accept`, which raises Refused where it is not sound."""
        given = {name: match if name == "m" else match[name] for name in self._rewrite}
        return self._accepted(op, self.rule.rewrite(op, **given), accept)

    def _accepted(self, op: Any, made: Any, accept: Callable[[Any], _Accepted]) -> _Accepted:
        if not isinstance(made, FirstOf):
            return accept(made)
        refusals: list[Refused] = []
        for way in made.ways:
            try:
                return self._accepted(op, way(), accept)
            except Refused as refused:
                op.discard()
                refusals.append(refused)
        raise refusals[0 if made.first_reason else -1]

    def _default_checks(self, match: Match) -> None:
        rule = self.rule
        if not rule.interior_may_be_used and len(match.nodes) > 1:
            inside = set(match.nodes)
            outputs = {r.node for r in match.roots}
            for node in match.nodes:
                if node not in outputs and (user := next((u for u in node.users if u not in inside), None)):
                    raise Refused("{at} is used outside the pattern, by {found}", at=node, found=user)
        captured = [v for v in match.bindings.values() if isinstance(v, Node)]
        if len(captured) < 2:
            return
        tensors = [(node, t) for node in captured if (t := tensor_fact(node)) is not None]
        for (_, first), (node, other) in ((tensors[0], t) for t in tensors[1:]):
            if not rule.mixed_dtypes and other.dtype != first.dtype:
                sentence = "different dtypes {wanted} and {found}"
                raise Refused(sentence, at=node, wanted=first.dtype, found=other.dtype)
            if other.device != first.device and other.dim() != 0 and first.dim() != 0:
                sentence = "different devices {wanted} and {found}"
                raise Refused(sentence, at=node, wanted=first.device, found=other.device)


def _wanted(method: Callable[..., Any], known: set[str] | None) -> frozenset[str]:
    """The captures a method asks for by its parameters; a name nobody captures is a mistake found early.

    None: what sites bring with them is not known before they are found.
    """
    names = list(inspect.signature(method).parameters)[1:]
    for name in names:
        if known is not None and name not in known and name != "m":
            raise TriptychError(f"{method.__qualname__} asks for {name!r}, which the pattern does not capture")
    return frozenset(names)


_COMPILED: dict[Any, CompiledRule] = {}


def compiled(rule: Rule) -> CompiledRule:
    """The rule made ready; once for each class, or for each rule that carries values of its own."""
    key = rule if vars(rule) else type(rule)
    if key not in _COMPILED:
        _COMPILED[key] = CompiledRule(rule)
    return _COMPILED[key]
