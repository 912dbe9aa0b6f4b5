"""Towers: many small similar networks, as compiled by Inductor, by Triptych, and batched by hand.

    python bench/towers.py [--device cuda] [--towers 32] [--graphs]

All candidates of a case run in one process, interleaved; the figure is the median of many rounds.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.nn as nn
from measure import compare
from models.recommenders import Towers

import triptych


class ByHand(nn.Module):
    """The same towers as one module: weights stacked once, one product for all towers."""

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


def joined(result):
    return torch.cat(result, 1) if isinstance(result, list) else result


def run_case(args, batch: int, own: bool, result: str) -> dict[str, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    like = {"device": args.device, "dtype": dtype}
    model = Towers(args.towers, args.width, args.width, args.out, result).to(**like).eval()
    inputs = [torch.randn(batch, args.width, **like) for _ in range(args.towers if own else 1)]
    x = inputs if own else inputs[0]
    mode = {"mode": "reduce-overhead"} if args.graphs else {}

    def ours(**options):
        return torch.compile(model, backend=triptych.compile_fx, options={**mode, **options})

    compiled = {
        "inductor": torch.compile(model, **mode),
        "triptych": ours(),
        "triptych, freeze": ours(freeze=True),
        "by hand": torch.compile(ByHand(model), **mode),
    }
    with torch.no_grad():
        wanted = joined(model(x))
        for name, f in compiled.items():
            torch.testing.assert_close(joined(f(x)), wanted, atol=2e-2, rtol=2e-2, msg=name)
        calls = {name: functools.partial(f, x) for name, f in compiled.items()}
        return compare(calls, args.device, args.rounds, 20 if cuda else 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--towers", type=int, default=32)
    parser.add_argument("--width", type=int, default=512, help="of the input and of the hidden layer")
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", default="1024,8192")
    parser.add_argument("--results", default="cat,list", help="how the towers' results are returned")
    args = parser.parse_args()
    print(f"{args.towers} towers {args.width}-{args.width}-{args.out}, {args.device}; ms (ratio to by hand)")
    for batch in map(int, args.batches.split(",")):
        for own in (False, True):
            for result in args.results.split(","):
                figures = run_case(args, batch, own, result)
                base = figures["by hand"]
                row = "  ".join(f"{n} {ms:.3f} ({ms / base:.2f}x)" for n, ms in figures.items())
                print(f"batch {batch:5d}  {'own input' if own else 'shared   '}  {result:5s}  {row}", flush=True)


if __name__ == "__main__":
    main()
