"""Compiling a model only to see what happens: from the beginning, and without a trace in Dynamo afterwards."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .. import _private


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Whatever is called inside is compiled from the beginning, for the sizes of that call, however often.

    Only the caches of whole graphs are off: with them on no pass would run. Those of single kernels stay, so
    that the kernels are the ones a user gets.
    """
    _allow_more_compiles()
    with (
        _private.unlimited_recompiles(),
        _private.dynamo_config.patch(automatic_dynamic_shapes=False),
        _private.functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        _private.inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


def _allow_more_compiles() -> None:
    """Let Dynamo compile functions again that it has given up, because they reached its limit of recompiles."""
    actions, limit = _private.eval_frame._FrameAction, _private.dynamo_config.recompile_limit
    for code in [reference() for reference in _private.input_codes.seen]:
        if code is not None and len(_private.cache_entries(code)) >= limit:
            usual = _private.eval_frame._FrameExecStrategy(actions.DEFAULT, actions.DEFAULT)
            _private.eval_frame.set_code_exec_strategy(code, usual)


@contextlib.contextmanager
def forgotten(backend: Callable[..., Any]) -> Iterator[None]:
    """What `backend` compiles inside is dropped at the end.

    Dynamo keeps compiled code with the user's functions. There it would stay alive, and count against the
    limit of recompilations of the user's own `torch.compile`.
    """
    codes: list[Any] = []
    own_thread = threading.get_ident()

    def note(code: Any, compiled: Any) -> None:
        if threading.get_ident() == own_thread:
            codes.append(code)

    handle = _private.register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        with _private.compile_lock:
            for code in codes:
                entries = _private.cache_entries(code)
                ours = [e for e in entries if getattr(e.backend, "compiler_fn", None) is backend]
                if len(ours) == len(entries) and not another_thread_compiles():
                    _private.reset_code(code)
                    continue
                for entry in ours:
                    entry.guard_manager.extra_state.invalidate(entry, _no_guards())


def _no_guards() -> Any:
    """Guards that hold for no call. Beside entries of the user's own compiles ours cannot be removed; and Dynamo counts
    the invalidated one against the limit unless its guards are about another object than the frame at hand."""
    deleted = _private.DeletedGuardManagerWrapper("compiled only to be explained")
    deleted.id_matched_objs = {"explained": weakref.ref(deleted)}
    return deleted


def another_thread_compiles() -> bool:
    """Is another thread in Dynamo, or waiting to enter it? It is about to store compiled code with some function, so no
    function may be reset."""
    own_thread = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own_thread]
    while frames:
        if any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame in frames):
            return True
        frames = [frame.f_back for frame in frames if frame.f_back is not None]
    return False
