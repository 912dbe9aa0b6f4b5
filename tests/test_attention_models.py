"""Eager attention of Hugging Face's models: how many of their layers become the fused call, checked in.

A dozen architectures by default; with TRIPTYCH_ALL_ATTENTION=1 all of them, each in training and inference, with and
without a mask.
"""

from __future__ import annotations

import os

import pytest
import torch

from triptych.options import Options
from triptych.passes.manager import run_stage
from triptych.passes.session import Session

transformers = pytest.importorskip("transformers")

ALL = os.environ.get("TRIPTYCH_ALL_ATTENTION") == "1"

SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100)
GROUPED = dict(SMALL, num_key_value_heads=2)
IMAGES = dict(SMALL, image_size=32, patch_size=8)
GPT = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
WINDOWS = dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
PAIR = dict(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100,
)  # fmt: skip

MODELS = {
    "albert": (dict(SMALL, embedding_size=32), 2),
    "bart": (PAIR, 6),
    "beit": (IMAGES, 2),
    "bert": (SMALL, 2),
    "bloom": (dict(hidden_size=64, n_layer=2, n_head=4, vocab_size=100), 2),
    "clip_vision_model": (IMAGES, 2),
    "codegen": (dict(GPT, rotary_dim=8), 2),
    "cohere": (GROUPED, 2),
    "deberta-v2": (SMALL, 2),
    "deit": (IMAGES, 2),
    "dinov2": (IMAGES, 2),
    "distilbert": (dict(dim=64, n_layers=2, n_heads=4, hidden_dim=128, vocab_size=100), 2),
    "electra": (dict(SMALL, embedding_size=64), 2),
    "falcon": (dict(SMALL, alibi=False), 2),
    "gemma": (dict(GROUPED, head_dim=16), 2),
    "gpt2": (GPT, 2),
    "gpt_neo": (
        dict(hidden_size=64, num_layers=2, num_heads=4, vocab_size=100, attention_types=[[["global", "local"], 1]]), 2,
    ),
    "gpt_neox": (SMALL, 2),
    "gpt_oss": (dict(GROUPED, head_dim=16, num_local_experts=2, num_experts_per_tok=1), 2),
    "gptj": (dict(GPT, rotary_dim=8), 2),
    "llama": (GROUPED, 2),
    "mbart": (PAIR, 6),
    "mistral": (GROUPED, 2),
    "mixtral": (dict(GROUPED, num_local_experts=2), 2),
    "mpnet": (SMALL, 2),
    "mpt": (dict(d_model=64, n_heads=4, n_layers=2, vocab_size=100), 2),
    "olmo": (SMALL, 2),
    "opt": (
        dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, vocab_size=100,
             word_embed_proj_dim=64), 2,
    ),
    "phi": (SMALL, 2),
    "qwen2": (GROUPED, 2),
    "qwen3": (dict(GROUPED, head_dim=16), 2),
    "roberta": (SMALL, 2),
    "siglip_vision_model": (IMAGES, 3),
    "stablelm": (GROUPED, 2),
    "starcoder2": (GROUPED, 2),
    "swin": (WINDOWS, 4),
    "swinv2": (WINDOWS, 4),
    "t5": (dict(d_model=64, num_layers=2, num_heads=4, d_kv=16, d_ff=128, vocab_size=100), 6),
    "vit": (IMAGES, 2),
    "whisper": (
        dict(d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
             vocab_size=100, num_mel_bins=8, max_source_positions=20, pad_token_id=0, decoder_start_token_id=1,
             bos_token_id=1, eos_token_id=2), 3,
    ),
    "xlm-roberta": (SMALL, 2),
}  # fmt: skip
"""A small configuration of each architecture, and how many attentions are found in it."""

IN_TRAINING = {"opt": 1, "bart": 3, "mbart": 3}
"""Where layers are dropped at random, one graph serves all layers."""

QUICK = "bert bloom distilbert gpt2 gpt_neox llama opt qwen3 swin t5 vit bart".split()
CASES = [(n, train, mask) for n in sorted(MODELS) for train in (False, True) for mask in (False, True)]
DEFAULT = [(n, i % 2 == 0, True) for i, n in enumerate(QUICK)] + [
    (n, i % 2 == 1, False) for i, n in enumerate(QUICK[:4])
]


def make_model(name, train):
    config = transformers.AutoConfig.for_model(name, **MODELS[name][0])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).train(train)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for rate in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob", "layerdrop", "drop_prob"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


def make_arguments(name, mask):
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    if "image_size" in MODELS[name][0]:
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids, "use_cache": False}
    given = {"input_ids": ids}
    if name in ("t5", "bart", "mbart"):
        given["decoder_input_ids"] = ids
    if mask:
        given["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
        given["attention_mask"][0, :3] = 0
    return given


@pytest.mark.parametrize(("name", "train", "mask"), CASES if ALL else DEFAULT)
def test_model(name, train, mask):
    model, given = make_model(name, train), make_arguments(name, mask)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    fused = []

    def backend(gm, example_inputs):
        session = Session(Options.make({"remove_passes": ["group_batch_fusion_passes"]}))
        made = run_stage("pre_grad", gm, session, graph="pre_grad", example_inputs=example_inputs)
        fused.extend(r.fired["fuse_attention"] for r in session.records if r.name == "fuse_attention")
        return made.forward

    with torch.set_grad_enabled(train):
        want = model(**given)[0]
        got = torch.compile(model, backend=backend)(**given)[0]
    assert sum(fused) == (IN_TRAINING if train else {}).get(name, MODELS[name][1])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    if train:
        weights = [p for p in model.parameters() if p.requires_grad]
        cotangent = torch.randn(want.shape)
        if "attention_mask" in given:  # no loss reads what stands for padding
            cotangent *= given["attention_mask"].unsqueeze(-1)
        gradients = [torch.autograd.grad((y * cotangent).sum(), weights, allow_unused=True) for y in (want, got)]
        for wanted, found in zip(*gradients):
            if wanted is not None:
                size = max(wanted.abs().max().item(), 1.0)  # what cancels is as wrong as the largest
                torch.testing.assert_close(found, wanted, atol=2e-4 * size, rtol=1e-3)
