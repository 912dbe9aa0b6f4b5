"""Programs of a real size on which `bench/gains.py` measures single passes: those whose declared examples say nothing
about speed when they are made larger.

A workload is what the pass is for, as a user would write it. It has two sizes, for a GPU and for a CPU. The gain of a
pass without a workload here is measured on one of its own examples, made larger (`gain_subjects.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Program = Callable[..., Any]


@dataclass(frozen=True)
class Work:
    """A program, its inputs, and how it is run."""

    program: Program
    inputs: Sequence[Any]
    what: str
    """A description of the program, with sizes."""
    training: bool = False
    """A step is a forward and a backward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Triptych's options, with the pass on and with it off."""
    dynamic: bool = False
    random: bool = False
    """Two runs draw different numbers, so results are not compared."""


@dataclass(frozen=True)
class Machine:
    """Where tensors live, and how large they are."""

    device: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def size(self, gpu: int, cpu: int) -> int:
        return gpu if self.device == "cuda" else cpu

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype or self.dtype)

    def like(self, module: nn.Module) -> nn.Module:
        return module.to(self.device, self.dtype).eval()


WORKLOADS: dict[str, Callable[[Machine], Work]] = {}


def measures(*names: str) -> Callable[[Callable[[Machine], Work]], Callable[[Machine], Work]]:
    """Registers the workload for the passes or rules of these names."""

    def add(build: Callable[[Machine], Work]) -> Callable[[Machine], Work]:
        WORKLOADS.update(dict.fromkeys(names, build))
        return build

    return add


@measures("fuse_attention")
def attention_by_hand(on: Machine) -> Work:
    batch, heads, length = on.size(4, 2), on.size(16, 4), on.size(2048, 256)
    shape = batch, heads, length, 64

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).float()
        return scores.softmax(-1).to(v.dtype) @ v

    return Work(program, [on.normal(*shape) for _ in range(3)], f"attention by hand, {_sizes(shape)}")


@measures("simplify_attention_masks")
def causal_mask_as_a_tensor(on: Machine) -> Work:
    shape = on.size(4, 2), on.size(16, 4), (length := on.size(2048, 256)), 64

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Work(program, [on.normal(*shape) for _ in range(3)], f"attention with a causal mask, {_sizes(shape)}")


@measures("attention_heads")
def grouped_queries(on: Machine) -> Work:
    batch, heads, length, groups = on.size(4, 2), on.size(32, 8), on.size(2048, 256), 4
    q, k, v = (on.normal(batch, count, length, 64) for count in (heads, heads // groups, heads // groups))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    what = f"attention of {heads} heads over {heads // groups} repeated ones, {batch} x {length} x 64"
    return Work(program, [q, k, v], what)


class Towers(nn.Module):
    """Similar networks, each with its own input."""

    def __init__(self, count: int, width: int, out: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, out), nn.Sigmoid()
            )
            for _ in range(count)
        )  # fmt: skip

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower, x in zip(self.towers, inputs)], 1)


@measures("group_batch_fusion_passes")
def towers(on: Machine) -> Work:
    count, rows, width = on.size(32, 8), on.size(1024, 128), on.size(512, 64)
    inputs = [on.normal(rows, width) for _ in range(count)]
    what = f"{count} towers linear, layer norm, relu, linear, sigmoid; {rows} rows, width {width}, an input each"
    return Work(on.like(Towers(count, width, 64)), inputs, what)


