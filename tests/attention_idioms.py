"""Attention as people write it, and things that look like it: each with what it is fed, how many attentions are to be
found in it, and, where none is, why.

Inputs are float tensors of the given shape unless a kind stands before it: `keep` a boolean mask with a key in every
row, `dead` one with rows that have none, `low` 0 or the lowest number, `sunk` the same with a row that is low
everywhere, `cut` 0 or -inf with a row that is all -inf, `ids` small integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

B, H, S, D = 2, 4, 6, 8
T = 10
"""Keys of cross attention."""
HEADS = (B, H, S, D)
QKV = (HEADS, HEADS, HEADS)
CROSS = (HEADS, (B, H, T, D), (B, H, T, D))
TOKENS = (B, S, H, D)
FLAT = (B * H, S, D)
GROUPED = (HEADS, (B, 2, S, D), (B, 2, S, D))


@dataclass(frozen=True)
class Idiom:
    name: str
    program: Callable[..., Any]
    inputs: tuple[Any, ...]
    fuses: int
    because: str
    tags: frozenset[str] = field(default_factory=frozenset)
    """`dropout`: draws random numbers; `eager_nan`: rows are NaN in eager; `causal`: a triangle that needs no mask;
    `static`: sizes are written into it, or rates that are not known at first; `sunk`: no loss reads the last row."""


IDIOMS: dict[str, Idiom] = {}


def idiom(*inputs: Any, fuses: int = 1, because: str = "", tags: str = "") -> Callable[[Any], Any]:
    def register(program: Any) -> Any:
        made = program() if isinstance(program, type) else program
        assert program.__name__ not in IDIOMS, program.__name__
        IDIOMS[program.__name__] = Idiom(program.__name__, made, inputs, fuses, because, frozenset(tags.split()))
        return program

    return register


def refused(*inputs: Any, because: str, tags: str = "") -> Callable[[Any], Any]:
    return idiom(*inputs, fuses=0, because=because, tags=tags)


# ---- products in all forms ----


@idiom(*QKV)
def plain(q, k, v):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1) @ v


@idiom(*QKV)
def functions(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q, torch.transpose(k, 2, 3)) * 0.35, dim=-1), v)


@idiom(*QKV)
def no_scale(q, k, v):
    return torch.softmax(q.matmul(k.mT), dim=3).matmul(v)


@idiom(*QKV)
def permuted_keys(q, k, v):
    return torch.softmax(q @ k.permute(0, 1, 3, 2) * 0.35, -1) @ v


@idiom(*QKV)
def swapped_axes(q, k, v):
    return torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * 0.35, -1) @ v.swapaxes(1, 2).swapaxes(1, 2)


@idiom(FLAT, FLAT, FLAT)
def three_axes_bmm(q, k, v):
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.35, dim=-1), v)


@idiom(FLAT, FLAT, FLAT)
def three_axes_baddbmm(q, k, v):
    scores = torch.baddbmm(torch.empty(q.size(0), q.size(1), k.size(1), dtype=q.dtype), q, k.mT, beta=0, alpha=0.35)
    return torch.bmm(scores.softmax(-1), v)


@idiom(FLAT, FLAT, FLAT, FLAT[:1] + (1, S))
def baddbmm_with_bias(q, k, v, alibi):
    return alibi.baddbmm(q, k.transpose(1, 2), beta=0.5, alpha=0.35).softmax(-1).bmm(v)


@idiom((S, D), (S, D), (S, D))
def two_axes(q, k, v):
    return F.softmax(q @ k.T / D**0.5, -1) @ v


@idiom((S, D), (T, D), (T, D))
def two_axes_linear(q, k, v):
    return torch.mm(F.softmax(F.linear(q, k) * 0.35, -1), v)


@idiom((S, D), (T, D), (T, D), (T,))
def two_axes_addmm(q, k, v, bias):
    return F.softmax(torch.addmm(bias, q, k.t(), alpha=0.35), -1).mm(v)


@idiom((B, S, D), (T, D), (T, D))
def external_memory(x, keys, values):
    return F.softmax(F.linear(x, keys), dim=-1) @ values


@idiom((B, 3, H, S, D), (B, 3, H, S, D), (B, 3, H, S, D))
def five_axes(q, k, v):
    return F.softmax(q @ k.mT * 0.35, -1) @ v


@idiom((2, B, 3, H, S, D), (2, B, 3, H, S, D), (2, B, 3, H, S, D), tags="static")
def six_axes(q, k, v):
    return F.softmax(q @ k.mT * 0.35, -1) @ v


@idiom(TOKENS, TOKENS, TOKENS)
def einsum_tokens(q, k, v):
    p = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.35).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


@idiom(TOKENS, TOKENS, TOKENS)
def einsum_heads_last(q, k, v):
    p = torch.einsum("bihd,bjhd->bijh", q, k).softmax(dim=2)
    return torch.einsum("bijh,bjhd->bihd", p, v)


@idiom(TOKENS, TOKENS, TOKENS)
def einsum_keys_first(q, k, v):
    p = torch.einsum("bihd,bjhd->bjih", q, k).softmax(dim=1)
    return torch.einsum("bjih,bjhd->bihd", p, v)


@idiom(*QKV)
def einsum_dots(q, k, v):
    return torch.einsum("...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v)


@idiom((B, S, D), (B, S, D), (B, S, D))
def einsum_implicit(q, k, v):
    p = torch.einsum("bid,bjd->bij", q, k).softmax(-1)
    return torch.einsum("bij,bjd->bid", p, v)


@idiom((S, D), (S, D), (S, D))
def einsum_without_arrow(q, k, v):
    return torch.einsum("ij,jd", torch.einsum("id,jd", q, k).softmax(-1), v)


@idiom(*QKV)
def values_on_the_left(q, k, v):
    p = F.softmax(k @ q.transpose(-1, -2) * 0.35, dim=-2)
    return (v.transpose(-1, -2) @ p).transpose(-1, -2)


@idiom((B, H, D, S), (B, H, D, S), (B, H, D, S))
def channels_first(q, k, v):
    attn = (q.transpose(-2, -1) @ k).softmax(dim=-1)
    return v @ attn.transpose(-2, -1)


@idiom((B, 3 * H * D, 4, 4), tags="static")
def convolutional(x):
    q, k, v = x.reshape(B * H, 3 * D, 16).split(D, dim=1)
    weight = torch.einsum("bct,bcs->bts", q * 0.6, k * 0.6).softmax(-1)
    return torch.einsum("bts,bcs->bct", weight, v).reshape(B, H * D, 4, 4)


@idiom((B, D, 4, 4), (B, D, 4, 4), (B, D, 4, 4))
def pixels(q, k, v):
    q, k, v = (x.flatten(2) for x in (q, k, v))
    return (torch.bmm(q.permute(0, 2, 1), k).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


# ---- layouts ----


@idiom((B, S, 3 * H * D))
def packed(x):
    q, k, v = x.view(x.size(0), x.size(1), 3, H, D).permute(2, 0, 3, 1, 4)
    return ((q @ k.mT * 0.35).softmax(-1) @ v).transpose(1, 2).reshape(x.size(0), x.size(1), H * D)


@idiom((B, S, 3 * H * D), tags="static")
def packed_chunks(x):
    q, k, v = (t.view(t.size(0), t.size(1), H, D).transpose(1, 2) for t in x.chunk(3, dim=-1))
    return ((q @ k.mT * 0.35).softmax(-1) @ v).transpose(1, 2).contiguous().view(x.size(0), x.size(1), -1)


@idiom((B, S, H * D), (B, S, H * D), (B, S, H * D))
def split_heads_to_batch(q, k, v):
    q, k, v = (torch.cat(x.split(D, dim=-1), dim=0) for x in (q, k, v))
    return torch.cat(((q @ k.mT * 0.35).softmax(-1) @ v).split(q.size(0) // H, dim=0), dim=-1)


@idiom((S, B, H * D), (S, B, H * D), (S, B, H * D))
def sequence_first(q, k, v):
    s, b = q.shape[:2]
    q, k, v = (x.contiguous().view(s, b * H, D).transpose(0, 1) for x in (q, k, v))
    return (torch.bmm(q, k.mT).softmax(-1) @ v).transpose(0, 1).contiguous().view(s, b, H * D)


@idiom(FLAT, FLAT, FLAT, (B, 1, S, S))
def view_to_four_axes_for_the_mask(q, k, v, mask):
    scores = torch.bmm(q, k.mT)
    scores = scores.view(-1, H, S, S) + mask
    return torch.bmm(F.softmax(scores.view(-1, S, S), dim=-1), v)


@idiom(FLAT, FLAT, FLAT)
def probabilities_reshaped(q, k, v):
    p = F.softmax(torch.bmm(q, k.mT).view(-1, H, S, S), dim=-1)
    return torch.bmm(p.view(-1, S, S), v)


@idiom(*QKV)
def scores_permuted(q, k, v):
    scores = (q @ k.mT).permute(2, 0, 1, 3)
    return scores.softmax(-1).permute(1, 2, 0, 3) @ v


@idiom((B, S, H, D), (B, S, H, D), (B, S, H, D), (H,))
def head_scale_on_the_last_axis(q, k, v, scale):
    scores = torch.einsum("bihd,bjhd->bijh", q, k) * scale
    return scores.permute(0, 3, 1, 2).softmax(-1) @ v.transpose(1, 2)


@idiom((4, 4, 4, D), (4, 4, 4, D), (4, 4, 4, D))
def all_sizes_equal(q, k, v):
    return F.softmax(q @ k.transpose(-1, -2), -1) @ v


@idiom((B, H, D, D), (B, H, D, D), (B, H, D, D))
def keys_not_transposed(q, k, v):
    return F.softmax(q @ k, -1) @ v


@idiom((B, H, D, D), (B, H, D, D), (B, H, D, D))
def keys_transposed_twice(q, k, v):
    return F.softmax(q @ k.mT.permute(0, 1, 3, 2), -1) @ v


@idiom((B, 1, S, D), (B, 1, S, D), (B, 1, S, D))
def one_head(q, k, v):
    return F.softmax(q.squeeze(1) @ k.squeeze(1).mT, -1) @ v.squeeze(1)


@idiom((B, S, D), (B, S, D), (B, S, D))
def one_head_unsqueezed(q, k, v):
    p = F.softmax((q @ k.mT).unsqueeze(1), -1)
    return (p @ v.unsqueeze(1)).squeeze(1)


# ---- scale ----


@idiom(*QKV)
def scale_on_q(q, k, v):
    return F.softmax((q * 0.35) @ k.mT, -1) @ v


@idiom(*QKV)
def scale_on_k(q, k, v):
    return F.softmax(q @ (k / 2.8).mT, -1) @ v


@idiom(*QKV)
def scale_on_both(q, k, v):
    scale = q.size(-1) ** -0.25
    return F.softmax((q * scale) @ (k * scale).mT, -1) @ v


@idiom(*QKV)
def scale_in_two_steps(q, k, v):
    return F.softmax((q @ k.mT).mul(0.5).div(1.5) * 1.1, -1) @ v


@idiom(*QKV)
def scale_tensor(q, k, v):
    scale = torch.tensor(q.size(-1), dtype=q.dtype).sqrt()
    return F.softmax(q @ k.mT / scale, -1) @ v


@idiom(*QKV, ())
def scale_learned(q, k, v, scale):
    return F.softmax(q @ k.mT * scale, -1) @ v


@idiom(*QKV, (1,))
def temperature_learned(q, k, v, temperature):
    return F.softmax(q @ k.mT / temperature.exp(), -1) @ v


@idiom(*QKV, (H, 1, 1))
def scale_of_each_head(q, k, v, scale):
    return F.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale.clamp(max=4.6).exp(), -1) @ v


@idiom(*QKV, (B, H, S, 1))
def scale_of_each_query(q, k, v, scale):
    return F.softmax(q @ k.mT * scale, -1) @ v


@idiom(*QKV, (B, H, 1, S))
def scale_of_each_key(q, k, v, scale):
    return F.softmax(q @ k.mT * scale, -1) @ v


@idiom(*QKV)
def negative_scale(q, k, v):
    return F.softmax(-(q @ k.mT) * 0.35, -1) @ v


@idiom(*QKV)
def negative_scale_large(q, k, v):
    return F.softmax((q @ k.mT) * -20.0, -1) @ v


@idiom(*QKV)
def softmin(q, k, v):
    return F.softmin(q @ k.mT * 0.35, dim=-1) @ v


@idiom(*QKV)
class ScaleAttribute(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = D**-0.5

    def forward(self, q, k, v):
        return ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1) @ v


@idiom(*QKV)
def scale_symbolic(q, k, v):
    return F.softmax(q @ k.mT / math.sqrt(k.shape[-1]), -1) @ v


@idiom(*QKV)
def scale_by_length(q, k, v):
    return F.softmax(q @ k.mT * (math.log(k.shape[-2]) / 3), -1) @ v


@idiom(*QKV)
def shifted_by_a_number(q, k, v):
    return F.softmax(q @ k.mT * 0.35 - 2.0, -1) @ v


@idiom(*QKV)
def added_with_alpha(q, k, v):
    return F.softmax(torch.add(torch.zeros_like(q[..., :1]), q @ k.mT, alpha=0.35), -1) @ v


@idiom(*QKV, (1, H, S, S))
def bias_with_alpha(q, k, v, bias):
    return F.softmax(torch.add(q @ k.mT, bias, alpha=0.5), -1) @ v


@idiom(*QKV, (1, H, S, S))
def bias_less_scores(q, k, v, bias):
    return F.softmax(bias - q @ k.mT, -1) @ v


# ---- masks ----


@idiom(*QKV, ("low", (B, 1, S, S)))
def additive_mask(q, k, v, mask):
    return F.softmax(q @ k.mT * 0.35 + mask, -1) @ v


@idiom(*QKV, ("low", (B, 1, 1, S)))
def additive_padding(q, k, v, mask):
    scores = q @ k.mT / 2.8
    scores = scores + mask
    return F.dropout(F.softmax(scores, dim=-1), 0.0, training=True) @ v


@idiom(*QKV, ("low", (S, S)))
def additive_two_axes(q, k, v, mask):
    return F.softmax(mask + q @ k.mT * 0.35, -1) @ v


@idiom(*QKV, ("low", (B, 1, S, S)))
def additive_in_place(q, k, v, mask):
    scores = q @ k.mT
    scores *= 0.35
    scores += mask
    return scores.softmax(-1) @ v


@idiom(*QKV, ("low", (B, 1, S, S)))
def additive_mask_scaled_after(q, k, v, mask):
    return F.softmax((q @ k.mT + mask) * 0.35, -1) @ v


@idiom(*QKV, ("cut", (B, 1, S, S)), tags="eager_nan")
def additive_with_rows_cut(q, k, v, mask):
    return F.softmax(q @ k.mT * 0.35 + mask, -1) @ v


@idiom(*QKV, ("sunk", (B, 1, S, S)))
def additive_with_rows_sunk(q, k, v, mask):
    return F.softmax(q @ k.mT * 0.35 + mask, -1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="sunk")
def additive_with_rows_sunk_less(q, k, v, keep):
    return F.softmax(q @ k.mT * 0.35 + (1.0 - keep.to(q.dtype)) * -10000.0, -1) @ v


@idiom(*QKV, ("ids", (B, S)))
def bert_padding(q, k, v, ids):
    mask = (1.0 - ids.ne(0)[:, None, None, :].to(q.dtype)) * -10000.0
    return F.softmax(q @ k.mT * 0.35 + mask, -1) @ v


@idiom(*QKV, ("ids", (B, S)))
def padding_lowest(q, k, v, ids):
    mask = torch.zeros(ids.shape, dtype=q.dtype).masked_fill(ids.eq(0), torch.finfo(q.dtype).min)
    return F.softmax(q @ k.mT * 0.35 + mask[:, None, None], -1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def masked_fill_inf(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def masked_fill_in_place(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill_(keep.logical_not(), -math.inf).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def masked_fill_finite(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(keep == 0, -1e9).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def masked_fill_before_scale(q, k, v, keep):
    return F.softmax((q @ k.mT).masked_fill(~keep, -1e9) / 2.8, -1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def masked_fill_tensor(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, torch.tensor(-1e9, dtype=q.dtype)).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="eager_nan")
def rows_without_a_key_inf(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def rows_without_a_key_finite(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, -1e9).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def rows_without_a_key_lowest(q, k, v, keep):
    scores = q @ k.mT * 0.35
    return torch.where(keep, scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def rows_without_a_key_zero(q, k, v, keep):
    p = (q @ k.mT * 0.35).masked_fill(~keep, float("-inf")).softmax(-1)
    return p.masked_fill(~keep, 0.0) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def rows_without_a_key_zero_by_where(q, k, v, keep):
    p = torch.where(keep, q @ k.mT * 0.35, -math.inf).softmax(-1)
    return torch.where(keep, p, 0.0) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), (1, H, S, S))
def rows_without_a_key_and_bias(q, k, v, keep, bias):
    return (q @ k.mT * 0.35 + bias).masked_fill(~keep, -1e9).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), (1, H, S, S))
def rows_without_a_key_bias_behind(q, k, v, keep, bias):
    return ((q @ k.mT * 0.35).masked_fill(~keep, torch.finfo(q.dtype).min) + bias).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def where_number(q, k, v, keep):
    scores = q @ k.mT * 0.35
    return torch.where(keep, scores, -1e9).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def where_turned(q, k, v, keep):
    scores = q @ k.mT * 0.35
    return torch.where(~keep, torch.full_like(scores, -math.inf), scores).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def where_full(q, k, v, keep):
    scores = q @ k.mT * 0.35
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return torch.where(keep, scores, lowest).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def mask_made_additive(q, k, v, keep):
    bias = torch.where(keep, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return (q @ k.mT * 0.35 + bias).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def mask_made_additive_by_zeros(q, k, v, keep):
    bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill_(~keep, -math.inf)
    return (q @ k.mT * 0.35 + bias).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, 1, S)), ("keep", (1, 1, S, S)))
def two_masks(q, k, v, padding, causal):
    scores = (q @ k.mT * 0.35).masked_fill(~padding, -1e9)
    return scores.masked_fill(~causal, -1e9).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, 1, S)), ("keep", (1, 1, S, S)))
def two_masks_of_two_kinds(q, k, v, padding, causal):
    scores = (q @ k.mT * 0.35).masked_fill(~padding, -1e9)
    return scores.masked_fill(~causal, -math.inf).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, 1, S)), ("keep", (1, 1, S, S)))
def masks_joined(q, k, v, padding, causal):
    return (q @ k.mT * 0.35).masked_fill(~(padding & causal), -math.inf).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def causal_tril(q, k, v):
    keep = torch.tril(torch.ones(q.size(-2), k.size(-2), dtype=torch.bool))
    return (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def causal_triu(q, k, v):
    cut = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
    return (q @ k.mT * 0.35).masked_fill(cut, -1e9).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def causal_triu_of_inf(q, k, v):
    bias = torch.full((q.size(-2), k.size(-2)), float("-inf"), dtype=q.dtype).triu(1)
    return (q @ k.mT * 0.35 + bias).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def causal_comparison(q, k, v):
    i, j = torch.arange(q.size(-2)), torch.arange(k.size(-2))
    return torch.where(i[:, None] >= j[None, :], q @ k.mT * 0.35, -math.inf).softmax(-1) @ v


@idiom(*QKV, tags="causal")
def causal_float_tril(q, k, v):
    keep = torch.tril(torch.ones(q.size(-2), k.size(-2))).view(1, 1, q.size(-2), k.size(-2))
    return (q @ k.mT * 0.35).masked_fill(keep == 0, float("-inf")).softmax(-1) @ v


@idiom(*QKV, tags="causal")
class CausalBuffer(torch.nn.Module):
    """A buffer could be changed: it stays a mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(16, 16, dtype=torch.bool)).view(1, 1, 16, 16))

    def forward(self, q, k, v):
        keep = self.bias[:, :, : q.size(-2), : k.size(-2)]
        return (q @ k.mT * 0.35).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


