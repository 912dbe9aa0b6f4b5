"""A small zoo: every model from random weights, without dropout, with inputs of two sizes.

Sizes are chosen so that no two dimensions of one model are equal by accident: with dynamic shapes Dynamo
would take equal sizes for one symbol, and a wrong dimension in a rewrite would go unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A model, a call, and a call of another size for dynamic shapes."""

    model: nn.Module
    call: Call
    other: Call


VOCABULARY = 97


class MLP(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)
        )


class ConvBatchNorm(nn.Module):
    """Running statistics make this one mutate its buffers; the residual makes a value be used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv_norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = torch.relu(x + self.conv_norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


class LSTM(nn.Module):
    """A cell in a Python loop: Dynamo unrolls it, and each step reads the same weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, 2 * width)

    def forward(self, sequence: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = cell = sequence.new_zeros(sequence.shape[1], self.cell.hidden_size)
        steps = []
        for step in sequence.unbind(0):
            hidden, cell = self.cell(step, (hidden, cell))
            steps.append(hidden)
        return torch.stack(steps), (hidden, cell)


class Encoder(nn.Module):
    """Sequence first: with the batch first, a layer in inference is one opaque operation."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(width))

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device, target.dtype)
        return self.layers(target, memory, tgt_mask=mask, tgt_is_causal=True)


def mlp(width: int, layers: int) -> Case:
    return Case(MLP(width), Call((torch.randn(5, width),)), Call((torch.randn(9, width),)))


def conv_batchnorm(width: int, layers: int) -> Case:
    # Inductor fixes the size of an image when it lowers the backward of a convolution: only the batch may
    # change
    return Case(
        ConvBatchNorm(width // 4),
        Call((torch.randn(4, 3, 11, 13),)),
        Call((torch.randn(6, 3, 11, 13),)),
    )


def lstm_cell(width: int, layers: int) -> Case:
    # the loop is unrolled, so its length is part of the program: only the batch may change
    return Case(LSTM(width), Call((torch.randn(3, 5, width),)), Call((torch.randn(3, 7, width),)))


def encoder(width: int, layers: int) -> Case:
    return Case(Encoder(width, layers), Call((torch.randn(7, 3, width),)), Call((torch.randn(11, 5, width),)))


def decoder(width: int, layers: int) -> Case:
    return Case(
        Decoder(width, layers),
        Call((torch.randn(3, 7, width), torch.randn(3, 9, width))),
        Call((torch.randn(5, 11, width), torch.randn(5, 6, width))),
    )


def _tokens(*shape: int) -> Tensor:
    return torch.randint(2, VOCABULARY, shape)


def _text(batch: int, length: int, **more: Tensor) -> Call:
    return Call(kwargs={"input_ids": _tokens(batch, length), **more})


def bert(width: int, layers: int) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Case(BertModel(config), _text(3, 7), _text(5, 11))


def gpt2(width: int, layers: int) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    # without it the loss function warns, and the warning breaks the graph
    model.loss_type = "ForCausalLM"
    return Case(model, _text(3, 7, labels=_tokens(3, 7)), _text(5, 11, labels=_tokens(5, 11)))


def llama(width: int, layers: int) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return Case(LlamaForCausalLM(config), _text(3, 7), _text(5, 11))


def t5(width: int, layers: int) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=layers,
        num_decoder_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
    )
    return Case(
        T5ForConditionalGeneration(config),
        _text(3, 7, decoder_input_ids=_tokens(3, 6)),
        _text(5, 11, decoder_input_ids=_tokens(5, 9)),
    )


def vit(width: int, layers: int) -> Case:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=24,
        patch_size=8,
    )
    # the position embedding fixes the image size: only the batch may change
    return Case(
        ViTModel(config),
        Call(kwargs={"pixel_values": torch.randn(4, 3, 24, 24)}),
        Call(kwargs={"pixel_values": torch.randn(5, 3, 24, 24)}),
    )


def resnet(width: int, layers: int) -> Case:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=width // 4, hidden_sizes=[width, 2 * width], depths=[layers, layers])
    # as for conv_batchnorm, only the batch may change
    return Case(
        ResNetModel(config),
        Call(kwargs={"pixel_values": torch.randn(4, 3, 22, 26)}),
        Call(kwargs={"pixel_values": torch.randn(6, 3, 22, 26)}),
    )


MODELS: dict[str, Callable[[int, int], Case]] = {
    builder.__name__: builder
    for builder in (mlp, conv_batchnorm, lstm_cell, encoder, decoder, bert, gpt2, llama, t5, vit, resnet)
}


def build(name: str, width: int = 32, layers: int = 1) -> Case:
    """The model of that name, the same weights and inputs every time; some have no layers to repeat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = MODELS[name](width, layers)
        _stir(case.model, 0.6 / width**0.5)
    return case


@torch.no_grad()
def _stir(model: nn.Module, amount: float) -> None:
    """Move every weight away from its initial value.

    Fresh models hide mistakes: biases are 0, norms multiply by 1, and weights are so small that attention is
    almost uniform, whatever its scale or mask.
    """
    for weight in model.parameters():
        weight += amount * torch.randn_like(weight)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer += amount * torch.randn_like(buffer)
        elif name.endswith("running_var"):
            buffer *= 1 + torch.rand_like(buffer)
