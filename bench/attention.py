"""Attention: Hugging Face models as shipped, and attention written by hand, against the best way to write it.

    python bench/attention.py [--device cuda]

"dropped" is the model with its mask functions made to return None: it shows what a mask that is true everywhere costs.
Needs transformers; weights are random. All candidates of a case run in one process, interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
from unittest import mock

import torch
import torch.nn.functional as F
from measure import compare
from transformers import AutoConfig, AutoModel

import triptych


def model_case(name: str, device: str, inputs: dict[str, torch.Tensor], small: bool):
    """A model as shipped, compiled by Inductor and by Triptych, and by Inductor without its masks."""
    sizes = {"num_hidden_layers": 2} if small else {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModel.from_config(AutoConfig.for_model(name, **sizes)).to(device, dtype).eval()
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    def call(compiled, dropped: bool = False):
        patch = mock.patch.object(module, "create_bidirectional_mask", lambda *a, **k: None)
        with patch if dropped else contextlib.nullcontext():
            return compiled(**inputs)[0]

    calls = {}
    for label, how in (("inductor", {}), ("triptych", {"backend": triptych.compile_fx}), ("dropped", {})):
        torch._dynamo.reset()
        calls[label] = functools.partial(call, torch.compile(model, **how), label == "dropped")
        calls[label]()
    return calls, model(**inputs)[0]


def grouped_by_hand(q, k, v):
    """Grouped queries, a causal mask and a softmax in float32, as many models write it."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    keep = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def hand_case(device: str, small: bool):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch, heads, length, width = (1, 8, 128, 32) if small else (4, 32, 2048, 64)
    q = torch.randn(batch, heads, length, width, device=device, dtype=dtype)
    k, v = (torch.randn(batch, heads // 4, length, width, device=device, dtype=dtype) for _ in range(2))
    compiled = {
        "inductor": torch.compile(grouped_by_hand),
        "triptych": torch.compile(grouped_by_hand, backend=triptych.compile_fx),
        "dropped": torch.compile(grouped),
    }
    return {n: functools.partial(f, q, k, v) for n, f in compiled.items()}, grouped_by_hand(q, k, v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    small = args.device == "cpu"
    ids = torch.randint(0, 1000, (2, 64) if small else (16, 512), device=args.device)
    pixels = torch.randn(2 if small else 64, 3, 224, 224, device=args.device)
    pixels = pixels if small else pixels.bfloat16()
    cases = {
        "BERT-base as shipped": lambda: model_case("bert", args.device, {"input_ids": ids}, small),
        "ViT-base as shipped": lambda: model_case("vit", args.device, {"pixel_values": pixels}, small),
        "grouped queries by hand": lambda: hand_case(args.device, small),
    }
    with torch.no_grad():
        for name, make in cases.items():
            torch._dynamo.reset()
            torch.manual_seed(0)
            calls, wanted = make()
            for label, call in calls.items():
                error = (call() - wanted).float().norm() / wanted.float().norm()
                assert error < 0.05, f"{name}, {label}: off by {error:.1%}"
            figures = compare(calls, args.device, args.rounds, 2 if small else 10)
            row = "  ".join(f"{n} {ms:.3f} ({ms / figures['dropped']:.2f}x)" for n, ms in figures.items())
            print(f"{name:24s}  {row}", flush=True)


if __name__ == "__main__":
    main()
