"""Recommenders: many small like networks, feature crosses, embeddings, compressed embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .workload import Clicks, Workload, workload


class Tower(nn.Module):
    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.second(torch.relu(self.norm(self.first(x)))))


class Towers(nn.Module):
    """One tower after the other, over one input or over an input each; the results side by side."""

    def __init__(self, count: int, width: int, hidden: int, out: int, result: str) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(width, hidden, out) for _ in range(count))
        self.result = result

    def forward(self, x: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        inputs = [x] * len(self.towers) if isinstance(x, Tensor) else x
        results = [tower(i) for tower, i in zip(self.towers, inputs)]
        return {"cat": lambda: torch.cat(results, 1), "stack": lambda: torch.stack(results), "list": lambda: results}[
            self.result
        ]()


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with relu between them."""
    layers = [nn.Linear(inner, out) for inner, out in zip(widths, widths[1:])]
    return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])


class MMoE(nn.Module):
    """Multi-gate mixture of experts: every task weighs all experts by a gate of its own."""

    def __init__(self, width: int, hidden: int, experts: int, tasks: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(width, 2 * hidden, hidden) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(mlp(hidden, hidden // 2, 1) for _ in range(tasks))

    def forward(self, x: Tensor) -> Tensor:
        experts = torch.stack([torch.relu(expert(x)) for expert in self.experts], 1)
        results = []
        for gate, tower in zip(self.gates, self.towers):
            weights = torch.softmax(gate(x), -1)
            results.append(tower((weights[:, :, None] * experts).sum(1)))
        return torch.cat(results, 1)


class DLRM(nn.Module):
    """Embeddings and dense features, their pairwise products, and a network over both."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = mlp(dense, hidden, hidden // 2, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = mlp(width + pairs.shape[1], hidden, hidden // 2, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = torch.relu(self.bottom(dense))
        features = torch.stack([bottom, *(table(ids) for table, ids in zip(self.tables, sparse.unbind()))], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], 1))


class DCNv2(nn.Module):
    """Deep and cross network: x0 * (W x + b) + x, beside a plain network."""

    def __init__(self, fields: int, rows: int, width: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(fields * rows, width)
        self.register_buffer("offsets", torch.arange(fields) * rows, persistent=False)
        inner = fields * width
        self.crosses = nn.ModuleList(nn.Linear(inner, inner) for _ in range(layers))
        self.deep = mlp(inner, hidden, hidden)
        self.head = nn.Linear(inner + hidden, 1)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embedding(ids + self.offsets).flatten(1)
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.head(torch.cat([x, torch.relu(self.deep(first))], 1))


class LCEStack(nn.Module):
    """Linear compression of embeddings: layers over the axis of the features, not over the embedding's."""

    def __init__(self, counts: Sequence[int], width: int, branches: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inner, out) for inner, out in zip(counts, counts[1:]))
        self.branches = nn.ModuleList(nn.Linear(counts[-1], counts[-1] // 2) for _ in range(branches))
        self.head = nn.Linear(branches * (counts[-1] // 2) * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x.transpose(1, 2)).transpose(1, 2))
        results = [F.relu(branch(x.transpose(1, 2)).transpose(1, 2)) for branch in self.branches]
        return self.head(torch.cat(results, 1).flatten(1))


@workload
def towers(small: bool) -> Workload:
    """32 towers linear-layernorm-relu-linear-sigmoid over one input"""
    count, width, out, batch = (8, 32, 8, 16) if small else (32, 512, 64, 1024)
    model = Towers(count, width, width, out, "cat")
    return Workload(model, {"x": torch.randn(batch, width)}, Clicks(batch, count * out))


@workload
def towers_own_inputs(small: bool) -> Workload:
    """the same towers, an input each"""
    count, width, out, batch = (8, 32, 8, 16) if small else (32, 512, 64, 1024)
    inputs = {"x": [torch.randn(batch, width) for _ in range(count)]}
    return Workload(Towers(count, width, width, out, "cat"), inputs, Clicks(batch, count * out))


@workload
def mmoe(small: bool) -> Workload:
    """multi-gate mixture of experts: 8 experts, 4 tasks"""
    width, hidden, experts, tasks, batch = (32, 16, 4, 2, 16) if small else (512, 256, 8, 4, 2048)
    return Workload(MMoE(width, hidden, experts, tasks), {"x": torch.randn(batch, width)}, Clicks(batch, tasks))


@workload
def dlrm(small: bool) -> Workload:
    """26 embedding tables with 4 ids a row, 13 dense features, pairwise products"""
    tables, rows, width, hidden, batch, ids = (5, 100, 8, 32, 16, 2) if small else (26, 100_000, 64, 512, 2048, 4)
    inputs = {"dense": torch.randn(batch, 13), "sparse": torch.randint(rows, (tables, batch, ids))}
    return Workload(DLRM(tables, rows, width, 13, hidden), inputs, Clicks(batch, 1))


@workload
def dcn_v2(small: bool) -> Workload:
    """deep and cross network: 26 fields, 3 crosses"""
    fields, rows, width, layers, hidden, batch = (4, 50, 8, 2, 32, 16) if small else (26, 50_000, 32, 3, 768, 4096)
    model = DCNv2(fields, rows, width, layers, hidden)
    return Workload(model, {"ids": torch.randint(rows, (batch, fields))}, Clicks(batch, 1))


@workload
def lce_stack(small: bool) -> Workload:
    """linear compression of embeddings: three layers, then three branches"""
    counts, width, batch = ((12, 8, 6), 8, 16) if small else ((512, 256, 128), 64, 1024)
    return Workload(LCEStack(counts, width, 3), {"x": torch.randn(batch, counts[0], width)}, Clicks(batch, 1))
