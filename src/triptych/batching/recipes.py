"""Recipes: for each kind of operation, when two calls can be batched and which operation computes the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..cost import Operand, OperatorCall, Part, Product, read_and_written
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact, tensor_of
from ..ir.program import ATEN, Program, Value
from ..ir.sizes import elements, size_hint
from ..ir.text import type_of
from ..ir.traits import is_pointwise, is_random
from ..kernels.group_linear import MOST
from ..kernels.registry import KERNEL_DTYPES
from ..rewrite.emit import Emitter
from .plan import Group, Member
from .stacked import Stacked, broadcast, flat_rows, join, stack

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which batched norms are computed, so that they round once at the end as the unbatched ones do."""


@dataclass(frozen=True)
class Recipe:
    """Subclasses say which operations they take, and build one operation for a group of them."""

    leads: bool = True
    """May begin a chain. Other recipes only continue one: stacking their operands would cost more than it saves."""

    gathers: bool = False
    """Reads the members' operands in place: neither operands nor results are stacked."""

    def name(self, call: Call) -> str:
        return f"batch_{call.op}"

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        raise AssertionError("each recipe says which operations it takes")

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        raise AssertionError("each recipe builds its own operation")

    def apart(self, group: Group) -> Sequence[Part]:
        """The work of the members one by one."""
        return []

    def together(self, group: Group) -> Sequence[Part]:
        """The work of the batched operation, without that of stacking."""
        return []


def signature(
    node: Node, call: Call, tensors: Sequence[Node | None], names: Sequence[str], of: Recipe
) -> Hashable | None:
    """The key that two calls must share to be batched: the operation, the facts of operands and result, and every other
    argument. None if the call cannot be batched."""
    facts = [None if t is None else tensor_fact(t) for t in tensors]
    if tensor_fact(node) is None or any(k is None and t is not None for k, t in zip(facts, tensors)):
        return None
    others = {k: v for k, v in call.args.items() if k not in names}
    if any(isinstance(n, Node) for v in others.values() for n in (v if isinstance(v, (list, tuple)) else (v,))):
        return None
    devices = {k.device for k in facts if k is not None}
    if len(devices) != 1 or any(k is not None and k.layout != torch.strided for k in facts):
        return None
    kinds = tuple(None if k is None else (type_of(k), k.requires_grad) for k in facts)
    return (of, call.op, type_of(tensor_fact(node)), kinds, repr(others), devices.pop())


LINEAR_PARAMETERS = {
    "linear": ("input", "weight", "bias"), "addmm": ("mat1", "mat2", "self"), "matmul": ("self", "other"),
}  # fmt: skip
"""For each operation that a linear layer can be written as, the parameter names of input, weight and bias."""


def linear_operands(program: Program, call: Call) -> tuple[Node, Node, Node | None] | None:
    """Input, weight and bias of a linear layer, which in an ATen graph is a product with a transposed matrix."""
    parameters = LINEAR_PARAMETERS.get(call.op)
    if parameters is None or not all(isinstance(call.args.get(key), Node) for key in parameters[:2]):
        return None
    x, w = (call.args[key] for key in parameters[:2])
    b = call.args.get(parameters[2]) if len(parameters) == 3 else None
    if call.op == "linear":
        return x, w, b
    transpose = program.call(w)
    if program.dialect != ATEN or call.args.keys() - set(parameters) or transpose is None or transpose.op != "permute":
        return None
    if list(transpose.args["dims"]) != [1, 0] or (b is not None and tensor_of(b).dim() != 1):
        return None
    weight = transpose.args["self"]
    fits = b is None or known_equal(tensor_of(b).shape[0], tensor_of(weight).shape[0])
    return (x, weight, b) if fits else None


def _linear(op: Emitter, x: Value, weight: Value, bias: Value | None) -> Value:
    if op.program.dialect != ATEN:
        return op.linear(x, weight, bias=bias)
    transposed = op.permute(weight, [1, 0])
    return op.matmul(x, transposed) if bias is None else op.addmm(bias, x, transposed)


