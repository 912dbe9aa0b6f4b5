"""Transformers and a diffusion block as people write them themselves."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .workload import Classes, MeanSquare, Workload, workload


class NanoAttention(nn.Module):
    """nanoGPT's slow path: scores, a causal mask in a buffer, softmax."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in self.c_attn(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), NanoAttention(width, heads, length)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(NanoBlock(width, heads, length) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@workload
def nanogpt(small: bool) -> Workload:
    """nanoGPT of GPT-2's size: attention by hand, its causal mask in a buffer"""
    vocabulary, length, width, heads, layers, batch = (
        (97, 32, 32, 4, 2, 3) if small else (50_304, 1024, 768, 12, 12, 4)
    )
    ids = torch.randint(vocabulary, (batch, length))
    loss = Classes(batch, length, classes=vocabulary)
    return Workload(NanoGPT(vocabulary, length, width, heads, layers), {"ids": ids}, loss)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class DecodeBlock(nn.Module):
    """A Llama block that reads one token a row and appends its keys and values to a cache of fixed length."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, rows: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, head = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, n * head, bias=False) for n in (heads, groups, groups, heads)
        )
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.register_buffer("keys", torch.randn(rows, groups, length, head))
        self.register_buffer("values", torch.randn(rows, groups, length, head))

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, keep: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(*y.shape[:2], count, -1).transpose(1, 2)
            for layer, count in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        self.keys.index_copy_(2, position, rotated(k, cos, sin))
        self.values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(
            rotated(q, cos, sin), self.keys, self.values, attn_mask=keep, enable_gqa=True
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaDecode(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, inner: int, heads: int, groups: int, layers: int, rows: int, length: int
    ) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, eps=1e-5)
        self.blocks = nn.ModuleList(DecodeBlock(width, inner, heads, groups, rows, length) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        frequencies = 10_000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.arange(length)[:, None] * torch.cat((frequencies, frequencies))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x, cos, sin = self.embedding(ids), self.cos[position], self.sin[position]
        keep = torch.arange(self.cos.shape[0], device=ids.device) <= position[:, None]
        for block in self.blocks:
            x = block(x, position, cos, sin, keep)
        return self.head(self.norm(x))


@workload
def llama_decode(small: bool) -> Workload:
    """8 Llama blocks with grouped queries, 8 rows, one token each, static cache"""
    vocabulary, width, inner, heads, groups, layers, length = (
        (97, 32, 64, 4, 2, 2, 24) if small else (32_000, 2048, 5632, 32, 8, 8, 1024)
    )
    model = LlamaDecode(vocabulary, width, inner, heads, groups, layers, 8, length)
    inputs = {"ids": torch.randint(vocabulary, (8, 1)), "position": torch.tensor([length // 2])}
    return Workload(model, inputs, loss=None)


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, out: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inner), nn.Conv2d(inner, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), nn.Conv2d(out, out, 3, padding=1)
        self.beside = nn.Conv2d(inner, out, 1) if inner != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.beside(x) + self.conv2(F.silu(self.norm2(y)))


class SpatialAttention(nn.Module):
    """Attention over the pixels and then over the text, written by hand."""

    def __init__(self, width: int, text: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(groups, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys = nn.ModuleList(nn.Linear(inner, width, bias=False) for inner in (width, text))
        self.values = nn.ModuleList(nn.Linear(inner, width, bias=False) for inner in (width, text))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def attend(self, i: int, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.queries[i](x), self.keys[i](context), self.values[i](context))
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        return self.outs[i]((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        normal = self.norms[0](y)
        y = y + self.attend(0, normal, normal)
        y = y + self.attend(1, self.norms[1](y), text)
        return x + y.transpose(1, 2).unflatten(2, x.shape[2:])


class UNetBlock(nn.Module):
    """One level of a diffusion network: down, attention, up, and joined across."""

    def __init__(self, width: int, time: int, text: int, heads: int, groups: int) -> None:
        super().__init__()
        self.first = ResidualBlock(width, width, time, groups)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.deep = ResidualBlock(width, 2 * width, time, groups)
        self.attention = SpatialAttention(2 * width, text, heads, groups)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = ResidualBlock(2 * width, width, time, groups)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.first(x, time)
        deep = self.attention(self.deep(self.down(x), time), text)
        deep = self.up(F.interpolate(deep, scale_factor=2.0, mode="nearest"))
        return self.last(torch.cat([x, deep], 1), time)


@workload
def unet_block(small: bool) -> Workload:
    """one level of a diffusion network: residual blocks, attention by hand over pixels and text"""
    width, time, text, heads, groups, side, words, batch = (
        (16, 24, 12, 4, 4, 8, 5, 2) if small else (320, 1280, 768, 8, 32, 64, 77, 4)
    )
    inputs = {
        "x": torch.randn(batch, width, side, side),
        "time": torch.randn(batch, time),
        "text": torch.randn(batch, words, text),
    }
    return Workload(UNetBlock(width, time, text, heads, groups), inputs, MeanSquare())
