"""The Triton kernels for linear layers against what they replace, on a GPU.

    python bench/linear_kernels.py

Times are those of a replayed CUDA graph, without the host, and of calls from Python; ratios are to the first variant.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from triptych.kernels import dot_compress, lce, parallel_linear  # noqa: F401  (each registers its operator)

ops = torch.ops.triptych


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def milliseconds(work, times=100):
    """Milliseconds on the device, replayed as a CUDA graph, and milliseconds when called from Python."""
    for _ in range(5):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return tuple(_timed(run, times) for run in (graph.replay, work))


def _timed(work, times):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def report(what, **ways):
    times = {name: milliseconds(work) for name, work in ways.items()}
    base = next(iter(times.values()))
    for name, (graphed, called) in times.items():
        print(f"{what:44} {name:16} graph {graphed:.4f} ms ({base[0] / graphed:.2f}x)   called {called:.4f} ms "
              f"({base[1] / called:.2f}x)")  # fmt: skip


@torch.no_grad()
def parallel_linear_times():
    for rows, outs in itertools.product((1, 8, 16, 64, 256), ((2048, 512, 512), (5632, 5632))):
        x, ws = random(rows, 2048, dtype=torch.bfloat16), [random(n, 2048, dtype=torch.bfloat16) for n in outs]
        merged = torch.cat(ws)
        report(
            f"{rows} x 2048 -> {outs}",
            one_by_one=lambda x=x, ws=ws: [F.linear(x, w) for w in ws],
            merged=lambda x=x, merged=merged: F.linear(x, merged),
            cat_each_call=lambda x=x, ws=ws: F.linear(x, torch.cat(ws)),
            kernel=lambda x=x, ws=ws: ops.parallel_linear(x, ws, [], None),
        )


@torch.no_grad()
def lce_times():
    for b, n, m, d in ((1024, 200, 64, 64), (4096, 512, 128, 64), (512, 1000, 100, 128), (64, 64, 64, 4096)):
        x, layer = random(b, n, d, dtype=torch.bfloat16), nn.Linear(n, m).cuda().to(torch.bfloat16)
        w, bias = layer.weight, layer.bias
        report(
            f"lce {b} x {n} x {d} -> {m}",
            as_written=lambda x=x, w=w, bias=bias: F.relu(F.linear(x.transpose(1, 2), w, bias).transpose(1, 2)),
            matmul=lambda x=x, w=w, bias=bias: F.relu(
                torch.bmm(w.expand(x.shape[0], *w.shape), x) + bias[:, None]
            ),
            kernel=lambda x=x, w=w, bias=bias: ops.lce(x, w, bias, "relu"),
            kernel_turned=lambda x=x, w=w, bias=bias: ops.lce(x, w, bias, "relu", True),
        )


@torch.no_grad()
def dot_compress_times():
    for b, n, d, k in ((1024, 256, 64, 32), (256, 1024, 128, 64), (2048, 100, 32, 16)):
        x, w = random(b, n, d, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16)
        report(
            f"dot_compress {b} x {n} x {d}, {k}",
            all_pairs=lambda x=x, w=w: x @ x.transpose(1, 2) @ w,
            two_products=lambda x=x, w=w: dot_compress.anywhere(x, w),
            kernel=lambda x=x, w=w: ops.dot_compress(x, w),
        )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here that torch can use")
    parallel_linear_times()
    lce_times()
    dot_compress_times()
