"""Compiles one program in a separate process and says how long it took; `bench/compile_time.py` starts it.

    python bench/one_compile.py gpt-6 inference --compiler triptych --kind cold|second

It prints one line of JSON: seconds of the clock, and seconds of the processor with those of ended child processes.
"""

from __future__ import annotations

import time

PROCESS_BEGAN = time.time()  # nearly: the interpreter itself has started before

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

STARTED = "TRIPTYCH_BENCH_STARTED"
"""The time at which the parent started this process."""
GPT = "gpt-"
WIDTH, HEADS, LENGTH, BATCH, WORDS = 64, 4, 16, 2, 100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.heads(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SmallTransformer(nn.Module):
    """A transformer of which only the depth matters: it runs in no time, and compiles in a time of its depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding, self.norm, self.words = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.words(self.norm(x)).flatten(0, 1), tokens.flatten())


def subject(name: str, mode: str, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """The program and its inputs: a transformer of so many layers, or a model of the suite."""
    if name.startswith(GPT):
        torch.manual_seed(0)
        model = SmallTransformer(int(name.removeprefix(GPT))).to(device)
        return model, {"tokens": torch.randint(WORDS, (BATCH, LENGTH), device=device)}
    from models import build  # some of these import other packages, whose time is not that of a compile

    workload = build(name, device == "cpu").to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return workload.program(mode), workload.inputs


def processor_seconds() -> float:
    """Of this process, and of those that it started and that have ended, such as the C++ compiler."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def timed(run: Callable[[], Any]) -> dict[str, float]:
    wall, processor = time.perf_counter(), processor_seconds()
    run()
    return {"wall": time.perf_counter() - wall, "cpu": processor_seconds() - processor}


def backend_of(compiler: str) -> Any:
    """Ours not by name, which torch does not know in a checkout that is not installed."""
    if compiler != "triptych":
        return compiler
    import triptych

    return triptych.compile_fx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", help="gpt-DEPTH or a model of the suite")
    parser.add_argument("mode", choices=["inference", "training"])
    parser.add_argument("--compiler", choices=["inductor", "triptych"], required=True)
    parser.add_argument("--kind", choices=["cold", "second"], required=True)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    # what is printed meanwhile goes to standard error
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend = backend_of(given.compiler)
    program, inputs = subject(given.subject, given.mode, given.device)
    compiled = torch.compile(program, backend=backend) if given.kind == "cold" else None

    def first_result() -> None:
        run = compiled if compiled is not None else torch.compile(program, backend=backend)
        with torch.set_grad_enabled(given.mode == "training"):
            result = run(**inputs)
            if given.mode == "training":
                result.backward()
        if given.device == "cuda":
            torch.cuda.synchronize()

    figures: dict[str, Any] = {}
    if given.kind == "cold":
        torch.compile(nn.ReLU(), backend=backend)(torch.ones(2, device=given.device))  # imports
        figures["cold"] = timed(first_result)
        torch._dynamo.reset()
        program.zero_grad(set_to_none=True)
        figures["warm"] = timed(first_result)
    else:
        figures["after import"] = timed(first_result)
        began = float(os.environ.get(STARTED, PROCESS_BEGAN))
        figures["second process"] = {"wall": time.time() - began, "cpu": processor_seconds()}
        figures["from cache"] = is_from_cache()
    print(json.dumps(figures), file=reports, flush=True)


def is_from_cache() -> bool:
    """Was everything that was compiled loaded from a cache?"""
    from torch._dynamo.utils import counters

    seen = {**counters["inductor"], **counters["aot_autograd"]}
    hits = sum(count for name, count in seen.items() if name.endswith("cache_hit"))
    return hits > 0 and not any(count for name, count in seen.items() if name.endswith("cache_miss"))


if __name__ == "__main__":
    sys.exit(main())
