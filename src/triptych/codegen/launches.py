"""Launch Triton kernels directly, where torch prepares each launch anew.

Before each launch, torch 2.11 and 2.12 ask whether the kernel is still to be tuned, dumped or interpreted, and set up
an allocator for scratch memory. After the first launch the answers stay the same. A training step launches hundreds of
kernels, and is often slowed down by the host rather than the GPU. Later releases launch directly themselves.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from .. import _private


def launch_kernels_directly(module: types.ModuleType) -> None:
    """The kernels of a module of generated code are launched directly from their second launch on."""
    if hasattr(_private.CachingAutotuner, "_build_fast_launcher"):
        return
    for kernel in vars(module).values():
        if type(kernel) is _private.CachingAutotuner and "run" not in vars(kernel):
            kernel.run = launch_once_then_directly(kernel)


def launch_once_then_directly(kernel: Any) -> Callable[..., Any]:
    """A `run` that calls torch's own for the first launch, which tunes the kernel, and then installs a direct one."""
    run = kernel.run

    def first(*args: Any, **how: Any) -> Any:
        result = run(*args, **how)
        if may_be_launched_directly(kernel):
            kernel.run = direct(without_preparation(kernel.launchers[0]), run)
        return result

    return first


def may_be_launched_directly(kernel: Any) -> bool:
    """One configuration is left, nothing is dumped, and the kernel needs no scratch memory, as static ones do not."""
    dumps = kernel.dump_launch_params or kernel.dump_launch_tensors
    return len(kernel.launchers) == 1 and getattr(kernel.launchers[0], "_is_static", False) and not dumps


PREPARED = ("C_impl", "function", "num_warps", "shared", "arg_tys", "has_global_scratch", "has_profile_scratch")
"""The attributes that a statically launched kernel reads at each launch."""


def without_preparation(launcher: types.FunctionType) -> Callable[..., Any]:
    """The launcher, which computes the grid, with a `runner` that goes straight to the C++ launch."""
    kernel = getattr(launcher.__globals__.get("runner"), "__self__", None)
    if torch.version.hip or not all(hasattr(kernel, name) for name in PREPARED):
        return launcher
    implementation, function, num_warps, shared, types_of_arguments, *scratch = (getattr(kernel, n) for n in PREPARED)
    # kernels of newer Triton releases take pointers to scratch memory; statically launched ones get null pointers
    no_scratch = (None,) * sum(scratch)
    types_of_arguments += "O" * sum(scratch)
    launch = implementation._launch_kernel

    def runner(grid_x: int, grid_y: int, grid_z: int, stream: int, *args: Any) -> None:
        launch(function, grid_x, grid_y, grid_z, num_warps, shared, types_of_arguments, args + no_scratch, stream)

    names = {**launcher.__globals__, "runner": runner}
    return types.FunctionType(launcher.__code__, names, closure=launcher.__closure__)


def direct(launch: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A direct launch; torch's own `run` if the profiler or `DebugMode` is active, or with further arguments."""
    is_profiled, debug_mode = _private.profiler_enabled, _private.get_active_debug_mode

    def launch_directly(*args: Any, stream: int, **how: Any) -> Any:
        if how or is_profiled() or debug_mode():
            return run(*args, stream=stream, **how)
        return launch(*args, stream=stream)

    return launch_directly
