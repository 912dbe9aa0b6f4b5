"""Tensors made from numbers in the forward, through the default code generator and through eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

import triptych
from tests.compare import check_inference, check_training


def write_one(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = tensor(3.0)
    return y


def write_many(x: Tensor) -> Tensor:
    y = x * 1
    y[1:] = tensor([1.0, 2.0, 3.0])
    return y


def write_into_constant(x: Tensor) -> Tensor:
    c = tensor([1.0, 2.0, 3.0, 4.0])
    c.add_(1)
    c[0] = 7
    c[tensor([1, 2])] += tensor([5.0, 6.0])
    return x + c


def return_constant_and_its_view(x: Tensor) -> tuple[Tensor, ...]:
    c = tensor([1.0, 2.0])
    return x + 1, c, c.view(2, 1)


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + tensor(1.0), lambda x: x - tensor([1.0, 2.0, 3.0, 4.0]), (x,))


VECTOR: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + tensor(2.0),
    "promote": lambda x: x * tensor(3) + tensor(2, dtype=torch.float64),
    "complex": lambda x: x * tensor(1 + 2j),
    "half": lambda x: x.half() * tensor(2.0, dtype=torch.float16),
    "where": lambda x: torch.where(x > 0, x, tensor(0.0)),
    "where_mask": lambda x: torch.where(tensor([True, False, True, False]), x, tensor(float("-inf"))),
    "clamp": lambda x: torch.clamp(x, tensor(-0.5), tensor(0.5)),
    "index": lambda x: x[tensor([0, 2])],
    "index_bool": lambda x: x[tensor([True, False, True, False])],
    "gather": lambda x: torch.gather(x, 0, tensor([3, 2, 1])),
    "take": lambda x: torch.take(x, tensor([0, 1])),
    "scatter": lambda x: torch.scatter(x, 0, tensor([0, 1]), tensor([9.0, 8.0])),
    "index_fill": lambda x: torch.index_fill(x, 0, tensor([0]), 3.0) * tensor([1.0, 2.0, 3.0, 4.0]),
    "cat": lambda x: torch.cat([x, tensor([1.0, 2.0])]),
    "stack": lambda x: torch.stack([x, tensor([1.0, 2.0, 3.0, 4.0])]),
    "matmul": lambda x: x @ tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]),
    "conv": lambda x: F.conv1d(x[None, None], tensor([[[1.0, 2.0, 1.0]]])),
    "unfold": lambda x: x.unfold(0, 2, 1) * tensor([1.0, 2.0]),
    "bucketize": lambda x: torch.bucketize(x, tensor([-1.0, 0.0, 1.0])),
    "long": lambda x: x + tensor(list(range(4000)), dtype=torch.float32)[:4],
    "empty": lambda x: x + tensor([]).sum(),
    "as_tensor": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0, 4.0]) + x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "write_one": write_one,
    "write_many": write_many,
    "write_into_constant": write_into_constant,
    "return_constant_and_its_view": return_constant_and_its_view,
    "branch": branch,
}


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VECTOR)
def test_constants_beside_a_vector(name: str, codegen: str) -> None:
    x = torch.tensor([-1.5, 0.25, 3.0, -0.0])
    check_inference(VECTOR[name], (x,), backend=triptych.compile_fx, options={"codegen": codegen}, dynamic=None)


def test_several_of_them_through_kernels() -> None:
    x = torch.tensor([-1.5, 0.25, 3.0, -0.0])

    def together(x: Tensor) -> list[Any]:
        return [program(x) for program in list(VECTOR.values())[::3]]

    check_inference(together, (x,), backend=triptych.compile_fx, options={"codegen": "inductor"})


TRAINED = [name for name in VECTOR if name != "bucketize"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 3 else ()) for i, name in enumerate(TRAINED)]
)
def test_constants_in_training(name: str) -> None:
    x = torch.tensor([-1.5, 0.25, 3.0, -0.0])
    check_training(VECTOR[name], (x,), backend=triptych.compile_fx, options={"codegen": "inductor"}, dynamic=None)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_look_up_tables(codegen: str) -> None:
    def look_up(i: Tensor) -> tuple[Tensor, Tensor]:
        rows = tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        return tensor([3.0, 1.0, 2.0])[i], F.embedding(i, rows)

    check_inference(look_up, (tensor([0, 2, 1, 1]),), backend=triptych.compile_fx, options={"codegen": codegen})


def test_a_returned_constant_is_new_in_every_call() -> None:
    compiled = torch.compile(lambda x: (x + 1, tensor([1.0, 2.0])), backend=triptych.compile_fx)
    compiled(torch.ones(2))[1].add_(5)
    assert compiled(torch.ones(2))[1].tolist() == [1.0, 2.0]
