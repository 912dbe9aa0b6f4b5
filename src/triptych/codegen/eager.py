"""Code generation that leaves every operation to PyTorch itself: the optimised graph runs as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from .. import _private
from ..errors import TriptychError
from ..passes.custom_passes import name_of
from ..passes.session import Session
from .base import Compiled, portable_decompositions
from .decompositions import Decompositions


class EagerCodegen:
    """Runs the optimised ATen graphs operation by operation."""

    settings: Mapping[str, Any] = {"fallback_random": True}
    reuses_saved_tensors = False
    session: Session | None = None

    def __init__(self, session: Session | None = None) -> None:
        self.session = session

    def decompositions(self) -> Decompositions:
        return portable_decompositions()

    def operators_with_kernels(self) -> Iterable[Any]:
        return ()

    def emit(self, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Compiled:
        gm.graph.set_codegen(_private.BoxedCodeGen())
        # generate the Python that runs it now rather than at the first call
        gm.recompile()
        _private.LazyGraphModule.force_recompile(gm)
        call = gm.forward
        if self.session is not None and self.session.observed and not self.session.recorders:
            self.session.runnable["backward" if graph == "backward" else "forward"] = gm

        def run(inputs: list[Any]) -> Any:
            return call(inputs)

        return boxed(run)


class CallableCodegen(EagerCodegen):
    """Hands the optimised ATen graphs to a compiler that the user provides."""

    def __init__(self, compile_fn: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]) -> None:
        self.compile_fn = compile_fn

    def emit(self, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Compiled:
        # a plain GraphModule: the lazy kind cannot be scripted or packaged
        plain = GraphModule(gm, gm.graph)
        plain.meta.update(gm.meta)
        compiled = self.compile_fn(plain, example_inputs)
        if not callable(compiled):
            raise TriptychError(f"{name_of(self.compile_fn)} returned {compiled!r}, not a callable")
        return compiled if getattr(compiled, "_boxed_call", False) else _private.make_boxed_func(compiled)


def boxed(function: Callable[[list[Any]], Any]) -> Compiled:
    """Mark a function of one list, which it empties, as AOTAutograd wants it marked."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