@idiom(*QKV)
def causal_like_the_scores(q, k, v):
    scores = q @ k.mT * 0.35
    keep = torch.ones_like(scores, dtype=torch.bool).tril()
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ v


@idiom(*QKV, ("low", (B, 1, 1, S)), tags="causal")
def causal_and_padding(q, k, v, padding):
    keep = torch.tril(torch.ones(q.size(-2), k.size(-2), dtype=torch.bool))
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf)
    return (scores + padding).softmax(-1) @ v


@idiom(*CROSS)
def causal_aligned_right(q, k, v):
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
    return (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1) @ v


@idiom(*QKV)
def sliding_window(q, k, v):
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))[None]
    keep = (j <= i) & (i - j < 3)
    return (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1) @ v


@idiom(*QKV)
def prefix_lm(q, k, v):
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))[None]
    return torch.where((j <= i) | (j < 3), q @ k.mT * 0.35, torch.finfo(q.dtype).min).softmax(-1) @ v


@idiom(*QKV, ("ids", (B, S)))
def same_document(q, k, v, ids):
    keep = ids[:, None, :, None] == ids[:, None, None, :]
    return (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1) @ v


@idiom(*QKV, ("ids", (B,)))
def lengths(q, k, v, lengths):
    keep = torch.arange(k.size(-2))[None, :] <= lengths[:, None]
    return (q @ k.mT * 0.35).masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v


