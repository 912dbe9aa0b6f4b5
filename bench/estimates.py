"""The estimate of the cost model beside the clock, for single operators.

    python bench/estimates.py [--device cpu|cuda] [--markdown]

Each operator runs by itself, as the report estimates it. On a GPU its own time is measured, without the host; on a CPU
the time of one call, the best of several rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from triptych.cost.arithmetic import flops
from triptych.cost.estimate import OperationCost, operation_cost
from triptych.cost.timing import apart_from_the_program, rounds_in_turns, rounds_on_gpu

aten = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """One operator with the shapes of its operands, for a CPU; on a GPU the first size of each is `larger` times."""

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    larger: int = 32
    indices: int = 0
    """How many of the operands, from the last, are indices: numbers below 64."""
    scaled: tuple[int, ...] = (0,)
    """Which operands grow."""

    def operands(self, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        made = []
        for number, shape in enumerate(self.shapes):
            if device == "cuda" and number in self.scaled:
                shape = (shape[0] * self.larger, *shape[1:])
            is_index = number >= len(self.shapes) - self.indices
            make = (lambda *s, **how: torch.randint(64, s, device=device)) if is_index else torch.randn
            precise = torch.float32 if shape[1:] == (1,) else dtype  # the statistics of a norm
            made.append(make(*shape, dtype=precise, device=device))
        return made


def convolution_backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    return aten.convolution_backward(grad, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])


def depthwise_backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    return aten.convolution_backward(grad, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 64, [True, True, False])


def norm_backward(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
    return aten.native_layer_norm_backward(grad, x, [512], mean, rstd, w, w, [True, True, True])


IMAGE, FILTER = (4, 64, 32, 32), (64, 64, 3, 3)
ROWS, HEADS = (2048, 512), (2, 8, 256, 64)
OPERATORS = (
    Operator("mm", torch.mm, (ROWS, (512, 512))),
    Operator("bmm", torch.bmm, ((8, 128, 64), (8, 64, 128)), scaled=(0, 1)),
    Operator("addmm", lambda b, x, w: torch.addmm(b, x, w), ((512,), ROWS, (512, 512)), scaled=(1,)),
    Operator("mv", torch.mv, ((2048, 512), (512,))),
    Operator("convolution", lambda x, w: F.conv2d(x, w, padding=1), (IMAGE, FILTER)),
    Operator("convolution, stride 2", lambda x, w: F.conv2d(x, w, stride=2, padding=1), (IMAGE, FILTER)),
    Operator("depthwise convolution", lambda x, w: F.conv2d(x, w, padding=1, groups=64), (IMAGE, (64, 1, 3, 3))),
    Operator("transposed convolution", lambda x, w: F.conv_transpose2d(x, w), (IMAGE, (64, 32, 2, 2))),
    Operator("convolution backward", convolution_backward, (IMAGE, IMAGE, FILTER), scaled=(0, 1)),
    Operator("depthwise backward", depthwise_backward, (IMAGE, IMAGE, (64, 1, 3, 3)), scaled=(0, 1)),
    Operator("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (HEADS,) * 3, 8, scaled=(0, 1, 2)),
    Operator(
        "causal attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (HEADS,) * 3, 8,
        scaled=(0, 1, 2),
    ),
    Operator("layer norm", lambda x, w, b: aten.native_layer_norm(x, [512], w, b, 1e-5), (ROWS, (512,), (512,)), 64),
    Operator(
        "layer norm backward", norm_backward, (ROWS, ROWS, (2048, 1), (2048, 1), (512,)), 64, scaled=(0, 1, 2, 3),
    ),
    Operator("batch norm", lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
             (IMAGE, (64,), (64,))),
    Operator("softmax", lambda x: torch.softmax(x, -1), (ROWS,), 64),
    Operator("log softmax", lambda x: torch.log_softmax(x, -1), (ROWS,), 64),
    Operator("sum of all", torch.sum, (ROWS,), 128),
    Operator("sum over rows", lambda x: x.sum(0), (ROWS,), 128),
    Operator("max over columns", lambda x: x.amax(-1), (ROWS,), 128),
    Operator("cumulative sum", lambda x: x.cumsum(-1), (ROWS,), 64),
    Operator("embedding", lambda w, i: F.embedding(i, w), ((64, 512), (2048,)), 128, indices=1, scaled=(1,)),
    Operator("index select", lambda x, i: x.index_select(0, i), ((8192, 512), (2048,)), 128, indices=1, scaled=(1,)),
    Operator("gather", lambda x, i: x.gather(1, i), (ROWS, ROWS), 32, indices=1, scaled=(0, 1)),
    Operator("scatter", lambda x, s, i: x.scatter(1, i, s), (ROWS, ROWS, ROWS), 32, indices=1, scaled=(0, 1, 2)),
    Operator("index add", lambda x, s, i: x.index_add(0, i, s), ((64, 512), ROWS, ROWS[:1]), 32, indices=1,
             scaled=(1, 2)),
    Operator("cat", lambda *given: torch.cat(given, 1), (ROWS,) * 4, 32, scaled=(0, 1, 2, 3)),
    Operator("copy of a transpose", lambda x: x.t().contiguous(), (ROWS,), 64),
    Operator("clone", torch.clone, (ROWS,), 128),
    Operator("add", torch.add, (ROWS, ROWS), 128, scaled=(0, 1)),
    Operator("gelu", F.gelu, (ROWS,), 128),
    Operator("exp", torch.exp, (ROWS,), 128),
    Operator("cast", lambda x: x.to(torch.float64 if x.dtype == torch.float32 else torch.float32), (ROWS,), 128),
)  # fmt: skip


def estimated(operator: Operator, operands: list[torch.Tensor]) -> tuple[OperationCost, float]:
    """The estimate of all nodes of the operator's graph, and their floating-point operations."""
    nodes: list[Node] = list(make_fx(operator.call)(*operands).graph.nodes)
    costs = [operation_cost(node) for node in nodes]
    total = OperationCost(*(sum(getattr(cost, what) for cost in costs) for what in ("gemms", "bytes", "seconds")))
    return total, sum(map(flops, nodes))


def measured(operator: Operator, operands: list[torch.Tensor], device: str) -> float:
    with apart_from_the_program(torch.device(device)):
        if device == "cuda":
            return min(rounds_on_gpu(lambda: operator.call(*operands)))
        return min(rounds_in_turns([lambda: operator.call(*operands)])[0])


def print_row(markdown: bool, name: str, *cells: str) -> None:
    if markdown:
        print(f"| {' | '.join((name, *cells))} |")
    else:
        print(f"{name:24}", *(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--markdown", action="store_true", help="print a table for the documentation")
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    print_row(given.markdown, "operator", "MB", "Mflop", "modelled us", "clock us", "modelled / clock")
    if given.markdown:
        print("|---" * 6 + "|")
    worst = 1.0
    for operator in OPERATORS:
        operands = operator.operands(given.device, dtype)
        if sys.stderr.isatty():
            print(f"{operator.name} ...", end="\r", file=sys.stderr, flush=True)
        cost, work = estimated(operator, operands)
        seconds = measured(operator, operands, given.device)
        ratio = cost.seconds / seconds
        worst = max(worst, ratio, 1 / ratio)
        figures = (cost.bytes / 1e6, work / 1e6, cost.seconds * 1e6, seconds * 1e6, ratio)
        print_row(given.markdown, operator.name, *(f"{figure:.2f}" for figure in figures))
    print(f"\nfarthest from the clock: {worst:.1f} times")


if __name__ == "__main__":
    main()
