"""Launches of Triton kernels as nodes of a graph, from which generated code launches them without Python operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .. import _private
from ..ir.facts import is_static
from ..options import Options

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def is_launched(options: Options, tensors: Iterable[torch.Tensor]) -> bool:
    """Does `launch_triton_kernels` work on an operator of these? A grid is a number, so all sizes must be known."""
    return options.codegen == "inductor" and all(is_static((*t.shape, *t.stride())) for t in tensors)


@contextmanager
def capturing() -> Iterator[None]:
    """While `make_fx` traces the CUDA form of an operator: its launches are written down, not made."""
    before = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(before)


def is_capturing() -> bool:
    return _capturing.get()


def capture(kernel: Any, grids: Sequence[tuple[int, ...]], arguments: Mapping[str, Any]) -> None:
    """Write down a launch; a kernel with several configurations has a grid for each."""
    _private.triton_kernel_wrapper_mutation(
        kernel_idx=_private.kernel_side_table.add_kernel(kernel), constant_args_idx=no_constants(),
        grid=[(*grid, 1, 1)[:3] for grid in grids], tma_descriptor_metadata={}, kwargs=dict(arguments),
    )  # fmt: skip


def no_constants() -> int:
    """The entry for no constants. `torch._dynamo.reset` empties the table, so the number is never kept."""
    table = _private.kernel_side_table
    known = (index for index, constants in table.constant_args.items() if not constants)
    found = next(known, None)
    return table.add_constant_args({}) if found is None else found
