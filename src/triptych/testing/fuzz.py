"""Random programs with views, copies and in-place writes, for testing that passes keep their meaning."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

Choose = Callable[[int], int]
"""A number below the given one: from hypothesis, or from `random.randrange`."""


@dataclass
class _Value:
    node: Node
    tensor: torch.Tensor


class ProgramBuilder:
    """Builds a torch-level graph step by step, running every step to know what is legal next."""

    def __init__(self, choose: Choose, inputs: list[torch.Tensor], taking_apart: bool = False) -> None:
        self.choose = choose
        self.taking_apart = taking_apart
        self.graph = Graph()
        self.inputs = [t.clone() for t in inputs]
        self.pool: list[_Value] = []
        for i, tensor in enumerate(inputs):
            self.pool.append(_Value(self.graph.placeholder(f"x{i}"), tensor.clone()))

    def build(self, steps: int) -> GraphModule:
        for _ in range(steps):
            self._step()
        wanted = {self.choose(len(self.pool)) for _ in range(1 + self.choose(4))} | {len(self.pool) - 1}
        self.graph.output(tuple(self.pool[i].node for i in sorted(wanted)))
        return GraphModule(torch.nn.Module(), self.graph)

    def _pick(self) -> _Value:
        # late values more often than early ones, so that chains form
        size = len(self.pool)
        return self.pool[max(self.choose(size), self.choose(size))]

    def _step(self) -> None:
        every = (self._unary, self._view, self._binary, self._join, self._pieces, self._write, self._noop)
        kinds = (self._rejoin, self._rejoin, self._view, self._write, *every[3:]) if self.taking_apart else every
        kinds[self.choose(len(kinds))]()

    def _add(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Run the step; one that torch refuses leaves no trace."""
        kwargs = kwargs or {}
        concrete = map_aggregate((args, kwargs), lambda a: a.tensor if isinstance(a, _Value) else a)
        try:
            function = getattr(torch.Tensor, target) if kind == "call_method" else target
            result = function(*concrete[0], **concrete[1])
        except (RuntimeError, IndexError, TypeError):
            return
        plain_args, plain_kwargs = map_aggregate(
            (args, kwargs), lambda a: a.node if isinstance(a, _Value) else a
        )
        node = self.graph.create_node(kind, target, plain_args, plain_kwargs)
        if isinstance(result, (tuple, list)):
            all_of_them = self.taking_apart and self.choose(3)
            for i, piece in enumerate(result):
                if all_of_them or self.choose(3):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    self.pool.append(_Value(part, piece))
        elif isinstance(result, torch.Tensor):
            self.pool.append(_Value(node, result))

    def _unary(self) -> None:
        x = self._pick()
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_function", torch.relu, (x,)), ("call_method", "relu", (x,)), ("call_function", torch.neg, (x,)),
            ("call_method", "sigmoid", (x,)), ("call_function", torch.abs, (x,)),
            ("call_method", "to", (x, (torch.float64, torch.float32, torch.bfloat16)[self.choose(3)])),
            ("call_function", torch.zeros_like, (x,)), ("call_function", torch.ones_like, (x,)),
            ("call_method", "sum", (x, -1)), ("call_function", torch.full_like, (x, 2)),
        ]  # fmt: skip
        self._add(*forms[self.choose(len(forms))])

    def _noop(self) -> None:
        x = self._pick()
        rank = x.tensor.dim()
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_method", "clone", (x,)), ("call_method", "contiguous", (x,)),
            ("call_function", operator.add, (x, 0)), ("call_function", operator.mul, (x, 1)),
            ("call_function", operator.truediv, (x, 1)), ("call_function", operator.sub, (x, 0)),
            ("call_method", "view", (x, *x.tensor.shape)), ("call_method", "reshape", (x, x.tensor.shape)),
            ("call_function", F.dropout, (x, 0.5, False)), ("call_method", "detach", (x,)),
            ("call_method", "expand", (x, *x.tensor.shape)), ("call_method", "to", (x, x.tensor.dtype)),
            ("call_function", torch.permute, (x, tuple(range(rank)))), ("call_function", torch.cat, ([x],)),
            ("call_function", torch.stack, ([x],)), ("call_function", operator.getitem, (x, slice(None))),
        ]  # fmt: skip
        self._add(*forms[self.choose(len(forms))])

    def _view(self) -> None:
        x = self._pick()
        shape, rank = list(x.tensor.shape), x.tensor.dim()
        dim = self.choose(rank) - (rank if self.choose(2) else 0) if rank else 0
        size = shape[dim] if rank else 1
        start = self.choose(size) if size else 0
        order = list(range(rank))
        for i in range(rank - 1, 0, -1):
            j = self.choose(i + 1)
            order[i], order[j] = order[j], order[i]
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_method", "flatten", (x,)), ("call_method", "reshape", (x, -1)), ("call_method", "view", (x, -1)),
            ("call_method", "unsqueeze", (x, dim)), ("call_method", "squeeze", (x,)),
            ("call_function", torch.transpose, (x, 0, dim)), ("call_function", torch.permute, (x, order)),
            ("call_method", "permute", (x, *order)),
            ("call_function", torch.narrow, (x, dim, start, 1 + self.choose(max(size - start, 1)))),
            ("call_function", operator.getitem, (x, start)), ("call_function", getattr, (x, "T")),
            ("call_method", "reshape", (x, *shape[:-2], -1)), ("call_method", "expand", (x, 2, *shape)),
            ("call_function", torch.unsqueeze, (x, 0)), ("call_method", "select", (x, dim, start)),
        ]  # fmt: skip
        self._add(*forms[self.choose(len(forms))])

    def _binary(self) -> None:
        x, y = self._pick(), self._pick()
        number = (0, 1, -0.0, 2.0)[self.choose(4)]
        other: Any = y if self.choose(3) else number
        target = (operator.add, operator.mul, torch.sub, torch.maximum, torch.add)[self.choose(5)]
        left, right = (x, other) if self.choose(2) else (other, x)
        self._add("call_function", target, (left, right))

    def _join(self) -> None:
        x = self._pick()
        alike = [v for v in self.pool if v.tensor.shape == x.tensor.shape]
        parts = [alike[self.choose(len(alike))] for _ in range(1 + self.choose(3))]
        dim = self.choose(max(x.tensor.dim(), 1)) * (1 if self.choose(2) else -1)
        self._add("call_function", (torch.cat, torch.stack, torch.concat)[self.choose(3)], (parts,), {"dim": dim})

    def _pieces(self) -> None:
        x = self._pick()
        rank = x.tensor.dim()
        if not rank:
            return
        dim = self.choose(rank)
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_method", "chunk", (x, 2, dim)), ("call_function", torch.split, (x, 1 + self.choose(2), dim)),
            ("call_method", "unbind", (x, dim)), ("call_function", torch.chunk, (x, 1, dim)),
        ]  # fmt: skip
        before = len(self.pool)
        self._add(*forms[self.choose(len(forms))])
        pieces = self.pool[before:]
        if pieces and self.choose(2):  # and often put together again
            join = (torch.cat, torch.stack)[self.choose(2)]
            self._add("call_function", join, (pieces,), {"dim": self.choose(rank)})

    def _rejoin(self) -> None:
        """Splits a value, applies the same steps to each piece, sometimes writes in place, and concatenates the pieces
        in some order, sometimes with another operand."""
        source = self._pick()
        taken = pieces = self._taken_apart(source)
        for _ in range(self.choose(3)):
            pieces = self._each(pieces)
        if not self.choose(3):
            self._write([source, *taken, *pieces])
        if not pieces:
            return
        order = (
            pieces, pieces, pieces, pieces[::-1], pieces[1:], pieces[::2], pieces * 2, [*pieces[1:], pieces[0]],
            [pieces[self.choose(len(pieces))] for _ in range(1 + self.choose(6))],
        )[self.choose(9)]  # fmt: skip
        operands = list(order) or pieces
        if not self.choose(3):
            alike = [v for v in self.pool if v.tensor.shape == operands[0].tensor.shape]
            operands.insert(self.choose(len(operands) + 1), alike[self.choose(len(alike))])
        rank = operands[0].tensor.dim()
        join = (torch.cat, torch.stack)[self.choose(2)]
        dim = self.choose(rank + 1) * (1 if self.choose(3) else -1)
        self._add("call_function", join, (operands,), {"dim": dim})

    def _taken_apart(self, x: _Value) -> list[_Value]:
        rank = x.tensor.dim()
        if not rank:
            return [x]
        dim = self.choose(rank)
        size = x.tensor.shape[dim]
        first = self.choose(size + 1)
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_method", "chunk", (x, 1 + self.choose(4), dim - rank)), ("call_method", "unbind", (x, dim)),
            ("call_function", torch.split, (x, 1 + self.choose(2), dim)), ("call_method", "unbind", (x, dim - rank)),
            ("call_method", "split", (x, [first, size - first], dim)),
            ("call_function", torch.tensor_split, (x, 1 + self.choose(3), dim)),
        ]  # fmt: skip
        before = len(self.pool)
        if self.choose(4):
            self._add(*forms[self.choose(len(forms))])
            return self.pool[before:]
        step = 1 + self.choose(2)
        for start in range(0, size, step):
            index = (*(slice(None),) * dim, slice(start, start + step) if self.choose(4) else start)
            self._add("call_function", operator.getitem, (x, index))
        return self.pool[before:]

    def _each(self, pieces: list[_Value]) -> list[_Value]:
        """The same step for every piece."""
        if not pieces:
            return []
        rank = pieces[0].tensor.dim()
        dim = self.choose(rank + 1)
        shape = list(pieces[0].tensor.shape)
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_method", "squeeze", (dim,)), ("call_method", "squeeze", ()), ("call_method", "unsqueeze", (dim,)),
            ("call_method", "reshape", (-1,)), ("call_method", "flatten", ()), ("call_method", "reshape", (2, -1)),
            ("call_method", "reshape", (*shape[:dim], -1)), ("call_function", torch.transpose, (0, -1)),
            ("call_method", "contiguous", ()), ("call_function", torch.flip, ([0],)),
            ("call_method", "expand", (2, *shape)), ("call_method", "clone", ()), ("call_function", torch.relu, ()),
        ]  # fmt: skip
        kind, target, rest = forms[self.choose(len(forms))]
        before = len(self.pool)
        for piece in pieces:
            self._add(kind, target, (piece, *rest))
        return self.pool[before:] or pieces

    def _write(self, among: list[_Value] | None = None) -> None:
        x, y = self._pick(), self._pick()
        if among and self.choose(4):
            x = among[self.choose(len(among))]
        forms: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("call_method", "add_", (x, 1)), ("call_method", "mul_", (x, y)), ("call_method", "relu_", (x,)),
            ("call_method", "copy_", (x, y)), ("call_method", "zero_", (x,)), ("call_method", "fill_", (x, 3)),
            ("call_function", operator.iadd, (x, y)), ("call_function", operator.setitem, (x, 0, 1.5)),
            ("call_function", F.relu, (x, True)),
        ]  # fmt: skip
        self._add(*forms[self.choose(len(forms))])


def random_inputs(choose: Choose) -> list[torch.Tensor]:
    """A few tensors with the values that break careless algebra among them."""
    shapes: tuple[list[int], ...] = ([4], [2, 4], [2, 3, 4], [1, 4], [], [0, 4])
    inputs = []
    for i in range(1 + choose(3)):
        shape = shapes[choose(len(shapes))]
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0])
        if tensor.numel():
            where = choose(tensor.numel())
            tensor.view(-1)[where] = special[choose(len(special))]
            tensor.view(-1)[(where * 7 + 3) % tensor.numel()] = -0.0
        inputs.append(tensor)
    return inputs


def random_program(
    choose: Choose, steps: int = 10, taking_apart: bool = False
) -> tuple[GraphModule, list[torch.Tensor]]:
    """A program and its inputs; with `taking_apart`, it consists mostly of splits, operations on the pieces,
    concatenations and in-place writes."""
    inputs = random_inputs(choose)
    return ProgramBuilder(choose, inputs, taking_apart).build(steps), inputs
