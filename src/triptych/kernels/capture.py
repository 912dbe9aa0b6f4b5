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

LAUNCHES_KERNELS = ("launch_triton_kernels", "launched_kernel")
"""The pass that lets generated code launch kernels, and its rule: either can be removed by name."""


def is_launched(options: Options, operands: Iterable[torch.Tensor]) -> bool:
    """Will generated code launch the kernel of an operator with these operands, without calling the operator?"""
    removed = not set(LAUNCHES_KERNELS).isdisjoint(options.remove_passes)
    return options.codegen == "inductor" and not removed and has_known_grid(operands)


def has_known_grid(operands: Iterable[torch.Tensor]) -> bool:
    """A grid is given in numbers, so all sizes and strides must be numbers."""
    return all(is_static((*t.shape, *t.stride())) for t in operands)


@contextmanager
def capturing() -> Iterator[None]:
    """While `make_fx` traces the CUDA form of an operator, its launches become nodes of the graph; nothing runs."""
    before = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(before)


def is_capturing() -> bool:
    return _capturing.get()


def capture(kernel: Any, grids: Sequence[tuple[int, ...]], arguments: Mapping[str, Any]) -> None:
    """Add the node of a launch to the graph; a kernel with several configurations has a grid for each."""
    _private.triton_kernel_wrapper_mutation(
        kernel_idx=_private.kernel_side_table.add_kernel(kernel), constant_args_idx=no_constants(),
        grid=[(*grid, 1, 1)[:3] for grid in grids], tma_descriptor_metadata={}, kwargs=dict(arguments),
    )  # fmt: skip


def no_constants() -> int:
    """The entry for no constants. `torch._dynamo.reset` empties the table, so the number is looked up every time."""
    table = _private.kernel_side_table
    entries = (index for index, constants in table.constant_args.items() if not constants)
    index = next(entries, None)
    return table.add_constant_args({}) if index is None else index
