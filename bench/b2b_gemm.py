"""Two products with a pointwise function between them: ours, Inductor's and eager's, on a GPU.

    python bench/b2b_gemm.py [--rows 65536] [--ends 64] [--middle 4096] [--dtype bfloat16]

All variants run in one process, in turns; the best round counts.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F

import triptych
from triptych.cost.timing import seconds

FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def report(name: str, rows: int, ends: int, middle: int, dtype: torch.dtype) -> None:
    f = FUNCTIONS[name]

    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return f(a @ b) @ c

    a = torch.randn(rows, ends, device="cuda", dtype=dtype)
    b = torch.randn(ends, middle, device="cuda", dtype=dtype) / math.sqrt(ends)
    c = torch.randn(middle, ends, device="cuda", dtype=dtype) / math.sqrt(middle)
    torch._dynamo.reset()
    ways = {
        "eager": program,
        "inductor": torch.compile(program, backend="inductor"),
        "triptych": torch.compile(program, backend=triptych.compile_fx),
    }
    exact = program(a.double(), b.double(), c.double())
    best = dict.fromkeys(ways, math.inf)
    for _ in range(3):
        for way, run in ways.items():
            best[way] = min(best[way], seconds(lambda run=run: run(a, b, c), rounds=3))
    for way, run in ways.items():
        error = ((run(a, b, c) - exact).abs().max() / exact.abs().max()).item()
        print(
            f"{name:10} {rows}x{ends}x{middle}x{ends} {str(dtype)[6:]:9} {way:9} {1e3 * best[way]:8.3f} ms "
            f"{best['inductor'] / best[way]:5.2f}x  error {error:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--ends", type=int, default=64)
    parser.add_argument("--middle", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    given = parser.parse_args()
    with torch.no_grad():
        for name in FUNCTIONS:
            report(name, given.rows, given.ends, given.middle, getattr(torch, given.dtype))


if __name__ == "__main__":
    main()
