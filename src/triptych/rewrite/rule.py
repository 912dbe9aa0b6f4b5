"""A rule: a formula, sites, a check, a rewrite, and examples of where it fires and where it declines.

    sites(program)  ->  check(site)  ->  rewrite(op, site)

`sites` says where the rule could fire: wherever its `pattern` matches, unless it is overridden. `check` refuses, or
asks the cost model. `rewrite` builds the replacement, which the rewriter installs if that is sound. The driver does
the rest for all rules: it counts, records refusals and decisions, enforces limits, and undoes failed rewrites.
"""

from __future__ import annotations

import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch.fx import Node

from ..arguments import what
from ..cost.decision import Decision, choose
from ..cost.work import Work
from ..errors import TriptychError
from ..ir.calls import Call
from ..ir.facts import tensor_fact
from ..ir.gradients import gradient_wanted
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..ir.text import line
from ..match.matcher import Matcher, PatternMatch
from ..match.pattern import Either, Operation, Pattern
from .emit import Emitter
from .refusal import Declined, NotConcerned, Refused
from .rule_checks import (
    captures_of,
    check_class,
    check_instance,
    not_given,
    pattern_of,
    require_captures,
    require_pattern,
    require_rewrite,
)

_Accepted = TypeVar("_Accepted")


class Match:
    """A site of a rule, as `check` and `rewrite` see it: a match of the pattern, or a result of the rule's analysis."""

    leftovers: tuple[Node, ...] = ()
    """Nodes that are not covered by the rewrite, but are erased after it if they have become dead."""
    decision: Decision | None = None
    asked_for: bool = False
    """The `asked_for` of the rule."""
    before: Node | None = None
    """The node before which new nodes are inserted; None means the last of the roots."""
    names: tuple[str, ...] | None = None
    """The names under which the rewrite is counted, once each; None means once, under the rule's own name. A rewrite
    with no names only changes the order and is not counted."""
    one_each: bool = False
    """Every root is a rewrite: a limit may stop after any of them, and reports name each. The edit counts them."""
    problem: str | Refusal | None = None
    """Why the site must be refused, if the analysis already knows that."""
    about: Node | None = None
    """The node that a report names for this site; None means the first of the roots."""
    emitter: type[Emitter] | Callable[[Program, Node, str], Emitter] = Emitter
    """Creates the emitter of the rewrite; set by a rule whose rewrites share nodes."""

    def __init__(self, program: Program, pattern_match: PatternMatch) -> None:
        self.program = program
        self.nodes = pattern_match.nodes
        """The nodes whose work the rewrite does; those that nobody uses any more are erased."""
        self.roots = tuple(Value(program, n) for n in pattern_match.roots)
        self.bindings = pattern_match.bindings
        """What the captures have bound, as it is in the graph; `m["x"]` gives it as a value with its facts."""
        self._values: dict[str, Any] = {}

    @staticmethod
    def at(
        program: Program,
        *roots: Node,
        covers: Iterable[Node] = (),
        before: Node | None = None,
        names: Sequence[str] | None = None,
        one_each: bool = False,
        problem: str | Refusal | None = None,
        about: Node | None = None,
        emitter: Callable[[Program, Node, str], Emitter] = Emitter,
        **found: Any,
    ) -> Match:
        """A site that `Rule.sites` has found: the values to replace, in order, and the results of the analysis by name.

        `check` and `rewrite` get those entries of `found` that they have as parameters. A site with a `problem` is
        refused for that reason, without calling `check`.
        """
        match = Match(program, PatternMatch(roots, found, tuple(dict.fromkeys((*roots, *covers)))))
        match.before, match.names, match.problem = before, None if names is None else tuple(names), problem
        match.about, match.emitter, match.one_each = about, emitter, one_each
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

    def firings(self, rule: str) -> list[tuple[str, Node]]:
        """What the rewrite counts as, for a rule of this name: names, each with the node that reports name."""
        if self.one_each:
            return [(rule, root.node) for root in self.roots]
        return [(name, self.node) for name in ((rule,) if self.names is None else self.names)]

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
        `found` are the compared values, of any type; `{at}`, `{wanted}` and `{found}` in the reason are replaced by the
        three. No text is formatted if the condition holds.
        """
        if not condition:
            raise Declined(reason, at=at, wanted=wanted, found=found)

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
        """A condition that the pattern cannot express ("to the same shape"); unless it holds, this is not a match."""
        if not condition:
            raise NotConcerned(reason, at=at, wanted=wanted, found=found)

    def pays(self, old: Work, new: Work) -> None:
        """Leave this site alone unless the new form is faster than the old one, by what is known of the work that a
        device does for each. Where the model of the device cannot tell, both are timed, if the option `tune` allows it.

        A rule that was added by name to get its form (`Rule.asked_for`) gets it in any case: the decision and both
        figures are only recorded.
        """
        for form in (old, new):
            if not isinstance(form, Work):
                raise TriptychError(f"m.pays takes two forms as triptych.cost.Work, not {what(form)}")
        self.accept(choose(old, new, self.program.options.tune, self.asked_for))

    def accept(self, decision: Decision) -> None:
        """Leave this site alone unless the decision says that the new form is faster."""
        self.decision = decision
        if not decision.pays:
            raise Declined(decision.refusal)

    def cover(self, nodes: Iterable[Node]) -> None:
        """Add nodes whose work the rewrite does: those that `check` has found beyond the pattern."""
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))

    def leave_behind(self, nodes: Iterable[Node]) -> None:
        """Erase these after the rewrite, if nobody uses them any more."""
        self.leftovers = tuple(nodes)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:  # created on demand: most matches fail at the first condition
            self._values[name] = _as_value(self.program, self.bindings.get(name))
        return self._values[name]


def _as_value(program: Program, raw: Any) -> Any:
    if isinstance(raw, Node):
        return Value(program, raw)
    if isinstance(raw, (list, tuple)):
        return type(raw)(_as_value(program, r) for r in raw) if type(raw) in (list, tuple) else tuple(raw)
    return raw


class FirstOf:
    """Returned by a rewrite that has several ways to write its result, best first: the first sound one is used.

    A way may itself return `FirstOf`. Where all are refused, the reason given is that of the last, or, with
    `first_reason`, of the first.
    """

    def __init__(self, *ways: Callable[[], Any], first_reason: bool = False) -> None:
        for way in ways:
            if not callable(way):
                raise TriptychError(f"FirstOf takes functions, as in FirstOf(lambda: x), not {what(way)}")
        self.ways, self.first_reason = ways, first_reason


class RuleType(ABCMeta):
    """Creates the rules: what is wrong with one of the user's is an error then, not while a graph is compiled."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        rule = super().__call__(*args, **kwargs)
        if rule.of_user:
            check_instance(rule, CompiledRule)
        return rule