class Projections(nn.Module):
    """Queries, keys and values of one input, by three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in (width, width // 4, width // 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


@measures("fuse_parallel_linear_pass")
def projections(on: Machine) -> Work:
    rows, width = 8, on.size(2048, 512)
    what = f"three linear layers over {rows} rows, {width} -> {width} + {width // 4} + {width // 4}, with CUDA graphs"
    # without CUDA graphs the host takes longer to call the joined kernel than the kernels take
    return Work(on.like(Projections(width)), [on.normal(rows, width)], what, options={"mode": "reduce-overhead"})


@measures("fuse_conv_bn", "freeze")
def convolution_and_normalization(on: Machine) -> Work:
    channels, images, pixels = on.size(256, 16), on.size(64, 2), on.size(56, 28)
    block = nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
    )  # fmt: skip
    x = on.normal(images, channels, pixels, pixels)
    what = f"convolution and batch norm, twice, {_sizes(x.shape)}, freeze"
    return Work(on.like(block), [x], what, options={"freeze": True})


@measures("efficient_conv_bn_eval")
def convolution_and_normalization_in_training(on: Machine) -> Work:
    channels, images, pixels = on.size(256, 16), on.size(64, 2), on.size(56, 28)
    block = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    x = on.normal(images, channels, pixels, pixels)
    what = f"a training step of a convolution and a batch norm in eval mode, {_sizes(x.shape)}"
    return Work(on.like(block), [x], what, training=True)


@measures("pad_mm", "pad_aten_mm_pass")
def odd_product(on: Machine) -> Work:
    n = on.size(4096, 512)
    a, b = on.normal(n, n - 1), on.normal(n - 1, n - 3)
    return Work(lambda a, b: a @ b, [a, b], f"a product of {_sizes(a.shape)} and {_sizes(b.shape)}")


@measures("B2B_GEMM_PASS")
def two_products(on: Machine) -> Work:
    rows, ends, middle = on.size(65536, 1024), 64, on.size(4096, 512)
    a = on.normal(rows, ends)
    b, c = on.normal(ends, middle, scale=ends**-0.5), on.normal(middle, ends, scale=middle**-0.5)
    what = f"relu(a @ b) @ c, {rows} x {ends} x {middle} x {ends}"
    return Work(lambda a, b, c: F.relu(a @ b) @ c, [a, b, c], what)


@measures("fused_int_mm_mul")
def quantized_layer(on: Machine) -> Work:
    rows, width, out = on.size(8192, 256), on.size(1024, 64), on.size(4096, 256)
    x, w = on.normal(rows, width), torch.randint(-128, 128, (out, width), dtype=torch.int8, device=on.device)
    w_scale = torch.rand(out, device=on.device) / width

    def program(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        x_scale = x.float().abs().amax(1, keepdim=True) / 127
        quantized = (x / x_scale).round().to(torch.int8)
        return (torch._int_mm(quantized, w.t()) * x_scale * w_scale).to(x.dtype)

    what = f"a layer of int8 weights, its input quantized row by row, {rows} rows, {width} -> {out}"
    return Work(program, [x, w, w_scale], what)


@measures("products_by_onednn")
def linear_layer(on: Machine) -> Work:
    rows, width, out = on.size(8192, 512), on.size(4096, 512), on.size(4096, 2048)
    w, b = on.normal(out, width, scale=width**-0.5), on.normal(out)
    return Work(F.linear, [on.normal(rows, width), w, b], f"a linear layer, {rows} rows, {width} -> {out}")


@measures("recompute_between_products")
def two_products_in_training(on: Machine) -> Work:
    rows, ends, middle = on.size(65536, 1024), 64, on.size(4096, 512)
    a = on.normal(rows, ends).requires_grad_()
    b, c = on.normal(ends, middle, scale=ends**-0.5), on.normal(middle, ends, scale=middle**-0.5)
    what = f"a training step of gelu(a @ b) @ c, {rows} x {ends} x {middle} x {ends}"
    return Work(lambda a, b, c: F.gelu(a @ b) @ c, [a, b.requires_grad_(), c.requires_grad_()], what, training=True)


class BlockWithNorm(nn.Module):
    """x + f(norm(x)), as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


@measures("fuse_norm_backward")
def blocks_with_norms_in_training(on: Machine) -> Work:
    rows, width, count = on.size(4096, 256), on.size(768, 64), on.size(12, 3)
    blocks = on.like(nn.Sequential(*(BlockWithNorm(width) for _ in range(count))))
    what = f"a training step of {count} layers with a norm each, {rows} x {width}"
    return Work(blocks, [on.normal(rows, width).requires_grad_()], what, training=True)


@measures("eliminate_common_subexpressions")
def product_computed_twice(on: Machine) -> Work:
    n = on.size(4096, 512)
    x, w = on.normal(n, n), on.normal(n, n, scale=n**-0.5)

    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu() + (x @ w).sigmoid()

    return Work(program, [x, w], f"a product of {_sizes(x.shape)} and {_sizes(w.shape)}, written twice")


@measures("auto_chunker")
def head_and_loss(on: Machine) -> Work:
    rows, hidden, classes = on.size(8192, 1024), on.size(2048, 128), on.size(128256, 32768)
    h = on.normal(rows, hidden).requires_grad_()
    w = on.normal(classes, hidden, scale=hidden**-0.5).requires_grad_()
    y = torch.randint(0, classes, (rows,), device=on.device)

    def program(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), y)

    what = f"a training step of a head and its loss, {rows} rows, {hidden} -> {classes}"
    return Work(program, [h, w, y], what, training=True)


