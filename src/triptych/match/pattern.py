"""The pattern language: operations by name, whatever their spelling in the graph.

    def pattern(self, op, x, a, b):
        return op.to(op.to(x, dtype=a), dtype=b)

Parameters after `op` are captures: they bind whatever value is at that position, and a capture that is used twice must
bind the same value both times. Annotate a capture (`x: Tensor`, `n: Int`, `c: Is("zero", is_zero)`) to restrict the
values that it can bind.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch.fx import Node

from ..errors import TriptychError, UnknownName
from ..ir.calls import op_parameters
from ..ir.canonical import SPELLING_OF
from ..ir.facts import fact, tensor_fact
from ..ir.operation_names import is_operation, require_count, unknown_operation


@dataclass(frozen=True)
class Is:
    """A restriction on a capture: a predicate with words for the report."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Number, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    if isinstance(value, Node):
        return isinstance(fact(value), (int, torch.SymInt))
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and (fact(value) is None or tensor_fact(value) is not None)


def _is_ints(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_int(i) for i in value)


Tensor = Annotated[Any, Is("a tensor", _is_tensor)]
Number = Annotated[Any, Is("a number", _is_number)]
Int = Annotated[Any, Is("an integer", _is_int)]
Ints = Annotated[Any, Is("a list of integers", _is_ints)]
Bool = Annotated[Any, Is("true or false", lambda v: isinstance(v, bool))]
Dtype = Annotated[Any, Is("a dtype", lambda v: isinstance(v, torch.dtype))]

PLAIN_TYPES = {int: Int, float: Number, bool: Bool, torch.Tensor: Tensor, torch.dtype: Dtype}


def restriction(note: Any) -> Is | None:
    """The restriction an annotation stands for: `Tensor`, `int`, or an `Is` written in place."""
    note = PLAIN_TYPES.get(note, note) if isinstance(note, type) else note
    restrictions = [m for m in getattr(note, "__metadata__", (note,)) if isinstance(m, Is)]
    return restrictions[0] if restrictions else None


class Pattern:
    """Something a value of the graph can match."""

    def __or__(self, other: Pattern) -> Pattern:
        return Either((self, other))

    def __getitem__(self, index: Any) -> Pattern:
        return Operation("getitem", {"self": self, "index": as_pattern(index)})

    def children(self) -> Iterator[Pattern]:
        return iter(())

    def root_ops(self) -> frozenset[str]:
        """The operations that the root of a match can call; empty means any."""
        return frozenset()

    def depth(self) -> int:
        return 1 + max((c.depth() for c in self.children()), default=0)

    def captures(self) -> set[str]:
        return set().union(*(c.captures() for c in self.children()))


@dataclass(frozen=True, eq=False)
class Capture(Pattern):
    name: str
    restriction: Is | None = None

    def captures(self) -> set[str]:
        return {self.name}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Constant(Pattern):
    """One particular value."""

    value: Any

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, eq=False)
class Such(Pattern):
    """A value that satisfies a predicate."""

    restriction: Is

    def __str__(self) -> str:
        return self.restriction.words


@dataclass(frozen=True, eq=False)
class Operation(Pattern):
    op: str
    args: dict[str, Pattern]

    def children(self) -> Iterator[Pattern]:
        return iter(self.args.values())

    def root_ops(self) -> frozenset[str]:
        return frozenset((self.op, *READ_AS.get(self.op, ())))

    def __str__(self) -> str:
        return f"{self.op}(...)"


READ_AS = {"transpose": ("permute",), "getitem": ("select",)}
"""Operations that are read under another name where ranks are known; a pattern can use them without a known rank."""


@dataclass(frozen=True, eq=False)
class CallOf(Pattern):
    """Any call of some operations, whatever its arguments."""

    ops: frozenset[str]
    """The names of the operations; empty means any operation."""
    writes: bool = False
    """Whether calls that write in place match too."""

    def root_ops(self) -> frozenset[str]:
        return self.ops

    def __str__(self) -> str:
        return " or ".join(sorted(self.ops)) or "any operation"


@dataclass(frozen=True, eq=False)
class Either(Pattern):
    """Several alternatives, tried in order."""

    options: tuple[Pattern, ...]

    def children(self) -> Iterator[Pattern]:
        return iter(self.options)

    @functools.cached_property
    def options_by_op(self) -> dict[str, tuple[Pattern, ...]]:
        """For each operation that the root of an option names: the options that a call of it can match."""
        roots = [(option, option.root_ops()) for option in self.options]
        return {op: tuple(o for o, ops in roots if not ops or op in ops) for _, named in roots for op in named}

    @functools.cached_property
    def other_options(self) -> tuple[Pattern, ...]:
        """The options that anything else than a call of those operations can match."""
        return tuple(option for option in self.options if not option.root_ops())

    def root_ops(self) -> frozenset[str]:
        roots = [o.root_ops() for o in self.options]
        return frozenset().union(*roots) if all(roots) else frozenset()

    def __str__(self) -> str:
        return " or ".join(str(o) for o in self.options)


