"""More of what people write: single queries, pooling, images, NaN and infinity taken out, torch's layer with masks.

Part of the collection in `attention_idioms`, which says what the inputs are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .attention_idioms import QKV, B, D, H, S, idiom, refused

WIDTH = H * D


# ---- one query ----


@idiom((B, D), (B, S, D), ("keep", (B, S)))
def one_query_on_the_right(query, states, keep):
    scores = torch.bmm(states, query.unsqueeze(2)).squeeze(2).masked_fill(~keep, -1e10)
    return torch.bmm(F.softmax(scores, dim=1).unsqueeze(1), states).squeeze(1)


@idiom((D,), (B, S, D), (B, S, D))
def one_query_for_all(query, k, v):
    return ((k @ query / math.sqrt(D)).softmax(-1).unsqueeze(1) @ v).squeeze(1)


@idiom((D,), (B, D, S), (B, S, D))
def one_query_on_the_left(query, k, v):
    return torch.einsum("bs,bsd->bd", (query @ k * 0.35).softmax(-1), v)


@idiom((B, S, WIDTH), ("keep", (B, S)))
class PoolingByHand(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x, keep):
        weights = self.score(x).squeeze(-1).masked_fill(~keep, -1e9).softmax(-1)
        return (weights.unsqueeze(-1) * x).sum(dim=1)


# ---- pointwise products ----


@idiom((B, D), (B, S, D))
def products_by_hand(query, states):
    weights = F.softmax(torch.sum(query.unsqueeze(1) * states, dim=-1) * 0.35, dim=-1)
    return torch.sum(weights.unsqueeze(-1) * states, dim=1)


@idiom(*QKV)
def products_by_hand_of_heads(q, k, v):
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / D**0.5
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


@refused((B, S), (B, S, D), because="")
def mixture_by_hand(gate, experts):
    return (gate.softmax(-1).unsqueeze(-1) * experts).sum(1)


# ---- factors and sums ----


@idiom(*QKV)
def divided_by_the_norms(q, k, v):
    norms = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
    return ((q @ k.mT / norms) * 10).softmax(-1) @ v


@idiom(*QKV)
def divided_by_each_norm(q, k, v):
    scores = q @ k.mT / q.norm(dim=-1, keepdim=True) / k.norm(dim=-1, keepdim=True).mT
    return (scores * 10).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)), ())
def masked_then_divided_by_a_tensor(q, k, v, keep, temperature):
    scores = torch.where(keep, q @ k.mT, -1e9)
    return (scores / temperature.exp()).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), (), because="may count beside others")
def masked_little_then_multiplied_by_a_tensor(q, k, v, keep, temperature):
    return ((q @ k.mT).masked_fill(~keep, -1e4) * temperature.exp()).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def masked_then_divided_by_a_constant(q, k, v, keep):
    scores = (q @ k.mT).masked_fill(~keep, -1e9)
    return (scores / torch.sqrt(torch.tensor(8.0, dtype=q.dtype))).softmax(-1) @ v


@idiom((B, S, D), (B, S, D))
def taken_from_the_maximum(x, v):
    energy = torch.bmm(x, x.mT)
    energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
    return torch.bmm(F.softmax(energy, dim=-1), v)


@idiom((B, S, D), (B, S, D), (B, S, D), (B, S, D))
def added_to_the_values(q, k, v, x):
    return torch.baddbmm(x, (q @ k.mT * 0.35).softmax(-1), v, beta=0.5, alpha=2)


@idiom(*QKV)
def exp_by_reciprocal(q, k, v):
    scores = q @ k.mT * 0.35
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return e * e.sum(-1, keepdim=True).reciprocal() @ v


@idiom(*QKV)
def weights_unread(q, k, v):
    weights = (q @ k.mT * 0.35).softmax(-1)
    weights.mean(1)
    return weights @ v


# ---- bias of images ----


@idiom((B, 16, D), (B, 16, D), (B, 16, D), (B, 4, 4, 4), (B, 4, 4, 4), tags="static")
def rows_and_columns(q, k, v, rows, columns):
    scores = (q * 0.35) @ k.transpose(-2, -1)
    scores = scores.view(B, 4, 4, 4, 4) + rows[:, :, :, :, None] + columns[:, :, :, None, :]
    return scores.view(B, 16, 16).softmax(-1) @ v


# ---- NaN and infinity ----


@idiom(*QKV, ("dead", (B, 1, S, S)))
def nan_taken_out_where_none_is(q, k, v, keep):
    return torch.nan_to_num((q @ k.mT * 0.35).masked_fill(~keep, -1e9).softmax(-1)) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def nan_filled(q, k, v, keep):
    weights = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1)
    return weights.masked_fill(weights.isnan(), 0.0) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def nan_chosen(q, k, v, keep):
    weights = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1)
    return torch.where(weights != weights, torch.zeros_like(weights), weights) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="another number than zero")
def nan_made_one(q, k, v, keep):
    return torch.nan_to_num((q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1), nan=1.0) @ v


@idiom(*QKV, ("low", (B, 1, S, S)))
def cut_off_at_the_lowest(q, k, v, mask):
    scores = q @ k.mT * 0.35 + mask
    return torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def infinity_cut_off(q, k, v, keep):
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf)
    return scores.clamp(min=torch.finfo(scores.dtype).min).softmax(-1) @ v


@refused(*QKV, (H, 1, 1), because="together with a sink")
def infinity_cut_off_beside_a_sink(q, k, v, sink):
    scores = torch.cat([q @ k.mT * 0.35, sink.expand(B, H, S, 1)], -1)
    return scores.clamp(min=torch.finfo(scores.dtype).min).softmax(-1)[..., :-1] @ v


@refused(*QKV, because="that were shifted")
def one_beside_the_highest(q, k, v):
    scores = q @ k.mT * 0.35
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@refused(*QKV, (H, 1, 1), because="that were shifted")
def sink_beside_shifted_scores(q, k, v, sink):
    scores = torch.cat([q @ k.mT * 0.35 + 3, sink.expand(B, H, S, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


@idiom(*QKV, (H, 1, 1), tags="static")
def sink_shifted_as_the_scores(q, k, v, sink):
    scores = torch.cat([q @ k.mT * 0.35, sink.expand(B, H, S, 1)], -1)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


@refused(*QKV, because="cut off")
def cut_off_higher(q, k, v):
    return torch.clamp(q @ k.mT, min=-50000).softmax(-1) @ v


# ---- autocast switched off ----


@idiom(*QKV)
def region_without_autocast(q, k, v):
    with torch.autocast("cpu", enabled=False):
        weights = (q.float() @ k.float().mT * 0.35).softmax(-1)
    return weights.to(v.dtype) @ v


# ---- torch's layer ----


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, H)

    def forward(self, x, mask):
        return self.attention(x, x, x, attn_mask=~mask)[0]


@idiom((S, B, WIDTH), ("keep", (S, S)), tags="static")
class LayerWithMask(Layer):
    pass


@idiom((S, B, WIDTH), ("dead", (S, S)), tags="eager_nan static")
class LayerWithRowsWithoutAKey(Layer):
    pass


@idiom((S, B, WIDTH), (5, B, WIDTH), ("keep", (B, 5)), tags="static")
class LayerWithPadding(Layer):
    def forward(self, x, y, keep):
        return self.attention(x, y, y, key_padding_mask=~keep)[0]


@refused((S, B, WIDTH), ("keep", (S, S)), because="weights are used", tags="static")
class LayerWithWeights(Layer):
    def forward(self, x, mask):
        return self.attention(x, x, x, attn_mask=~mask)
