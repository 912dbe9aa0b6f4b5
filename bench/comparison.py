"""Is what a comparison with Inductor claims what a clock says?

    OMP_NUM_THREADS=1 python bench/comparison.py [--device cuda] [--train] [--rounds 30] [MODEL ...]

For six small models, `triptych.explain(..., stock=True, profile=True)` says how many times as fast a step is as that of
stock Inductor, and how many times as fast its kernels are. Then both compiles of `torch.compile` run in turns: on a CPU
by the processor time of the process, on a GPU by its events, from an idle GPU to an idle GPU. A claim that is more than
2 times off is marked, and the script then ends with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triptych

OFF = 2.0
"""A claim may differ from the clock by this factor."""
CALLS = 3
"""Calls a turn."""


class Block(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + mask
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


class Bert(nn.Module):
    def __init__(self, words: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(2)), nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.where(tokens[:, None, None] == 0, -1e4, 0.0)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Towers(nn.Module):
    def __init__(self, count: int = 8, width: int = 64) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU()) for _ in range(count)
        )
        self.head = nn.Linear(32 * count, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([tower(x) for tower in self.towers], dim=-1)).sigmoid()


class Recurrent(nn.Module):
    """A cell like that of an LSTM, in a loop over time."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            i, f, g, o = (self.of_input(step) + self.of_state(state)).chunk(4, dim=-1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
        return state


class Norms(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.scales = nn.ParameterList(torch.rand(width) for _ in range(depth))
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        for norm, scale in zip(self.norms, self.scales):
            x = x + F.silu(norm(x)) * scale
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.head(x)


def convolutions() -> nn.Module:
    sizes = (3, 16, 32, 32)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in zip(sizes, sizes[1:])
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": lambda: (Blocks(), torch.randn(4, 64, 128)),
    "towers": lambda: (Towers(), torch.randn(256, 64)),
    "cnn": lambda: (convolutions(), torch.randn(8, 3, 32, 32)),
    "bert": lambda: (Bert(), torch.randint(0, 1000, (4, 64))),
    "lstm": lambda: (Recurrent(), torch.randn(32, 8, 128)),
    "norms": lambda: (Norms(), torch.randn(1024, 512)),
}


def step(model: nn.Module, x: Tensor, backend: str, train: bool) -> Callable[[], Any]:
    compiled = torch.compile(model, backend=backend)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def training() -> Any:
        output = compiled(x)
        return torch.autograd.grad([output], weights, [torch.ones_like(output)], allow_unused=True)

    def inference() -> Any:
        with torch.no_grad():
            return compiled(x)

    call = training if train else inference
    for _ in range(3):
        call()
    return call


def seconds(call: Callable[[], Any], device: str) -> float:
    """Of one call: processor time, or by the GPU's events from idle to idle."""
    if device == "cpu":
        began = time.process_time()
        for _ in range(CALLS):
            call()
        return (time.process_time() - began) / CALLS
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def by_clock(model: nn.Module, x: Tensor, device: str, train: bool, rounds: int) -> float:
    """How many times as fast a step of ours is."""
    torch._dynamo.reset()
    calls = [step(model, x, backend, train) for backend in ("inductor", triptych.compile_fx)]
    best = [float("inf")] * 2
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            best[place] = min(best[place], seconds(calls[place], device))
    return best[0] / best[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    print(f"{'model':12} {'claimed: step':>14} {'kernels':>8} {'estimated':>10} {'clock':>7} {'claim/clock':>12}")
    wrong = 0
    for name in given.models or MODELS:
        torch.manual_seed(0)
        with torch.device(given.device):
            model, x = MODELS[name]()
        model.train(given.train)
        explanation = triptych.explain(model, x, train=given.train, stock=True, profile=True)
        claimed, kernels, estimated = claims(explanation)
        clock = by_clock(model, x, given.device, given.train, given.rounds)
        off = max(claimed / clock, clock / claimed) > OFF
        wrong += off
        figures = f"{claimed:14.2f} {kernels:8.2f} {estimated:>10} {clock:7.2f} {claimed / clock:12.2f}"
        print(f"{name:12} {figures}{'  more than 2 times off' if off else ''}", flush=True)
    return 1 if wrong else 0


def claims(explanation: Any) -> tuple[float, float, str]:
    """What the comparison says: of a step, of the kernels, both measured; and by estimate, which it does not claim."""
    ours, theirs = explanation.profile, explanation.stock.profile
    estimates = []
    for profile in (theirs, ours):
        known = [part.launch.cost.seconds for part in profile.launches if part.launch.cost is not None]
        estimates.append(sum(known))
    estimated = f"{estimates[0] / estimates[1]:.2f}" if all(estimates) else "?"
    return theirs.wall_seconds / ours.wall_seconds, theirs.kernel_seconds / ours.kernel_seconds, estimated


if __name__ == "__main__":
    sys.exit(main())
