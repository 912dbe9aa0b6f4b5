"""A roofline model of a device: memory bandwidth, arithmetic, and the minimal cost of a kernel.

Known devices come from a table of sustained rates, not of those in the data sheet; another GPU is measured once and the
result is stored on disk. The answers are estimates: they decide whether a rewrite pays, never whether it is correct.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from .store import add_to_store, read_store
from .timing import apart_from_the_program, seconds

log = logging.getLogger("triptych")

TILE = 64
"""A GEMM kernel works on tiles of about this size: a product with fewer tiles than the device has cores leaves the
rest idle."""


HALF = (torch.float16, torch.bfloat16)

LAST_STEP = 1e-6
"""Seconds that a bias of one row adds to a GEMM on a GPU in dtypes other than half precision, for which there are fewer
kernels: 1 to 14 us on an H200. In bfloat16 it adds nothing."""


FEW_OPERANDS = 8
"""Up to this many operands of a cat, Inductor generates one copy with a condition for each operand (its setting
`max_pointwise_cat_inputs`). For more of them, its kernel searches for the operand that a block of elements comes
from."""

SEARCH = 1 / 12
"""That search takes this share of the time of the copy for each operand: on an H200, a cat of 32 operands with 256 MiB
takes 0.50 ms, and a copy 0.14 ms; a cat of nine operands is as fast as a call of torch's kernel at 64 MiB."""


@dataclass(frozen=True)
class DeviceModel:
    """What one device sustains, in bytes, operations and seconds."""

    name: str
    bandwidth: float
    half: float
    """Floating-point operations a second in GEMMs of bf16 and fp16."""
    single: float
    launch: float
    """The minimal cost of a kernel, from its call to the next one."""
    cores: int = 1
    operator: float = 0.0
    """The minimal cost of calling an operator written in Python: it takes the host longer than one of torch's."""

    @property
    def is_gpu(self) -> bool:
        return self.operator > 0

    def flops(self, dtype: torch.dtype) -> float:
        if dtype in HALF:
            return self.half
        if dtype == torch.int8:
            return 2 * self.half
        return self.single / 2 if dtype == torch.float64 else self.single

    def gemm(self, m: int, n: int, k: int, dtype: torch.dtype, batch: int = 1, rate: float = 1.0) -> float:
        """Seconds for `batch` products of (m, k) by (k, n), in one call; `rate` is the fraction of the usual rate."""
        tiles = math.ceil(m / TILE) * math.ceil(n / TILE) * batch
        busy = rate * min(1.0, max(tiles, 1) / self.cores)
        arithmetic = 2.0 * batch * m * n * k / (self.flops(dtype) * busy)
        moved = batch * (m * k + k * n + m * n) * dtype.itemsize
        return self.launch + max(arithmetic, moved / self.bandwidth)

    def copy(self, moved: float) -> float:
        """Seconds for one kernel that reads and writes that many bytes in all."""
        return self.launch + moved / self.bandwidth

    def generated_cat(self, moved: float, operands: int) -> float:
        """Seconds for the kernel that Inductor generates for a cat, which moves that many bytes in all."""
        slower = 1.0 if operands <= FEW_OPERANDS else 1.0 + operands * SEARCH
        return self.launch + slower * (self.copy(moved) - self.launch)


def _gpu(name: str, bandwidth: float, half: float, single: float, cores: int) -> DeviceModel:
    """Bandwidth in TB/s, GEMM rates in Tflop/s: about four fifths of the data sheet's."""
    return DeviceModel(name, bandwidth * 0.8e12, half * 0.8e12, single * 0.8e12, GPU_LAUNCH, cores, GPU_OPERATOR)


GPU_LAUNCH = 5e-6
GPU_OPERATOR = 60e-6
KNOWN = (
    _gpu("H200", 4.8, 989, 67, 132),
    _gpu("H100", 3.35, 989, 67, 132),
    _gpu("A100", 2.0, 312, 19.5, 108),
    _gpu("L40", 0.86, 181, 91, 142),
    _gpu("L4", 0.3, 121, 30, 58),
    _gpu("A10", 0.6, 125, 31, 72),
    _gpu("V100", 0.9, 125, 15.7, 80),
    _gpu("T4", 0.3, 65, 8.1, 40),
    _gpu("RTX 4090", 1.0, 165, 82, 128),
)

