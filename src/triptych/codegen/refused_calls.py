"""Calls that eager refuses, such as `ceil` of booleans, or `clamp` with a bound that the dtype cannot represent.

Fake tensors take them, and so do many decompositions and kernels: a program that raises in eager would return
something. Whether eager refuses a call depends on the operator, the dtypes, the device and the numbers it is given, so
it is asked once for each of these, with operands of a few elements. A refused call is left whole, and its graph is run
operation by operation: it raises what it raises in eager.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _private
from ..ir.facts import known
from ..passes.session import Session
from .decompositions import Decomposition, Decompositions

DEVICES = ("cpu", "cuda")
FEW, TWO = 4, 2
"""A made-up operand has at most this many elements along each dim. One would be too few: eager fills a tensor of one
element with infinity where it refuses to fill a larger one."""

ABOUT_DTYPES = (
    "not implemented for",
    "cannot be converted to type",
    "expected scalar type",
    "same dtype",
    "dtypes must be the same",
)
"""What errors about dtypes say; other errors may come from sizes that are not those of the program."""

VALUES_MATTER = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
"""Operators with such a tag draw random numbers, or what they return depends on more than sizes and dtypes."""

PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device)

_answers: dict[Any, bool] = {}


class RefusedCalls:
    """Watches the operators of one program as AOTAutograd traces it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.found = False
        self._inside = 0

    def left_whole(self, table: Decompositions, with_kernels: Iterable[Any]) -> Decompositions:
        """The decompositions, wrapped so that they leave calls that eager refuses whole. Operators that the code
        generator has kernels for are watched, too; it calls ATen for all others."""
        watched = [overload for overload in with_kernels if _is_asked_about(overload)]
        everything = {**dict.fromkeys(watched), **table}
        return {overload: functools.partial(self._decompose, overload, how) for overload, how in everything.items()}

    def _decompose(self, overload: Any, how: Decomposition | None, *args: Any, **kwargs: Any) -> Any:
        # what a decomposition calls is not what eager would call
        if not self._inside and refused_by_eager(overload, args, kwargs):
            self.found = self.session.passes_off = True  # passes would fold or drop the call that must raise
            return NotImplemented
        if how is None:
            return NotImplemented
        self._inside += 1
        try:
            return how(*args, **kwargs)
        finally:
            self._inside -= 1


@functools.cache
def _is_asked_about(overload: Any) -> bool:
    """Can eager be asked with made-up operands? Not if the call draws numbers, or if their values decide a size."""
    if not isinstance(overload, _private.OpOverload):
        return False
    schema = overload._schema
    if overload.namespace != "aten" or schema.is_mutable or overload.is_view or VALUES_MATTER & set(overload.tags):
        return False
    returns = schema.returns
    if not returns or any(str(result.type) != "Tensor" for result in returns):
        return False
    if _any_error_counts(overload) or overload in _listed():
        return True
    # the types are written as text last: that takes longest, and every operator with a kernel is asked about
    return sum("Tensor" in str(argument.type) for argument in schema.arguments) == 1


@functools.cache
def _factories() -> tuple[Any, ...]:
    """Operators without operands that are given a number."""
    return torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default


@functools.cache
def _products() -> tuple[Any, ...]:
    """Matrix products: their operands still fit when every size is cut to the same maximum."""
    aten = torch.ops.aten
    matrices = aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default
    return *matrices, aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default


@functools.cache
def _listed() -> frozenset[Any]:
    return frozenset((*_factories(), *_products()))


def _place_of_size(overload: Any) -> int | None:
    """Which argument of `full` and `new_full` is a size: asking with the program's size would allocate it."""
    return {torch.ops.aten.full.default: 0, torch.ops.aten.new_full.default: 1}.get(overload)


def _is_pointwise(overload: Any) -> bool:
    return torch.Tag.pointwise in overload.tags


def _any_error_counts(overload: Any) -> bool:
    """Does any error count? Smaller operands still broadcast to each other, so it does not come from their sizes."""
    return _is_pointwise(overload) or overload._schema.name.endswith("_loss")


def refused_by_eager(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does the operator itself raise, whatever values its operands have?"""
    if not _is_asked_about(overload):
        return False
    most = TWO if _any_error_counts(overload) else FEW
    if (place := _place_of_size(overload)) is not None and place < len(args):
        small = [_made_up_size(size, most) for size in args[place]]
        args = (*args[:place], small, *args[place + 1 :])
    leaves, spec = _private.pytree.tree_flatten((args, kwargs))
    if not all(map(_can_be_made_up, leaves)):
        return False
    takes_numbers = _is_pointwise(overload) or overload in _products()
    if not takes_numbers and any(map(_may_be_indices_on_a_gpu, leaves)):
        return False
    leaves = [MadeUp.like(leaf, most) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    key = (overload, spec, tuple((type(leaf), repr(leaf)) for leaf in leaves))
    if key not in _answers:
        _answers[key] = _raises(overload, spec, leaves)
    return _answers[key]


def _can_be_made_up(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return leaf is None or isinstance(leaf, PLAIN)
    if leaf.device.type not in DEVICES or (leaf.device.type == "cuda" and not torch.cuda.is_available()):
        return False
    # on empty tensors eager refuses nothing
    return leaf.layout is torch.strided and not any(known(size == 0) for size in leaf.shape)


def _may_be_indices_on_a_gpu(leaf: Any) -> bool:
    """Could it be indices on a GPU? An invalid index raises on a CPU; on a GPU it ends all work on that GPU."""
    on_gpu = isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"
    return on_gpu and not (leaf.is_floating_point() or leaf.is_complex())


def _made_up_size(size: Any, most: int) -> int:
    return min(size, most) if isinstance(size, int) else most


@dataclass(frozen=True)
class MadeUp:
    """An operand with few elements, all of them 1: a valid index, a divisor that is not 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, x: torch.Tensor, most: int) -> MadeUp:
        return cls(tuple(_made_up_size(size, most) for size in x.shape), x.dtype, x.device)

    def tensor(self) -> torch.Tensor:
        return torch.ones(self.shape, dtype=self.dtype, device=self.device)


def _raises(overload: Any, spec: Any, leaves: list[Any]) -> bool:
    with _private.without_dispatch_modes(), _private.without_autocast(), torch.no_grad():
        try:
            leaves = [leaf.tensor() if isinstance(leaf, MadeUp) else leaf for leaf in leaves]
        except RuntimeError:  # `torch.ones` does not support this dtype
            return False
        args, kwargs = _private.pytree.tree_unflatten(leaves, spec)
        try:
            overload(*args, **kwargs)
        except Exception as error:
            return _any_error_counts(overload) or any(words in str(error) for words in ABOUT_DTYPES)
    return False
