"""Hugging Face models from their configurations, as shipped and with attention written out.

The name alone is the model as shipped; NAME-eager-attention is the same with `attn_implementation="eager"`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .workload import MODELS, Classes, Unavailable, Workload, workload

EAGER = "-eager-attention"


def hugging_face(builder: Callable[[bool, dict[str, Any]], Workload]) -> None:
    """Decorator: enter a builder twice; its second argument goes to the configuration."""

    @functools.wraps(builder)
    def shipped(small: bool) -> Workload:
        _require_transformers()
        return builder(small, {})

    @functools.wraps(builder)
    def eager(small: bool) -> Workload:
        _require_transformers()
        built = builder(small, {"attn_implementation": "eager"})
        if not built.model._supports_sdpa:
            raise Unavailable("as shipped, its attention is written out already")
        return built

    eager.__doc__ = f"{builder.__doc__}; attention written out"
    workload(shipped)
    MODELS[builder.__name__ + EAGER] = eager


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except Exception as error:
        raise Unavailable(f"needs transformers: {error}") from error


def logits(result: Any) -> Tensor:
    return result.logits


def image_logits(result: Any) -> Tensor:
    return result.logits_per_image


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


@dataclasses.dataclass(frozen=True)
class Size:
    """What the models have in common."""

    batch: int
    length: int
    vocabulary: int
    width: int
    heads: int
    layers: int


def size(small: bool, **real: int) -> Size:
    """The small size is the same for all; the real one is that of the base model, unless said otherwise."""
    if small:
        return Size(batch=2, length=12, vocabulary=97, width=32, heads=4, layers=2)
    return Size(**{"batch": 16, "length": 512, "vocabulary": 32_000, "width": 768, "heads": 12, "layers": 12, **real})


@hugging_face
def bert(small: bool, how: dict[str, Any]) -> Workload:
    """BERT-base, classification, 16 x 512"""
    from transformers import BertConfig, BertForSequenceClassification

    s = size(small, vocabulary=30_522)
    config = BertConfig(
        vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        intermediate_size=4 * s.width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **how,
    )  # fmt: skip
    inputs = {"input_ids": tokens(s.batch, s.length, s.vocabulary)}
    return Workload(BertForSequenceClassification(config), inputs, Classes(s.batch, classes=2), logits)


@hugging_face
def gpt2(small: bool, how: dict[str, Any]) -> Workload:
    """GPT-2, language model, 4 x 1024"""
    from transformers import GPT2Config, GPT2LMHeadModel

    s = size(small, batch=4, length=1024, vocabulary=50_257)
    config = GPT2Config(
        vocab_size=s.vocabulary, n_embd=s.width, n_layer=s.layers, n_head=s.heads, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **how,
    )  # fmt: skip
    return language_model(GPT2LMHeadModel(config), s)


def language_model(model: torch.nn.Module, s: Size) -> Workload:
    inputs = {"input_ids": tokens(s.batch, s.length, s.vocabulary)}
    return Workload(model, inputs, Classes(s.batch, s.length, classes=s.vocabulary), logits)


@hugging_face
def llama(small: bool, how: dict[str, Any]) -> Workload:
    """Llama-like, 8 layers of width 2048, grouped queries, 4 x 1024"""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = size(small, batch=4, length=1024, width=2048, heads=32, layers=8)
    config = LlamaConfig(
        vocab_size=s.vocabulary, hidden_size=s.width, intermediate_size=64 if small else 5632,
        num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=2 if small else 8,
        use_cache=False, **how,
    )  # fmt: skip
    return language_model(LlamaForCausalLM(config), s)


@hugging_face
def mixtral(small: bool, how: dict[str, Any]) -> Workload:
    """Mixtral-like, 4 layers of width 1024, 8 experts, 4 x 512"""
    from transformers import MixtralConfig, MixtralForCausalLM

    s = size(small, batch=4, width=1024, heads=16, layers=4)
    config = MixtralConfig(
        vocab_size=s.vocabulary, hidden_size=s.width, intermediate_size=64 if small else 3584,
        num_hidden_layers=s.layers, num_attention_heads=s.heads, num_key_value_heads=2 if small else 4,
        num_local_experts=4 if small else 8, use_cache=False, **how,
    )  # fmt: skip
    return language_model(MixtralForCausalLM(config), s)


def translation(model: torch.nn.Module, s: Size, **encoder: Tensor) -> Workload:
    """An encoder and a decoder, which reads a quarter as many tokens."""
    length = s.length // 4
    inputs = {**encoder, "decoder_input_ids": tokens(s.batch, length, s.vocabulary)}
    return Workload(model, inputs, Classes(s.batch, length, classes=s.vocabulary), logits)


@hugging_face
def t5(small: bool, how: dict[str, Any]) -> Workload:
    """T5-base, 8 x 512 to 8 x 128"""
    from transformers import T5Config, T5ForConditionalGeneration

    s = size(small, batch=8, vocabulary=32_128)
    config = T5Config(
        vocab_size=s.vocabulary, d_model=s.width, d_kv=s.width // s.heads, d_ff=4 * s.width, num_layers=s.layers,
        num_heads=s.heads, dropout_rate=0.0, use_cache=False, **how,
    )  # fmt: skip
    inputs = {"input_ids": tokens(s.batch, s.length, s.vocabulary)}
    return translation(T5ForConditionalGeneration(config), s, **inputs)


@hugging_face
def bart(small: bool, how: dict[str, Any]) -> Workload:
    """BART-base, 8 x 512 to 8 x 128"""
    from transformers import BartConfig, BartForConditionalGeneration

    s = size(small, batch=8, vocabulary=50_265, layers=6)
    config = BartConfig(
        vocab_size=s.vocabulary, d_model=s.width, encoder_layers=s.layers, decoder_layers=s.layers,
        encoder_attention_heads=s.heads, decoder_attention_heads=s.heads, encoder_ffn_dim=4 * s.width,
        decoder_ffn_dim=4 * s.width, dropout=0.0, use_cache=False, **how,
    )  # fmt: skip
    inputs = {"input_ids": tokens(s.batch, s.length, s.vocabulary)}
    return translation(BartForConditionalGeneration(config), s, **inputs)


@hugging_face
def whisper(small: bool, how: dict[str, Any]) -> Workload:
    """Whisper-base, 8 x 30 seconds to 8 x 128 tokens"""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    s = size(small, batch=8, vocabulary=51_865, width=512, heads=8, layers=6)
    frames = 32 if small else 3000
    config = WhisperConfig(
        vocab_size=s.vocabulary, d_model=s.width, encoder_layers=s.layers, decoder_layers=s.layers,
        encoder_attention_heads=s.heads, decoder_attention_heads=s.heads, encoder_ffn_dim=4 * s.width,
        decoder_ffn_dim=4 * s.width, max_source_positions=frames // 2, dropout=0.0, use_cache=False,
        **({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1} if small else {}),
        **how,
    )  # fmt: skip
    sound = {"input_features": torch.randn(s.batch, config.num_mel_bins, frames)}
    return translation(WhisperForConditionalGeneration(config), s, **sound)


def images(small: bool) -> tuple[int, int, int, Tensor]:
    """Batch, side, side of a patch, and the images."""
    batch, side, patch = (2, 32, 8) if small else (64, 224, 16)
    return batch, side, patch, torch.randn(batch, 3, side, side)


@hugging_face
def vit(small: bool, how: dict[str, Any]) -> Workload:
    """ViT-base, classification, 64 images"""
    from transformers import ViTConfig, ViTForImageClassification

    s, (batch, side, patch, pixels) = size(small), images(small)
    config = ViTConfig(
        hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads, intermediate_size=4 * s.width,
        image_size=side, patch_size=patch, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=1000, **how,
    )  # fmt: skip
    return Workload(ViTForImageClassification(config), {"pixel_values": pixels}, Classes(batch, classes=1000), logits)


@hugging_face
def swin(small: bool, how: dict[str, Any]) -> Workload:
    """Swin-T, classification, 64 images"""
    from transformers import SwinConfig, SwinForImageClassification

    batch, side, _, pixels = images(small)
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
    config = SwinConfig(image_size=side, drop_path_rate=0.0, num_labels=1000, **(sizes if small else {}), **how)
    return Workload(SwinForImageClassification(config), {"pixel_values": pixels}, Classes(batch, classes=1000), logits)


@hugging_face
def clip(small: bool, how: dict[str, Any]) -> Workload:
    """CLIP ViT-B/32, 64 images and captions"""
    from transformers import CLIPConfig, CLIPModel

    s, (batch, side, patch, pixels) = size(small), images(small)
    text: dict[str, Any] = {"max_position_embeddings": s.length, "vocab_size": s.vocabulary} if small else {}
    vision: dict[str, Any] = {"image_size": side, "patch_size": patch if small else 32}
    if small:
        for part in (text, vision):
            part.update(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        text.update(eos_token_id=2, bos_token_id=1, pad_token_id=0)
    length, vocabulary = (s.length, s.vocabulary) if small else (77, 49_406)
    config = CLIPConfig(text_config=text, vision_config=vision, **how)
    captions = tokens(batch, length, vocabulary)
    captions[:, -1] = config.text_config.eos_token_id
    model = CLIPModel(config)
    return Workload(model, {"input_ids": captions, "pixel_values": pixels}, Classes(batch, classes=batch), image_logits)
