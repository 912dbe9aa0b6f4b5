"""Large programs of one kind each, of any size: what compile time must grow linearly with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Program = Callable[..., Any]
Inputs = tuple[Any, ...]
Maker = Callable[[int], tuple[Program, Inputs]]

BIG_GRAPHS: dict[str, Maker] = {}
"""By name: a function that takes a number of steps and returns a program and its inputs."""


def big_graph(*sizes: tuple[int, ...]) -> Callable[[Callable[..., Program]], Maker]:
    """Register a program with inputs of these sizes; `make(n)` builds the program."""

    def register(make: Callable[..., Program]) -> Maker:
        def maker(n: int) -> tuple[Program, Inputs]:
            generator = torch.Generator().manual_seed(0)
            return make(n), tuple(torch.randn(size, generator=generator) for size in sizes)

        BIG_GRAPHS[make.__name__] = maker
        return maker

    return register


def repeated(n: int, step: Callable[[Tensor, int], Tensor]) -> Program:
    def program(x: Tensor) -> Tensor:
        for i in range(n):
            x = step(x, i)
        return x

    return program


@big_graph((8, 8))
def pointwise_chain(n):
    return repeated(n, lambda x, i: (x * 1.5).relu() if i % 2 else x.sigmoid() - 0.5)


@big_graph((4, 6))
def view_chain(n):
    """Of views that do not cancel: each pair of them is another order of the elements."""
    return repeated(n, lambda x, i: x.reshape(6, 4) if i % 2 else x.transpose(0, 1))


@big_graph((2, 3, 4))
def permute_chain(n):
    return repeated(n, lambda x, i: x.permute(1, 2, 0))


@big_graph((4, 6))
def views_all_used(n):
    def program(x):
        total = x.sum()
        for i in range(n):
            x = x.t() if i % 2 else x.reshape(x.shape[1], x.shape[0])
            total = total + x.sum()
        return total

    return program


@big_graph((4, 4))
def squeeze_chain(n):
    return repeated(n, lambda x, i: x.unsqueeze(0).squeeze(0) if i % 2 else x.unsqueeze(1).expand(4, 2, 4)[:, 0])


@big_graph((8, 8))
def in_place_chain(n):
    def program(x):
        y = x.clone()
        for _ in range(n):
            y.add_(1.0)
        return y

    return program


@big_graph((8, 8))
def views_with_writes(n):
    def program(x):
        y = x.clone()
        for i in range(n):
            y[i % 8].mul_(2.0)
        return y

    return program


@big_graph((8, 8))
def slice_assignments(n):
    def program(x):
        y = x.clone()
        for i in range(n):
            y[:, i % 8] = x[:, (i + 1) % 8]
        return y

    return program


@big_graph((64, 4))
def slices(n):
    return lambda x: sum(x[i % 60 : i % 60 + 4].sum() * i for i in range(n))


@big_graph((8, 12))
def split_getitem_cat(n):
    def step(x, i):
        a, b, c = x.split(4, dim=1)
        return torch.cat([c, a, b], dim=1) * 2

    return repeated(n, step)


@big_graph((2, 4))
def nested_cats(n):
    """Flat only at the end: each but the last goes into a larger one."""

    def program(x):
        y = x
        for _ in range(n):
            y = torch.cat([y, x])
        return y

    return program


@big_graph((2, 4))
def nested_cats_all_used(n):
    def program(x):
        y, total = x, x.sum()
        for _ in range(n):
            y = torch.cat([y, x])
            total = total + y.sum()
        return total

    return program


@big_graph((2, 4))
def wide_cat(n):
    return lambda x: torch.cat([x * float(i) for i in range(n)])


@big_graph((2, 4))
def wide_stack(n):
    return lambda x: torch.stack([x + float(i) for i in range(n)], dim=1).relu()


@big_graph((8, 8))
def wide_fan_out(n):
    def program(x):
        y = x.relu()
        return [y * float(i) for i in range(n)]

    return program


@big_graph((8, 8))
def sum_of_terms(n):
    def program(x):
        y = x.exp()
        total = x
        for i in range(n):
            total = total + y * float(i)
        return total

    return program


@big_graph((8, 8))
def sum_in_a_list(n):
    return lambda x: sum([torch.sin(x * i) for i in range(n)])


@big_graph((4, 8), (8, 8), (8,))
def linears_of_one_input(n):
    def program(x, w, b):
        return [F.linear(x, w * float(i), b).relu() for i in range(n)]

    return program


@big_graph((4, 8), (8, 8), (8,))
def linear_chain(n):
    def program(x, w, b):
        for _ in range(n):
            x = F.relu(F.linear(x, w, b))
        return x

    return program


@big_graph((4, 8), (8, 8))
def residual_chain(n):
    def program(x, w):
        for _ in range(n):
            x = x + F.gelu(F.layer_norm(x, (8,)) @ w)
        return x

    return program


@big_graph((2000, 2))
def getitems(n):
    def program(x):
        parts = x[:n].unbind(0)
        return [p * 2 for p in parts]

    return program


@big_graph((2000, 2))
def split_stacked(n):
    def program(x):
        parts = x[:n].split(1)
        return torch.stack([p.relu() for p in reversed(parts)])

    return program


@big_graph((2, 2, 4, 8))
def attentions(n):
    def step(x, i):
        scores = (x @ x.transpose(-1, -2)) * 0.3
        return x + scores.softmax(-1) @ x

    return repeated(n, step)


@big_graph((16, 4))
def index_puts(n):
    def program(x):
        rows = torch.arange(3)
        y = x.clone()
        for i in range(n):
            y = y.index_put((rows,), x[i % 8 : i % 8 + 3])
        return y

    return program


@big_graph((8, 8))
def where_chain(n):
    return repeated(n, lambda x, i: torch.where(x > float(i), x, x * 2))


@big_graph((8, 8))
def masked_fill_chain(n):
    return repeated(n, lambda x, i: x.masked_fill(x > float(i), 0.0))


@big_graph((8, 8))
def cast_chain(n):
    kinds = (torch.float64, torch.float32, torch.float16, torch.float32)
    return repeated(n, lambda x, i: x.to(kinds[i % 4]))


@big_graph((8, 8))
def constants(n):
    return repeated(n, lambda x, i: x + torch.tensor(float(i)))


@big_graph((8, 8))
def filled_constants(n):
    return repeated(n, lambda x, i: x * torch.full((8,), float(i)) + torch.ones(8, 8))


@big_graph((8, 8))
def dropouts(n):
    return repeated(n, lambda x, i: F.dropout(x, 0.5, True))


@big_graph((8, 8))
def autocast_regions(n):
    def program(x):
        for _ in range(n):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = x @ x
            x = x.float().relu()
        return x

    return program


@big_graph((8, 8))
def inside_autocast(n):
    def program(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(n):
                x = (x @ x).view(64).view(8, 8).relu()
        return x

    return program


@big_graph((8, 8))
def no_grad_regions(n):
    def program(x):
        for _ in range(n):
            with torch.no_grad():
                y = x * 2
            x = x + y
        return x

    return program


@big_graph((8, 8))
def additions_of_zero(n):
    return repeated(n, lambda x, i: (x * 1.0 + 0.0).clone() - 0)


@big_graph((8, 8))
def einsums(n):
    return repeated(n, lambda x, i: torch.einsum("ij,jk->ik", x, x))


@big_graph((2, 3, 8, 8), (3, 3, 3, 3), (3,))
def conv_norms(n):
    def program(x, w, s):
        for _ in range(n):
            x = F.batch_norm(F.conv2d(x, w, padding=1), s.abs(), s.abs() + 1, s, s).relu()
        return x

    return program


@big_graph((8, 8))
def reductions(n):
    return repeated(n, lambda x, i: x / x.sum(-1, keepdim=True) - x.amax(0))


@big_graph((4, 8))
def stack_tanh_unbind(n):
    def step(x, i):
        return sum(torch.stack([p.tanh() for p in x.chunk(4, 1)]).unbind(0)).repeat(1, 4)

    return repeated(n, step)


@big_graph((8, 8))
def views_and_copies(n):
    """Every reshape copies: each view has memory of its own to tell apart."""
    return repeated(n, lambda x, i: x.view(4, 2, 4, 2).transpose(1, 2).reshape(8, 8))


@big_graph((24,))
def views_and_copies_in_turn(n):
    return repeated(n, lambda x, i: x.view(6, 4).transpose(0, 1).reshape(24))


@big_graph((2, 4))
def nested_cats_of_others(n):
    def program(x):
        y = x
        for i in range(n):
            y = torch.cat([y, x * float(i)])
        return y

    return program


@big_graph((8, 8))
def accumulated(n):
    def program(x):
        total = torch.zeros_like(x)
        for i in range(n):
            total += x * float(i)
        return total

    return program


@big_graph((8, 8))
def masked_writes(n):
    def program(x):
        y = x.clone()
        for i in range(n):
            y[x > float(i)] = float(i)
        return y

    return program


@big_graph((4, 2000), (3, 2))
def sums_of_layers_over_pieces(n):
    def program(x, w):
        return sum(F.linear(piece, w * float(i)) for i, piece in enumerate(x[:, : 2 * n].split(2, dim=1)))

    return program
