"""Queries that see no key, as those of left padding: results and gradients are those of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triptych

B, H, T, D = 2, 4, 7, 8
LOWEST = torch.finfo(torch.float32).min


def given_as_it_is(q, k, v, padding):
    return F.softmax(q @ k.mT * D**-0.5 + _bias(padding, LOWEST), -1) @ v


def added_twice(q, k, v, padding):
    """-1e9 for a key that comes later, and -1e9 for padding: where both hold, the sum is lower than elsewhere."""
    later, padded = torch.ones(T, T).triu(1), 1 - padding[:, None, None, :]
    return F.softmax(q @ k.mT * D**-0.5 + later * -1e9 + padded * -1e9, -1) @ v


def repeated_keys(q, k, v, padding):
    """Half as many heads of keys and values as of queries."""
    k, v = (x[:, ::2].repeat_interleave(2, dim=1) for x in (k, v))
    return F.softmax((q * 0.3) @ k.mT + _bias(padding, -1e9), -1) @ v


def negative_scale(q, k, v, padding):
    return F.softmax(_bias(padding, LOWEST) - q @ k.mT, -1) @ v


def _bias(padding, low):
    keep = torch.ones(T, T).tril() * padding[:, None, None, :]
    return (1 - keep) * low


def gradients(program, padding):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, generator=generator).requires_grad_() for _ in range(3))
    result = program(q, k, v, padding)
    (result * torch.randn(result.shape, generator=generator)).sum().backward()
    return result.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("program", [given_as_it_is, repeated_keys, negative_scale])
def test_rows_without_keys_have_the_gradients_of_eager(program, codegen):
    padding = torch.ones(B, T)
    padding[0, :3] = 0
    options = {"codegen": codegen, "on_error": "raise"}
    compiled = torch.compile(program, backend=triptych.compile_fx, options=options)
    for want, got in zip(gradients(program, padding), gradients(compiled, padding)):
        torch.testing.assert_close(got, want)


def test_they_are_fused():
    q, k, v = (torch.randn(B, H, T, D, requires_grad=True) for _ in range(3))
    explanation = triptych.explain(given_as_it_is, q, k, v, torch.ones(B, T), train=True, options={"codegen": "eager"})
    assert explanation.runs_of("fuse_attention")[0].fired["fuse_attention"] == 1


def test_without_padding_nothing_is_added():
    """That some key is left to each query is known of a triangle."""

    def causal(q, k, v):
        return F.softmax(q @ k.mT + (1 - torch.ones(T, T).tril()) * LOWEST, -1) @ v

    inputs = [torch.randn(B, H, T, D, requires_grad=True) for _ in range(3)]
    explanation = triptych.explain(causal, *inputs, train=True, options={"codegen": "eager"})
    calls = [n.name for n in explanation.graphs["pre_grad"].graph.nodes if n.op == "call_function"]
    assert calls[-2:] == ["scaled_dot_product_attention", "nan_rows_default"] and "matmul" not in calls


def test_rows_of_different_low_numbers_keep_their_results():
    """What the pass says of them: the gradient of the keys is another, all else is as in eager."""
    padding = torch.ones(B, T)
    padding[0, :3] = 0
    compiled = torch.compile(added_twice, backend=triptych.compile_fx, options={"codegen": "eager"})
    want, got = gradients(added_twice, padding), gradients(compiled, padding)
    for index in (0, 1, 3):
        torch.testing.assert_close(got[index], want[index])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_llama_trains_as_in_eager(side):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids, padding = torch.randint(32, (2, T)), torch.ones(2, T, dtype=torch.long)
    padding[0, slice(3) if side == "left" else slice(T - 3, T)] = 0
    steps = []
    for call in (model, torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager"})):
        model.zero_grad()
        call(input_ids=ids, attention_mask=padding, labels=ids).loss.backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-4, atol=1e-5)
