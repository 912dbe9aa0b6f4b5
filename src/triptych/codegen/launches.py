"""Launch Triton kernels directly, where torch prepares each launch anew.

Before each launch, torch 2.11 and 2.12 ask whether the kernel is still to be tuned, dumped or interpreted, and set up
an allocator for scratch memory. After the first launch the answers stay the same. A training step launches hundreds of
kernels, and is often slowed down by the host rather than the GPU. Later releases launch directly themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .. import _private


@contextlib.contextmanager
def launching_directly() -> Iterator[None]:
    """The kernels of generated code that is loaded inside are launched directly from their second launch on."""
    if hasattr(_private.CachingAutotuner, "_build_fast_launcher"):
        yield
        return
    loaded = _private.PyCodeCache.modules
    before = len(loaded)
    yield
    for module in loaded[before:]:
        for kernel in vars(module).values():
            if type(kernel) is _private.CachingAutotuner and "run" not in vars(kernel):
                kernel.run = launch_once_then_directly(kernel)


def launch_once_then_directly(kernel: Any) -> Callable[..., Any]:
    """Torch's own `run` for the first launch, which tunes the kernel; then puts a direct one in its place."""
    run = kernel.run

    def first(*args: Any, **how: Any) -> Any:
        result = run(*args, **how)
        if may_be_launched_directly(kernel):
            kernel.run = direct(kernel.launchers[0], run)
        return result

    return first


def may_be_launched_directly(kernel: Any) -> bool:
    """One configuration is left, nothing is dumped, and the kernel needs no scratch memory, as static ones do not."""
    dumps = kernel.dump_launch_params or kernel.dump_launch_tensors
    return len(kernel.launchers) == 1 and getattr(kernel.launchers[0], "_is_static", False) and not dumps


def direct(launch: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A launch with no questions asked, except for those who watch: the profiler and torch's `DebugMode`."""
    is_profiled, debug_mode = _private.profiler_enabled, _private.get_active_debug_mode

    def launch_directly(*args: Any, stream: int, **how: Any) -> Any:
        if how or is_profiled() or debug_mode():
            return run(*args, stream=stream, **how)
        return launch(*args, stream=stream)

    return launch_directly
