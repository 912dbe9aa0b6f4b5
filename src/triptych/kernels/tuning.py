"""Shared by the Triton kernels: compiling a kernel from source text, which configurations are tried, and for which
sizes tuning is repeated."""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from ..cost import measuring_allowed
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


_BEST: dict[Any, dict[str, Any]] = {}


def run_tuned(kernel: Any, key: tuple[Any, ...], grid: Any, *args: Any, **constants: Any) -> None:
    """Launch a kernel with the configuration that was the quickest for sizes with this key.

    Triton's tuner would look at every argument on every call, which takes longer than a small kernel. Where nothing
    may depend on a measurement, the first configuration is taken. A launch that is captured becomes a node of a
    graph, and generated code tunes it by itself.
    """
    if is_capturing():
        tuned = kernel if measuring_allowed() else _with_first_configuration(kernel)
        arguments = {**dict(zip(kernel.arg_names, args)), **constants}
        capture(tuned, [grid({**arguments, **c.all_kwargs()}) for c in tuned.configs], arguments)
        return
    best = _BEST.get((kernel, key)) if measuring_allowed() else kernel.configs[0].all_kwargs()
    if best is None:
        kernel[grid](*args, **constants)
        _BEST[kernel, key] = kernel.best_config.all_kwargs()
    else:
        kernel.fn[grid](*args, **constants, **best)


@functools.cache
def _with_first_configuration(kernel: Any) -> Any:
    return triton.autotune(configs=kernel.configs[:1], key=[])(kernel.fn)
