"""Attention masks as models build them: what is left of them before a kernel is chosen, and that results are eager's."""

from __future__ import annotations

import pytest
import torch

import triptych
from triptych.pre_grad.simplify_attention_masks import SimplifyAttentionMasks
from triptych.testing.check import run_pass

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "max_position_embeddings": 64}
USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **SMALL}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "use_cache": False, **SMALL,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

MODELS = {
    "Bert": (USUAL, {}),
    "Roberta": (USUAL, {}),
    "DistilBert": ({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **SMALL}, {}),
    "ViT": ({**{k: v for k, v in USUAL.items() if k not in SMALL}, "image_size": 32, "patch_size": 8}, {}),
    "Bart": (SEQ2SEQ, {}),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64, "use_cache": False, **TOKENS}, {}),
    "Llama": ({**USUAL, "num_key_value_heads": 2, "use_cache": False}, {}),
    "Mistral": ({**USUAL, "num_key_value_heads": 2, "use_cache": False, "sliding_window": 4}, {}),
}  # fmt: skip

EXPECTED = {
    "Bert": {"plain": 2},
    "Roberta": {"plain": 2},
    "DistilBert": {"plain": 2},
    "ViT": {"plain": 2},
    "Bart": {"plain": 2, "causal": 1},
    "GPT2": {"causal": 2},
    "Llama": {"causal": 2},
    "Mistral": {"masked": 2},
}
"""How the attentions of each model are called when the pass is done."""


def build(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0], attn_implementation="sdpa")
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(5, 60, (2, 7))
    if name == "ViT":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    return model, {"input_ids": ids, **({"decoder_input_ids": ids.flip(1)} if name == "Bart" else {})}


def kinds(gm):
    """How many attentions have a mask, are causal, or are neither."""
    found = {}
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
            mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
            causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
            kind = "masked" if mask is not None else "causal" if causal else "plain"
            found[kind] = found.get(kind, 0) + 1
    return found


def compiled(function, inputs, dynamic):
    """Results of a function whose graphs went through the pre-grad stage, and those graphs."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(triptych.pre_grad_passes(gm, example_inputs))
        return graphs[-1]

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(function, backend=backend, dynamic=dynamic)(**inputs)
    return result, graphs


def total(graphs):
    return {k: sum(kinds(g).get(k, 0) for g in graphs) for k in {k for g in graphs for k in kinds(g)}}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_masks_of_models(name, dynamic):
    model, inputs = build(name)
    with torch.no_grad():
        eager = model(**inputs).last_hidden_state
    result, graphs = compiled(model, inputs, dynamic)
    assert total(graphs) == EXPECTED[name]
    torch.testing.assert_close(result.last_hidden_state, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["Bert", "Llama", "Bart"])
def test_a_padding_mask_that_is_given_stays(name):
    model, inputs = build(name)
    keep = torch.ones(2, 7, dtype=torch.int64)
    keep[1, 4:] = 0
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(triptych.pre_grad_passes(gm, example_inputs))
        return graphs[-1]

    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend)
    for mask in (keep, keep.flip(0), torch.ones_like(keep)):  # one graph for all of them
        given = {**inputs, "attention_mask": mask}
        with torch.no_grad():
            torch.testing.assert_close(
                fast(**given).last_hidden_state, model(**given).last_hidden_state, atol=1e-5, rtol=1e-4
            )
    assert total(graphs).get("masked", 0) >= 1


def test_mask_builders_go():
    model, inputs = build("Llama")
    used: set[str] = set()

    def backend(gm, example_inputs):
        used.update(n.name for n in gm.graph.nodes if n.users)
        run_pass(SimplifyAttentionMasks, gm)
        left = [n.name for n in gm.graph.nodes if n.name in used and not n.users]
        assert not left and kinds(gm) == {"causal": 2} and "diff" not in str(gm.graph)
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    assert used
