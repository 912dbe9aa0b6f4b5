"""Compiles programs for an H200 on a machine without a GPU: Inductor generates their code, and Triton compiles every
kernel of it. Nothing runs. It needs a build of torch for CUDA, which brings Triton.

    python -m tests.gpu_code [NAME ...]    # programs of bench/gain_workloads.py, operators; a line of JSON for each

Tensors are fake ones, and torch, Inductor and Triton are told that there is a GPU, so this needs a process of its own.
Training steps are left out: autograd asks the driver for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=139 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536, L2_cache_size=60 << 20,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="",
)  # fmt: skip


def always(answer: Any) -> Any:
    return lambda *args, **kwargs: answer


class NoContext(contextlib.nullcontext):
    """In place of the context in which a device is the current one."""


class Driver:
    """What Triton asks of a GPU while it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    get_current_device = get_current_stream = always(0)
    get_active_torch_device = always(torch.device("cuda", 0))


def pretend_that_there_is_a_gpu() -> None:
    import torch._dynamo.device_interface as device_interface
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as triton_of_torch
    import triton

    torch._C._ensureCUDADeviceGuardSet()  # guards of devices that are not there do nothing
    fake_tensor.init_gpu_context = always(None)
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES, "_get_device_properties": PROPERTIES, "get_device_capability": (9, 0),
        "is_bf16_supported": True, "is_initialized": False, "is_current_stream_capturing": False,
        "mem_get_info": (100 << 30, 139 << 30),
        "init": None, "_lazy_init": None, "synchronize": None, "set_device": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "get_rng_state": state, "set_rng_state": None, "manual_seed": None,
        "manual_seed_all": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, always(answer))
    torch.cuda.device = NoContext
    torch._C._cuda_getCurrentRawStream = always(0)
    interface = device_interface.CudaInterface
    for name, answer in {
        "is_available": True, "current_device": 0, "get_compute_capability": 90, "is_bf16_supported": True,
        "is_triton_capable": True, "raise_if_triton_unavailable": None,
    }.items():  # fmt: skip
        setattr(interface, name, staticmethod(always(answer)))
    interface.Worker.get_device_properties = staticmethod(always(PROPERTIES))
    interface.Worker.current_device = staticmethod(always(0))
    triton_of_torch.has_triton = always(True)
    triton_helpers.set_driver_to_gpu = always(None)
    triton.runtime.driver.set_active(Driver())


class Compiled(Exception):
    """Everything is compiled; running it is not possible."""


def stop_after_code_generation(kernels: list[str]) -> None:
    """Inductor raises `Compiled` when Triton has compiled all kernels of a graph, whose names go to `kernels`."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

    def compile_kernel(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
        kernels.append(name)
        return kernel

    def compile_kernels(self: Any) -> None:
        code, *_ = self.codegen()
        exec(compile(getattr(code, "value", code), "generated", "exec"), {"__name__": "generated", "__file__": ""})
        raise Compiled

    AsyncCompile.triton = compile_kernel
    GraphLowering.compile_to_module = compile_kernels
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False


def find_every_new_form_quicker() -> None:
    """What is timed later takes less time: the new form is timed after the old one."""
    from triptych.cost import clock

    number = itertools.count()
    clock._rounds_on_gpu = lambda part, device: [[1.5 ** -next(number)] * clock.AGREEING]
    clock.add_to_store = always(None)


def normalised_rows(with_others: bool) -> list[Any]:
    """Operands of `norm_backward` for 4096 rows of 768 numbers; `with_others`: also those that it need not have."""
    matrix, statistic = torch.empty(4, 1024, 768), torch.empty(4, 1024, 1, dtype=torch.float32)
    other = matrix.clone() if with_others else None
    return [matrix, other, matrix.clone(), statistic, statistic.clone(), torch.empty(768), other, 16, with_others]


OPERATORS: dict[str, Any] = {
    "norm_backward": lambda: normalised_rows(False),
    "norm_backward, all operands": lambda: normalised_rows(True),
    "sum_parts": lambda: (
        [torch.empty(rows, 2304, dtype=torch.float32) for rows in (256, 256, 32)],
        [768] * 7 + [2304 - 768],
        torch.bfloat16,
        None,
    ),
}
"""Operands of operators that passes write into graphs of training steps."""


def program_of(name: str) -> tuple[Any, Sequence[Any], dict[str, Any], bool | None]:
    """A program, its inputs, options, and whether sizes are symbolic."""
    from gain_workloads import WORKLOADS, Machine

    class Here(Machine):
        def like(self, module: torch.nn.Module) -> torch.nn.Module:
            return module.eval()  # it is made with this device and dtype

    if name in OPERATORS:
        operator = getattr(torch.ops.triptych, name.partition(",")[0])
        return operator, OPERATORS[name](), {}, False
    work = WORKLOADS[name](Here("cuda"))
    return work.program, work.inputs, work.options, work.dynamic


def compile_workload(name: str, kernels: list[str]) -> dict[str, Any]:
    """The rules that fired, and the kernels that Triton compiled."""
    import triptych

    kernels.clear()
    torch._dynamo.reset()
    torch.set_default_dtype(torch.bfloat16)
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        program, inputs, options, dynamic = program_of(name)
        how: dict[str, Any] = {"options": {**options, "on_error": "raise"}, "dynamic": dynamic}
        with triptych.record() as explanation:
            try:
                torch.compile(program, backend=triptych.compile_fx, **how)(*inputs)
            except Exception as error:
                if Compiled.__name__ not in repr(error):
                    raise
    fired: Counter[str] = Counter()
    for record in explanation.passes:
        fired.update(record.fired)
    products = [products_of(session) for session in explanation.sessions]
    return {
        "workload": name, "fired": fired, "kernels": kernels, "warnings": explanation.warnings, "products": products,
    }  # fmt: skip


def products_of(session: Any) -> list[int]:
    """How many products are in the graph that was captured, and in those that code generation got."""
    from triptych.cost.estimate import operation_cost

    captured = next(iter(session.listings.values())).first
    lowered = [node for gm in session.lowered.values() for node in gm.graph.nodes]
    return [sum(line.cost.gemms for line in captured), sum(operation_cost(node).gemms for node in lowered)]


def main(names: list[str]) -> None:
    pretend_that_there_is_a_gpu()
    kernels: list[str] = []
    stop_after_code_generation(kernels)
    find_every_new_form_quicker()
    for name in names:
        print(json.dumps(compile_workload(name, kernels)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
