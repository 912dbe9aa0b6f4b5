"""A training step of a language model's head and loss: time and peak memory, ours and Inductor's, on a GPU.

    python bench/head.py [--rows 8192] [--hidden 4096] [--classes 128256] [--dtype bfloat16] [--chunks 0]

Both variants run in one process, in turns; the best round counts. Memory is the peak during a step, with the weight and
the hidden states and without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

import triptych
from triptych.cost.timing import seconds


def head(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, w).float(), y)


def step_of(loss: Callable[..., torch.Tensor], *given: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        for tensor in given:
            tensor.grad = None
        value = loss(*given)
        value.backward()
        return value

    return step


def peak(step: Callable[[], torch.Tensor], *given: torch.Tensor) -> tuple[float, float]:
    """GiB at the peak of a step, with its inputs and without."""
    for tensor in given:
        tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before
    return (beyond + sum(t.nbytes for t in given)) / 2**30, beyond / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--chunks", type=int, nargs="*", default=[0], help="0: as the cost model says")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    h = torch.randn(given.rows, given.hidden, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(given.classes, given.hidden, device="cuda") / math.sqrt(given.hidden)).to(dtype).requires_grad_()
    y = torch.randint(0, given.classes, (given.rows,), device="cuda")
    ways = {"inductor": torch.compile(head, backend="inductor")}
    for chunks in given.chunks:
        options = {"auto_chunker.chunks": chunks}
        ways[f"triptych {chunks or ''}"] = torch.compile(head, backend=triptych.compile_fx, options=options)
    steps = {way: step_of(run, h, w, y) for way, run in ways.items()}
    best = dict.fromkeys(ways, math.inf)
    for _ in range(3):
        for way, step in steps.items():
            best[way] = min(best[way], seconds(step, rounds=3))
    exact: list[torch.Tensor] = []
    for way, step in steps.items():
        total, beyond = peak(step, h, w)
        gradients = [t.grad.float() for t in (h, w) if t.grad is not None]
        exact = exact or gradients
        apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients, exact))
        print(
            f"{way:12} {1e3 * best[way]:8.3f} ms {best[way] / best['inductor']:5.3f} of Inductor's  {total:6.2f} GiB, "
            f"{beyond:6.2f} GiB beyond the operands  gradients apart by {apart:.1e}"
        )


if __name__ == "__main__":
    main()
