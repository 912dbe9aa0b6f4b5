"""Numerical check of a pass: the outputs, written inputs and gradients of a graph before it and after it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _private
from ..errors import VerificationError
from ..ir.alias import Aliasing
from ..ir.facts import fact
from ..ir.graph_copies import copy_graph
from ..ir.modules import attribute
from ..ir.origins import given_tensor
from ..ir.program import ATEN, dialect_of
from ..ir.text import target_name
from .inputs import Given, Unsampled, hint, samples
from .running import Result, run_graph
from .tolerances import VERIFIED, beyond, largest, magnitude

LIMIT = 2**30
"""A graph whose values take more bytes than this is not run."""

FACTOR = 8.0
"""The rounding error allowed after a pass, as a multiple of the error before it (measured against float64)."""

ROUNDED_INTEGERS = 0.01
"""The fraction of integers that may differ if they come from floating-point numbers (an argmax, a mask): they flip
where two values are almost equal."""


@dataclass
class _Reference:
    """A run of the graph before the pass."""

    inputs: list[Any]
    how: dict[str, bool]
    result: Result
    exact: Result | None = None
    """The same run in float64, if every operation supports that."""
    note: str | None = None


class NumericCheck:
    """Runs a graph before and after a pass on the same inputs and compares the results."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], given: Given = given_tensor) -> None:
        self.gm, self.example_inputs, self.given = gm, example_inputs, given
        self.dialect = dialect_of(gm)
        self.differentiate = self.dialect != ATEN and torch.is_grad_enabled()
        self.rebase()

    def rebase(self) -> None:
        """From now on compare with the graph as it is now."""
        self.graph = copy_graph(self.gm)
        self.aliasing = Aliasing(self.graph)
        self._references: dict[bool, _Reference | str] = {}

    def check(self) -> str | None:
        """Compare the graph with the one before the pass; raises VerificationError.

        Returns a note on what could not be compared, or None.
        """
        with _private.without_dispatch_modes():  # AOTAutograd calls passes in a fake tensor mode
            return self._check()

    def _check(self) -> str | None:
        aliasing = Aliasing(self.gm.graph)
        if _draws(self.graph, self.aliasing) != _draws(self.gm.graph, aliasing):
            self.rebase()
            return "numbers were not compared: other random numbers are drawn"
        writes = _writes_inputs(self.graph, self.aliasing) or _writes_inputs(self.gm.graph, aliasing)
        reference = self._reference(writes)
        if isinstance(reference, str):
            return f"numbers were not compared: {reference}"
        try:
            after = run_graph(self.gm, self.gm.graph, reference.inputs, **reference.how)
        except torch.OutOfMemoryError as error:
            return f"numbers were not compared: {error}"
        except Exception as error:
            raise VerificationError(f"the graph runs no more: {type(error).__name__}: {error}") from error
        self._add_unread_attributes(reference.result, after)
        compare(reference.result, after, reference.exact, self._from_floats(), self._coarsest())
        if self.dialect != ATEN:  # later, some outputs are read by the backward only: any layout is allowed
            compare_strides(reference.result, after)
        return reference.note

    def _add_unread_attributes(self, before: Result, after: Result) -> None:
        """A constant that was folded is no longer read; it counts as unchanged."""
        for name in before.written.keys() - after.written.keys():
            kind, _, path = name.partition(" ")
            with contextlib.suppress(AttributeError):  # the module no longer has it
                if kind == "attribute" and isinstance(value := attribute(self.gm, path), torch.Tensor):
                    after.written[name] = value.detach()

    def _reference(self, writes: bool) -> _Reference | str:
        """The results of the graph before the pass, or the reason why it cannot be run."""
        if writes not in self._references:
            try:
                self._references[writes] = self._run_before(writes)
            except Unsampled as error:
                self._references[writes] = str(error)
            except Exception as error:
                self._references[writes] = f"the graph cannot be run on the inputs at hand: {_first_line(error)}"
        return self._references[writes]

    def _run_before(self, writes: bool) -> _Reference | str:
        if (size := _bytes(self.graph)) > LIMIT:
            return f"its values take {size / 2**30:.1f} GiB, more than is run for a check"
        if any(name in str(n.target) for n in self.graph.nodes for name in ("c10d", "symm_mem")):
            return "it talks to other processes"
        if any("resize_storage_bytes_" in str(n.target) for n in self.graph.nodes):
            return "it frees memory of its inputs"
        how = {"writes": writes, "gradients": self.differentiate, "autocast": self.dialect != ATEN}
        try:
            return self._sampled(how)
        except Unsampled:
            raise
        except Exception as error:
            if not self.differentiate:
                raise
            reference = self._sampled({**how, "gradients": False})
            reference.note = f"gradients were not compared: {_first_line(error)}"
            return reference

    def _sampled(self, how: dict[str, bool]) -> _Reference:
        """Run on random inputs; if that fails or gives mostly NaN, on cautious ones."""
        result = None
        with contextlib.suppress(Exception):
            inputs = samples(self.graph, self.example_inputs, self.given)
            result = run_graph(self.gm, self.graph, inputs, **how)
        if result is None or _mostly_undefined(result):
            inputs = samples(self.graph, self.example_inputs, self.given, cautious=True)
            result = run_graph(self.gm, self.graph, inputs, **how)
        reference = _Reference(inputs, how, result)
        with contextlib.suppress(Exception):  # some operations do not support float64
            reference.exact = run_graph(self.gm, self.graph, inputs, **how, wide=True)
        return reference

    def _from_floats(self) -> bool:
        """Does the graph compute with floating-point numbers?"""
        values = [fact(n) for n in self.graph.nodes]
        return any(v is None or (isinstance(v, torch.Tensor) and v.dtype.is_floating_point) for v in values)


    def _coarsest(self) -> torch.dtype | None:
        """The floating-point dtype with the fewest digits in the graph before the pass."""
        values = map(fact, self.graph.nodes)
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype in VERIFIED}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def compare(
    before: Result, after: Result, exact: Result | None = None, from_floats: bool = True,
    coarsest: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Raise VerificationError, naming what differs and by how much, unless both results are the same.

    `coarsest` is the floating-point dtype with the fewest digits in the graph before the pass: a float32 result that
    comes from bfloat16 values is no more exact than these.
    """
    if len(before.outputs) != len(after.outputs):
        raise VerificationError(f"{len(before.outputs)} outputs became {len(after.outputs)}")
    renamed = dict(zip(before.outputs, after.outputs))
    for kind in ("outputs", "written", "gradients"):
        was, now = getattr(before, kind), getattr(after, kind)
        truth = getattr(exact, kind) if exact is not None else {}
        scale = max(map(largest, was.values()), default=0.0)
        for name, want in was.items():
            got = now.get(renamed.get(name, name))
            problem = _difference(want, got, truth.get(name), scale, from_floats, coarsest)
            if problem:
                raise VerificationError(f"{name} {problem}")


def compare_strides(before: Result, after: Result) -> None:
    """Raise VerificationError if an output has other strides than before: the caller sees them."""
    for (name, want), got in zip(before.outputs.items(), after.outputs.values()):
        if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor) and _strides(want) != _strides(got):
            raise VerificationError(f"{name} has strides {got.stride()}, and had {want.stride()}")


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: those of dims with more than one element."""
    return [s for n, s in zip(tensor.shape, tensor.stride()) if n > 1] if tensor.numel() else []


def _difference(
    want: Any, got: Any, truth: Any, scale: float, from_floats: bool, coarsest: torch.dtype | None
) -> str | None:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        # a gradient of zeros differs from None: an optimizer decays a weight that has a gradient, and skips it if not
        if want is None and isinstance(got, torch.Tensor):
            return f"is there, {largest(got):.4g} at most, and was not"
        if got is None and isinstance(want, torch.Tensor):
            return f"is gone: it was {largest(want):.4g} at most"
        return None if _same_number(want, got) else f"is {got}, and was {want}"
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"is {got.dtype}{list(got.shape)}, and was {want.dtype}{list(want.shape)}"
    if not want.numel() or torch.equal(want, got):
        return None
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        off = int((want != got).sum())
        if from_floats and off <= max(1, ROUNDED_INTEGERS * want.numel()):
            return None
        return f"differs in {off} of {want.numel()} elements"
    return _float_difference(want, got, truth, scale, coarsest or want.dtype)


def _float_difference(
    want: torch.Tensor, got: torch.Tensor, truth: Any, scale: float, coarsest: torch.dtype
) -> str | None:
    allowed: Any = _allowed(want, truth, scale, coarsest)
    if allowed is None:
        truth, limits = want, VERIFIED.get(want.dtype, VERIFIED[torch.float32])
        allowed = limits.relative * magnitude(want).nan_to_num(0.0, 0.0)
        allowed = allowed + limits.scaled * largest(want) + limits.group * scale
    problem = beyond(want, got, allowed, truth)
    return f"differs: {problem}" if problem else None


def _allowed(want: torch.Tensor, truth: Any, scale: float, coarsest: torch.dtype) -> float | None:
    """The allowed error, from that of the graph before the pass; None where no float64 run shows that error."""
    if not isinstance(truth, torch.Tensor) or truth.shape != want.shape:
        return None
    if want.dtype in (torch.float64, torch.complex128):
        return None  # a run in float64 is the same run: it shows no error
    own = (want.to(truth.dtype) - truth).abs()
    own = own[want.isfinite() & truth.isfinite()]
    size = largest(truth)
    own_error = float(own.max()) if own.numel() else 0.0
    if own_error > max(_relative(want.dtype), _relative(coarsest)) * max(size, scale):
        return None  # the run in float64 diverged, and does not show the rounding error
    epsilon = torch.finfo(want.dtype).eps
    return FACTOR * own_error + 4 * epsilon * size + epsilon * scale


def _relative(dtype: torch.dtype) -> float:
    return VERIFIED.get(dtype, VERIFIED[torch.float32]).relative


def _same_number(want: Any, got: Any) -> bool:
    if not isinstance(want, (int, float)) or not isinstance(got, (int, float)):
        return (want is None) == (got is None)
    return math.isclose(want, got, rel_tol=1e-5) or (math.isnan(want) and math.isnan(got))


def _mostly_undefined(result: Result) -> bool:
    """Mostly NaN or infinite, as the logarithm of random negative inputs is: nothing could be compared."""
    floats = [v for _, _, v in result.values() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel()]
    return any(float(v.isfinite().double().mean()) < 0.5 for v in floats)


def _writes_inputs(graph: Graph, aliasing: Aliasing) -> bool:
    return any(n.op in ("placeholder", "get_attr") and aliasing.written(n) for n in graph.nodes)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _bytes(graph: Graph) -> int:
    """The total size of all values of the graph."""
    total = 0
    for node in graph.nodes:
        value = fact(node)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                total += math.prod(hint(s) for s in tensor.shape) * tensor.dtype.itemsize
    return total


def _draws(graph: Graph, aliasing: Aliasing) -> list[tuple[str, Any]]:
    """The random draws in order: graphs with equal lists draw the same numbers from one seed."""
    return [(target_name(n), _shape(n)) for n in graph.nodes if aliasing.effects(n).random]


def _shape(node: Node) -> Any:
    value = fact(node)
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else None
