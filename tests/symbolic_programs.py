"""Programs with a number among their arguments that automatic dynamic shapes turns into an input of the graph.

Each is called with several numbers: from the second call on, Dynamo passes the number as a symbol (an int) or as
a value read from a tensor (a float), so that a node stands wherever the program wrote a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Program:
    """A function of a tensor and a number, and the numbers it is called with."""

    function: Callable[..., Any]
    numbers: tuple[Any, ...] = (0, 1, 2)
    shape: tuple[int, ...] = (4, 6, 8)

    def tensor(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0))


DIMS = {
    "narrow": lambda x, d: x.narrow(d, 0, 2) + 1,
    "narrow twice, joined": lambda x, d: torch.cat([x.narrow(d, 0, 2), x.narrow(d, 2, 2)], d),
    "split": lambda x, d: [p * 2 for p in x.split(2, d)],
    "split, joined": lambda x, d: torch.cat(x.split(2, dim=d), dim=d),
    "split by sizes, joined": lambda x, d: torch.cat(x.split([1, x.shape[d] - 1], d), d),
    "chunk": lambda x, d: x.chunk(2, d)[1] * 2,
    "chunk, joined": lambda x, d: torch.cat(x.chunk(2, d), d) + 1,
    "chunk, squeezed, joined": lambda x, d: torch.cat([p.squeeze(d) for p in x.chunk(4, d)], 0),
    "chunk, reshaped, joined": lambda x, d: torch.cat([p.reshape(-1, 2) for p in x.chunk(2, d)], 0),
    "tensor_split": lambda x, d: x.tensor_split(2, d)[0] * 2,
    "tensor_split at places": lambda x, d: torch.cat(x.tensor_split((1, 3), d), d),
    "hsplit": lambda x, d: torch.hsplit(x.transpose(1, d), 2)[0] * 2,
    "transpose": lambda x, d: x.transpose(d, 1) * 2,
    "transpose twice": lambda x, d: x.transpose(d, 1).transpose(d, 1) * 2,
    "transpose, product": lambda x, d: x.transpose(d, -1) @ x.transpose(d, -1).transpose(1, 2),
    "swapaxes": lambda x, d: x.swapaxes(0, d) + 1,
    "movedim": lambda x, d: x.movedim(d, 0) * 2,
    "movedim to": lambda x, d: x.movedim(0, d).contiguous(),
    "movedim of several": lambda x, d: x.movedim((d, (d + 1) % 3), (0, 1)),
    "moveaxis": lambda x, d: torch.moveaxis(x, d, -1).relu(),
    "select": lambda x, d: x.select(d, 1) * 2,
    "select, stacked": lambda x, d: torch.stack([x.select(d, 0), x.select(d, 1)], d),
    "select of index": lambda x, d: x.select(1, d) + x.select(1, -1),
    "unbind": lambda x, d: x.unbind(d)[0] * 2,
    "unbind, stacked": lambda x, d: torch.stack(x.unbind(d), d),
    "unbind, joined": lambda x, d: torch.cat(x.unbind(d), 0),
    "unbind, tanh, stacked": lambda x, d: torch.stack([p.tanh() for p in x.unbind(d)], d),
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "cat of cats": lambda x, d: torch.cat([torch.cat([x, x * 2], d), x], d),
    "cat, then pointwise": lambda x, d: torch.cat([x, x * 2, x + 1], d).relu().sigmoid(),
    "stack": lambda x, d: torch.stack([x, x * 2], d).tanh(),
    "stack of slices": lambda x, d: torch.stack([x[:, :2], x[:, 2:4]], dim=d),
    "squeeze": lambda x, d: x[:, :, None].squeeze(d) * 2,
    "unsqueeze": lambda x, d: x.unsqueeze(d) + 1,
    "unsqueeze, squeezed": lambda x, d: x.unsqueeze(d).squeeze(d) + 1,
    "permute": lambda x, d: x.permute(d, (d + 1) % 3, (d + 2) % 3) * 2,
    "permute by a list": lambda x, d: x.permute([d, (d + 1) % 3, (d + 2) % 3]).contiguous(),
    "permute twice": lambda x, d: x.permute(d, (d + 1) % 3, (d + 2) % 3).permute(0, 2, 1) * 2,
    "roll": lambda x, d: x.roll(d + 1, 1),
    "roll over": lambda x, d: x.roll(1, d),
    "roll over several": lambda x, d: x.roll((1, 2), (0, d + 1 if d < 2 else 1)),
    "flip": lambda x, d: x.flip(d) * 2,
    "flip of several": lambda x, d: x.flip([d, -1] if d < 2 else [0]),
    "sum": lambda x, d: x.sum(d),
    "sum, kept": lambda x, d: x - x.sum(dim=d, keepdim=True),
    "mean of several": lambda x, d: x.mean([d, -1] if d < 2 else [0]),
    "amax": lambda x, d: x - x.amax(d, keepdim=True),
    "max": lambda x, d: x.max(d).values * 2,
    "argmax": lambda x, d: x.argmax(d) + 1,
    "var": lambda x, d: x.var(d, unbiased=False),
    "std, mean": lambda x, d: (x - x.mean(d, True)) / (x.std(d, keepdim=True) + 1e-5),
    "softmax": lambda x, d: x.softmax(d),
    "softmax function": lambda x, d: F.softmax(x * 2, dim=d),
    "softmax by hand": lambda x, d: (x - x.amax(d, True)).exp() / (x - x.amax(d, True)).exp().sum(d, True),
    "log_softmax": lambda x, d: F.log_softmax(x, d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "gather": lambda x, d: x.gather(d, torch.zeros(2, 2, 2, dtype=torch.long)),
    "scatter": lambda x, d: x.scatter(d, torch.zeros(2, 2, 2, dtype=torch.long), 1.0),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([1, 0])),
    "index_add": lambda x, d: x.index_add(d, torch.tensor([0]), torch.ones_like(x.narrow(d, 0, 1))),
    "index_fill": lambda x, d: x.index_fill(d, torch.tensor([1]), 2.0),
    "take_along_dim": lambda x, d: torch.take_along_dim(x, x.argsort(d), d),
    "sort": lambda x, d: x.sort(dim=d, stable=True).values * 2,
    "topk over": lambda x, d: x.topk(2, d).values,
    "topk": lambda x, d: x.topk(d + 1, -1).values * 2,
    "kthvalue": lambda x, d: x.kthvalue(d + 1, -1).values,
    "diagonal": lambda x, d: x.diagonal(0, d, (d + 1) % 3) * 2,
    "tril": lambda x, d: x.tril(d) + x.triu(d),
    "unfold": lambda x, d: x.unfold(d, 2, 2) * 2,
    "glu": lambda x, d: F.glu(x, d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "cosine_similarity": lambda x, d: F.cosine_similarity(x, x + 1, dim=d),
    "flatten": lambda x, d: x.flatten(d) * 2,
    "flatten to": lambda x, d: x.flatten(0, d).relu(),
    "unflatten": lambda x, d: x.unflatten(d, (2, -1)) * 2,
    "size": lambda x, d: x * x.size(d),
    "cross": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "einsum of moved": lambda x, d: torch.einsum("abc,abd->acd", x.transpose(d, 0), x.transpose(d, 0)),
    "repeat_interleave": lambda x, d: x.repeat_interleave(2, d) * 2,
    "in place, of a narrowed": lambda x, d: _add_narrowed(x.clone(), d),
    "in place, of a selected": lambda x, d: _zero_selected(x * 1, d),
    "negative": lambda x, d: x.sum(-1 - d, keepdim=True) * x.select(-1 - d, 0).sum(),
    "linears of chunks": lambda x, d: [p @ p.transpose(1, 2) for p in x.chunk(2, d)],
    "max_pool": lambda x, d: F.max_pool1d(x, d + 1),
    "avg_pool": lambda x, d: F.avg_pool1d(x, 2, stride=d + 1),
}  # fmt: skip
"""The number is a dim, or counts something small."""

SIZES = {
    "view": lambda x, d: x.view(-1, d) * 2,
    "view, then back": lambda x, d: x.view(-1, d).view(x.shape) + 1,
    "reshape": lambda x, d: x.reshape(d, -1).relu(),
    "reshape of two": lambda x, d: x.reshape(d, 192 // d).t() @ x.reshape(d, 192 // d),
    "unflatten": lambda x, d: x.flatten().unflatten(0, (d, -1)) * 2,
    "expand": lambda x, d: x[:, :1].expand(4, d, 8) * 2,
    "expand of new dim": lambda x, d: x.expand(d, -1, -1, -1) + 1,
    "repeat": lambda x, d: x.repeat(d, 1, 1) + 1,
    "repeat_interleave": lambda x, d: x.repeat_interleave(d, 1),
    "tile": lambda x, d: x.tile((d, 1, 1)),
    "arange": lambda x, d: x.sum() * torch.arange(d),
    "arange between": lambda x, d: x.sum() * torch.arange(1, d, 2),
    "linspace": lambda x, d: x.sum() * torch.linspace(0, 1, d),
    "full": lambda x, d: x.sum() * torch.full((d,), 1.0),
    "full of number": lambda x, d: x * torch.full((4, 1, 1), d),
    "zeros": lambda x, d: torch.cat([x, torch.zeros(4, d, 8)], 1),
    "ones": lambda x, d: x.sum() + torch.ones(d, 2) * d,
    "new_zeros": lambda x, d: x.new_zeros(d).sum() + x,
    "eye": lambda x, d: x.sum() * torch.eye(d),
    "pad": lambda x, d: F.pad(x, (d, 0)) * 2,
    "pad with number": lambda x, d: F.pad(x, (1, 1), value=d),
    "one_hot": lambda x, d: F.one_hot((x > 0).long(), d + 2) * 2,
    "interpolate": lambda x, d: F.interpolate(x, size=d, mode="nearest"),
    "slice from": lambda x, d: x[:, d - 1 :] * 2,
    "slice to": lambda x, d: x[:, :d].relu(),
    "slice both, joined": lambda x, d: torch.cat([x[:, :d], x[:, d:]], 1),
    "slice with step": lambda x, d: x[:, ::d],
    "slice negative": lambda x, d: x[:, -d:] + x[:, :d],
    "slice written": lambda x, d: _write_slice(x * 1, d),
    "narrow of length": lambda x, d: x.narrow(1, 1, d) * 2,
    "narrow from": lambda x, d: x.narrow(1, d, 1) * 2,
    "split of size": lambda x, d: x.split(d, 1)[0] * 2,
    "split of size, joined": lambda x, d: torch.cat(x.split(d, 1), 1) + 1,
    "split by sizes": lambda x, d: [p * 2 for p in x.split([d, 6 - d], 1)],
    "chunk of count": lambda x, d: torch.cat(x.chunk(d, 2), 2) + 1,
    "index": lambda x, d: x[d - 1] * 2,
    "index of second": lambda x, d: x[:, d] + x[:, -d],
    "index after new dim": lambda x, d: x[..., None, d] * 2,
    "index by numbers": lambda x, d: x[d - 1, 0] + x[:, d, None, :],
    "index by a list": lambda x, d: x[[0, d - 1]] * 2,
    "index by a tensor and a number": lambda x, d: x[torch.tensor([0, 1]), d] * 2,
    "index by a mask": lambda x, d: x.masked_fill(x > d, 0.0),
    "index written": lambda x, d: _write_index(x * 1, d),
    "stack of indices": lambda x, d: torch.stack([x[:, d - 1], x[:, d]]),
    "where": lambda x, d: torch.where(torch.tensor(d > 2), x, x * 2),
    "where by number": lambda x, d: torch.where(x > d, x, d),
    "clamp": lambda x, d: x.clamp(min=-d, max=d),
    "clamp of clamp": lambda x, d: x.clamp(min=-d).clamp(min=-1),
    "clamp_min": lambda x, d: F.relu(x).clamp_min(d - 2),
    "pow": lambda x, d: x.detach().pow(d),
    "pow of number": lambda x, d: d ** x.detach(),
    "add alpha": lambda x, d: torch.add(x, x * 3, alpha=d),
    "sub alpha": lambda x, d: torch.sub(x, x * 3, alpha=d),
    "rsub": lambda x, d: torch.rsub(x, x * 3, alpha=d) + (d - x),
    "add": lambda x, d: x + d + 0,
    "mul": lambda x, d: x * d * 1,
    "div": lambda x, d: d / x + x / d + x.detach() // d,
    "remainder": lambda x, d: x % d,
    "comparison": lambda x, d: (x > d).float() + (x == d),
    "addmm": lambda x, d: torch.addmm(x[0, :, :6], x[1], x[2].t(), beta=d, alpha=d - 1),
    "baddbmm": lambda x, d: torch.baddbmm(x[:, :, :6], x, x.transpose(1, 2), alpha=d),
    "softmax of scaled": lambda x, d: (x * d).softmax(-1),
    "softmax of divided": lambda x, d: (x / d).softmax(-1),
    "attention": lambda x, d: ((x @ x.transpose(1, 2)) / d).softmax(-1) @ x,
    "attention, scale": lambda x, d: F.scaled_dot_product_attention(x, x, x, scale=1.0 / d),
    "attention, heads": lambda x, d: _heads(x, d),
    "attention, masked": lambda x, d: _masked(x, d),
    "layer_norm": lambda x, d: F.layer_norm(x[:, :, : d + 2], (d + 2,)),
    "layer_norm of reshaped": lambda x, d: F.layer_norm(x.reshape(-1, 2 * d), (2 * d,)),
    "group_norm": lambda x, d: F.group_norm(x, d),
    "norm": lambda x, d: x.norm(p=d),
    "norm over": lambda x, d: torch.norm(x, d, dim=1),
    "dropout": lambda x, d: F.dropout(x, 0.5, training=d > 10),
    "conv": lambda x, d: F.conv1d(x, torch.ones(3, 6, 2), stride=d, padding=d),
    "keepdim": lambda x, d: x.sum(1, keepdim=d > 2),
    "to": lambda x, d: (x * d).to(torch.float64).to(torch.float32),
    "numel": lambda x, d: x[:, :d].sum() / x[:, :d].numel(),
    "as_strided": lambda x, d: x.as_strided((d, 2), (8, 1)) * 2,
    "select_scatter": lambda x, d: x.select_scatter(x[:, 0] * 2, 1, d),
    "fill": lambda x, d: (x * 1).fill_(d) + x,
    "tensor of number": lambda x, d: x + torch.tensor(d) + torch.tensor([1.0, float(d)]).sum(),
    "number returned": lambda x, d: (x * d, d + 1),
}  # fmt: skip
"""The number is a size, an index or an operand."""

FLOATS = {
    "add": lambda x, d: x + d,
    "add alpha": lambda x, d: torch.add(x, x * 3, alpha=d),
    "mul twice": lambda x, d: x * d * d,
    "div": lambda x, d: x / d + d / x,
    "pow": lambda x, d: x.abs().pow(d),
    "clamp": lambda x, d: x.clamp(-d, d),
    "dropout, idle": lambda x, d: F.dropout(x, d / 2, training=False) * 2,
    "layer_norm eps": lambda x, d: F.layer_norm(x, (8,), eps=d),
    "batch_norm eps": lambda x, d: F.batch_norm(x, torch.zeros(6), torch.ones(6), eps=d),
    "normalize eps": lambda x, d: F.normalize(x, eps=d),
    "norm": lambda x, d: x.norm(d),
    "leaky_relu": lambda x, d: F.leaky_relu(x, d) + F.elu(x, alpha=d),
    "softplus": lambda x, d: F.softplus(x, beta=d),
    "interpolate": lambda x, d: F.interpolate(x, scale_factor=d, mode="nearest"),
    "full": lambda x, d: x + torch.full((8,), d),
    "masked_fill": lambda x, d: x.masked_fill(x > d, d),
    "where": lambda x, d: torch.where(x > d, x, d),
    "pad": lambda x, d: F.pad(x, (1, 1), value=d),
    "attention": lambda x, d: ((x @ x.transpose(1, 2)) * d).softmax(-1) @ x,
    "attention, scale": lambda x, d: F.scaled_dot_product_attention(x, x, x, scale=d),
    "softmax of scaled": lambda x, d: (x * d).softmax(-1),
    "addmm": lambda x, d: torch.addmm(x[0, :, :6], x[1], x[2].t(), beta=d, alpha=d),
    "huber": lambda x, d: F.huber_loss(x, x * 0, delta=d),
    "nan_to_num": lambda x, d: torch.nan_to_num(x.relu(), nan=d),
    "lerp": lambda x, d: torch.lerp(x, x + 1, d),
    "quantized": lambda x, d: torch.round(x / d).clamp(-8, 7) * d,
    "arange": lambda x, d: x.sum() * torch.arange(0, 2, d),
    "tensor of number": lambda x, d: x + torch.tensor(d),
}  # fmt: skip


def _add_narrowed(y, d):
    y.narrow(d, 0, 2).add_(1)
    return y


def _zero_selected(y, d):
    y.select(d, 0).zero_()
    return y * 2


def _write_slice(y, d):
    y[:, :d] = 0
    return y + 1


def _write_index(y, d):
    y[d - 1] = 1.0
    y[:, d] += 1
    return y * 2


def _heads(x, d):
    q = x.view(4, 6, d, 8 // d).transpose(1, 2)
    weights = (q @ q.transpose(-2, -1) / (8 // d) ** 0.5).softmax(-1)
    return (weights @ q).transpose(1, 2).reshape(4, 6, 8)


def _masked(x, d):
    scores = x @ x.transpose(1, 2)
    mask = torch.ones(6, 6, dtype=torch.bool).tril(d)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


PROGRAMS: dict[str, Program] = {
    **{f"dim: {name}": Program(f) for name, f in DIMS.items()},
    **{f"size: {name}": Program(f, (2, 3, 4)) for name, f in SIZES.items()},
    **{f"float: {name}": Program(f, (0.5, 1.5, 2.0)) for name, f in FLOATS.items()},
}
for _name, _changes in {
    "dim: chunk, squeezed, joined": {"shape": (4, 4, 4)},
    "dim: einsum of moved": {"shape": (6, 6, 6)},
    "size: attention, heads": {"numbers": (2, 4, 8)},
    "size: group_norm": {"numbers": (2, 3, 6)},
}.items():
    PROGRAMS[_name] = replace(PROGRAMS[_name], **_changes)
