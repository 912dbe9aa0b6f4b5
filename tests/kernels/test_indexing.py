"""Reading and writing through indices, with kernels. Several programs share a compile: most of its time is the C++ compiler's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triptych
from tests.compare import check_inference, check_training


def reads(x: Tensor, i: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    rows = torch.arange(x.shape[0])
    return (
        x[i],
        x[:, i % 3],
        x[rows[:, None], i[:2]],
        x[..., [0, -1], None],
        x[1:-1:2, ::3],
        x[-1],
        torch.where(keep, x, -x),
        x.gather(1, i[None].expand(x.shape[0], -1) % 3),
        torch.take_along_dim(x, x.argsort(1), 1),
        x.index_select(1, torch.tensor([2, 0, 2])),
        F.embedding(i, x),
        F.one_hot(i, 6).to(x.dtype),
        torch.flip(x, [0]).roll(2, 1),
        x.unfold(1, 3, 2).sum(-1),
        x.diagonal(1),
    )


def writes(x: Tensor, y: Tensor, i: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    whole = x.clone()
    whole[0] = y[0]
    whole[:, 1] += 2
    whole[1:3, ::2] = y[1:3, ::2] * 3
    whole[keep] = 0.5
    whole[i[:2]] *= 2
    added = torch.zeros_like(x).index_add(0, i, y[: i.shape[0]])
    put = x.index_put((i, i % 3), y[0, : i.shape[0]], accumulate=True)
    scattered = x.scatter(1, i[None].expand(x.shape[0], -1) % 3, 2.0)
    return whole, added, put, scattered, x.masked_scatter(keep, y), x.index_fill(1, i[:1] % 3, 7.0)


def write_arguments(x: Tensor, y: Tensor) -> Tensor:
    x[1].copy_(y[0])
    x.t()[0].add_(1)
    y.mul_(2)
    return x[1:] + y[1:]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reads_and_writes(dynamic: bool) -> None:
    torch.manual_seed(0)
    x, y, i = torch.randn(6, 8), torch.randn(6, 8), torch.tensor([0, 3, 2, 5])
    keep = torch.rand(6, 8) > 0.5

    def both(x: Tensor, y: Tensor, i: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        return (*reads(x, i, keep), *writes(x, y, i, keep))

    check_inference(both, (x, y, i, keep), backend=triptych.compile_fx, dynamic=dynamic)
    if not dynamic:
        check_training(both, (x, y, i, keep), backend=triptych.compile_fx)


@pytest.mark.parametrize("shared", [False, True])
def test_written_arguments(shared: bool) -> None:
    base = torch.randn(8, 3)
    arguments = (base[:4], base[4:]) if shared else (base[:4].clone(), base[4:].clone())
    check_inference(write_arguments, arguments, backend=triptych.compile_fx)


def test_a_written_view_returned_with_its_base() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x.clone()
        view = whole.t()[2]
        view.mul_(-1)
        return whole, view

    check_inference(program, (torch.randn(6, 8),), backend=triptych.compile_fx)
