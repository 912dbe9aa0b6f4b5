"""PyTorch's databases of operators and modules behind one interface: names, dtypes, samples."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from tests.models import Call

DATABASES = ("op_db", "module_db", "hop_db", "custom_op_db")

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize")
"""Operators whose values are whatever the memory held before."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator: what is called, with what."""

    function: Callable[..., Any]
    call: Call
    in_place: Callable[..., Any] | None = None
    """The variant that writes its first argument, if this call has one."""


@dataclass(frozen=True)
class Operator:
    """One entry of a database."""

    database: str
    name: str
    dtypes: frozenset[torch.dtype]
    entry: Any = field(repr=False, compare=False)

    @property
    def initialised(self) -> bool:
        return self.name.rstrip("_") not in UNINITIALISED

    def samples(self, dtype: torch.dtype, gradient: bool) -> list[Sample]:
        """The database's own samples, the same in every run."""
        with _seeded():
            if self.database == "module_db":
                return list(_module_samples(self.entry, dtype, gradient))
            wanted = gradient and bool(self.entry.supports_autograd)
            return [
                Sample(self.entry.op, _call(sample), self._in_place(sample, wanted))
                for sample in self.entry.sample_inputs("cpu", dtype, requires_grad=wanted)
            ]

    def _in_place(self, sample: Any, gradient: bool) -> Callable[..., Any] | None:
        if self.database != "op_db" or sample.broadcasts_input:
            return None  # elsewhere a method of the same name may be another thing: `map_`
        return self.entry.inplace_variant if self.entry.supports_inplace_autograd or not gradient else None

    def errors(self) -> list[Sample]:
        """Calls that eager refuses."""
        if self.database == "module_db" or self.entry.error_inputs_func is None:
            return []
        with _seeded():
            return [Sample(self.entry.op, _call(e.sample_input)) for e in self.entry.error_inputs("cpu")]


def operators(databases: tuple[str, ...] = DATABASES) -> list[Operator]:
    """All entries, in the order of the databases. Their modules are slow to import, so they are imported here."""
    return [operator for database in databases for operator in _ENTRIES[database]()]


def _op_db() -> Iterator[Operator]:
    from torch.testing._internal.common_methods_invocations import op_db

    yield from _op_infos("op_db", op_db)


def _hop_db() -> Iterator[Operator]:
    from torch.testing._internal.hop_db import hop_db

    yield from _op_infos("hop_db", hop_db)


def _custom_op_db() -> Iterator[Operator]:
    from torch.testing._internal.custom_op_db import custom_op_db

    yield from _op_infos("custom_op_db", custom_op_db)


def _op_infos(database: str, entries: list[Any]) -> Iterator[Operator]:
    for entry in entries:
        dtypes = frozenset(d for d in DTYPES.values() if d in entry.dtypes)
        yield Operator(database, entry.full_name, dtypes, entry)


def _module_db() -> Iterator[Operator]:
    from torch.testing._internal.common_modules import module_db

    for entry in module_db:
        yield Operator("module_db", entry.name, frozenset(d for d in DTYPES.values() if d in entry.dtypes), entry)


_ENTRIES = {"op_db": _op_db, "module_db": _module_db, "hop_db": _hop_db, "custom_op_db": _custom_op_db}


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _call(sample: Any) -> Call:
    return Call((sample.input, *sample.args), dict(sample.kwargs))


def _module_samples(entry: Any, dtype: torch.dtype, gradient: bool) -> Iterator[Sample]:
    for sample in entry.module_inputs_func(entry, "cpu", dtype, requires_grad=gradient, training=gradient):
        if sample.forward_input is None:
            continue
        torch.manual_seed(0)
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        module = entry.module_cls(*args, **kwargs).to(dtype if dtype.is_floating_point or dtype.is_complex else None)
        call = Call(tuple(sample.forward_input.args), dict(sample.forward_input.kwargs))
        if isinstance(module, LazyModuleMixin):  # it has no parameters before its first call
            with torch.no_grad():
                first = copied(call)
                module(*first.args, **first.kwargs)
        module.train(gradient).requires_grad_(gradient)
        yield Sample(module, call)


def copied(sample_part: Any) -> Any:
    """A deep copy that keeps strides and shared memory, and takes tensors that are no leaves of autograd too."""
    memo: dict[int, Any] = {}
    keep_alive: list[Any] = []

    def copy_one(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copy.deepcopy(value, memo)
        if isinstance(value, torch.Tensor):
            detached = value.detach()
            if value.layout != torch.strided:
                return detached.clone().requires_grad_(value.requires_grad)
            keep_alive.append(detached)
            return copy.deepcopy(detached, memo).requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            parts = [copy_one(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            return {k: copy_one(v) for k, v in value.items()}
        if isinstance(value, Call):
            return Call(copy_one(value.args), copy_one(value.kwargs))
        return value

    return copy_one(sample_part)