@idiom(*QKV, ("keep", (B, 1, S, S)))
def mask_with_one_on_the_diagonal(q, k, v, keep):
    keep = keep | torch.eye(q.size(-2), dtype=torch.bool)
    return (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1) @ v


# ---- biases ----


@idiom(*QKV, (H,))
def alibi(q, k, v, slopes):
    i, j = torch.arange(q.size(-2)), torch.arange(k.size(-2))
    bias = slopes[:, None, None] * (j[None] - i[:, None]).to(q.dtype)
    return F.softmax(q @ k.mT * 0.35 + bias, -1) @ v


@idiom(*QKV, (32, H))
def t5_bias(q, k, v, table):
    i, j = torch.arange(q.size(-2)), torch.arange(k.size(-2))
    bias = F.embedding((j[None] - i[:, None]).clamp(-15, 16) + 15, table).permute(2, 0, 1).unsqueeze(0)
    scores = q @ k.transpose(3, 2)
    scores += bias
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


@idiom((B * 4, H, S, D), (B * 4, H, S, D), (B * 4, H, S, D), (H, S, S), ("low", (4, S, S)))
def swin_windows(q, k, v, bias, mask):
    attn = (q * 0.35) @ k.mT + bias.unsqueeze(0)
    attn = attn.view(-1, 4, H, S, S) + mask.unsqueeze(1).unsqueeze(0)
    return attn.view(-1, H, S, S).softmax(-1) @ v


