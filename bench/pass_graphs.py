"""The graphs on which the time of the passes is measured: models of many kinds, as Dynamo and AOTAutograd give them.

The models are narrow, because the width of a tensor is nothing to a graph pass, and as deep as real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from models.written_by_hand import NanoGPT
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

VOCABULARY, LENGTH, BATCH, WIDTH = 1000, 64, 4, 256
HEADS = WIDTH // 64
LAYERS = 12

Subject = tuple[nn.Module, dict[str, Any]]
SUBJECTS: dict[str, Callable[[], Subject]] = {}
"""By name: builds a model and the arguments of one call; the call returns a loss while the model is training."""


def subject(title: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    def enter(build: Callable[[], Subject]) -> Callable[[], Subject]:
        SUBJECTS[title] = build
        return build

    return enter


class WithLoss(nn.Module):
    """In training the mean square of a model's result, so that every graph has a backward."""

    def __init__(self, model: nn.Module, result: Callable[[Any], Tensor] = lambda result: result) -> None:
        super().__init__()
        self.model, self.result = model, result

    def forward(self, **inputs: Any) -> Tensor:
        result = self.result(self.model(**inputs))
        return result.float().square().mean() if self.training else result


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def logits(result: Any) -> Tensor:
    return result.logits


def language_model(model: Any) -> Subject:
    """A model that computes its own loss."""
    model.loss_type = "ForCausalLM"  # without it a warning breaks the graph
    return OfTokens(model), {"input_ids": tokens()}


class OfTokens(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, labels=input_ids).loss if self.training else self.model(input_ids).logits


@subject("GPT-2")
def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return language_model(GPT2LMHeadModel(config))  # with the dropout that it has by default


@subject("Llama")
def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, use_cache=False,
    )  # fmt: skip
    return language_model(LlamaForCausalLM(config))


@subject("Mixtral")
def mixtral() -> Subject:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS // 2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, num_local_experts=4, use_cache=False,
        experts_implementation="batched_mm",  # in one graph, forward and backward
    )  # fmt: skip
    return WithLoss(MixtralForCausalLM(config), logits), {"input_ids": tokens()}


@subject("BERT")
def bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )  # fmt: skip
    return WithLoss(BertForSequenceClassification(config), logits), {"input_ids": tokens()}


@subject("T5")
def t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=64, d_ff=4 * WIDTH, num_layers=LAYERS // 2, num_heads=HEADS,
        use_cache=False,
    )  # fmt: skip
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens()}
    return WithLoss(T5ForConditionalGeneration(config), logits), inputs


@subject("ViT")
def vit() -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        image_size=64, patch_size=8, num_labels=16,
    )  # fmt: skip
    return WithLoss(ViTForImageClassification(config), logits), {"pixel_values": torch.randn(BATCH, 3, 64, 64)}


@subject("nanoGPT")
def nanogpt() -> Subject:
    model = NanoGPT(VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS)
    return WithLoss(model), {"ids": tokens()}


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.convolutions = nn.ModuleList([
            nn.Conv2d(width, inner, 1, bias=False),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.Conv2d(inner, width, 1, bias=False),
        ])  # fmt: skip
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (inner, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            y = norm(convolution(y))
            y = F.relu(y + x if number == 2 else y)
        return y


@subject("ResNet")
def resnet() -> Subject:
    """Sixteen blocks, as many as ResNet-50 has."""
    body = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), *(Bottleneck(64) for _ in range(16)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 16))
    return WithLoss(OfImages(nn.Sequential(body, head))), {"images": torch.randn(BATCH, 3, 32, 32)}


class OfImages(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


class NextBlock(nn.Module):
    """A block of ConvNeXt: a convolution for each channel, and a layer norm and a network over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.spatial(x).permute(0, 2, 3, 1))) * self.scale
        return x + y.permute(0, 3, 1, 2)


@subject("ConvNeXt")
def convnext() -> Subject:
    body = nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), *(NextBlock(64) for _ in range(18)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 16))
    return WithLoss(OfImages(nn.Sequential(body, head))), {"images": torch.randn(BATCH, 3, 32, 32)}


class Towers(nn.Module):
    """What a recommender has: small networks side by side over embeddings, joined at the end."""

    def __init__(self, towers: int = 16, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(towers))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width))
            for _ in range(towers)
        )
        self.head = nn.Sequential(nn.Linear(towers * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, ids: Tensor) -> Tensor:
        parts = [t(e(ids[:, i])) for i, (t, e) in enumerate(zip(self.towers, self.tables))]
        return self.head(torch.cat(parts, dim=-1))


@subject("MLP towers")
def towers() -> Subject:
    return WithLoss(Towers()), {"ids": torch.randint(VOCABULARY, (BATCH * LENGTH, 16))}


@dataclass
class Captured:
    """The graphs of one model before any pass."""

    torch_level: list[tuple[GraphModule, Sequence[Any]]] = field(default_factory=list)
    """In training and in inference, with the inputs."""
    joint: GraphModule | None = None
    joint_inputs: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the partitioner needs to cut the joint graph."""
    inference: GraphModule | None = None


def capture(title: str, device: str = "cpu") -> Captured:
    """The graphs of one training step and of one call in inference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = SUBJECTS[title]()
    model, inputs = model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}
    captured = Captured()

    def partition(gm: GraphModule, inputs: Any, **facts: Any) -> tuple[GraphModule, GraphModule]:
        captured.joint, captured.joint_inputs, captured.facts = copy.deepcopy(gm), inputs, facts
        return min_cut_rematerialization_partition(gm, inputs, **facts)

    def inference(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        captured.inference = copy.deepcopy(gm)
        return nop(gm, inputs)

    through_aot = aot_autograd(
        fw_compiler=nop, partition_fn=partition, inference_compiler=inference, decompositions=select_decomp_table()
    )

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        captured.torch_level.append((copy.deepcopy(gm), inputs))
        return through_aot(gm, inputs)

    for training in (True, False):
        torch._dynamo.reset()
        model.train(training)
        with torch.set_grad_enabled(training):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(**inputs)
    return captured
