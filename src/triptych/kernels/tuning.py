"""Shared by the Triton kernels: compiling a kernel from source text, which configurations are tried, and for which
sizes tuning is repeated."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl

from ..cost.clock import measuring_allowed
from ..cost.store import CONFIGURATIONS, add_to_store, read_store
from .capture import capture, is_capturing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def configs(choices: Sequence[tuple[dict[str, int], int, int]]) -> list[Any]:
    """(blocks, warps, stages) as Triton wants them; the interpreter cannot measure and takes the first."""
    made = [triton.Config(blocks, num_warps=warps, num_stages=stages) for blocks, warps, stages in choices]
    return made[:1] if INTERPRETED else made


def kernel_of(source: str, name: str, **known: Any) -> Any:
    """The kernel `name` that `source` defines. Triton reads the source of a function by way of `linecache`, where the
    text is stored, so that no file is needed."""
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"tl": tl, "__name__": __name__, **known}
    exec(compile(source, file, "exec"), names)
    return triton.jit(names[name])


def bucket(size: int) -> int:
    """Sizes up to the next power of two are tuned as one: a growing batch is not measured at every step."""
    return 1 << max(size - 1, 0).bit_length()


MOST_UNROLLED = 2048
"""Multiplications of float32 that a thread may have in one step. Without tensor cores all of them are written out: a
kernel with more takes a minute to compile and runs out of registers."""

_BEST: dict[Any, dict[str, Any]] = {}


def run_tuned(kernel: Any, key: tuple[Any, ...], grid: Any, *args: Any, **constants: Any) -> None:
    """Launch a kernel with the configuration that was the quickest for sizes with this key.

    Triton's tuner would look at every argument on every call, which takes longer than a small kernel. Where nothing
    may depend on a measurement, the first configuration is taken. A launch that is captured becomes a node of a
    graph, and generated code tunes it by itself, unless the best configuration is known.
    """
    if is_capturing():
        tuned = _for_generated_code(kernel, key, constants)
        arguments = {**dict(zip(kernel.arg_names, args)), **constants}
        capture(tuned, [grid({**arguments, **c.all_kwargs()}) for c in tuned.configs], arguments)
        return
    best = _BEST.get((kernel, key)) if measuring_allowed() else kernel.configs[0].all_kwargs()
    if best is None:
        best = _BEST[kernel, key] = _stored(kernel, key, constants) or _tune(kernel, key, grid, args, constants)
    kernel.fn[grid](*args, **constants, **best)


def _tune(kernel: Any, key: Any, grid: Any, args: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """The quickest configuration, by Triton's tuner, which runs the kernel."""
    tuned = _with_configurations(kernel, _promising(kernel, constants))
    if not INTERPRETED:
        _compile_at_once(tuned, grid, args, constants)
    tuned[grid](*args, **constants)
    best: dict[str, Any] = tuned.best_config.all_kwargs()
    if len(kernel.configs) > 1 and not INTERPRETED:
        add_to_store(CONFIGURATIONS, _question(kernel, key, constants), best)
    return best


def _compile_at_once(tuned: Any, grid: Any, args: Any, constants: dict[str, Any]) -> None:
    """Compile all configurations in threads, before they are run one after the other: most of that is work of LLVM and
    of the assembler, which run beside each other. One that cannot be compiled fails again when it is run."""
    if len(tuned.configs) < 2:
        return
    device = torch.cuda.current_device()

    def compile_one(config: Any) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            tuned.fn.warmup(*args, grid=grid, **constants, **config.all_kwargs())

    with ThreadPoolExecutor(min(len(tuned.configs), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, tuned.configs))


def _promising(kernel: Any, constants: dict[str, Any]) -> tuple[int, ...]:
    """The numbers of the configurations that are worth a try."""
    everything = range(len(kernel.configs))
    if constants.get("PRECISION") != "ieee":
        return tuple(everything)

    def unrolled(number: int) -> float:
        config = kernel.configs[number]
        blocks = {name: size for name, size in {**constants, **config.kwargs}.items() if name.startswith("BLOCK_")}
        return math.prod(blocks.values()) / (32 * config.num_warps)

    few = [number for number in everything if unrolled(number) <= MOST_UNROLLED]
    return tuple(few or [min(everything, key=unrolled)])


def _for_generated_code(kernel: Any, key: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    if not measuring_allowed():
        return _with_configurations(kernel, (0,))
    promising = _promising(kernel, constants)
    if len(promising) > 1:
        best = _BEST.get((kernel, key)) or _stored(kernel, key, constants)
        known = [number for number in promising if kernel.configs[number].all_kwargs() == best]
        promising = tuple(known) or promising
    return _with_configurations(kernel, promising)


@functools.cache
def _with_configurations(kernel: Any, numbers: tuple[int, ...]) -> Any:
    """The kernel with some of its configurations."""
    if len(numbers) == len(kernel.configs):
        return kernel
    keys = kernel.keys if len(numbers) > 1 else []
    return triton.autotune(configs=[kernel.configs[number] for number in numbers], key=keys)(kernel.fn)


def _stored(kernel: Any, key: Any, constants: dict[str, Any]) -> dict[str, Any] | None:
    """The quickest configuration that an earlier process has found, if it still is one."""
    if len(kernel.configs) < 2 or INTERPRETED or not torch.cuda.is_available():
        return None
    best = read_store(CONFIGURATIONS).get(_question(kernel, key, constants))
    return next((config.all_kwargs() for config in kernel.configs if config.all_kwargs() == best), None)


def _question(kernel: Any, key: Any, constants: dict[str, Any]) -> str:
    """Everything that the best configuration depends on."""
    text = f"{kernel.fn.cache_key} {[str(config) for config in kernel.configs]}"
    source = hashlib.sha256(text.encode()).hexdigest()[:16]
    device = torch.cuda.get_device_name()
    return f"{device} | triton {triton.__version__} | {kernel.fn.__name__} {source} | {key} {sorted(constants.items())}"