@idiom(*QKV, (1, H, S, S), (B, 1, S, S))
def two_biases(q, k, v, bias, other):
    return F.softmax(q @ k.mT * 0.35 + bias + other, -1) @ v


@idiom(*QKV, (2 * S - 1, D))
def relative_keys(q, k, v, table):
    i = torch.arange(q.size(-2))
    relative = table[i[:, None] - i[None] + q.size(-2) - 1]
    return F.softmax((q @ k.mT + torch.einsum("bhid,ijd->bhij", q, relative)) * 0.35, -1) @ v


@idiom(*QKV, (H, S, S))
def bias_of_heads_scaled(q, k, v, bias):
    return F.softmax((q @ k.mT + bias) / 2.8, -1) @ v


@idiom(*QKV, (B, H, S, 1))
def bias_of_queries(q, k, v, bias):
    return F.softmax(q @ k.mT * 0.35 + bias, -1) @ v


@idiom(*QKV, (S,))
def bias_of_keys(q, k, v, bias):
    return F.softmax(q @ k.mT * 0.35 + bias, -1) @ v


@idiom(*QKV, (1, H, S, S))
def bias_in_float32(q, k, v, bias):
    scores = q @ k.mT * 0.35 + bias.float()
    return F.softmax(scores, -1).to(v.dtype) @ v


