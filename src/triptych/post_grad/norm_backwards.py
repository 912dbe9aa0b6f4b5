"""The backward of a layer norm in a graph: what belongs to it, and what it costs in several kernels and in one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import DeviceModel, can_measure, device_model, measured
from ..cost.timed import timed
from ..cost.timing import Work
from ..ir.facts import is_contiguous, known_equal, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.readers import readers
from ..ir.traits import is_pointwise, is_reduction, is_view
from ..kernels.registry import KERNEL_DTYPES
from ..match.matcher import Matcher, PatternMatch
from ..match.pattern import Tensor, build_pattern
from ..rules.sums_over_rows import SumOverRows, sum_over_rows

NORM_BACKWARD = torch.ops.triptych.norm_backward.default
PROGRAMS_A_CORE = 2
LEAST_ROWS = 8
"""A program adds up at least this many rows, so that the sums are far smaller than the matrix."""

OF_PRODUCT, OF_GRAD, OF_RESULT = range(3)
"""The blocks of sums that the operator returns: those of the weight and of the bias, and of the result."""


@dataclass(frozen=True)
class NormBackward:
    """A layer norm's backward in a graph."""

    grad: Node
    other_grad: Node | None
    """Another gradient that is added to `grad`, where the result of the norm is read twice."""
    x: Node
    mean: Node
    rstd: Node
    weight: Node
    added: Node | None
    """The gradient that reaches x by another path, and is added to that of the norm."""
    result: Node
    sums: Mapping[int, SumOverRows]
    """The sums over the rows that the graph computes, by their block in the operator's second result."""

    @property
    def arguments(self) -> tuple[Node | None, ...]:
        """The first arguments of the operator."""
        return self.grad, self.other_grad, self.x, self.mean, self.rstd, self.weight, self.added

    @property
    def operands(self) -> list[Node]:
        return [argument for argument in self.arguments if argument is not None]

    @property
    def matrices(self) -> list[Node]:
        """The operands that have the size of the result."""
        return [n for n in (self.grad, self.other_grad, self.x, self.added) if n is not None]

    @property
    def rows(self) -> int:
        return math.prod(tensor_of(self.x).shape[:-1])

    @property
    def columns(self) -> int:
        return tensor_of(self.x).shape[-1]

    @property
    def how(self) -> tuple[int, bool]:
        """The last arguments of the operator: a program adds up a power of two rows, for a few programs per core."""
        programs = PROGRAMS_A_CORE * device_model(tensor_of(self.x).device).cores
        rows = max(LEAST_ROWS, 1 << ((self.rows - 1) // programs).bit_length())
        return rows, OF_RESULT in self.sums

    @property
    def blocks(self) -> int:
        """The number of blocks of sums that the operator returns."""
        return 3 if OF_RESULT in self.sums else 2

    def apart(self, model: DeviceModel) -> float:
        """Seconds of a kernel for the result, one for the sums of weight and bias, and one for those of the result."""
        seconds = model.copy(_bytes(*self.matrices, self.result))
        seconds += model.copy(_bytes(self.grad, self.other_grad, self.x))
        return seconds + (model.copy(_bytes(self.result)) if OF_RESULT in self.sums else 0.0)

    def fused(self, model: DeviceModel) -> float:
        """Seconds of the one kernel, with the time to write the partial sums and to read them in the kernel that
        finishes the sums of many norms. Separate kernels have partial sums too, but fewer of them, which are neglected.
        """
        return model.copy(_bytes(*self.matrices, self.result) + 2 * self._bytes_of_parts)

    def timed(self) -> tuple[float, float] | None:
        """The results of `apart` and `fused`, with the copies and the kernel timed on the device."""
        device, given = tensor_of(self.x).device, [None if n is None else tensor_of(n) for n in self.arguments]
        if not can_measure(device, 3 * _bytes(*self.operands)):
            return None
        apart = timed(device, lambda model: (self.apart(model), 0.0))

        def prepare() -> Work:
            tensors = [None if t is None else torch.randn(t.shape, dtype=t.dtype, device=device) for t in given]
            return lambda: NORM_BACKWARD(*tensors, *self.how)

        dtypes = [None if t is None else str(t.dtype) for t in given]
        fused = measured(f"norm_backward {self.rows}x{self.columns} {dtypes} {self.how}", device, prepare)
        if apart is None or fused is None:
            return None
        return apart[0], fused + device_model(device).copy(self._bytes_of_parts)

    @property
    def _bytes_of_parts(self) -> int:
        return torch.float32.itemsize * self.blocks * self.columns * -(-self.rows // self.how[0])


def _bytes(*nodes: Node | None) -> int:
    return sum(tensor_of(n).numel() * tensor_of(n).dtype.itemsize for n in nodes if n is not None)


def _decomposed(op: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dims, size):
    """The gradient of the normalised values, as AOTAutograd decomposes it."""
    xhat = op.mul(op.sub(x, mean), rstd)
    weighted = op.mul(grad, weight)
    centred = op.sub(op.mul(weighted, size), op.sum(weighted, dims, keepdim=True))
    along = op.mul(xhat, op.sum(op.mul(xhat, weighted), dims, keepdim=True))
    return op.mul(op.div(rstd, size), op.sub(centred, along))


PATTERN = build_pattern(_decomposed)


Found = tuple[NormBackward, list[Node], list[Node]]
"""The backward of a layer norm; the nodes whose work the operator does; and the casts, and the sum of two gradients,
that it does for itself and others may still need."""


def norm_backwards(program: Program, device: str) -> Iterator[Found]:
    """All of them on devices of this type, in the order of the graph."""
    matcher = Matcher(program)
    for node in program.calls_of("mul"):
        call = None if node._erased else program.call(node)
        result = tensor_fact(node)  # None for a product of sizes
        if call is None or call.op != "mul" or result is None or result.device.type != device:
            continue
        read = (_read(program, found) for found in matcher.find(PATTERN, node) if _is_norm(found.bindings))
        if (found := next(filter(None, read), None)) is not None:
            yield found


def _is_norm(bindings: Mapping[str, Any]) -> bool:
    """Is it a norm over the last dim, with a gradient of the shape of x, a mean and an rstd for each row, and a weight
    for each column?"""
    x = tensor_fact(bindings["x"])
    if x is None or x.dim() < 2 or bindings["size"] != x.shape[-1]:
        return False
    statistic = (*x.shape[:-1], 1)
    shapes = {"grad": x.shape, "mean": statistic, "rstd": statistic, "weight": x.shape[-1:]}
    operands = [(tensor_fact(bindings[name]), shape) for name, shape in shapes.items()]
    fits = all(t is not None and known_equal(t.shape, shape) for t, shape in operands)
    return fits and _dims(bindings["dims"], x.dim()) == {x.dim() - 1}


def _read(program: Program, found: PatternMatch) -> Found | None:
    """The backward of a layer norm of which the pattern has matched a part. None if the graph does not compute the
    gradient of the weight."""
    dx, grad, x, mean, rstd = found.roots[0], *(found.bindings[name] for name in ("grad", "x", "mean", "rstd"))
    centred = _computed(program, "sub", x, mean)
    xhat = _computed(program, "mul", centred, rstd)
    product = _computed(program, "mul", grad, xhat)
    of_product, of_grad = _sum_over_rows(program, product), _sum_over_rows(program, grad)
    if centred is None or xhat is None or product is None or of_product is None:
        return None
    sums = {OF_PRODUCT: of_product} | ({} if of_grad is None else {OF_GRAD: of_grad})
    first = min(dx, *(over_rows.chain[0] for over_rows in sums.values()))
    chain, added = _cast_and_added(program, dx, before=first)
    if (of_result := _sum_over_rows(program, chain[-1])) is not None:
        sums[OF_RESULT] = of_result
    given = grad, mean, rstd, found.bindings["weight"]
    source = _before_cast(program, x, tensor_of(chain[-1]).dtype)
    grad, mean, rstd, weight = (_before_cast(program, node) for node in given)
    chains = (node for over_rows in sums.values() for node in over_rows.chain)
    covers = [*found.nodes, centred, xhat, product, *chain, *chains]
    inlined = [node for node in (x, *given) if node not in (source, grad, mean, rstd, weight)]
    if (terms := _terms(program, grad, covers)) is not None:
        inlined.append(grad)
        grad, other_grad = terms
    else:
        other_grad = None
    return NormBackward(grad, other_grad, source, mean, rstd, weight, added, chain[-1], sums), covers, inlined


def _terms(program: Program, node: Node, inside: Collection[Node]) -> tuple[Node, Node] | None:
    """The two matrices whose sum this is, if the sum is computed in the kernels that read it."""
    call = program.call(node)
    if call is None or call.op != "add" or not is_inline(program, node, inside):
        return None
    terms = [term for term in call.args.values() if _is_like(term, node)]
    return (terms[0], terms[1]) if len(terms) == len(call.args) == 2 else None


def _computed(program: Program, op: str, one: Node | None, other: Node | None) -> Node | None:
    """op(one, other), if the graph computes it."""
    for user in () if one is None or other is None else one.users:
        call = program.call(user)
        if call is not None and call.op == op and call.args == {"self": one, "other": other}:
            return user
        if call is not None and call.op == op == "mul" and call.args == {"self": other, "other": one}:
            return user
    return None


def _sum_over_rows(program: Program, value: Node | None) -> SumOverRows | None:
    """The sum of a value over all dims but the last, if the graph computes it."""
    for node in () if value is None else readers(program, value):
        if (over_rows := sum_over_rows(program, node)) is None:
            continue
        matrix, whole = tensor_of(over_rows.x), tensor_of(value)
        same_rows = known_equal(matrix.shape[-1:], whole.shape[-1:]) and known_equal(matrix.numel(), whole.numel())
        if matrix.dtype == whole.dtype and is_contiguous(matrix) and same_rows:  # `x.view(dtype)` is a view, too
            return over_rows
    return None


def _cast_and_added(program: Program, dx: Node, before: Node) -> tuple[list[Node], Node | None]:
    """dx, its cast, and its sum with another gradient that is computed before the node `before`: the chain ends where a
    value has several users. Also that other gradient, if the chain has the sum."""
    chain = [dx]
    for op in ("to", "add"):
        user = next(iter(chain[-1].users)) if len(chain[-1].users) == 1 else None
        call = None if user is None else program.call(user)
        if user is None or call is None or call.op != op:
            continue
        if op == "to" and set(call.args) == {"self", "dtype"}:
            chain.append(user)
        others = [other for other in call.args.values() if other is not chain[-1]]
        if op == "add" and len(call.args) == 2 and len(others) == 1 and _is_like(others[0], chain[-1]):
            return ([*chain, user], others[0]) if others[0] < before else (chain, None)
    return chain, None


def _is_like(value: Any, node: Node) -> bool:
    one, two = tensor_fact(value) if isinstance(value, Node) else None, tensor_of(node)
    return one is not None and one.dtype == two.dtype and known_equal(one.shape, two.shape)


def _before_cast(program: Program, node: Node, dtype: torch.dtype | None = None) -> Node:
    """The value that this node casts to float32, if that value has the given dtype or, without one, any dtype that the
    kernel takes; otherwise the node itself."""
    call = program.call(node)
    if call is None or call.op != "to" or call.args != {"self": call.args["self"], "dtype": torch.float32}:
        return node
    source = tensor_fact(call.args["self"])
    wanted = KERNEL_DTYPES if dtype is None else (dtype,)
    return call.args["self"] if source is not None and source.dtype in wanted else node


def is_inline(program: Program, node: Node, inside: Collection[Node]) -> bool:
    """Is the value computed by a pointwise operation, and read only by the nodes `inside`, or by casts that only they
    read? Then the kernels that read it also compute it, and it is never written to memory."""
    source = node
    while (call := program.call(source)) is not None and is_view(call.op) and not call.mutates:
        operand = call.args["self"]
        if call.op == "to" and tensor_of(operand).dtype != tensor_of(source).dtype and not _is_sum(program, operand):
            break
        source = operand
    if call is None or call.mutates or not is_pointwise(call.op):
        return False
    return all(reader in inside for reader in readers(program, source))  # a cast is read through, as a view is


def _is_sum(program: Program, node: Node) -> bool:
    """Is the value, or what it is a view of, computed by a reduction? The kernel of the reduction then casts it."""
    while (call := program.call(node)) is not None and is_view(call.op) and call.op != "to":
        node = call.args["self"]
    return call is not None and is_reduction(call.op)


def _dims(dims: Any, count: int) -> set[int]:
    """The dims of a tensor of `count` dims as non-negative numbers."""
    return {d % count for d in ([dims] if isinstance(dims, int) else dims or [])}
