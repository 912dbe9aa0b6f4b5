"""Launch Triton kernels directly, where torch prepares each launch anew.

Before each launch, torch 2.11 and 2.12 ask whether the kernel is still to be tuned, dumped or interpreted, and set up
an allocator for scratch memory. After the first launch the answers stay the same. A training step launches hundreds of
kernels, and is often slowed down by the host rather than the GPU. Later releases launch directly themselves, except for
the kernels of our operators.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _private

log = logging.getLogger("triptych")

OUR_KERNELS = (
    "b2b_gemm_kernel", "dot_compress_kernel", "int_mm_mul_kernel", "lce_kernel", "linears_kernel",
    "norm_backward_kernel", "sums_kernel",
)  # fmt: skip
"""The Triton kernels of our operators. Torch launches kernels that it did not generate through Triton, which takes the
host several times as long as torch's static launcher."""


@contextlib.contextmanager
def direct_launches() -> Iterator[None]:
    """Applies to the modules of generated code that are loaded inside."""
    loaded = _private.PyCodeCache.modules
    before = len(loaded)
    yield
    for module in loaded[before:]:
        launch_kernels_directly(module)


def launch_kernels_directly(module: types.ModuleType) -> None:
    """The kernels of a module of generated code are launched directly from their second launch on."""
    for kernel in vars(module).values():
        if type(kernel) is _private.CachingAutotuner and "run" not in vars(kernel):
            if not torch_launches_directly() or is_ours(kernel):
                kernel.run = launch_once_then_directly(kernel)


def torch_launches_directly() -> bool:
    return hasattr(_private.CachingAutotuner, "_build_fast_launcher")


def is_ours(kernel: Any) -> bool:
    return getattr(getattr(kernel, "fn", None), "__name__", "") in OUR_KERNELS


def launch_once_then_directly(kernel: Any) -> Callable[..., Any]:
    """Torch's own `run` for the first launch, which tunes the kernel; then puts a direct one in its place."""
    run = kernel.run

    def first(*args: Any, **how: Any) -> Any:
        result = run(*args, **how)
        if is_ours(kernel):
            use_static_launcher(kernel)
        if torch_launches_directly():
            vars(kernel).pop("run", None)  # another thread may have been quicker
        elif may_be_launched_directly(kernel):
            kernel.run = direct(without_preparation(kernel.launchers[0]), run)
        return result

    return first


def use_static_launcher(kernel: Any) -> None:
    """Let torch's static launcher launch a kernel that has been tuned; leave a kernel alone that it cannot launch."""
    if len(kernel.launchers) != 1 or getattr(kernel.launchers[0], "_is_static", False):
        return
    results, config = _private.StaticTritonCompileResult, kernel.launchers[0].config
    try:
        (compiled,) = (result for result in kernel.compile_results if result.config is config)
        with _private.inductor_config.patch(static_launch_user_defined_triton_kernels=True):
            how = kernel.inductor_meta, kernel.triton_meta, kernel.heuristic_type
            static = results.can_statically_launch(compiled.kernel, *how)
        if static is not None:
            static_result = results(static, config, compiled.compile_meta, compiled.inductor_meta)
            kernel.launchers = [static_result.make_launcher()]
            kernel._cached_launcher = None  # torch 2.13 and later note here how they launch
    except Exception as error:  # another release may differ here: Triton then launches the kernel, as before
        log.info("%s is launched by Triton: %s", kernel.fn.__name__, error)


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