@measures("replace_random_passes")
def dropout(on: Machine) -> Work:
    shape = on.size(8192, 512), on.size(8192, 512)
    x = on.normal(*shape).requires_grad_()

    def program(x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x), 0.1)

    return Work(program, [x], f"a training step of gelu and dropout, {_sizes(shape)}", training=True, random=True)


@measures("apply_gumbel_max_trick")
def sampling(on: Machine) -> Work:
    shape = on.size(1024, 64), on.size(128256, 4096)

    def program(logits: Tensor) -> Tensor:
        p = torch.softmax(logits, -1, dtype=torch.float32)
        return torch.argmax(p / torch.empty_like(p).exponential_(), -1)

    return Work(program, [on.normal(*shape)], f"one draw of a softmax, {_sizes(shape)}", random=True)


@measures("cat_in_one_launch")
def cat_of_many(on: Machine) -> Work:
    count, shape = 32, (on.size(65536, 2048), 64)
    inputs = [on.normal(*shape) for _ in range(count)]
    return Work(lambda *given: torch.cat(given, 1), inputs, f"cat of {count} x {_sizes(shape)}")


@measures("reduced_atomic_contention")
def gradient_of_few_rows(on: Machine) -> Work:
    rows, width, additions = 4, on.size(1024, 64), on.size(65536, 2048)
    table = on.normal(rows, width, dtype=torch.float32)
    index = torch.randint(0, rows, (additions,), device=on.device)
    values = on.normal(additions, width, dtype=torch.float32)

    def program(table: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return table.index_put((index,), values * 2, accumulate=True)

    return Work(program, [table, index, values], f"{additions} additions to {rows} rows of {width}")


@measures("move_constructors_to_gpu")
def positions(on: Machine) -> Work:
    shape = on.size(4096, 256), on.size(4096, 256)

    def program(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1]).to(x.device)

    return Work(program, [on.normal(*shape)], f"x + arange(n).to(device), {_sizes(shape)}")


@measures("reinplace")
def cache_of_keys(on: Machine) -> Work:
    shape = on.size(16, 2), on.size(8192, 512), on.size(1024, 128)
    cache, keys = on.normal(*shape), on.normal(shape[0], 1, shape[2])
    at = torch.tensor([7], device=on.device)

    def program(cache: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(1, at, keys * 2)
        return cache[:, 0] + 1

    return Work(program, [cache, keys, at], f"one position written to a cache of {_sizes(shape)}")


@measures("compute_masks_again")
def relu_before_product(on: Machine) -> Work:
    batch, n = on.size(16, 4), on.size(1024, 128)
    x, w = on.normal(n, batch, n).requires_grad_(), on.normal(batch, n, n, scale=n**-0.5).requires_grad_()

    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(F.relu(x).permute(1, 0, 2), w)

    return Work(program, [x, w], f"a training step of relu(x), permuted, times w, {_sizes(x.shape)}", training=True)


@measures("sink_cat_after_pointwise")
def pointwise_on_pieces(on: Machine) -> Work:
    shape, count = (on.size(65536, 2048), 512), 16

    def program(x: Tensor) -> Tensor:
        return torch.cat([piece.sqrt() for piece in x.square().chunk(count)])

    return Work(program, [on.normal(*shape)], f"sqrt of {count} pieces of {_sizes(shape)}, put together again")


@measures("merge_stack_tanh_unbind_pass")
def tanh_of_pieces(on: Machine) -> Work:
    rows, width, count = on.size(65536, 2048), 1024, 16

    def program(x: Tensor) -> Tensor:
        pieces = torch.stack(x.split(width // count, 1)).tanh().unbind()
        return torch.cat([p.relu() for p in pieces], 1)

    return Work(program, [on.normal(rows, width)], f"tanh of {count} stacked pieces of {_sizes((rows, width))}")


@measures("remove_split_ops_pass")
def pieces_put_together(on: Machine) -> Work:
    rows, width, count = on.size(65536, 2048), 1024, 32
    x, y = on.normal(rows, width), on.normal(rows, width // count)

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y, *x.split(width // count, 1)[1:], y], 1)

    return Work(program, [x, y], f"{count - 1} of {count} pieces of {_sizes((rows, width))} put between two others")


@measures("decompose_mm_pass")
def product_over_few(on: Machine) -> Work:
    rows = on.size(1 << 20, 1 << 14)
    a, b = on.normal(rows, 4), on.normal(4, 8)
    return Work(lambda a, b: a @ b, [a, b], f"a product of {_sizes(a.shape)} and {_sizes(b.shape)}")


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
