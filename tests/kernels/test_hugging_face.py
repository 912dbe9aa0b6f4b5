"""Families of Hugging Face models from small configurations, as shipped and with eager attention, through kernels.

`tests/test_models.py` has the most common ones as shipped; here are those whose code is unusual, and the same with
attention that is written out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import triptych
from tests.compare import check_inference, check_training

transformers = pytest.importorskip("transformers")

WIDTH, WORDS, POSITIONS = 16, 41, 32


def bart(**how: Any) -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=WORDS, max_position_embeddings=POSITIONS, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=WIDTH, decoder_ffn_dim=WIDTH, dropout=0.0,
        use_cache=False, **how,
    )  # fmt: skip
    return transformers.BartModel(config)


def longformer(**how: Any) -> nn.Module:
    config = transformers.LongformerConfig(
        vocab_size=WORDS, attention_window=[4], hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=WIDTH, max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=1, **how,
    )  # fmt: skip
    return transformers.LongformerModel(config)


def gpt2(**how: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=POSITIONS, n_embd=WIDTH, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, use_cache=False, **how,
    )  # fmt: skip
    return transformers.GPT2Model(config)


def bert(**how: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=WIDTH,
        max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **how,
    )  # fmt: skip
    return transformers.BertModel(config)


def llama(**how: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, use_cache=False, **how,
    )  # fmt: skip
    return transformers.LlamaModel(config)


def mixtral(**how: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=POSITIONS, use_cache=False, **how,
    )  # fmt: skip
    return transformers.MixtralModel(config)


def t5(**how: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=WIDTH, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False, **how,
    )  # fmt: skip
    return transformers.T5EncoderModel(config)


EAGER = {"attn_implementation": "eager"}
CASES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], torch.dtype, bool]] = {
    "bart": (bart, {}, torch.float32, True),
    "bart_eager": (bart, EAGER, torch.float32, False),
    "longformer": (longformer, {}, torch.float32, False),
    "gpt2_eager_bf16": (gpt2, EAGER, torch.bfloat16, True),
    "bert_eager": (bert, EAGER, torch.float32, False),
    "llama_eager": (llama, EAGER, torch.float32, False),
    "mixtral": (mixtral, {}, torch.float32, False),
    "t5_eager": (t5, EAGER, torch.float32, False),
}
"""Builder, configuration, dtype, and whether it is trained too."""


ALL = bool(os.environ.get("ALL_KERNELS"))
QUICK = (("longformer", "eager"), ("gpt2_eager_bf16", "inductor"))
"""What `make test` runs: the first has no unusual kernels, only an unusual graph. `make test-kernels` runs all, and
trains them."""


@pytest.mark.parametrize(
    "name, codegen", [(name, "inductor") for name in CASES] if ALL else QUICK
)
def test_family(name: str, codegen: str) -> None:
    build, how, dtype, trained = CASES[name]
    torch.manual_seed(0)
    model = build(**how).to(dtype)

    tokens = torch.randint(2, WORDS, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    how_compiled: dict[str, Any] = {"backend": triptych.compile_fx, "options": {"codegen": codegen}}
    check_inference(model, (), {"input_ids": tokens, "attention_mask": mask}, **how_compiled)
    if trained and ALL:
        check_training(model, (), {"input_ids": tokens, "attention_mask": mask}, **how_compiled)
