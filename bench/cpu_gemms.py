"""Products that share an activation, on a CPU: joined against one by one, and packed by oneDNN.

    OMP_NUM_THREADS=1 python bench/cpu_gemms.py [--compiled]

All variants run in one process, in turns, on one thread. Only the CPU time of that thread is measured, so other load
does not count. The ratio is the median, over the turns, of the time of one variant over that of the other.
`--compiled`: whole models, with the passes and without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import triptych

PRODUCTS = [
    (512, 256, (4,) * 8), (8, 256, (8,) * 4), (32, 64, (16,) * 3), (1, 64, (64,) * 3), (256, 64, (64,) * 3),
    (1, 512, (512,) * 3), (8, 512, (512, 128, 128)), (4, 1024, (2816,) * 2), (16, 768, (768,) * 3),
    (128, 512, (512,) * 2),
]  # fmt: skip
INT4 = [(128, (64,) * 3), (256, (256, 64, 64)), (512, (512,) * 3), (1024, (1024, 256, 256))]


def ratio(before: Callable[[], Any], after: Callable[[], Any], budget: float = 0.5) -> tuple[float, float, float]:
    """The quickest run of each in microseconds, and the median of before / after."""
    for _ in range(3):
        before(), after()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + budget
    while len(times[0]) < 9 or time.perf_counter() < end:
        order = (0, 1) if len(times[0]) % 2 else (1, 0)
        for way in order:
            start = time.thread_time()
            (before, after)[way]()
            times[way].append(time.thread_time() - start)
    quotient = statistics.median(b / a for b, a in zip(*times))
    return 1e6 * min(times[0]), 1e6 * min(times[1]), quotient


def show(name: str, *measured: float) -> None:
    print(f"{name:64} {measured[0]:9.1f} us -> {measured[1]:9.1f} us  {measured[2]:5.2f}x", flush=True)


def products(dtype: torch.dtype) -> None:
    for rows, inner, outs in PRODUCTS:
        name = f"{str(dtype)[6:]} {rows}x{inner} by {outs}"
        x = torch.randn(rows, inner).to(dtype)
        weights = [torch.randn(out, inner).to(dtype) for out in outs]
        joined = torch.cat(weights)

        def apart(x: Any = x, weights: Any = weights) -> Any:
            return [torch.mm(x, w.t()) for w in weights]

        def one(x: Any = x, joined: Any = joined, outs: Any = outs) -> Any:
            return torch.mm(x, joined.t()).split(outs, 1)

        def each_call(x: Any = x, weights: Any = weights, outs: Any = outs) -> Any:
            return torch.mm(x, torch.cat(weights).t()).split(outs, 1)

        show(f"{name}, joined once", *ratio(apart, one))
        show(f"{name}, joined at each call", *ratio(apart, each_call))
        try:
            reordered = torch.ops.mkldnn._reorder_linear_weight(joined, rows)
        except RuntimeError:  # bf16 needs AVX-512
            continue

        def packed(x: Any = x, reordered: Any = reordered, outs: Any = outs) -> Any:
            return torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "").split(outs, 1)

        show(f"{name}, joined -> joined and packed", *ratio(one, packed))


def int4(dtype: torch.dtype, rows: int) -> None:
    multiply, pack = torch.ops.aten._weight_int4pack_mm_for_cpu, torch.ops.aten._convert_weight_to_int4pack_for_cpu
    for inner, outs in INT4:
        x = torch.randn(rows, inner).to(dtype)
        weights = [pack(torch.randint(0, 16, (out, inner), dtype=torch.int32), 1) for out in outs]
        scales = [torch.randn(inner // 32, out, 2).to(dtype) for out in outs]
        whole = torch.cat(weights), torch.cat(scales, 1)

        def apart(x: Any = x, weights: Any = weights, scales: Any = scales) -> Any:
            return [multiply(x, w, 32, s) for w, s in zip(weights, scales)]

        def one(x: Any = x, whole: Any = whole, outs: Any = outs) -> Any:
            return multiply(x, whole[0], 32, whole[1]).split(outs, 1)

        show(f"int4 {str(dtype)[6:]} {rows}x{inner} by {outs}", *ratio(apart, one))


class Projections(nn.Module):
    """Layers of eight einsum projections of one activation, then a sum."""

    def __init__(self, inner: int, sizes: tuple[int, ...], layers: int = 4) -> None:
        super().__init__()
        made = [torch.randn(inner, 2, size) / inner for _ in range(layers) for size in sizes]
        self.weights, self.count = nn.ParameterList(map(nn.Parameter, made)), len(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.weights), self.count):
            weights = self.weights[first : first + self.count]
            x = x + sum(torch.einsum("bsi,ihd->bshd", x, w).tanh().sum((-1, -2)).unsqueeze(-1) for w in weights)
        return x


class Int4Layers(nn.Module):
    def __init__(self, inner: int, outs: tuple[int, ...], layers: int = 8) -> None:
        super().__init__()
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.layers, self.count = layers, len(outs)
        for i, out in enumerate(outs * layers):
            self.register_buffer(f"w{i}", pack(torch.randint(0, 16, (out, inner), dtype=torch.int32), 1))
            self.register_buffer(f"s{i}", (torch.randn(inner // 32, out, 2) * 0.01).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(self.layers):
            numbers = range(layer * self.count, (layer + 1) * self.count)
            parts = [(getattr(self, f"w{i}"), getattr(self, f"s{i}")) for i in numbers]
            results = [torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 32, s) for w, s in parts]
            x = (x + sum(y.tanh().mean(-1, keepdim=True) for y in results)).contiguous()
        return x


def compiled() -> None:
    models = {
        "8 einsum projections of 4 columns, 64x4 rows": (Projections(64, (2,) * 8), torch.randn(64, 4, 64)),
        "3 einsum projections of 16 columns, 8x4 rows": (Projections(64, (8,) * 3), torch.randn(8, 4, 64)),
        "int4, 3 layers of 64 columns, 1 row": (Int4Layers(128, (64,) * 3), torch.randn(1, 128).bfloat16()),
        "int4, 3 layers of 512 columns, 1 row": (Int4Layers(512, (512,) * 3), torch.randn(1, 512).bfloat16()),
    }
    for name, (model, x) in models.items():
        ways = []
        for removed in ("grouped_gemm_pass,concat_linear_woq_int4", ""):
            torch._dynamo.reset()
            options = {"freeze": True, "remove_passes": removed}
            run = torch.compile(model, backend=triptych.compile_fx, options=options)
            torch.testing.assert_close(run(x), model(x), rtol=2e-2, atol=2e-2)
            ways.append(lambda run=run, x=x: run(x))
        torch.testing.assert_close(ways[1](), ways[0](), rtol=1e-4, atol=1e-4)
        show(name, *ratio(*ways, budget=3.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true", help="whole models, with the pass and without")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if given.compiled:
            compiled()
            return
        products(torch.float32)
        products(torch.bfloat16)
        for rows in (1, 4):
            int4(torch.bfloat16, rows)


if __name__ == "__main__":
    main()
