"""Kernels launched directly, on releases of torch that prepare each launch anew. The kernel here is a stand-in."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

from triptych import _private, kernels
from triptych.codegen.launches import OUR_KERNELS, direct_launches, without_preparation

STREAM = 7


class Kernel:
    """What `direct_launches` knows of a kernel in generated code; `calls` says who was called with what."""

    dump_launch_params = dump_launch_tensors = False

    def __init__(self, configurations: int = 1, is_static: bool = True) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.launchers = [self._launcher(is_static) for _ in range(configurations)]

    def _launcher(self, is_static):
        def launch(*args, stream):
            assert stream == STREAM
            self.calls.append(("launch", args))

        launch._is_static = is_static
        return launch

    def run(self, *args, stream, benchmark_run=False):
        self.calls.append(("run", args))


@pytest.fixture
def load(monkeypatch):
    """Load generated code that has one kernel."""
    modules: list[types.ModuleType] = []
    monkeypatch.setattr(_private, "CachingAutotuner", Kernel)
    monkeypatch.setattr(_private, "PyCodeCache", types.SimpleNamespace(modules=modules))

    def load(kernel: Kernel) -> Kernel:
        module = types.ModuleType("generated")
        module.kernel, module.call = kernel, lambda: None
        modules.append(module)
        return kernel

    return load


class Compiled:
    """What is known of a statically launched kernel: its `run` prepares, then calls the C++ launch.

    With scratch memory, the kernel takes one more pointer, which is null: the memory has size 0.
    """

    function, num_warps, shared, arg_tys = 11, 4, 0, "Oi"
    has_profile_scratch = False

    def __init__(self, has_global_scratch: bool = False) -> None:
        self.has_global_scratch = has_global_scratch
        self.launched: list[tuple[object, ...]] = []
        self.C_impl = types.SimpleNamespace(_launch_kernel=lambda *args: self.launched.append(args))

    def run(self, grid_x, grid_y, grid_z, stream, *args):
        self.launched.append(("prepared",))


@pytest.mark.parametrize("has_scratch", [False, True])
def test_the_launch_goes_straight_to_cpp(has_scratch):
    compiled = Compiled(has_scratch)
    names = {"runner": compiled.run}
    exec("def launcher(x, n, stream): runner(-(n // -4), 1, 1, stream, x, n)", names)
    without_preparation(names["launcher"])("x", 10, stream=STREAM)
    arguments = ("OiO", ("x", 10, None)) if has_scratch else ("Oi", ("x", 10))
    assert compiled.launched == [(11, 3, 1, 1, 4, 0, *arguments, STREAM)]
    assert names["runner"] == compiled.run  # torch's own launcher stays as it is


def launch(kernel: Kernel, times: int) -> list[tuple[str, tuple[int, ...]]]:
    for number in range(times):
        kernel.run(number, stream=STREAM)
    return kernel.calls


def test_the_first_launch_is_torchs_own(load):
    with direct_launches():
        with direct_launches():  # as the cache of programs does around a compile
            kernel = load(Kernel())
    assert launch(kernel, 3) == [("run", (0,)), ("launch", (1,)), ("launch", (2,))]


@pytest.mark.parametrize("kernel", [Kernel(is_static=False), Kernel(configurations=2)], ids=["scratch", "not tuned"])
def test_left_to_torch(load, kernel):
    with direct_launches():
        load(kernel)
    assert launch(kernel, 2) == [("run", (0,)), ("run", (1,))]


def test_dumped_launches_are_left_to_torch(load, monkeypatch):
    monkeypatch.setattr(Kernel, "dump_launch_tensors", True)
    with direct_launches():
        kernel = load(Kernel())
    assert launch(kernel, 2) == [("run", (0,)), ("run", (1,))]


def test_code_loaded_by_somebody_else_is_not_touched(load):
    kernel = load(Kernel())
    with direct_launches():
        pass
    assert launch(kernel, 2) == [("run", (0,)), ("run", (1,))]


def test_profiled_and_benchmarked_launches_are_torchs_own(load):
    with direct_launches():
        kernel = load(Kernel())
    kernel.run(0, stream=STREAM)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        kernel.run(1, stream=STREAM)
    kernel.run(2, stream=STREAM, benchmark_run=True)
    kernel.run(3, stream=STREAM)
    assert kernel.calls == [("run", (0,)), ("run", (1,)), ("run", (2,)), ("launch", (3,))]


def test_releases_that_do_so_themselves(load, monkeypatch):
    monkeypatch.setattr(Kernel, "_build_fast_launcher", None, raising=False)
    with direct_launches():
        kernel = load(Kernel())
    assert "run" not in vars(kernel)


class OfOurs(Kernel):
    """A kernel of one of our operators, which torch launches through Triton."""

    fn = types.SimpleNamespace(__name__="sums_kernel")
    inductor_meta, triton_meta, heuristic_type = {}, {}, "user"

    def __init__(self) -> None:
        super().__init__(is_static=False)
        self.launchers[0].config = config = object()
        self.compile_results = [types.SimpleNamespace(config=c, kernel=c, compile_meta={}, inductor_meta={}) for c in (object(), config)]


def static_results(can_launch: bool) -> type:
    """A stand-in for torch's results: the setting is on while it is asked, and it makes a launcher."""

    class Results:
        def __init__(self, kernel, *_) -> None:
            self.kernel = kernel

        @staticmethod
        def can_statically_launch(compiled, *_):
            assert _private.inductor_config.static_launch_user_defined_triton_kernels
            return compiled if can_launch else None

        def make_launcher(self):
            def launch(*args, stream):
                launch.calls.append(args)

            launch._is_static, launch.config, launch.calls = True, self.kernel, []
            return launch

    return Results


