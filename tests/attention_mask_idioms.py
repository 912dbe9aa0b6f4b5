"""Masks that are written into the scores, multiplied with them, or applied after the softmax; and attention sinks.

Part of the collection in `attention_idioms`, which says what the inputs are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .attention_idioms import QKV, B, H, S, idiom, refused

# ---- masks that are written into the scores ----


@idiom(*QKV, ("keep", (B, H, S, S)))
def assigned(q, k, v, keep):
    scores = q @ k.mT * 0.35
    scores[~keep] = -math.inf
    return scores.softmax(-1) @ v


@idiom(*QKV, ("dead", (B, H, S, S)))
def assigned_finite(q, k, v, keep):
    scores = q @ k.mT * 0.35
    scores[~keep] = -1e9
    return scores.softmax(-1) @ v


@idiom(*QKV, ("dead", (B, H, S, S)), tags="eager_nan")
def assigned_rows_without_a_key(q, k, v, keep):
    scores = q @ k.mT
    scores *= 0.35
    scores[keep.logical_not()] = float("-inf")
    return scores.softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def assigned_expanded(q, k, v, keep):
    scores = q @ k.mT * 0.35
    scores[~keep.expand_as(scores)] = torch.finfo(scores.dtype).min
    return F.dropout(scores.softmax(-1), 0.0) @ v


@idiom(*QKV, ("keep", (S, S)), (1, H, S, S))
def assigned_to_all_heads(q, k, v, keep, bias):
    scores = q @ k.mT * 0.35
    scores += bias
    scores[:, :, ~keep] = -math.inf
    return scores.softmax(-1) @ v


@idiom(*QKV, ("keep", (S,)))
def assigned_to_keys(q, k, v, keep):
    scores = q @ k.mT
    scores[..., ~keep] = torch.tensor(-1e9, dtype=scores.dtype)
    return (scores * 0.35).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def assigned_triangle(q, k, v):
    scores = q @ k.mT * 0.35
    scores[..., torch.ones(q.size(-2), k.size(-2)).triu(1) == 1] = -math.inf
    return scores.softmax(-1) @ v


@idiom(*QKV, ("keep", (B, H, S, S)))
def put_by_index(q, k, v, keep):
    scores = (q @ k.mT * 0.35).index_put((~keep,), torch.tensor(-1e9, dtype=q.dtype))
    return scores.softmax(-1) @ v


@refused(*QKV, ("keep", (B, H, S, S)), because="may count beside others")
def assigned_small(q, k, v, keep):
    scores = q @ k.mT * 0.35
    scores[~keep] = -5.0
    return scores.softmax(-1) @ v


@refused(*QKV, ("keep", (B, H, S, S)), because="")
def assigned_and_seen_elsewhere(q, k, v, keep):
    scores = q @ k.mT * 0.35
    rows = scores.view(B, H, -1)
    scores[~keep] = -1e9
    return scores.softmax(-1) @ v, rows


@refused(*QKV, because="used outside")
def assigned_where_low(q, k, v):
    scores = q @ k.mT * 0.35
    scores[scores < -1] = -math.inf
    return scores.softmax(-1) @ v


@refused(*QKV, ("keep", (S, S)), because="")
def assigned_to_one_head(q, k, v, keep):
    scores = q @ k.mT * 0.35
    scores[:, 0, ~keep] = -math.inf
    return scores.softmax(-1) @ v