# ---- what comes before: rotary, norms, repeated heads, caches ----


def rotate(x):
    half = x.size(-1) // 2
    angle = torch.arange(x.size(-2))[:, None] * 10000 ** (-torch.arange(half) / half)
    cos, sin = torch.cat([angle, angle], -1).cos().to(x.dtype), torch.cat([angle, angle], -1).sin().to(x.dtype)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@idiom(*QKV)
def rotary(q, k, v):
    return F.softmax(rotate(q) @ rotate(k).transpose(2, 3) * 0.35, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@idiom(*QKV, (D,))
def normed_queries_and_keys(q, k, v, weight):
    return F.softmax(F.rms_norm(q, (D,), weight) @ F.rms_norm(k, (D,), weight).mT, -1) @ v


@idiom((B, S, H * D), (H * D, H * D), (H * D, H * D), (H * D, H * D))
def projections(x, wq, wk, wv):
    q, k, v = (F.linear(x, w / 6).view(x.size(0), x.size(1), H, D).transpose(1, 2) for w in (wq, wk, wv))
    return ((q @ k.mT * 0.35).softmax(-1) @ v).transpose(1, 2).flatten(2)


@idiom(*GROUPED)
def grouped_by_expand(q, k, v):
    b, g, s, d = k.shape
    k = k[:, :, None].expand(b, g, 2, s, d).reshape(b, 2 * g, s, d)
    v = v[:, :, None].expand(b, g, 2, s, d).reshape(b, 2 * g, s, d)
    return F.softmax(q @ k.transpose(2, 3) * 0.35, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@idiom(*GROUPED)
def grouped_by_repeat_interleave(q, k, v):
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom(*GROUPED)
def grouped_by_einsum(q, k, v):
    q = q.unflatten(1, (2, 2))
    p = torch.einsum("bgrqd,bgkd->bgrqk", q, k).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bgrqd", p, v).flatten(1, 2)


@idiom(*GROUPED)
def grouped_by_broadcast(q, k, v):
    q = q.unflatten(1, (2, 2))
    return ((q @ k.unsqueeze(2).mT * 0.35).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


@idiom(*GROUPED, ("low", (B, 1, S, S)))
def grouped_and_masked(q, k, v, mask):
    k, v = (torch.repeat_interleave(x, 2, 1) for x in (k, v))
    return F.softmax(q @ k.mT * 0.35 + mask[:, :, :, : k.shape[-2]], -1, dtype=torch.float32).to(q.dtype) @ v


@idiom(HEADS, (B, 1, S, D), (B, 1, S, D))
def multi_query(q, k, v):
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom(HEADS, (B, S, D), (B, S, D))
def multi_query_einsum(q, k, v):
    return torch.einsum("bhij,bjd->bhid", torch.einsum("bhid,bjd->bhij", q, k).softmax(-1), v)


@idiom(*CROSS)
def cross(q, k, v):
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom(*CROSS, ("keep", (B, 1, 1, T)))
def cross_with_padding(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, -1e9).softmax(-1) @ v


@idiom((H, 3, D), (B, H, S, D), (B, H, S, D))
def learned_queries(q, k, v):
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom((3, D), (B, S, D), (B, S, D))
def learned_queries_einsum(q, k, v):
    return torch.einsum("bqs,bsd->bqd", torch.einsum("qd,bsd->bqs", q, k).softmax(-1), v)


@idiom(HEADS, HEADS, (B, H, S, 2 * D))
def wider_values(q, k, v):
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom((B, H, 1, D), (B, H, S, D), (B, H, S, D), (B, H, 1, D), (B, H, 1, D))
def decode_with_cache(q, k_cache, v_cache, k, v):
    k, v = torch.cat([k_cache, k], 2), torch.cat([v_cache, v], dim=2)
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom((B, H, 1, D), HEADS, HEADS, ("keep", (B, 1, 1, S)))
def decode_squeezed(q, k, v, keep):
    scores = (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).squeeze(2)
    return scores.softmax(-1).unsqueeze(2) @ v


@idiom((B, H, D), TOKENS, TOKENS)
def decode_without_query_axis(q, k, v):
    return torch.einsum("bht,bthd->bhd", torch.einsum("bhd,bthd->bht", q, k).mul(0.35).softmax(-1), v)


@idiom((B, H, D), (B, S, D), (B, S, D), ("keep", (B, 1, S)))
def decode_multi_query(q, k, v, keep):
    scores = torch.einsum("bhd,btd->bht", q, k).masked_fill(~keep, -math.inf)
    return torch.einsum("bht,btd->bhd", scores.softmax(-1), v)


@idiom((B, H, S, D), (B, H, 1, D), (B, H, 1, D))
def one_key(q, k, v):
    return (q @ k.mT * 0.35).softmax(-1) @ v


@idiom((B, S, D))
def pooling(x):
    return ((x[:, :1] @ x.mT * 0.35).softmax(-1) @ x).squeeze(1)


# ---- softmax by hand, and in other dtypes ----


@idiom(*QKV)
def softmax_of_exp(q, k, v):
    scores = q @ k.mT * 0.35
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@idiom(*QKV)
def softmax_of_exp_max(q, k, v):
    scores = q @ k.mT * 0.35
    e = (scores - scores.max(dim=-1, keepdim=True).values.detach()).exp()
    return (e / torch.sum(e, dim=-1, keepdim=True)) @ v


@idiom(*QKV)
def softmax_of_exp_unsqueezed(q, k, v):
    scores = q @ k.mT * 0.35
    e = torch.exp(scores - torch.amax(scores, dim=-1)[..., None])
    return e.div(e.sum(dim=3).unsqueeze(-1)) @ v


@idiom(*QKV)
def softmax_of_exp_alone(q, k, v):
    e = torch.exp(q @ k.mT * 0.35)
    return (e / e.sum(-1, keepdim=True)) @ v


@idiom(*QKV)
def softmax_divided_late(q, k, v):
    scores = q @ k.mT * 0.35
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


@idiom(*QKV)
def softmax_of_logsumexp(q, k, v):
    scores = q @ k.mT * 0.35
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)) @ v


@idiom(*QKV)
def softmax_of_log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT * 0.35, dim=-1).exp() @ v