@pytest.mark.parametrize("can_launch", [True, False])
def test_our_kernels_are_launched_without_triton(load, monkeypatch, can_launch):
    monkeypatch.setattr(_private, "CachingAutotuner", OfOurs)
    monkeypatch.setattr(_private, "StaticTritonCompileResult", static_results(can_launch))
    with direct_launches():
        kernel = load(OfOurs())
    by_torch = launch(kernel, 3)
    if can_launch:
        assert by_torch == [("run", (0,))] and kernel.launchers[0].calls == [(1,), (2,)]
        assert kernel.launchers[0].config is kernel.compile_results[1].config
    else:
        assert by_torch == [("run", (0,)), ("run", (1,)), ("run", (2,))]


def test_a_release_that_cannot_do_it_launches_as_before(load, monkeypatch):
    def fails(*_):
        raise AttributeError("has moved")

    monkeypatch.setattr(_private, "CachingAutotuner", OfOurs)
    monkeypatch.setattr(_private, "StaticTritonCompileResult", types.SimpleNamespace(can_statically_launch=fails))
    with direct_launches():
        kernel = load(OfOurs())
    assert launch(kernel, 2) == [("run", (0,)), ("run", (1,))]


def test_a_torch_that_launches_directly_gets_its_run_back(load, monkeypatch):
    monkeypatch.setattr(OfOurs, "_build_fast_launcher", None, raising=False)
    monkeypatch.setattr(_private, "CachingAutotuner", OfOurs)
    monkeypatch.setattr(_private, "StaticTritonCompileResult", static_results(True))
    with direct_launches():
        kernel = load(OfOurs())
    assert launch(kernel, 2) == [("run", (0,)), ("run", (1,))]
    assert "run" not in vars(kernel) and kernel.launchers[0]._is_static and kernel._cached_launcher is None


def test_all_our_kernels_are_known():
    folder = Path(kernels.__file__).parent
    names = {name for path in folder.glob("triton_*.py") for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    assert names == set(OUR_KERNELS)
