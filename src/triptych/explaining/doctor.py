"""The checks of `triptych doctor`: is everything available that a compile needs?"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .. import __version__, _private
from ..cost.clock import MEASUREMENTS, forget, stored_answers
from ..cost.device import DEVICES
from ..cost.store import CONFIGURATIONS, store_path
from ..errors import in_one_line
from ..releases import SUPPORTED, is_newer_than_tested

GOOD, WARNING, BAD = "good", "warning", "bad"
OLDER = ("measured.json",)
"""What earlier releases wrote."""
TOLERANCE = 1e-4
"""Tolerance of the tiny compile, in float32."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    status: str
    detail: str
    advice: str = ""
    """What to do, where something is missing."""


def examine(compile: bool = True) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """The checks in order: the name of each, and a function that performs it. If it raises, that is a finding, too."""
    checks: dict[str, Callable[[], Finding]] = {
        "versions": _versions,
        "private names of torch": _private_names,
        "backend name": _backend_name,
        "device": _device,
        "C++ compiler": _cpp_compiler,
        "Triton": _triton,
        "Triptych's cache": lambda: _writable("Triptych's cache", store_path("")),
        "measurements": _measurements,
        "Inductor's cache": lambda: _writable("Inductor's cache", Path(_private.inductor_cache_dir())),
    }
    if compile:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            for codegen in ("eager", "inductor"):
                name = f"tiny compile, codegen={codegen}, {device}"
                checks[name] = functools.partial(_tiny_compile, name, codegen, device)
    for name, check in checks.items():
        yield name, functools.partial(_found, name, check)


def _found(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(name, BAD, in_one_line(error))


def _versions() -> Finding:
    where = f"Python {platform.python_version()}, {platform.system()}"
    versions = f"triptych {__version__}, torch {torch.__version__}, {where}"
    if is_newer_than_tested():
        return Finding("versions", WARNING, versions, f"this torch is newer than those tested ({SUPPORTED})")
    return Finding("versions", GOOD, versions)


def _private_names() -> Finding:
    name, missing = "private names of torch", _private.missing()
    if missing:
        return Finding(name, BAD, f"not in this torch: {', '.join(missing)}", f"install {SUPPORTED}")
    return Finding(name, GOOD, f"all {len(_private.NAMES)} are there")


def _backend_name() -> Finding:
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if any(entry.name == "triptych" for entry in entries):
        return Finding("backend name", GOOD, 'torch.compile(model, backend="triptych") works')
    detail = 'the package is not installed, so that backend="triptych" is not known'
    return Finding("backend name", WARNING, detail, "say backend=triptych.compile_fx, or pip install .")


def _device() -> Finding:
    threads = torch.get_num_threads()
    cpu = f"{os.cpu_count()} CPU cores, {threads} thread{'s' * (threads != 1)}"
    if not torch.cuda.is_available():
        return Finding("device", GOOD, f"{cpu}; no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    gpu = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB"
    return Finding("device", GOOD, f"{torch.cuda.device_count()} x {gpu}; {cpu}")


def _cpp_compiler() -> Finding:
    configured = _private.inductor_config.cpp.cxx
    names = [name for name in (configured if isinstance(configured, (list, tuple)) else [configured]) if name]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        advice = 'install g++ or set CXX; without it, options={"codegen": "eager"} works'
        return Finding("C++ compiler", BAD, f"none of {', '.join(names)} was found: no kernels for CPUs", advice)
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return Finding("C++ compiler", GOOD, f"{path}: {version.partition(chr(10))[0]}")


def _triton() -> Finding:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        needed = torch.cuda.is_available()
        detail = "not here: no kernels for GPUs" if needed else "not here, and not needed on a CPU"
        return Finding("Triton", BAD if needed else GOOD, detail, "pip install triton" if needed else "")
    return Finding("Triton", GOOD, version)


def _writable(name: str, folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = "set XDG_CACHE_HOME or TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        return Finding(name, WARNING, f"{folder} cannot be written: {error.strerror or error}", advice)
    return Finding(name, GOOD, f"{folder} can be written")


def _measurements() -> Finding:
    """What earlier compiles have timed on this machine, which later ones rely on."""
    path, answers = store_path(MEASUREMENTS), len(stored_answers())
    if not path.exists():
        return Finding("measurements", GOOD, f"none yet; {path} will have them")
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime)
    age = (datetime.datetime.now() - written).days
    detail = f"{answers} in {path}, {path.stat().st_size / 1024:.0f} KiB, last added to {_days(age)}"
    return Finding("measurements", GOOD, detail)


def _days(age: int) -> str:
    return "today" if age <= 0 else "yesterday" if age == 1 else f"{age} days ago"


def forget_measurements() -> list[str]:
    """Delete what was measured on this machine; returns the paths of the files that were there."""
    forgotten = []
    for name in (MEASUREMENTS, CONFIGURATIONS, DEVICES, *OLDER):
        path = store_path(name)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            forgotten.append(str(path))
    forget()
    return forgotten


def _tiny_compile(name: str, codegen: str, device: str) -> Finding:
    """A training step of a small program, compared with eager."""
    from .compiled_model import CompileSettings
    from .explain import Run, observed_run, run_once

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.cat([torch.cat([x, x]), x]) @ weight).sum(dim=0)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = tuple(torch.randn(size, 8).to(device).requires_grad_() for size in (4, 8))

    def results(run: Run) -> list[torch.Tensor]:
        gradients = {id(leaf): gradient for leaf, gradient in run.gradients}
        return [run.outputs.detach(), *(gradients[id(leaf)] for leaf in inputs)]

    expected = results(run_once(program, inputs, {}, train=True))
    settings = CompileSettings(options={"codegen": codegen, "on_error": "raise"})
    actual = results(observed_run(program, inputs, {}, train=True, settings=settings))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))
    if not worst <= TOLERANCE:
        return Finding(name, BAD, f"differs from eager by {worst:.1e}", "triptych bisect finds the rewrite at fault")
    return Finding(name, GOOD, f"results and gradients are eager's (largest difference {worst:.1e})")
