"""Attention masks as models build them: what is left of them before a kernel is chosen, and that results are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import triptych
from triptych.backend import compile_fx
from triptych.passes.session import watching
from triptych.pre_grad.simplify_attention_masks import SimplifyAttentionMasks
from triptych.testing.capture import capture
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


ONE_OF_A_KIND = ("Bert", "Bart", "GPT2", "Mistral")
"""Models whose masks with symbolic sizes are not those of a model before; the others are marked slow there."""


@pytest.mark.parametrize(
    "name, dynamic",
    [pytest.param(name, False, id=f"{name}-static") for name in MODELS]
    + [
        pytest.param(name, True, id=f"{name}-dynamic", marks=() if name in ONE_OF_A_KIND else pytest.mark.slow)
        for name in MODELS
    ],
)
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


# ---- attention by hand: what must be kept ----


def simplified(function, *inputs, dynamic=False):
    """The graph after the pass, and what it gives beside what it gave."""
    gm, args = capture(function, inputs, "torch", dynamic)
    before = copy.deepcopy(gm)
    tally = run_pass(SimplifyAttentionMasks, gm)
    (expected,), (actual,) = before(*args), gm(*args)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    return gm, tally


def attend(q, k=None, v=None, mask=None, **how):
    k, v = q if k is None else k, q if v is None else v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how)


def causal(rows, keys, past=0):
    return torch.arange(keys)[None, :] <= torch.arange(past, past + rows)[:, None]


Q, KV, LONG = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 4, 9, 8)


def test_grouped_queries_scale_and_dropout_are_kept():
    gm, _ = simplified(lambda q, k: attend(q, k, k, causal(6, 6), scale=0.3, enable_gqa=True), Q, KV)
    (call,) = [n for n in gm.graph.nodes if "attention" in n.name]
    assert call.kwargs == {"scale": 0.3, "enable_gqa": True, "is_causal": True}
    gm, args = capture(lambda q: attend(q, mask=causal(6, 6), dropout_p=0.25), [Q], "torch")
    assert run_pass(SimplifyAttentionMasks, gm).fired
    (call,) = [n for n in gm.graph.nodes if "attention" in n.name]
    assert call.kwargs == {"dropout_p": 0.25, "is_causal": True}


@pytest.mark.parametrize("program, kind", {
    "more keys than queries, as with a cache": (lambda q, k: attend(q, k, k, causal(6, 9, past=3)), "masked"),
    "more keys, aligned top left": (lambda q, k: attend(q, k, k, causal(6, 9)), "masked"),
    "one query sees all of a cache": (lambda q, k: attend(q[:, :, :1], k, k, causal(1, 9, past=8)), "plain"),
    "the strict triangle, whose first row is empty": (lambda q, k: attend(q, mask=causal(6, 6).tril(-1)), "masked"),
    "the upper triangle": (lambda q, k: attend(q, mask=causal(6, 6).t()), "masked"),
    "booleans as floats are added": (lambda q, k: attend(q, mask=causal(6, 6).float()), "masked"),
    "nothing is kept": (lambda q, k: attend(q, mask=torch.zeros(6, 6, dtype=torch.bool)), "masked"),
    "no queries": (lambda q, k: attend(q[:, :, :0], k, k, torch.ones(0, 9, dtype=torch.bool)), "plain"),
    "no keys": (lambda q, k: attend(q, k[:, :, :0], k[:, :, :0], torch.ones(6, 0, dtype=torch.bool)), "plain"),
    "causal by word": (lambda q, k: attend(q, is_causal=True), "causal"),
    "for each head": (lambda q, k: attend(q, mask=causal(6, 6).expand(2, 4, 6, 6).contiguous()), "causal"),
    "a bias written in place": (lambda q, k: attend(q, mask=_written(q)), "causal"),
}.values())  # fmt: skip
def test_masks_by_hand(program, kind):
    gm, _ = simplified(program, Q, LONG)
    assert kinds(gm) == {kind: 1}


def _written(q):
    bias = torch.zeros(q.shape[-2], q.shape[-2])
    bias.masked_fill_(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril().logical_not(), -float("inf"))
    return bias


def test_queries_and_keys_of_unrelated_symbolic_lengths():
    def program(q, k):
        return attend(q, k, k, causal(q.shape[-2], k.shape[-2]))

    gm, tally = simplified(program, Q, LONG, dynamic=True)
    assert kinds(gm) == {"masked": 1}
    assert any("not known to be equal" in d.reason for d in tally.declines.values())


def test_a_mask_with_a_gradient_stays():
    bias = torch.zeros(6, 6, requires_grad=True)
    gm, tally = simplified(lambda q, b: attend(q, mask=b * torch.zeros(6, 6)), Q, bias)
    assert kinds(gm) == {"masked": 1}


@pytest.mark.parametrize("mask", [lambda: causal(6, 6), lambda: torch.ones(6, 6, dtype=torch.bool), lambda: torch.zeros(6, 6)])
def test_gradients(mask):
    def program(q, k, v):
        return attend(q, k, v, mask()).transpose(1, 2).reshape(2, 6, -1).sin().sum()

    leaves = [torch.randn(2, 4, 6, 8, dtype=torch.float32).requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(program(*leaves), leaves)
    torch._dynamo.reset()
    fast = torch.compile(program, backend=compile_fx, options={"codegen": "eager"})
    with watching() as seen:
        actual = torch.autograd.grad(fast(*leaves), leaves)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want)
    assert any(r.name == "simplify_attention_masks" and r.rewrites for s in seen for r in s.records)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="facts about a GPU need a torch that knows GPUs")
@pytest.mark.parametrize("permuted", [False, True])
def test_a_bias_that_lies_otherwise_is_copied_for_the_kernel(permuted):
    shapes = [(2, 4, 6, 8), (6, 6, 4) if permuted else (4, 6, 6)]
    graph = torch.fx.Graph()
    with FakeTensorMode():  # as Dynamo would see it on a GPU
        facts = [torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
        q, bias = (graph.placeholder(n) for n in ("q", "bias"))
        q.meta["example_value"], bias.meta["example_value"] = facts
        mask = bias
        if permuted:
            mask = graph.call_method("permute", (bias, 2, 0, 1))
            mask.meta["example_value"] = facts[1].permute(2, 0, 1)
        made = graph.call_function(F.scaled_dot_product_attention, (q, q, q), {"attn_mask": mask})
        made.meta["example_value"] = F.scaled_dot_product_attention(facts[0], facts[0], facts[0])
        graph.output((made,))
    gm = torch.fx.GraphModule({}, graph)
    assert run_pass(SimplifyAttentionMasks, gm).fired["lay_out_mask"] == int(permuted)
