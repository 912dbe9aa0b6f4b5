"""The names of operations that a rule can use: `op.reshape` in a pattern, whatever spelling the program has.

An operation has the name that ATen gives it. Of several spellings of one operation (`view`, `reshape`, `flatten`) one
stands for all, and a pattern cannot use the others: `canonical.py` converts calls of them before anything is matched.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _private
from ..errors import TriptychError, UnknownName
from .calls import op_parameters
from .canonical import CANONICAL, SPELLING_OF
from .operations import OPERATIONS, operation
from .schema import REQUIRED
from .traits import traits


@dataclass(frozen=True)
class OperationInfo:
    """An operation as a rule names it."""

    name: str
    parameters: Mapping[str, Any]
    """In order, each with its default; `REQUIRED` if it has none."""
    spellings: tuple[str, ...] = ()
    """Other names under which programs call it."""
    traits: tuple[str, ...] = ()
    """What rules may rely on, such as "commutative" and "view"."""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(_shown(*item) for item in self.parameters.items())})"


def _shown(name: str, default: Any) -> str:
    return name if default is REQUIRED else f"{name}={default}"


def is_operation(name: str) -> bool:
    """Can a pattern name it? A name that is always read as another one would never match."""
    return bool(op_parameters(name)) and (name not in CANONICAL or bool(operation(name).parameters))


@functools.cache
def operation_names() -> tuple[str, ...]:
    """Every name that a pattern can use. In-place forms (`add_`) and ATen's internals (`_softmax`) are left out."""
    aten = {name for name in _private.aten_names() if not name.startswith("_") and not name.endswith("_")}
    own = {name for name, row in OPERATIONS.items() if row.parameters}
    return tuple(sorted(name for name in aten | own if is_operation(name)))


def list_operations(name: str | None = None) -> list[OperationInfo]:
    """All operations that rules can name; with `name`, only the operation of that name or of that spelling."""
    if name is not None:
        name = str(name)
        op = name if is_operation(name) else SPELLING_OF.get(name, name)
        if not is_operation(op):
            raise unknown_operation(op)
        return [_info(op)]
    return [_info(op) for op in operation_names()]


def _info(name: str) -> OperationInfo:
    # `getattr` stands for `x.T`, which has a row of its own
    spellings = sorted(one for one, op in SPELLING_OF.items() if op == name and one not in (name, "getattr"))
    all_traits = {*traits(name), *operation(name).traits.split()}
    return OperationInfo(name, op_parameters(name), tuple(spellings), tuple(sorted(all_traits)))


def require_count(name: str, args: Sequence[Any], parameters: Sequence[str]) -> None:
    """Raise an error if a call of an operation has more positional arguments than it takes."""
    if len(args) > len(parameters):
        raise TriptychError(f"{name} takes {', '.join(parameters)}; {len(args)} arguments were given by position")


def unknown_operation(name: str) -> UnknownName:
    """The error for a name that no pattern can use; it says what to write instead."""
    op = SPELLING_OF.get(name)
    if op is not None and is_operation(op) and op != name:
        hint = f"it is read as '{op}', which stands for all its spellings: write op.{_info(op)}"
        return UnknownName("operation", name, [op], hint=hint)
    return UnknownName("operation", name, operation_names())
