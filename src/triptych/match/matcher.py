"""Matching: a pattern against the values of a program. A miss is a refusal that says how far the pattern got."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ..ir.calls import Call, op_parameters
from ..ir.facts import known_equal
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.schema import REQUIRED, same_constant
from ..ir.traits import is_commutative
from .pattern import READ_AS, CallOf, Capture, Constant, Each, Either, ListOf, Operation, Pattern, Such, Through
from .ranks import by_name, by_rank


@dataclass
class PatternMatch:
    """One way in which a pattern matches."""

    roots: tuple[Node, ...]
    bindings: dict[str, Any]
    nodes: tuple[Node, ...]
    """Every node the pattern covers, the root first."""


class _Missed:
    """The miss that matched most nodes; recorded only for `why_not`."""

    def __init__(self) -> None:
        self.best: Refusal | None = None
        self._furthest = -1

    def note(self, at: Node | None, matched: int, wanted: Any, found: Any) -> None:
        if matched > self._furthest:
            self._furthest = matched
            self.best = Refusal(at=at, wanted=wanted, found=str(found), matched=matched)


@dataclass
class Matcher:
    """Finds the ways a pattern matches at a node, trying alternatives and operand orders."""

    program: Program
    missed: _Missed | None = None
    _bindings: dict[str, Any] = field(default_factory=dict)
    _nodes: list[Node] = field(default_factory=list)
    _user: Node | None = None
    """The call whose arguments are being matched."""

    def find(self, roots: tuple[Pattern, ...], node: Node) -> Iterator[PatternMatch]:
        self._bindings, self._nodes = {}, []
        if isinstance(roots[0], CallOf) and len(roots) == 1:  # no alternatives to try: the rule checks the rest
            if self._is_call_of(roots[0], node):
                yield PatternMatch((node,), {}, (node,))
            return
        for _ in self._match(roots[0], node):
            for rest in self._other_roots(roots[1:], (node,)):
                yield PatternMatch(rest, dict(self._bindings), tuple(dict.fromkeys(self._nodes)))

    def why_not(self, roots: tuple[Pattern, ...], node: Node) -> Refusal | None:
        """Why the pattern does not match at this node; None if it does."""
        self.missed = _Missed()
        match = next(self.find(roots, node), None)
        best, self.missed = self.missed.best, None
        if match is not None:
            return None
        return best or Refusal(at=node, wanted=roots[0], found=node, matched=0)

    def _other_roots(self, patterns: tuple[Pattern, ...], done: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
        """Matches of the remaining roots. Each of them uses a value that is already bound or covered, so the candidates
        are the users of those values."""
        if not patterns:
            yield done
            return
        anchors = [v for v in (*self._bindings.values(), *self._nodes) if isinstance(v, Node)]
        candidates = dict.fromkeys(user for a in anchors for user in a.users)
        for candidate in candidates:
            if candidate in done:
                continue
            for _ in self._match(patterns[0], candidate):
                yield from self._other_roots(patterns[1:], (*done, candidate))

    def _miss(self, value: Any, wanted: Any, found: Any) -> None:
        if self.missed is not None:
            at = value if isinstance(value, Node) else self._user  # for a number, blame the call that takes it
            self.missed.note(at, len(self._nodes), wanted, found)

    def _match(self, pattern: Pattern, value: Any) -> Iterator[None]:
        """Yields once for each way to match; the bindings are valid until the caller advances the iterator."""
        return _BY_KIND[type(pattern)](self, pattern, value)

    def _match_constant(self, pattern: Constant, value: Any) -> Iterator[None]:
        if equal(pattern.value, value):
            yield
        else:
            self._miss(value, pattern, value)

    def _match_such(self, pattern: Such, value: Any) -> Iterator[None]:
        if pattern.restriction.holds(value):
            yield
        else:
            self._miss(value, pattern, value)

    def _match_either(self, pattern: Either, value: Any) -> Iterator[None]:
        call = self.program.call(value) if isinstance(value, Node) else None
        options = pattern.other_options if call is None else pattern.options_by_op.get(call.op, pattern.other_options)
        for option in pattern.options if self.missed is not None else options:
            yield from self._match(option, value)

    def _match_list(self, pattern: ListOf, value: Any) -> Iterator[None]:
        if isinstance(value, (list, tuple)) and len(value) == len(pattern.items):
            yield from self._match_all(list(zip(pattern.items, value)), self._user)
        else:
            self._miss(value, pattern, value)

    def _match_capture(self, capture: Capture, value: Any) -> Iterator[None]:
        name, restriction = capture.name, capture.restriction
        if name in self._bindings:
            if equal(self._bindings[name], value):
                yield
            else:
                self._miss(value, f"the same {name} again", value)
            return
        if restriction is not None and not restriction.holds(value):
            self._miss(value, f"{name} to be {restriction.words}", value)
            return
        self._bindings[name] = value
        yield
        del self._bindings[name]

    def _match_operation(self, pattern: Operation, value: Any) -> Iterator[None]:
        """Returns an empty iterator, without creating a generator, if the operation differs: most often it does."""
        call = self.program.call(value) if isinstance(value, Node) else None
        if call is not None and call.op in READ_AS.get(pattern.op, ()):
            pattern = by_name(pattern, call) or pattern
        if call is None or call.op != pattern.op or call.mutates:
            if self.missed is not None:
                self._miss(value, pattern.op, _what(value, call))
            return iter(())
        for extra in call.args:
            if extra not in pattern.args:
                self._miss(value, f"{pattern.op} without {extra}", f"{extra}={call.args[extra]}")
                return iter(())
        return self._match_arguments(pattern, call, value)

    def _match_call_of(self, pattern: CallOf, value: Any) -> Iterator[None]:
        if self._is_call_of(pattern, value):
            self._nodes.append(value)
            yield
            self._nodes.pop()

    def _is_call_of(self, pattern: CallOf, value: Any) -> bool:
        call = self.program.call(value) if isinstance(value, Node) else None
        wanted = call is not None and (not pattern.ops or call.op in pattern.ops)
        if call is None or not wanted or (call.mutates and not pattern.writes):
            self._miss(value, pattern, _what(value, call))
            return False
        return True

    def _match_arguments(self, pattern: Operation, call: Call, value: Node) -> Iterator[None]:
        self._nodes.append(value)
        for pairs in self._argument_orders(pattern, call, value):
            yield from self._match_all(pairs, value)
        self._nodes.pop()

    def _argument_orders(self, pattern: Operation, call: Call, node: Node) -> Iterator[list[tuple[Pattern, Any]]]:
        pairs = []
        for name, wanted in pattern.args.items():
            if name not in call.args and op_parameters(call.op).get(name, REQUIRED) is REQUIRED:
                self._miss(node, f"{call.op} with {name}", "none")
                return
            pairs.append((by_rank(name, wanted, call), call.get(name)))
        yield pairs
        scaled = call.args.keys() - {"self", "other"}  # `add(a, b, alpha=3)` is not `add(b, a, alpha=3)`
        if is_commutative(call.op) and not scaled and "self" in pattern.args and "other" in pattern.args:
            swapped = {"self": call.get("other"), "other": call.get("self")}
            yield [(wanted, swapped.get(name, call.get(name))) for name, wanted in pattern.args.items()]

    def _match_all(self, pairs: list[tuple[Pattern, Any]], user: Node | None) -> Iterator[None]:
        if not pairs:
            yield
            return
        pattern, value = pairs[0]
        self._user = user
        for _ in self._match(pattern, value):
            yield from self._match_all(pairs[1:], user)

    def _match_through(self, pattern: Through, value: Any, steps: tuple[Node, ...] = ()) -> Iterator[None]:
        call = self.program.call(value) if isinstance(value, Node) else None
        if call is not None and call.op in pattern.ops and not call.mutates:
            operand = call.args.get("self", call.args.get("input"))
            self._nodes.append(value)
            yield from self._match_through(pattern, operand, (*steps, value))
            self._nodes.pop()
        if pattern.steps:
            self._bindings[pattern.steps] = steps
        yield from self._match(pattern.inner, value)
        if pattern.steps:
            self._bindings.pop(pattern.steps, None)

    def _match_each(self, pattern: Each, value: Any) -> Iterator[None]:
        if not isinstance(value, (list, tuple)):
            self._miss(value, pattern, value)
            return
        outer, covered = dict(self._bindings), len(self._nodes)
        collected: dict[str, list[Any]] = {n: [] for n in pattern.element.captures() - pattern.same - set(outer)}
        for item in value:
            attempt = self._one(pattern.element, item)
            if next(attempt, self) is self:
                self._restore(outer, covered)
                return
            bound, nodes = dict(self._bindings), list(self._nodes)
            attempt.close()
            for name, values in collected.items():
                values.append(bound.pop(name, None))
            self._bindings, self._nodes = bound, nodes
        self._bindings.update({name: tuple(values) for name, values in collected.items()})
        yield
        self._restore(outer, covered)

    def _one(self, pattern: Pattern, value: Any) -> Generator[None, None, None]:
        yield from self._match(pattern, value)

    def _restore(self, bindings: dict[str, Any], covered: int) -> None:
        self._bindings = bindings
        del self._nodes[covered:]


_BY_KIND: dict[type[Pattern], Callable[..., Iterator[None]]] = {
    Operation: Matcher._match_operation,
    CallOf: Matcher._match_call_of,
    Capture: Matcher._match_capture,
    Constant: Matcher._match_constant,
    Such: Matcher._match_such,
    Either: Matcher._match_either,
    Through: Matcher._match_through,
    ListOf: Matcher._match_list,
    Each: Matcher._match_each,
}


def equal(left: Any, right: Any) -> bool:
    """The same argument: the same node, or numbers that are provably equal."""
    if isinstance(left, Node) or isinstance(right, Node):
        return left is right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right))
    if same_constant(left, right):
        return True
    return hasattr(left, "node") and known_equal(left, right)


def _what(value: Any, call: Call | None) -> str:
    if call is not None:
        return call.op
    return f"{value.op} {value.name}" if isinstance(value, Node) else str(value)