@idiom(*QKV)
def softmax_less_maximum(q, k, v):
    scores = q @ k.mT * 0.35
    return (scores - scores.max(-1, keepdim=True)[0]).softmax(-1) @ v


@idiom(*QKV)
def softmax_less_highest_of_all(q, k, v):
    scores = q @ k.mT * 0.35
    return (scores - scores.max()).softmax(-1) @ v


@idiom(*QKV, tags="static")
class SoftmaxModule(torch.nn.Module):
    """Under dynamic=True the rate of its dropout is a symbol."""

    def __init__(self):
        super().__init__()
        self.softmax, self.dropout = torch.nn.Softmax(dim=-1), torch.nn.Dropout(0.0)

    def forward(self, q, k, v):
        return torch.matmul(self.dropout(self.softmax(torch.matmul(q, k.mT) / 2.8)), v)


@idiom(*QKV)
def softmax_in_float32(q, k, v):
    return F.softmax(q @ k.mT * 0.35, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@idiom(*QKV)
def scores_in_float32(q, k, v):
    scores = (q @ k.mT).float() * 0.35
    return scores.softmax(-1).type_as(v) @ v


@idiom(*QKV)
def all_in_float32(q, k, v):
    return (F.softmax(q.float() @ k.float().mT * 0.35, -1) @ v.float()).to(q.dtype)


@idiom(*QKV)
def values_in_float32(q, k, v):
    return (F.softmax(q @ k.mT * 0.35, -1, dtype=torch.float32) @ v.float()).to(v.dtype)


@idiom(*QKV)
def queries_in_float32(q, k, v):
    return F.softmax(q.float() @ k.float().mT * 0.35, -1).to(v.dtype) @ v


@idiom(*QKV)
def autocast_region(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return F.softmax(q @ k.mT * 0.35, -1) @ v


# ---- dropout, factors of probabilities ----


@idiom(*QKV, tags="dropout")
def dropout(q, k, v):
    return F.dropout(F.softmax(q @ k.mT * 0.35, -1), 0.1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), tags="dropout")
def dropout_and_mask(q, k, v, keep):
    return F.dropout(F.softmax((q @ k.mT * 0.35).masked_fill(~keep, -1e9), -1), p=0.1, training=True) @ v


@idiom(*QKV)
def dropout_in_eval(q, k, v):
    return F.dropout(F.softmax(q @ k.mT * 0.35, -1), 0.1, training=False) @ v


@idiom(*QKV, (H, 1, 1))
def head_mask(q, k, v, mask):
    return (F.softmax(q @ k.mT * 0.35, -1) * mask) @ v


@idiom(*QKV, (B, 1, 1, S))
def factor_of_each_key(q, k, v, weight):
    return (F.softmax(q @ k.mT * 0.35, -1) * weight) @ v


@idiom(*QKV)
def half_of_the_probabilities(q, k, v):
    return (F.softmax(q @ k.mT * 0.35, -1) / 2) @ v


# ---- several in one graph ----


@idiom(*QKV, fuses=2)
def two_in_a_row(q, k, v):
    x = F.softmax(q @ k.mT * 0.35, -1) @ v
    return F.softmax(x @ k.mT * 0.35, -1) @ v


@idiom(*QKV, HEADS, ("low", (B, 1, S, S)), fuses=2)
def differential(q, k, v, other, mask):
    return F.softmax(q @ k.mT * 0.35 + mask, -1) @ v - 0.5 * (F.softmax(other @ k.mT * 0.35 + mask, -1) @ v)


@idiom(*QKV, ("dead", (B, 1, S, S)), fuses=2)
def one_fill_for_two(q, k, v, keep):
    lowest = torch.tensor(-1e9, dtype=q.dtype)
    x = torch.where(keep, q @ k.mT, lowest).softmax(-1) @ v
    return torch.where(keep, x @ k.mT, lowest).softmax(-1) @ v


@idiom((B, 4, S, D), fuses=2)
def axial(x):
    x = F.softmax(x @ x.mT * 0.35, -1) @ x
    y = x.transpose(1, 2)
    return (F.softmax(y @ y.mT * 0.35, -1) @ y).transpose(1, 2)


@idiom((B, S, H * D), fuses=1)
class MultiheadAttentionWithoutWeights(torch.nn.Module):
    """torch's own, which calls the fused function itself where no weights are asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.MultiheadAttention(H * D, H, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


# ---- what must not fuse ----


@refused(*QKV, because="tanh stands between")
def soft_cap(q, k, v):
    return F.softmax(torch.tanh(q @ k.mT / 5) * 5, -1) @ v


@refused(*QKV, because="")
def sigmoid_attention(q, k, v):
    return torch.sigmoid(q @ k.mT * 0.35 - 1.8) @ v


@refused(*QKV, (H, H), because="no place for")
def talking_heads(q, k, v, mix):
    return F.softmax(torch.einsum("bhij,gh->bgij", (q @ k.mT).relu(), mix), -1) @ v


@refused(*QKV, (H, H), because="used")
def talking_heads_below(q, k, v, mix):
    p = F.softmax(q @ k.mT, -1)
    return torch.einsum("bhij,gh->bgij", p, mix) @ v + p.sum()


@refused(*QKV, because="used outside")
def top_k(q, k, v):
    scores = q @ k.mT * 0.35
    kept = scores >= scores.topk(3, dim=-1).values[..., -1:]
    return scores.masked_fill(~kept, -math.inf).softmax(-1) @ v


@refused(*QKV, because="the softmax is not over the keys")
def softmax_over_queries(q, k, v):
    return F.softmax(q @ k.mT * 0.35, -2) @ v


@refused((B, S, S, S), (B, S, S, S), (B, S, S, S), because="the softmax is not over the keys")
def softmax_over_heads(q, k, v):
    return F.softmax(q @ k.mT * 0.35, 1) @ v


@refused(*QKV, because="the values are not summed over the keys")
def values_summed_over_queries(q, k, v):
    return F.softmax(q @ k.mT * 0.35, -1).mT @ v


@refused(*QKV, because="used 2 times")
def weights_returned(q, k, v):
    p = F.softmax(q @ k.mT * 0.35, -1)
    return p @ v, p


@refused(*QKV, because="used outside")
def scores_returned(q, k, v):
    scores = q @ k.mT * 0.35
    return F.softmax(scores, -1) @ v, scores


@refused(*QKV, ("keep", (B, 1, S, S)), because="may count beside others")
def small_fill(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, -10.0).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="may count beside others")
def fill_from_a_tensor(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, k[0, 0, 0, 0]).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="until they may count")
def fill_scaled_away(q, k, v, keep):
    return ((q @ k.mT).masked_fill(~keep, -1e4) * 1e-3).softmax(-1) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)), ("low", (B, 1, 1, S)))
def small_fill_beside_a_bias(q, k, v, keep, bias):
    return ((q.float() @ k.float().mT * 0.35).masked_fill(~keep, -1e4) + bias).softmax(-1) @ v.float()


@refused(*QKV, ("keep", (B, 1, S, S)), because="varies with query and key")
def mask_multiplied(q, k, v, keep):
    return (q @ k.mT * 0.35 * keep.to(q.dtype)).softmax(-1) @ v


@refused(*QKV, ("keep", (B, 1, S, S)), because="varies with query and key")
def probabilities_masked(q, k, v, keep):
    return (F.softmax(q @ k.mT * 0.35, -1) * keep.to(q.dtype)) @ v


@idiom(*QKV, ("dead", (B, 1, S, S)))
def nan_to_num_below(q, k, v, keep):
    return F.softmax((q @ k.mT * 0.35).masked_fill(~keep, -math.inf), -1).nan_to_num() @ v


@refused(*QKV, because="cut off above")
def scores_clamped(q, k, v):
    return F.softmax((q @ k.mT * 0.35).clamp(-5, 5), -1) @ v


@refused(*QKV, because="relu stands between")
def scores_rectified(q, k, v):
    return F.softmax(F.relu(q @ k.mT), -1) @ v


@refused(*QKV, because="multiplied by 0.0")
def scale_zero(q, k, v):
    return F.softmax(q @ k.mT * 0.0, -1) @ v


@refused(*QKV, because="multiplied by inf")
def scale_infinite(q, k, v):
    return F.softmax(q @ k.mT * math.inf, -1) @ v


@refused(*QKV, because="squared")
def scores_squared(q, k, v):
    scores = q @ k.mT * 0.35
    return F.softmax(scores * scores, -1) @ v


@refused(*QKV, because="")
def maximum_index_subtracted(q, k, v):
    scores = q @ k.mT * 0.35
    return (scores - scores.max(-1, keepdim=True)[1]).softmax(-1) @ v


@refused(*QKV, because="writes")
def queries_written_in_between(q, k, v):
    q = q * 1.5
    scores = q @ k.mT * 0.35
    q.zero_()
    return scores.softmax(-1) @ v + q


@refused(*QKV, because="")
def detached_scores(q, k, v):
    return F.softmax((q @ k.mT * 0.35).detach(), -1) @ v


@refused(*QKV, because="stands between the matched nodes")
def scores_without_gradient(q, k, v):
    with torch.no_grad():
        scores = q @ k.mT * 0.35
    return F.softmax(scores, -1) @ v


@refused(*QKV, because="would be made in torch.")
def scores_in_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        scores = q.float() @ k.float().mT * 0.35
    return F.softmax(scores.to(v.dtype), -1) @ v


@refused((B, H, 0, D), (B, H, 0, D), (B, H, 0, D), because="there may be no keys")
def nothing(q, k, v):
    return F.softmax(q @ k.mT * 0.35, -1) @ v


@refused((B, S, D), (B, S, D), (B, S, S, D), because="no place for")
def values_of_each_query(q, k, v):
    return torch.einsum("bqk,bqkd->bqd", F.softmax(q @ k.mT * 0.35, -1), v)


@refused((B, 1, S, D), (B, 1, S, D), HEADS, because="not multiplied as in attention")
def values_of_more_heads(q, k, v):
    return F.softmax(q @ k.mT * 0.35, -1) @ v


@refused((B, 1, S, D), (B, 1, S, D), HEADS, ("keep", (B, H, S, S)), because="")
def mask_of_more_heads(q, k, v, keep):
    return (q @ k.mT * 0.35).masked_fill(~keep, -math.inf).softmax(-1) @ v


@refused((B, S, D), because="")
def linear_attention(x):
    return F.softmax(x, -1) @ (F.softmax(x, -2).mT @ x)


@refused(*QKV, because="another kind of number")
def probabilities_rounded(q, k, v):
    return (F.softmax(q @ k.mT * 9, -1).to(torch.int32).to(v.dtype)) @ v


@refused(*QKV, because="")
def slots(q, k, v):
    p = F.softmax(q @ k.mT * 0.35, dim=-2)
    return (p / p.sum(-1, keepdim=True)) @ v


@refused(*QKV, because="")
def renormalised(q, k, v):
    p = F.softmax(q @ k.mT * 0.35, -1)
    return (p / (p.sum(-1, keepdim=True) + 1e-3)) @ v


@refused(*QKV, because="may overflow")
def softmax_in_half(q, k, v):
    return F.softmax(q.float() @ k.float().mT, -1, dtype=torch.float16).to(v.dtype) @ v