USUAL = KNOWN[0]

CPU_THREAD = DeviceModel("cpu", bandwidth=20e9, half=20e9, single=40e9, launch=2.5e-6)
"""One thread of a recent server; a launch is a call from generated code to a kernel and back."""


def device_model(device: torch.device | str) -> DeviceModel:
    """The model of a device: known by its name, stored by an earlier measurement, or measured now."""
    device = torch.device(device)
    return _gpu_model(device) if device.type == "cuda" else _cpu_model(torch.get_num_threads())


@functools.cache
def _cpu_model(threads: int) -> DeviceModel:
    one = CPU_THREAD
    bandwidth, half, single = one.bandwidth * min(threads, 8), one.half * threads, one.single * threads
    return replace(one, bandwidth=bandwidth, half=half, single=single)


@functools.cache
def _gpu_model(device: torch.device) -> DeviceModel:
    if not torch.cuda.is_available():  # the graph is for a GPU of another machine
        return USUAL
    name = torch.cuda.get_device_name(device)
    for model in KNOWN:
        if model.name in name:
            return model
    return _remembered(name) or _remember(measure(name, device))


def tf32_is_allowed() -> bool:
    """May GPUs round the operands of float32 products to TF32? This setting reflects the older ones too, and those
    raise when they are read after this one was set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def products_of_float32_on_a_cpu() -> str:
    """The setting that says to what oneDNN may round the operands of float32 products on a CPU."""
    setting: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return setting


def precision_of_products(dtype: torch.dtype, device: torch.device) -> str:
    """The setting that the time of a product depends on, for a question to `measured`."""
    if dtype != torch.float32:
        return ""
    return f" tf32={tf32_is_allowed()}" if device.type == "cuda" else f" {products_of_float32_on_a_cpu()}"


NOMINAL_THREADS = 8


def nominal_model(device: torch.device) -> DeviceModel:
    """The model of a kind of device, whichever this one is: for decisions that must be the same on every rank, though
    ranks may have different GPUs, or different numbers of threads."""
    if device.type == "cuda":
        return USUAL
    one, threads = CPU_THREAD, NOMINAL_THREADS
    return replace(one, bandwidth=one.bandwidth * threads, half=one.half * threads, single=one.single * threads)


# ---- devices that are not in the table ----

DEVICES = "devices.json"


def measure(name: str, device: torch.device) -> DeviceModel:
    """Measures bandwidth by a copy and arithmetic by a product, which takes about a second, once. The cost of a launch
    is not measured: it is that of the known GPUs."""
    log.info("measuring %s, once", name)
    with apart_from_the_program(device):
        large = torch.empty(1 << 27, dtype=torch.uint8, device=device)
        target = torch.empty_like(large)
        bandwidth = 2 * large.numel() / seconds(lambda: target.copy_(large))
        rates: Mapping[torch.dtype, float] = {d: _gemm_rate(d, device) for d in (torch.float16, torch.float32)}
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceModel(name, bandwidth, rates[torch.float16], rates[torch.float32], GPU_LAUNCH, cores, GPU_OPERATOR)


def _gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    n = 4096
    x = torch.ones(n, n, dtype=dtype, device=device)
    return 2.0 * n**3 / seconds(lambda: x @ x)


def _remembered(name: str) -> DeviceModel | None:
    try:
        held = DeviceModel(**read_store(DEVICES)[name])
        rates = (held.bandwidth, held.half, held.single, held.cores)
        if not all(0 < rate < math.inf for rate in rates):
            return None
    except (KeyError, TypeError):
        return None
    return replace(held, launch=GPU_LAUNCH, operator=GPU_OPERATOR)  # never measured, so not taken from the file


def _remember(model: DeviceModel) -> DeviceModel:
    add_to_store(DEVICES, model.name, asdict(model))
    return model
