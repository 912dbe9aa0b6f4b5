"""Towers: many small like networks, as compiled by Inductor, by Triptych, and batched by hand.

    python bench/towers.py [--device cuda] [--towers 32] [--graphs]

All candidates of a case run in one process, interleaved; the figure is the median of many rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn as nn

import triptych


class Tower(nn.Module):
    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, out)

    def forward(self, x):
        return torch.sigmoid(self.second(torch.relu(self.norm(self.first(x)))))


class Towers(nn.Module):
    """One tower after the other, over one input or over an input each; the results side by side."""

    def __init__(self, count: int, width: int, hidden: int, out: int, result: str) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(width, hidden, out) for _ in range(count))
        self.result = result

    def forward(self, x):
        inputs = [x] * len(self.towers) if isinstance(x, torch.Tensor) else x
        results = [tower(i) for tower, i in zip(self.towers, inputs)]
        return {"cat": lambda: torch.cat(results, 1), "stack": lambda: torch.stack(results), "list": lambda: results}[
            self.result
        ]()


class ByHand(nn.Module):
    """The same, written as one: weights stacked once, a product for all towers."""

    def __init__(self, towers: Towers) -> None:
        super().__init__()

        def stacked(pick):
            return nn.Parameter(torch.stack([pick(t).detach() for t in towers.towers]))

        self.w1, self.b1 = stacked(lambda t: t.first.weight), stacked(lambda t: t.first.bias)
        self.g, self.c = stacked(lambda t: t.norm.weight), stacked(lambda t: t.norm.bias)
        self.w2, self.b2 = stacked(lambda t: t.second.weight), stacked(lambda t: t.second.bias)
        self.result = towers.result

    def forward(self, x):
        count, hidden, _ = self.w1.shape
        if isinstance(x, torch.Tensor):
            h = nn.functional.linear(x, self.w1.flatten(0, 1), self.b1.flatten()).view(-1, count, hidden)
            h = torch.relu(nn.functional.layer_norm(h, (hidden,)) * self.g + self.c).transpose(0, 1)
        else:
            h = torch.baddbmm(self.b1[:, None], torch.stack(x), self.w1.transpose(1, 2))
            h = torch.relu(nn.functional.layer_norm(h, (hidden,)) * self.g[:, None] + self.c[:, None])
        y = torch.sigmoid(torch.baddbmm(self.b2[:, None], h, self.w2.transpose(1, 2)))
        if self.result == "stack":
            return y
        return y.transpose(0, 1).flatten(1) if self.result == "cat" else [m.clone() for m in y.unbind()]


def timed(call, device: str, times: int) -> float:
    """Milliseconds a call, over a few in a row."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e3


def compare(candidates, device: str, rounds: int, times: int) -> dict[str, float]:
    seen: dict[str, list[float]] = {name: [] for name in candidates}
    for name, call in candidates.items():
        for _ in range(4):
            call()
    for _ in range(rounds):
        for name, call in candidates.items():
            seen[name].append(timed(call, device, times))
    return {name: statistics.median(times) for name, times in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--towers", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", default="1024,8192")
    parser.add_argument("--results", default="cat,list")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    mode = "reduce-overhead" if args.graphs else None
    times = 20 if cuda else 3
    print(f"{args.towers} towers {args.width}-{args.width}-{args.out}, {dtype}, {args.device}, median ms, ratio to by hand")
    for batch in map(int, args.batches.split(",")):
        for own in (False, True):
            for result in args.results.split(","):
                torch._dynamo.reset()
                torch.manual_seed(0)
                model = Towers(args.towers, args.width, args.width, args.out, result).to(args.device, dtype).eval()
                shape = (batch, args.width)
                x = torch.randn(*shape, device=args.device, dtype=dtype)
                x = [torch.randn(*shape, device=args.device, dtype=dtype) for _ in range(args.towers)] if own else x
                extra = {"mode": mode} if mode else {}
                options = {"mode": mode} if mode else {}
                compiled = {
                    "inductor": torch.compile(model, **extra),
                    "triptych": torch.compile(model, backend=triptych.compile_fx, options=options),
                    "triptych, freeze": torch.compile(model, backend=triptych.compile_fx, options={**options, "freeze": True}),
                    "by hand": torch.compile(ByHand(model), **extra),
                }
                with torch.no_grad():
                    wanted = torch.cat(model(x), 1) if result == "list" else model(x)
                    for name, f in compiled.items():
                        got = torch.cat(f(x), 1) if result == "list" else f(x)
                        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2, msg=name)
                    figures = compare({n: (lambda f=f: f(x)) for n, f in compiled.items()}, args.device, args.rounds, times)
                base = figures["by hand"]
                row = "  ".join(f"{n} {ms:.3f} ({ms / base:.2f}x)" for n, ms in figures.items())
                print(f"batch {batch:5d}  {'own input' if own else 'shared   '}  {result:5s}  {row}", flush=True)


if __name__ == "__main__":
    main()
