"""Attention sinks: a column of scores without a value.

Part of the collection in `attention_idioms`, which says what the inputs are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .attention_idioms import HEADS, QKV, B, D, H, S, T, idiom, refused


def beside(scores, sinks):
    return torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)], dim=-1)


@idiom(*QKV)
def attention_sink(q, k, v):
    scores = torch.cat([q @ k.mT * 0.35, torch.zeros_like(q[..., :1])], -1)
    return F.softmax(scores, -1)[..., :-1] @ v


@idiom(*QKV, (H,), ("low", (B, 1, S, S)))
def gpt_oss(q, k, v, sinks, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.35
    scores = scores + mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    p = F.softmax(combined, dim=-1, dtype=combined.dtype)
    p = F.dropout(p[..., :-1], p=0.1, training=False).to(v.dtype)
    return torch.matmul(p, v).transpose(1, 2).contiguous()


@idiom(*QKV, (H,), ("dead", (B, 1, S, S)))
def sink_and_mask(q, k, v, sinks, keep):
    """A row without a key keeps its sink: it is zero."""
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf)
    return beside(scores, sinks).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,), ("dead", (B, 1, S, S)))
def sink_and_finite_mask(q, k, v, sinks, keep):
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -1e9)
    return beside(scores, sinks).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,), ("sunk", (B, 1, S, S)))
def sink_and_sunk_rows(q, k, v, sinks, mask):
    return beside(q @ k.mT * 0.35 + mask, sinks).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,), ("cut", (B, 1, S, S)))
def sink_and_cut_rows(q, k, v, sinks, mask):
    return beside(q @ k.mT * 0.35 + mask, sinks).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,), ("dead", (B, 1, S, S)))
def sink_and_gate(q, k, v, sinks, keep):
    m = keep.to(q.dtype)
    return beside(q @ k.mT * 0.35 * m - 1e10 * (1 - m), sinks).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,), (1, H, S, S), ("keep", (B, 1, S, S)))
def sink_bias_and_mask(q, k, v, sinks, bias, keep):
    scores = torch.where(keep, q @ k.mT * 0.35 + bias, -math.inf)
    return beside(scores, sinks).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,))
def sink_in_front(q, k, v, sinks):
    scores = q @ k.mT * 0.35
    column = sinks.view(1, -1, 1, 1).expand(q.size(0), -1, q.size(2), 1)
    return torch.cat((column, scores), dim=3).softmax(3)[..., 1:] @ v


@idiom(*QKV, (H,))
def sink_scaled_after(q, k, v, sinks):
    combined = beside(q @ k.mT, sinks) * 0.35
    return combined.float().softmax(-1).to(v.dtype)[:, :, :, : k.size(2)] @ v


@idiom(*QKV, (B, H, S, 1))
def sink_of_each_query(q, k, v, sinks):
    return torch.cat([q @ k.mT * 0.35, sinks], -1).softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H,), (B, 1, 1, S))
def sink_and_factor_of_each_key(q, k, v, sinks, weight):
    return (beside(q @ k.mT * 0.35, sinks).softmax(-1)[..., :-1] * weight) @ v


@idiom(HEADS, (B, H, T, D), (B, H, T, D), (H,), tags="static")
def sink_of_flat_heads(q, k, v, sinks):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    combined = beside(torch.bmm(q, k.mT).view(B, H, S, T), sinks)
    return torch.bmm(combined.softmax(-1).view(B * H, S, T + 1)[..., :-1], v)


@idiom(*QKV, (H,), tags="dropout")
def sink_and_dropout(q, k, v, sinks):
    return F.dropout(beside(q @ k.mT * 0.35, sinks).softmax(-1), 0.1)[..., :-1] @ v


@idiom(*QKV)
def off_by_one(q, k, v):
    scores = q @ k.mT * 0.35
    m = scores.max(-1, keepdim=True).values
    e = torch.exp(scores - m)
    return (e / (torch.exp(-m) + e.sum(-1, keepdim=True))) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def off_by_one_and_mask(q, k, v, keep):
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf)
    m = scores.amax(-1, keepdim=True).detach().clamp(min=0)
    e = (scores - m).exp()
    return F.dropout(e / (e.sum(-1, keepdim=True) + (-m).exp()), 0.0) @ v


@idiom(*QKV)
def off_by_one_without_a_shift(q, k, v):
    e = torch.exp(q @ k.mT * 0.35)
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@refused(*QKV, ("dead", (B, 1, S, S)), because="")
def off_by_one_with_rows_of_nan(q, k, v, keep):
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf)
    m = scores.amax(-1, keepdim=True)
    e = (scores - m).exp()
    return (e / (e.sum(-1, keepdim=True) + (-m).exp())) @ v


@refused(*QKV, because="")
def off_by_two(q, k, v):
    e = torch.exp(q @ k.mT * 0.35)
    return (e / (2 + e.sum(-1, keepdim=True))) @ v


@refused(*QKV, (H,), because="more or less than the sink")
def sink_left_in(q, k, v, sinks):
    return beside(q @ k.mT * 0.35, sinks).softmax(-1)[..., 1:] @ v


@refused(*QKV, (H,), because="the sink counts as a value")
def sink_with_a_value(q, k, v, sinks):
    v = torch.cat([v, v.mean(2, keepdim=True)], 2)
    return beside(q @ k.mT * 0.35, sinks).softmax(-1) @ v


@refused(*QKV, (B, H, S, 2), because="cat stands between")
def two_sinks(q, k, v, sinks):
    return torch.cat([q @ k.mT * 0.35, sinks], -1).softmax(-1)[..., :-2] @ v


@refused(*QKV, (H,), ("keep", (B, 1, S, S + 1)), because="together with a sink")
def sink_masked_too(q, k, v, sinks, keep):
    return beside(q @ k.mT * 0.35, sinks).masked_fill(~keep, -1e9).softmax(-1)[..., :-1] @ v


@refused(*QKV, because="used outside")
def sink_made_of_scores(q, k, v):
    scores = q @ k.mT * 0.35
    return torch.cat([scores, scores.mean(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


@refused(*QKV, because="a part of the probabilities is taken")
def part_of_the_keys(q, k, v):
    return (q @ k.mT * 0.35).softmax(-1)[..., :-1] @ v[..., :-1, :]


@refused(*QKV, (H,), because="")
def sink_returned(q, k, v, sinks):
    p = beside(q @ k.mT * 0.35, sinks).softmax(-1)
    return p[..., :-1] @ v, p
