"""Corrects the order of reads and writes in Inductor.

Values that are read before an operator writes the memory are computed before it. Inductor computes a pointwise value
where it is used, and decides that it must be computed earlier only when the operator that writes has its place already:
`x * 3`, used after a custom operator has written x, would be computed from the new x.

A node whose loop is computed again still waits for the writes it depends on. To fuse two nodes, the C++ backend
computes the loop of one again and reads from it which buffers the node needs. The loop does not say after which write
of a buffer its contents are read, nor that a write must wait for a reader. Torch 2.11 forgets both, 2.13 the first
(pytorch/pytorch#177631, #185509). The node may then run before a write whose result it reads: where random numbers are
drawn in place, it reads the memory before the draw.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from .. import _private

_CORRECTED = ContextVar("_CORRECTED", default=False)
"""Is the program that is being compiled one of ours? Others keep the scheduler that they have without us."""

METHOD = "recompute_size_and_body"


@contextlib.contextmanager
def keeping_write_order() -> Iterator[None]:
    """Within it, reads and writes of the same memory keep their order."""
    _install()
    token = _CORRECTED.set(True)
    try:
        yield
    finally:
        _CORRECTED.reset(token)


@functools.cache
def _install() -> None:
    recompute = vars(_private.SchedulerNode).get(METHOD)
    if recompute is not None:
        setattr(_private.SchedulerNode, METHOD, _with_order(recompute))
    kernel = _private.FallbackKernel
    kernel.create = classmethod(_after_reads(vars(kernel)["create"].__func__))


def _after_reads(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def corrected(cls: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if _CORRECTED.get() and isinstance(operator, _private.OpOverload):
            for written in _written(operator, args, kwargs):
                written.realize()
                _private.virtualized.graph.mark_buffer_mutated(written.get_name())
        return create(cls, operator, *args, **kwargs)

    return corrected


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The values that a call writes."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, _private.TensorBox):
                    yield one


def _with_order(recompute: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(recompute)
    def corrected(node: Any, *args: Any, **kwargs: Any) -> None:
        if not _CORRECTED.get():
            return recompute(node, *args, **kwargs)
        order = [need for need in node.read_writes.reads if isinstance(need, (_private.WeakDep, _private.StarDep))]
        recompute(node, *args, **kwargs)
        needs = node.read_writes
        for need in order:
            needs = needs.with_read(need)
        node.set_read_writes(needs.rename(node.mutation_renames))

    return corrected
