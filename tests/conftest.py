"""What every test stands on: one thread, own caches, the same seed, nothing left of the test before."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Iterator

# before torch is imported, which reads them. The cache is new for every run and every worker: a kernel from
# an older source, or one that another worker is just writing, would make the tests say something about
# another program.
_CACHE = tempfile.mkdtemp(prefix="triptych-tests-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] = _CACHE
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch compiles small programs to see which vector instructions work, four seconds for each new cache; what the
# processor says it has is enough here
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# a compile that fails must fail the test, not fall back to another one
os.environ["TRIPTYCH_ON_ERROR"] = "raise"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# where it is set, Inductor refuses operators that it otherwise takes: the tests are to see that on every machine
os.environ["CI"] = "true"

import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402

from tests.breadth import mark_breadth  # noqa: E402
from triptych.cost import clock  # noqa: E402

clock.HOST_BYTES = 0  # nothing is timed on a CPU: what a test sees must not depend on what else runs on the machine

torch.set_num_threads(1)

# Each compile of Dynamo flushes the processor's caches to measure how long its guards take, 25 ms for a number that only
# logs show, and collects garbage. Thousands of small compiles spend a good part of their time in that.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
torch._dynamo.config.run_gc_after_compile = False


def compile_kernels_quickly() -> None:
    """The C++ compiler takes nearly half of the tests' time. Without debug information, and at -O1 in place of -O3, it is
    a quarter quicker; no test depends on how fast a kernel is. `make test-all` compiles them as users do."""
    from torch._inductor import cpp_builder

    flags_of = cpp_builder._get_optimization_cflags

    def quick(*args, **kwargs):
        flags, *rest = flags_of(*args, **kwargs)
        return [{"O3": "O1", "g1": "g0"}.get(flag, flag) for flag in flags], *rest

    cpp_builder._get_optimization_cflags = quick


if "OPTIMISED_KERNELS" not in os.environ:
    compile_kernels_quickly()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="rewrite the golden texts of the examples that run")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("measures time: run it with -n 0")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_breadth(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay until the end: the collector need not look at them again and again


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Recompile limits and counters are global: without this, a test would depend on those before it."""
    random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
