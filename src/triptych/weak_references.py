"""Dropping the weak references to the user's tensors that a compile leaves behind.

Fake values remember which tensor they stand for, and live on with the graphs and closures of a compiled program.
`torch.utils.swap_tensors`, and with it `load_state_dict` of a model whose parameters are swapped, refuses a tensor that
anybody has a weak reference to. Dynamo drops them itself, but only for backends that are given by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import GraphModule

from . import _private
from .ir.facts import fact

_left_over: list[tuple[Any, list[Any]]] = []
"""Tracing contexts and fake modes of programs that Dynamo is still busy with."""


@contextlib.contextmanager
def dropping_references(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Compile inside; afterwards nothing refers to the tensors that the program was captured with.

    Within Dynamo, references are dropped once the whole frame is compiled: until then, its guards and other parts of
    the same graph ask which fake value a tensor has. Elsewhere, fake modes that existed before belong to the caller and
    are left alone.
    """
    given = _modes_of([*(fact(n) for n in gm.graph.find_nodes(op="placeholder")), *example_inputs])
    context = _private.TracingContext.try_get()
    try:
        yield
    finally:
        facts = [fact(n) for n in gm.graph.nodes]
        if context is not None and _private.CompileContext.try_get() is not None:
            _left_over.append((context, _modes_of([*facts, *example_inputs, context])))
            callbacks = _private.compile_callbacks
            if _drop not in callbacks.end_callbacks:
                callbacks.register_end_callback(_drop)
        else:
            for mode in _modes_of(facts):
                if not any(mode is other for other in given):
                    _private.forget_tensors(mode)


def _modes_of(values: Sequence[Any]) -> list[Any]:
    """The fake modes of fake values, and those that a tracing context has."""
    leaves = _private.pytree.tree_leaves(list(values))
    modes = {id(mode): mode for v in leaves if (mode := getattr(v, "fake_mode", None)) is not None}
    return list(modes.values())


def _drop(*_: Any) -> None:
    while _left_over:
        context, modes = _left_over.pop()
        context.tensor_to_context.clear()
        for mode in modes:
            _private.forget_tensors(mode)
