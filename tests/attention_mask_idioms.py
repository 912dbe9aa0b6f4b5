"""Masks that are written into the scores, multiplied with them, or applied after the softmax.

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


# ---- masks of zeros and ones, multiplied and added ----


@idiom(*QKV, ("dead", (B, 1, S, S)))
def gated(q, k, v, keep):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m + (m - 1) * 1e9).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def gated_by_difference(q, k, v, keep):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m - 1e10 * (1 - m)).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def gated_before_scale(q, k, v, keep):
    m = keep.to(q.dtype)
    return (((q @ k.mT) * m - 1e6 * (1 - m)) / 2.8).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, S, S)))
def gated_twice_viewed(q, k, v, keep):
    gate, rest = keep.to(q.dtype)[:, None], (1.0 - keep.to(q.dtype))[:, None]
    return (rest * -1e9 + gate * (q @ k.mT * 0.35)).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def gated_by_booleans(q, k, v, keep):
    return (q @ k.mT * 0.35 * keep.to(q.dtype) + torch.where(keep, 0.0, -1e9).to(q.dtype)).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def gated_by_the_opposite(q, k, v, keep):
    cut = (keep == 0).to(q.dtype)
    return ((q @ k.mT * 0.35) * (1 - cut) + cut * -1e9).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="eager_nan")
def gated_by_inf(q, k, v, keep):
    bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -math.inf)
    return (q @ k.mT * 0.35 * keep.to(q.dtype) + bias).softmax(-1) @ v


@idiom(*QKV, ("ids", (B, S)))
def gated_by_ids(q, k, v, ids):
    m = (ids[:, None, :, None] == ids[:, None, None, :]).long().to(q.dtype)
    return (q @ k.mT * 0.35 * m - (1.0 - m) * 10000.0).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def gpt2(q, k, v):
    n, s = q.size(-2), k.size(-2)
    b = torch.tril(torch.ones(n, s, dtype=q.dtype)).view(1, 1, n, s)
    return ((q @ k.mT * 0.35) * b - 1e10 * (1 - b)).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def gpt1(q, k, v):
    b = torch.ones(1, 1, q.size(-2), k.size(-2), dtype=q.dtype).tril()
    w = q @ k.mT / math.sqrt(v.size(-1))
    w = w * b + -1e4 * (1 - b)
    return F.dropout(F.softmax(w, dim=-1), 0.0) @ v


@idiom(*QKV, tags="causal")
def gpt2_by_comparison(q, k, v):
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
    b = (i >= j - k.size(-2) + q.size(-2)).to(q.dtype)[None, None]
    return ((q @ k.mT * 0.35) * b - 1e10 * (1 - b)).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), (1, H, S, S))
def gated_with_bias(q, k, v, keep, bias):
    m = keep.to(q.dtype)
    return ((q @ k.mT * 0.35 + bias) * m + (m - 1) * 1e9).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), (1, H, S, S))
def gated_with_bias_in_between(q, k, v, keep, bias):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m + bias + (m - 1) * 1e9).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), (1, H, S, S))
def gated_with_bias_behind(q, k, v, keep, bias):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m + (m - 1) * 1e9 + bias).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def gated_in_float32(q, k, v, keep):
    m = keep.float()
    return ((q @ k.mT).float() * 0.35 * m - 1e10 * (1 - m)).softmax(-1).to(v.dtype) @ v


@idiom(*QKV, ("keep", (B, 1, 1, S)))
def gated_keys(q, k, v, keep):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m - 1e9 * (1 - m)).softmax(-1) @ v


@idiom(*QKV, (B, 1, 1, S))
def gated_keys_by_anything(q, k, v, m):
    """Whatever m holds: the factor goes to the keys."""
    return (q @ k.mT * 0.35 * m - 10 * (1 - m)).softmax(-1) @ v


@refused(*QKV, (B, 1, S, S), because="varies with query and key")
def gated_by_anything(q, k, v, m):
    return (q @ k.mT * 0.35 * m + (m - 1) * 1e9).softmax(-1) @ v


@refused(*QKV, ("ids", (B, 1, S, S)), because="varies with query and key")
def gated_by_integers(q, k, v, ids):
    m = ids.to(q.dtype)
    return (q @ k.mT * 0.35 * m + (m - 1) * 1e9).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="varies with query and key")
def gated_by_little(q, k, v, keep):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m + (m - 1) * 50).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="varies with query and key")
def gated_the_wrong_way(q, k, v, keep):
    m = keep.to(q.dtype)
    return (q @ k.mT * 0.35 * m - m * 1e9).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), ("keep", (B, 1, S, S)), because="varies with query and key")
def gated_by_two_masks(q, k, v, keep, other):
    return (q @ k.mT * 0.35 * keep.to(q.dtype) + (other.to(q.dtype) - 1) * 1e9).softmax(-1) @ v


@refused(*QKV, ("keep", (B, H, S, S)), because="varies with query and key")
def gated_and_turned(q, k, v, keep):
    m = keep.to(q.dtype)
    return ((q @ k.mT * 0.35 * m).mT + (m - 1) * 1e9).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def gate_raised(q, k, v, keep):
    m = keep.to(q.dtype)
    scores = q @ k.mT * 0.35 * m
    m = m + 1
    return (scores + (m - 2) * 1e9).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="varies with query and key")
def gate_written_in_between(q, k, v, keep):
    m = keep.to(q.dtype)
    scores = q @ k.mT * 0.35 * m
    m[..., 1].fill_(1.0)
    return (scores + (m - 1) * 1e9).softmax(-1) @ v


# ---- masks after the softmax ----


@idiom(*QKV, ("dead", (B, 1, S, S)))
def masked_before_and_after(q, k, v, keep):
    p = (q @ k.mT * 0.35).masked_fill(~keep, -1e9).softmax(-1)
    return (p * keep.to(q.dtype)) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="eager_nan")
def masked_by_inf_before_and_after(q, k, v, keep):
    """NaN times zero is NaN."""
    p = (q @ k.mT * 0.35).masked_fill(keep == 0, -math.inf).softmax(-1)
    return (p * keep.to(q.dtype)) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def gated_before_and_after(q, k, v, keep):
    m = keep.to(q.dtype)
    p = (q @ k.mT * 0.35 * m - 1e10 * (1 - m)).softmax(-1) * m
    return F.dropout(p, 0.0) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="eager_nan")
def renormalised_after_a_mask(q, k, v, keep):
    p = (q @ k.mT * 0.35).softmax(-1) * keep.to(q.dtype)
    return (p / p.sum(-1, keepdim=True)) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="eager_nan")
def renormalised_after_masked_fill(q, k, v, keep):
    p = F.softmax(q @ k.mT * 0.35, dim=-1).masked_fill(~keep, 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    return F.dropout(p, 0.0) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def renormalised_after_where(q, k, v, keep):
    p = torch.where(keep, F.softmax(q @ k.mT * 0.35, dim=-1), 0.0)
    return torch.div(p, torch.sum(p, -1).unsqueeze(-1)) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="eager_nan")
def renormalised_and_gated(q, k, v, keep):
    m = keep.to(q.dtype)
    p = (q @ k.mT * 0.35 * m).softmax(-1) * m
    return (p / p.sum(-1, keepdim=True)) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def renormalised_in_float32(q, k, v, keep):
    p = F.softmax(q @ k.mT * 0.35, dim=-1, dtype=torch.float32) * keep
    p = p / p.sum(-1, keepdim=True)
    return p.to(v.dtype) @ v


@idiom(*QKV, tags="causal")
def renormalised_triangle(q, k, v):
    p = (q @ k.mT * 0.35).softmax(-1).tril()
    return (p / p.sum(-1, keepdim=True)) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="how large it is counts")
def renormalised_with_a_margin(q, k, v, keep):
    """Something is added to the sum of what is kept: how much it is counts."""
    p = (q @ k.mT * 0.35).softmax(-1) * keep.to(q.dtype)
    return (p / (p.sum(-1, keepdim=True) + 1e-6)) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="how large it is counts")
def renormalised_above_a_margin(q, k, v, keep):
    p = (q @ k.mT * 0.35).softmax(-1).masked_fill(~keep, 0)
    return (p / p.sum(-1, keepdim=True).clamp(min=1e-9)) @ v


@refused(*QKV, (B, 1, S, S), because="not proved")
def renormalised_after_anything(q, k, v, m):
    p = (q @ k.mT * 0.35).softmax(-1) * m
    return (p / p.sum(-1, keepdim=True)) @ v


@refused(*QKV, ("keep", (B, H, S, S)), because="another axis")
def renormalised_over_queries(q, k, v, keep):
    p = (q @ k.mT * 0.35).softmax(-1) * keep.to(q.dtype)
    return (p / p.sum(-2, keepdim=True)) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="used")
def renormalised_and_returned(q, k, v, keep):
    p = (q @ k.mT * 0.35).softmax(-1) * keep.to(q.dtype)
    return (p / p.sum(-1, keepdim=True)) @ v, p


@refused(*QKV, ("keep", (B, 1, S, S)), ("keep", (B, 1, S, S)), because="varies with query and key")
def masked_otherwise_after(q, k, v, keep, other):
    p = (q @ k.mT * 0.35).masked_fill(~keep, -1e9).softmax(-1)
    return (p * other.to(q.dtype)) @ v