@dataclass(frozen=True, eq=False)
class Through(Pattern):
    """`inner`, followed by any number of operations out of `ops` on its result."""

    ops: frozenset[str]
    inner: Pattern
    steps: str | None = None
    """The name of a capture for the nodes of those operations, outermost first."""

    def children(self) -> Iterator[Pattern]:
        return iter((self.inner,))

    def captures(self) -> set[str]:
        return self.inner.captures() | ({self.steps} if self.steps else set())

    def root_ops(self) -> frozenset[str]:
        inner = self.inner.root_ops()
        return self.ops | inner if inner else frozenset()

    def __str__(self) -> str:
        return str(self.inner)


@dataclass(frozen=True, eq=False)
class ListOf(Pattern):
    """A list of fixed length."""

    items: tuple[Pattern, ...]

    def children(self) -> Iterator[Pattern]:
        return iter(self.items)

    def __str__(self) -> str:
        return f"a list of {len(self.items)}"


@dataclass(frozen=True, eq=False)
class Each(Pattern):
    """Every element of a list; each capture in `element` binds a tuple with one entry per element."""

    element: Pattern
    same: frozenset[str] = field(default_factory=frozenset)
    """Captures that must bind the same value for all elements."""

    def children(self) -> Iterator[Pattern]:
        return iter((self.element,))

    def __str__(self) -> str:
        return f"a list of {self.element}"


def as_pattern(value: Any) -> Pattern:
    if isinstance(value, Pattern):
        return value
    if (wanted := restriction(value)) is not None:
        return Such(wanted)
    if isinstance(value, (list, tuple)):
        return ListOf(tuple(as_pattern(v) for v in value))
    return Constant(value)


class PatternBuilder:
    """`op` in a pattern: calling an operation by name builds a pattern for it."""

    def __getattr__(self, name: str) -> Callable[..., Pattern]:
        params = op_parameters(name)
        if not is_operation(name):
            raise unknown_operation(name)

        def build(*args: Any, **kwargs: Any) -> Pattern:
            names = list(params)
            require_count(name, args, names)
            bound = dict(zip(names, args))
            for key, value in kwargs.items():
                if key not in params:
                    raise UnknownName(f"parameter of {name}", key, names)
                bound[key] = value
            return Operation(name, {k: as_pattern(v) for k, v in bound.items()})

        return build

    def call_of(self, *ops: str, writes: bool = False) -> Pattern:
        """Any call of these operations, or of any if none is named: `check` reads the arguments in `m.root.call`."""
        for name in ops:
            if name in SPELLING_OF and not is_operation(name) and not writes:
                raise unknown_operation(name)
        return CallOf(frozenset(ops), writes)

    def any_of(self, *options: Any) -> Pattern:
        return Either(tuple(as_pattern(o) for o in options))

    def one_of(self, ops: Sequence[str], *args: Any, **kwargs: Any) -> Pattern:
        """Any of several operations over the same arguments."""
        return Either(tuple(getattr(self, name)(*args, **kwargs) for name in ops))

    def optional(self, op: str, x: Any, *args: Any, **kwargs: Any) -> Pattern:
        """An operation that may be absent; its captures are None then."""
        inner = as_pattern(x)
        return Either((getattr(self, op)(inner, *args, **kwargs), inner))

    def through(self, ops: Sequence[str], x: Any, steps: str | None = None) -> Pattern:
        for name in ops:
            if not is_operation(name):
                raise unknown_operation(name)
        return Through(frozenset(ops), as_pattern(x), steps)

    def each(self, element: Any, same: Sequence[str] = ()) -> Pattern:
        return Each(as_pattern(element), frozenset(same))

    def such(self, words: str, holds: Callable[[Any], bool]) -> Pattern:
        return Such(Is(words, holds))


def build_pattern(method: Callable[..., Any]) -> tuple[Pattern, ...]:
    """Call a rule's `pattern` with captures for its parameters; one pattern for each root."""
    signature = inspect.signature(method, eval_str=True)
    arguments: list[Any] = []
    for i, (name, param) in enumerate(signature.parameters.items()):
        if i == 0:
            arguments.append(PatternBuilder())
            continue
        if param.annotation is param.empty:
            arguments.append(Capture(name))
            continue
        wanted = restriction(param.annotation)
        if wanted is None:
            raise TriptychError(f"{method.__qualname__}: cannot restrict {name!r} to {param.annotation!r}")
        arguments.append(Capture(name, wanted))
    result = method(*arguments)
    roots = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(r, Pattern) for r in roots):
        raise TriptychError(f"{method.__qualname__} must return a pattern built with `op`")
    return roots
