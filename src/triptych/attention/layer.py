"""torch's own attention layer, where it returns weights that nobody reads. With a mask it is decomposed into the
products that it computes; without one it is called without weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import fact, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.edits import SetArguments
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match
from .rule import AttentionRule, may_draw_otherwise

LAYER = "torch.nn.functional.multi_head_attention_forward"
UNUSUAL = ("bias_k", "bias_v", "static_k", "static_v")

TORCH = ("torch",)
LAYER_INPUTS = ["f32[6, 2, 16]", "f32[48, 16]", "f32[16, 16]"]


def layer_of_two_heads(x: Any, inward: Any, outward: Any, mask: Any, weights: bool = False) -> Any:
    """For examples: the layer with two heads, and its weights if they are asked for."""
    results = F.multi_head_attention_forward(
        x, x, x, 16, 2, inward, None, None, None, False, 0.0, outward, None, need_weights=True, attn_mask=mask
    )
    return results if weights else results[0]


class LayerApart(AttentionRule):
    """multi_head_attention_forward(q, k, v, ..., mask)[0] -> the products that it computes, so that the mask is seen"""

    takes_random = True

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        call, result = asked_for_weights(program, node), only_result_read(program, node)
        if call is None or result is None or not _is_usual(call):
            return
        if all(call.args.get(name) is None for name in ("attn_mask", "key_padding_mask")):
            return
        if call.args.get("training") and call.args.get("dropout_p") and not may_draw_otherwise(program):
            return
        yield Match.at(program, result, covers=[node], call=call)

    def rewrite(self, op, call):
        return _products(call, op)

    examples = [
        fires(layer_of_two_heads, *LAYER_INPUTS, "bool[6, 6]", dialects=TORCH),
        fires(layer_of_two_heads, *LAYER_INPUTS, "f32[6, 6]", dialects=TORCH),
        declines(layer_of_two_heads, *LAYER_INPUTS, None, dialects=TORCH),
        declines(lambda x, w, o, mask: layer_of_two_heads(x, w, o, mask, weights=True), *LAYER_INPUTS,
                 "f32[6, 6]", dialects=TORCH),
    ]  # fmt: skip


class WithoutWeights(AttentionRule):
    """multi_head_attention_forward(..., need_weights=True)[0] -> the same with need_weights=False, which calls the
    fused kernel"""

    takes_random = True

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        if (call := asked_for_weights(program, node)) is not None:
            yield Match.at(program, node, names=["fuse_attention"], call=call)

    def check(self, m, call):
        m.require(only_result_read(m.program, m.root.node) is not None, "the weights are used")
        masked = any(call.args.get(k) is not None for k in ("attn_mask", "key_padding_mask"))
        m.require(not masked and not call.args.get("is_causal"), "queries may be without a key")
        draws = call.args.get("training") and call.args.get("dropout_p")
        m.require(not draws or may_draw_otherwise(m.program), "dropout would draw other numbers than eager")

    def rewrite(self, op, m, call):
        node = m.root.node
        return SetArguments(node, (), {**call.args, "need_weights": False}, value=(fact(node)[0], None))

    examples = [
        fires(layer_of_two_heads, *LAYER_INPUTS, None, dialects=TORCH),
        declines(lambda x, w, o: layer_of_two_heads(x, w, o, None, weights=True), *LAYER_INPUTS, dialects=TORCH,
                 because="the weights are used"),
        declines(layer_of_two_heads, *LAYER_INPUTS, "bool[6, 6]", dialects=TORCH, because="without a key"),
    ]  # fmt: skip


def asked_for_weights(program: Program, node: Node) -> Call | None:
    """The call of torch's own layer, if it also returns the weights."""
    call = program.call(node)
    if call is None or call.op != LAYER or not call.args.get("need_weights") or not isinstance(fact(node), tuple):
        return None
    return call


def only_result_read(program: Program, node: Node) -> Node | None:
    """The first result of the layer, if nothing else of it is read."""
    users = list(node.users)
    read = program.call(users[0]) if len(users) == 1 else None
    return users[0] if read is not None and read.op == "getitem" and read.args["index"] == 0 else None


def _is_usual(call: Call) -> bool:
    args = call.args
    query, key, value = (tensor_fact(args[name]) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or query.dim() != 3 or not known_equal(key.shape, value.shape):
        return False
    if args.get("add_zero_attn") or any(args.get(name) is not None for name in UNUSUAL):
        return False
    weight = tensor_fact(args["out_proj_weight"])
    if not isinstance(args["num_heads"], int) or weight is None or not isinstance(weight.shape[0], int):
        return False
    if not isinstance(args.get("dropout_p"), (int, float)) or (len({x.dtype for x in (query, key, value)}) != 1):
        return False
    masks = [tensor_fact(args.get(name)) for name in ("attn_mask", "key_padding_mask")]
    return all(m is None or m.dtype == torch.bool or m.dtype.is_floating_point for m in masks)


def _products(call: Call, op: Emitter) -> Any:
    args, heads = call.args, call.args["num_heads"]
    queries, batch, _ = Value(op.program, args["query"]).shape
    width = Value(op.program, args["out_proj_weight"]).shape[0]
    keys = Value(op.program, args["key"]).shape[0]
    parts = _projected(op, args, width)
    q, k, v = (
        op.permute(op.reshape(x, [rows, batch, heads, width // heads]), [1, 2, 0, 3])
        for x, rows in zip(parts, (queries, keys, keys))
    )
    scores = op.matmul(op.mul(q, (width // heads) ** -0.5), op.permute(k, [0, 1, 3, 2]))
    padding, mask = args.get("key_padding_mask"), args.get("attn_mask")
    if mask is not None:
        given = Value(op.program, mask)
        shape = [batch, heads, queries, keys] if given.rank == 3 else [queries, keys]
        scores = op.add(scores, _added(op, op.reshape(given, shape), q.dtype))
    if padding is not None:
        scores = op.add(scores, _added(op, op.reshape(padding, [batch, 1, 1, keys]), q.dtype))
    weights = op.softmax(scores, 3)
    if args.get("training") and args["dropout_p"]:
        weights = op.dropout(weights, args["dropout_p"], True)
    heads_joined = op.reshape(op.permute(op.matmul(weights, v), [2, 0, 1, 3]), [queries, batch, width])
    return op.linear(heads_joined, args["out_proj_weight"], args.get("out_proj_bias"))


def _projected(op: Emitter, args: dict[str, Any], width: int) -> list[Value]:
    inputs = [args["query"], args["key"], args["value"]]
    bias = args.get("in_proj_bias")
    biases = [None] * 3 if bias is None else [op.slice(bias, 0, i * width, (i + 1) * width) for i in range(3)]
    if args.get("use_separate_proj_weight"):
        weights = [args[f"{name}_proj_weight"] for name in "qkv"]
    elif inputs[0] is inputs[1] is inputs[2]:
        whole = op.linear(inputs[0], args["in_proj_weight"], bias)
        return [op.slice(whole, 2, i * width, (i + 1) * width) for i in range(3)]
    else:
        weights = [op.slice(args["in_proj_weight"], 0, i * width, (i + 1) * width) for i in range(3)]
    return [op.linear(x, w, b) for x, w, b in zip(inputs, weights, biases)]


def _added(op: Emitter, mask: Value, dtype: torch.dtype) -> Value:
    """A mask as the layer adds it to the scores."""
    if mask.dtype != torch.bool:
        return mask
    zero = op.full([], 0.0, dtype=dtype, device=mask.device)
    return op.where(mask, -math.inf, zero)
