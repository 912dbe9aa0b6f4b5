"""Hugging Face encoders as shipped, bf16 inference: Inductor, and Triptych, which proves their masks away.

    python bench/attention_masks.py            # on a GPU; BERT-base 16 x 512, ViT-base 64 images
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers


def models() -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    sdpa = {"attn_implementation": "sdpa"}
    bert = transformers.BertModel(transformers.BertConfig(**sdpa))
    vit = transformers.ViTModel(transformers.ViTConfig(**sdpa))
    ids = torch.randint(5, 20000, (16, 512))
    pictures = torch.randn(64, 3, 224, 224, dtype=torch.bfloat16)
    return {"BERT-base 16 x 512": (bert, {"input_ids": ids}), "ViT-base 64 images": (vit, {"pixel_values": pictures})}


def milliseconds(model: Callable[..., Any], inputs: dict[str, torch.Tensor], repeats: int = 30) -> float:
    for _ in range(5):
        model(**inputs)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        model(**inputs)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    torch.set_grad_enabled(False)
    for name, (model, inputs) in models().items():
        model = model.eval().to("cuda", torch.bfloat16)
        inputs = {k: v.cuda() for k, v in inputs.items()}
        eager = model(**inputs).last_hidden_state
        print(f"{name}: eager {milliseconds(model, inputs):.2f} ms", end="")
        for backend in ("inductor", "triptych"):
            torch._dynamo.reset()
            fast = torch.compile(model, backend=backend)
            gap = (fast(**inputs).last_hidden_state - eager).abs().max().item()
            print(f", {backend} {milliseconds(fast, inputs):.2f} ms (off by {gap:.3f})", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
