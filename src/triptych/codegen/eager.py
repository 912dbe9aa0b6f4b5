"""Code generation that leaves every operation to PyTorch itself: the optimised graph runs as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from .. import _private
from .base import Compiled, portable_decompositions
from .decompositions import Decompositions


class EagerCodegen:
    """Runs the optimised ATen graphs operation by operation."""

    settings: Mapping[str, Any] = {"fallback_random": True}
    reuses_saved_tensors = False

    def decompositions(self) -> Decompositions:
        return portable_decompositions()

    def emit(self, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Compiled:
        spell_out_complex_numbers(gm)
        gm.graph.set_codegen(_private.BoxedCodeGen())
        # generate the Python that runs it now rather than at the first call
        gm.recompile()
        _private.LazyGraphModule.force_recompile(gm)
        call = gm.forward

        def run(inputs: list[Any]) -> Any:
            return call(inputs)

        return boxed(run)


class CallableCodegen(EagerCodegen):
    """Hands the optimised ATen graphs to somebody else's compiler."""

    def __init__(self, compile_fn: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]) -> None:
        self.compile_fn = compile_fn

    def emit(self, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Compiled:
        spell_out_complex_numbers(gm)
        # a plain GraphModule: the lazy kind cannot be scripted or packaged
        plain = GraphModule(gm, gm.graph)
        plain.meta.update(gm.meta)
        compiled = self.compile_fn(plain, example_inputs)
        return compiled if getattr(compiled, "_boxed_call", False) else _private.make_boxed_func(compiled)


def spell_out_complex_numbers(gm: GraphModule) -> None:
    """Complex constants whose text is no Python, or that of another number, become calls of `complex`.

    The code of a graph contains constants as `repr` writes them: `(1+nanj)` is an undefined name, and `(-0+1j)` has
    lost the sign of its zero.
    """
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if not any(_unwritable(value) for value in _private.pytree.tree_leaves((node.args, node.kwargs))):
                continue
            with module.graph.inserting_before(node):
                node.args, node.kwargs = _private.pytree.tree_map(
                    lambda value, graph=module.graph: _call_of_complex(graph, value), (node.args, node.kwargs)
                )
            module.recompile()


def _unwritable(value: Any) -> bool:
    if not isinstance(value, complex):
        return False
    parts = (value.real, value.imag)
    return not all(map(math.isfinite, parts)) or any(part == 0 and math.copysign(1, part) < 0 for part in parts)


def _call_of_complex(graph: Graph, value: Any) -> Any:
    return graph.call_function(complex, (value.real, value.imag)) if _unwritable(value) else value


def boxed(function: Callable[[list[Any]], Any]) -> Compiled:
    """Mark a function of one list, which it empties, as AOTAutograd wants it marked."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