@dataclass(frozen=True)
class BatchLinear(Recipe):
    """linear(x_i, W_i, b_i) -> baddbmm(b, x, W^T) over the stack; of one x -> linear(x, cat(W), cat(b))"""

    def name(self, call: Call) -> str:
        return "batch_linear"

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        operands = linear_operands(program, call)
        if operands is None or call.mutates:
            return None
        x, w, b = operands
        key = signature(node, call, operands, LINEAR_PARAMETERS[call.op], self)
        if key is None or tensor_of(x).dim() < 2 or tensor_of(w).dim() != 2:
            return None
        return Member(node, self, key, (x,), (w, b))

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        (x,) = operands
        weights = [m.weights[0] for m in group.members]
        biases = [m.weights[1] for m in group.members]
        has_bias = biases[0] is not None
        if x.axis is None:
            bias = join(op, biases) if has_bias else None  # type: ignore[arg-type]
            result = _linear(op, x.value, join(op, weights), bias)  # type: ignore[arg-type]
            *lead, width = result.shape
            return Stacked(op.reshape(result, [*lead, len(group), width // len(group)]), len(lead))
        rows, lead = flat_rows(op, x)
        w = op.permute(stack(op, weights).value, [0, 2, 1])  # type: ignore[arg-type]
        if has_bias:
            result = op.baddbmm(op.unsqueeze(stack(op, biases).value, 1), rows, w)  # type: ignore[arg-type]
        else:
            result = op.matmul(rows, w)
        if len(lead) != 1:
            result = op.reshape(result, [len(group), *lead, result.shape[-1]])
        return Stacked(result, 0)

    def apart(self, group: Group) -> Sequence[Part]:
        return [_linear_layer(member) for member in group.members]

    def together(self, group: Group) -> Sequence[Part]:
        first, count = group.members[0], len(group)
        if len({member.data for member in group.members}) == 1:
            return [_linear_layer(first, columns=count)]
        return [_linear_layer(first, batch=count)]


def _linear_layer(member: Member, columns: int = 1, batch: int = 1) -> Product:
    """A layer with the sizes of a member, with so many times its columns, or a batch of so many."""
    x, w = tensor_of(member.data[0]), tensor_of(member.weights[0])
    n, k = (size_hint(s) for s in w.shape)
    return Product.sized(elements(x.shape[:-1]), columns * n, k, x.dtype, batch)


@dataclass(frozen=True)
class GroupLinear(Recipe):
    """linear(x_i, W_i, b_i) of any sizes -> one launch that reads each operand in place"""

    gathers: bool = True

    def name(self, call: Call) -> str:
        return "group_linear"

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        linear = BatchLinear().member(program, node, call)
        if linear is None or tensor_of(node).dtype not in KERNEL_DTYPES or not same_dtypes(linear):
            return None
        result = tensor_of(node)
        key = (self, result.dtype, result.device, linear.weights[1] is None)
        return Member(node, self, key, linear.data, linear.weights)

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        operand_lists = [[m.data[0] for m in group.members], *zip(*(m.weights for m in group.members))]
        xs, weights, biases = ([n for n in nodes if n is not None] for nodes in operand_lists)
        return Stacked(op.call(torch.ops.triptych.group_linear.default, xs, weights, biases), None)

    def apart(self, group: Group) -> Sequence[Part]:
        return [_linear_layer(member) for member in group.members]

    def together(self, group: Group) -> Sequence[Part]:
        return [_one_launch(group.members[i : i + MOST]) for i in range(0, len(group), MOST)]


def _one_launch(members: Sequence[Member]) -> Part:
    """Linear layers of any sizes, after a kernel that passes their sizes and addresses."""
    nodes = [[m.data[0] for m in members], *zip(*(m.weights for m in members))]
    operands = tuple(tuple(Operand.of(tensor_of(n)) for n in each if n is not None) for each in nodes)
    return OperatorCall(
        torch.ops.triptych.group_linear.default, operands, does=tuple(map(_linear_layer, members)), rate=1 / SLOWER,
        precision=tensor_of(members[0].node).dtype, launches=2, through_python=True,
    )  # fmt: skip


SLOWER = 2.0
"""Cost of the grouped kernel relative to the best kernel for each size."""


def same_dtypes(member: Member) -> bool:
    operands = (*member.data, *(w for w in member.weights if w is not None))
    return len({tensor_of(o).dtype for o in operands} | {tensor_of(member.node).dtype}) == 1


@dataclass(frozen=True)
class BatchMatmul(Recipe):
    """x_i @ y_i -> one batched product"""

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        if call.op != "matmul":
            return None
        x, y = call.args["self"], call.args["other"]
        key = signature(node, call, (x, y), ("self", "other"), self)
        if key is None or tensor_of(x).dim() != 2 or tensor_of(y).dim() != 2:
            return None
        return Member(node, self, key, (x, y))

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        x, y = (o.value if o.axis is None else o.in_front(op) for o in operands)
        return Stacked(op.matmul(x, y), 0)

    def apart(self, group: Group) -> Sequence[Part]:
        return len(group) * [self._product(group)]

    def together(self, group: Group) -> Sequence[Part]:
        return [self._product(group, len(group))]

    def _product(self, group: Group, batch: int = 1) -> Product:
        x, y = (tensor_of(d) for d in group.members[0].data)
        m, k, n = size_hint(x.shape[0]), size_hint(x.shape[1]), size_hint(y.shape[1])
        return Product.sized(m, n, k, x.dtype, batch)


@dataclass(frozen=True)
class BatchNormalization(Recipe):
    """layer_norm(x_i, w_i, b_i) -> layer_norm(x) * w + b over the stack, rounded once; rms_norm likewise"""

    def name(self, call: Call) -> str:
        return {"layer_norm": "batch_layernorm", "rms_norm": "batch_rmsnorm"}[call.op]

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        if call.op not in ("layer_norm", "rms_norm"):
            return None
        x, w, b = call.args["input"], call.get("weight"), call.args.get("bias")
        key = signature(node, call, (x, w, b), ("input", "weight", "bias"), self)
        if key is None or (call.op == "rms_norm" and call.get("eps") is None and tensor_of(x).dtype in WIDE):
            return None  # the default eps depends on the operand's dtype, and the batched norm uses a wider one
        return Member(node, self, key, (x,), (w, b))

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        (x,) = operands
        shape = list(call.args["normalized_shape"])
        value, axis = x.value, x.axis or 0
        if axis > x.member_rank - len(shape):
            value, axis = x.in_front(op), 0
        weights = [_together(op, [m.weights[i] for m in group.members]) for i in (0, 1)]
        wide = WIDE.get(value.dtype) if any(weights) else None
        if wide is not None:
            narrow, value = value.dtype, op.to(value, dtype=wide)
        plain = {k: v for k, v in call.args.items() if k not in ("input", "weight", "bias")}
        value = getattr(op, call.op)(value, **plain)
        for combine, weight in zip((op.mul, op.add), weights):
            if weight is not None:
                value = combine(value, broadcast(op, weight, x.member_rank, axis))
        return Stacked(value if wide is None else op.to(value, dtype=narrow), axis)

    def apart(self, group: Group) -> Sequence[Part]:
        return len(group) * [read_and_written(tensor_of(group.members[0].data[0]), times=2)]

    def together(self, group: Group) -> Sequence[Part]:
        return [read_and_written(tensor_of(group.members[0].data[0]), times=2 * len(group))]


def _together(op: Emitter, nodes: Sequence[Node | None]) -> Stacked | None:
    """Weights of the members: none, one for all, or stacked."""
    first = nodes[0]
    if first is None:
        return None
    if all(n is first for n in nodes):
        return Stacked(Value(op.program, first), None)
    return stack(op, nodes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BatchPointwise(Recipe):
    """f(x_i, y_i) -> f(x, y) over the stack, for any pointwise f; bit-exact"""

    draws: bool = False
    """Batch dropout too: the batched dropout draws as many independent random numbers, but different ones."""

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        if call.mutates or tensor_fact(node) is None or not (call.op == "detach" or is_pointwise(call.op)):
            return None
        random = is_random(call.op) or call.op == "dropout"
        if random and not (self.draws and call.op == "dropout" and call.get("train") is True):
            return None
        names = [k for k, v in call.args.items() if isinstance(v, Node) and tensor_fact(v) is not None]
        operands = tuple(call.args[k] for k in names)
        key = signature(node, call, operands, names, self)
        rank = tensor_of(node).dim()
        if key is None or not operands or all(tensor_of(o).dim() != rank for o in operands):
            return None
        return Member(node, self, (key, tuple(names)), operands)

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        names = [k for k, v in call.args.items() if isinstance(v, Node) and tensor_fact(v) is not None]
        rank = max(o.member_rank for o in operands)
        axis = next(o.axis for o in operands if o.axis is not None and o.member_rank == rank)
        values = {k: broadcast(op, o, rank, axis) for k, o in zip(names, operands)}
        return Stacked(getattr(op, call.op)(**{**call.args, **values}), axis)

    def apart(self, group: Group) -> Sequence[Part]:
        if _fused(group):
            return []
        return len(group) * [read_and_written(tensor_of(group.members[0].node), times=2)]

    def together(self, group: Group) -> Sequence[Part]:
        if _fused(group):
            return []
        return [read_and_written(tensor_of(group.members[0].node), times=2 * len(group))]


def _fused(group: Group) -> bool:
    """Is the operation fused into the kernel before it, batched or not?"""
    return any(not isinstance(feed.recipe, (BatchLinear, BatchMatmul)) for feed in group.feeds)


@dataclass(frozen=True)
class BatchAlongDims(Recipe):
    """softmax, sum, permute, unsqueeze and others of x_i -> the same over the stack, with dims shifted by one"""

    leads: bool = False

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        if call.mutates or tensor_fact(node) is None or call.op not in (*ALONG_DIM, *ALONG_DIMS, "reshape"):
            return None
        x = call.args.get("self")
        if not isinstance(x, Node) or (call.op in ALONG_DIM and not isinstance(call.get("dim"), (int, list, tuple))):
            return None
        key = signature(node, call, (x,), ("self",), self)
        return None if key is None else Member(node, self, key, (x,))

    def build(self, op: Emitter, group: Group, operands: Sequence[Stacked], call: Call) -> Stacked:
        value = operands[0].in_front(op)
        args = {**call.args, "self": value}
        if call.op == "reshape":
            args["shape"] = [len(group), *call.args["shape"]]
        elif call.op in ALONG_DIMS:
            args["dims"] = [0, *(d + 1 for d in call.args["dims"])]
        else:
            dim = call.get("dim")
            args["dim"] = dim + 1 if isinstance(dim, int) else [d + 1 for d in dim]
        return Stacked(getattr(op, call.op)(**args), 0)


ALONG_DIM = frozenset(
    "softmax log_softmax sum mean amax amin argmax argmin logsumexp cumsum unsqueeze squeeze slice select".split()
)
ALONG_DIMS = frozenset(["permute"])