class Rule(metaclass=RuleType):
    """Subclass this, with a docstring whose first paragraph is the formula.

    `pattern(self, op, x, ...)` names operations; `check(self, m, x, ...)` says what must hold with `m.require`;
    `rewrite(self, op, x, ...)` builds the replacement and returns it, or an `Edit`, or `FirstOf` several ways. A rule
    that no pattern can express overrides `sites` instead of `pattern`.
    """

    exact: ClassVar[bool] = True
    """The result is bit-identical; False where rounding may differ, and the formula says so."""
    interior_may_be_used: ClassVar[bool] = False
    """The rule fires even if an inner value of the pattern is also used elsewhere (the value then stays)."""
    mixed_dtypes: ClassVar[bool] = False
    """Captured tensors may be of several dtypes."""
    takes_random: ClassVar[bool] = False
    """The pattern covers random draws, and the rewrite keeps their meaning."""
    without_facts: ClassVar[bool] = False
    """Sound even where shapes and dtypes are unknown: the form of the rewrite preserves both."""
    without_gradient: ClassVar[bool] = False
    """The values stay the same but their gradient may change: the rule is refused where a gradient may be needed."""
    stages: ClassVar[tuple[str, ...]] = ("pre_grad", "joint")
    """The stages in which the rule runs if it is given in the option `add_rules`."""
    asked_for: ClassVar[bool] = False
    """Whoever adds the rule by name wants its form, even if it is slower: costs are only recorded."""
    only_explains: ClassVar[bool] = False
    """The rule rewrites nothing: where something looks like a site of the pass, it says why nothing can be done."""
    examples: ClassVar[list[Any]] = []
    of_user: ClassVar[bool] = True
    """The rule is the user's own, not one of this package."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.of_user = cls.__module__.partition(".")[0] != __name__.partition(".")[0]
        check_class(cls)

    @classmethod
    def require_complete(cls) -> None:
        """Raise an error unless the rule can be run. `find` and `why_not` look for a pattern without a rewrite too."""
        require_pattern(cls)
        require_rewrite(cls)

    @classmethod
    def rule_name(cls) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @property
    def name(self) -> str:
        return self.rule_name()

    def counts_as(self, name: str) -> bool:
        """Are rewrites of the rule counted under this name? A rule that sets `Match.names` overrides this."""
        return name == self.name

    @classmethod
    def formula(cls) -> str:
        """The first paragraph of the docstring, in one line."""
        return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())

    def sites(self, program: Program) -> Iterator[Match]:
        """Where the rule could fire, one site after the other. It only reads the graph.

        Each site is rewritten, if possible, before the next one is requested. A rule that overrides this sees the
        graph after that rewrite: it must not return nodes that are erased.
        """
        ready, matcher = compiled(self), Matcher(program)
        for node in list(program.graph.nodes):
            call = None if node._erased else program.call(node)
            if call is not None and (not ready.root_ops or call.op in ready.root_ops):
                yield from (Match(program, pattern_match) for pattern_match in matcher.find(ready.roots, node))

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        """A quick look at a call before the pattern is matched there, for rules over operations that every graph is
        full of. False only where `check` would say, by `m.applies`, that the rule does not apply."""
        return True

    if TYPE_CHECKING:  # the parameters are the captures of each rule
        pattern: Callable[..., Any]
        check: Callable[..., None]
        rewrite: Callable[..., Any]
    else:

        def pattern(self, op):
            raise TriptychError(f"{type(self).__name__} has no pattern")

        def check(self, m):
            """By default nothing is checked beyond the pattern."""

        def rewrite(self, op):
            raise TriptychError(f"{type(self).__name__} has no rewrite")


OperandNeeds = list[list[frozenset[str]]]


class CompiledRule:
    """A prepared rule: its pattern, the operations that its root can call, and the captures that its methods take."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name = rule.name
        self.finds_itself = type(rule).sites is not Rule.sites
        """The rule has no pattern: it overrides `sites`."""
        self.roots: tuple[Pattern, ...] = () if self.finds_itself else pattern_of(rule.pattern, self.name)
        self.root_ops = self.roots[0].root_ops() if self.roots else frozenset()
        self.looks_first = type(rule).concerns is not Rule.concerns
        self._needs = _operand_ops(self.roots[0]) if self.roots else None
        self.depth = max((r.depth() for r in self.roots), default=1)
        known = None if self.finds_itself else captures_of(self.roots)
        self._check = require_captures(rule.check, known)
        self._rewrite = require_captures(rule.rewrite, known)

    def operand_needs(self, op: str) -> OperandNeeds | None:
        """For each way in which the pattern can match a call of this operation: for each operand of which the pattern
        says what computes it, the operations that can. None if operands do not tell whether the pattern matches."""
        if self._needs is None:
            return None
        ways = [operands for root_ops, operands in self._needs if op in root_ops]
        return ways if all(ways) else None

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        try:
            return self.rule.concerns(program, node, call)
        except Exception:  # `check` fails in the same way, and is reported
            return True

    def check(self, match: Match) -> None:
        match.asked_for = self.rule.asked_for
        if match.problem:
            raise Refused(match.problem)
        if not self.finds_itself:
            self._default_checks(match)
        check: Callable[..., Any] = self.rule.check
        answer = check(match, **self._arguments(check, self._check, match))
        if self.rule.of_user and isinstance(answer, bool):
            hint = "a check declines by m.require(condition, reason)"
            raise TriptychError(f"{check.__qualname__} returned {answer}: {hint}")
        if self.rule.without_gradient and gradient_wanted(match.program):
            raise Refused("a gradient may be needed, and would not be the same")

    def rewrite(self, op: Any, match: Match, accept: Callable[[Any], _Accepted]) -> _Accepted:
        """Build the replacement and pass it to `accept`, which raises Refused where it is not sound."""
        arguments = self._arguments(self.rule.rewrite, self._rewrite, match)
        return self._accepted(op, self.rule.rewrite(op, **arguments), accept)

    def _arguments(self, method: Callable[..., Any], names: frozenset[str], match: Match) -> dict[str, Any]:
        if self.finds_itself and self.rule.of_user:
            for name in names - match.bindings.keys() - {"m"}:
                raise not_given(method, name, match.bindings, "the site does not give")
        return {name: match if name == "m" else match[name] for name in names}

    def _accepted(self, op: Any, result: Any, accept: Callable[[Any], _Accepted]) -> _Accepted:
        if not isinstance(result, FirstOf):
            return accept(result)
        refusals: list[Refused] = []
        for way in result.ways:
            try:
                return self._accepted(op, way(), accept)
            except Refused as refused:
                op.discard()
                refusals.append(refused)
        raise refusals[0 if result.first_reason else -1]

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


def _operand_ops(root: Pattern) -> list[tuple[frozenset[str], list[frozenset[str]]]] | None:
    """For each alternative of a pattern: the operations that its root can call, and, for each operand of which the
    pattern says what computes it, the operations that can. None if operands do not tell whether the pattern matches."""
    needs = []
    for option in root.options if isinstance(root, Either) else (root,):
        if not isinstance(option, Operation):
            return None
        needs.append((option.root_ops(), [ops for c in option.children() if (ops := c.root_ops())]))
    return needs if any(operands for _, operands in needs) else None


_COMPILED: dict[Any, CompiledRule] = {}


def compiled(rule: Rule) -> CompiledRule:
    """The prepared rule; it is prepared once per class, or once per instance if the instance has attributes."""
    key: Any = type(rule)
    if vars(rule):
        key = rule if type(rule).__hash__ is not None else id(rule)  # the prepared rule keeps it alive
    if key not in _COMPILED:
        _COMPILED[key] = CompiledRule(rule)
    return _COMPILED[key]
