"""Matrix products that share an operand: which ones a single product can replace, what that costs, and how each result
is sliced out of the joined one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import Part, Product, read_and_written, size_hint
from ..ir.facts import is_static, tensor_fact, tensor_of
from ..ir.program import ATEN, Program
from ..ir.sizes import elements
from ..rewrite.clones import copied_as
from ..rewrite.emit import Emitter
from ..rewrite.layout import follow
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match
from .normalized_nodes import linear_parts, turned_matrix


@dataclass(frozen=True)
class ProductNode:
    """A matrix product or linear layer, by its operands."""

    node: Node
    """The value that the joined product replaces."""
    x: Node
    weight: Node
    bias: Node | None
    turned: bool = False
    """The weight is transposed: its shape is (in, out)."""
    inner: tuple[Node, ...] = ()
    """Nodes, such as the transpose of the weight, that are dead once the product is replaced."""

    @property
    def out(self) -> Any:
        return tensor_of(self.weight).shape[1 if self.turned else 0]

    @property
    def wants_gradient(self) -> bool:
        """Does it need a gradient? A frozen layer that is joined with a trained one would then need one too."""
        facts = [tensor_fact(n) for n in self.operands]
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in facts)

    @property
    def operands(self) -> list[Node]:
        return [n for n in (self.x, self.weight, self.bias) if n is not None]


PRODUCTS = ("linear", "matmul", "addmm")
"""The operations that `product_of` reads."""


def product_of(program: Program, node: Node) -> ProductNode | None:
    """A linear layer in any spelling: `linear`, `x @ w`, `x @ w.t()`, `addmm`."""
    call = program.call(node)
    if call is None or call.mutates:
        return None
    if (parts := linear_parts(call)) is not None:
        x, weight, bias = parts
        if call.op == "linear" and (straight := turned_matrix(weight)) is not None:
            return ProductNode(node, x, straight, bias, turned=True, inner=(weight,))
        inner = (call.args["mat2"],) if call.op == "addmm" else ()
        return ProductNode(node, x, weight, bias, inner=inner)
    if call.op == "matmul":
        x, weight, bias = call.args["self"], call.args["other"], None
    elif call.op == "addmm" and set(call.args) == {"self", "mat1", "mat2"}:
        x, weight, bias = call.args["mat1"], call.args["mat2"], call.args["self"]
    else:
        return None
    if (straight := turned_matrix(weight)) is not None and bias is None:
        return ProductNode(node, x, straight, None, inner=(weight,))
    return ProductNode(node, x, weight, bias, turned=True)


def op_of(program: Program, node: Node) -> str:
    call = program.call(node)
    return call.op if call is not None else ""


def emit_linear(op: Emitter, like: ProductNode, x: Any, weight: Any, bias: Any) -> Any:
    """Emits a linear layer in the form of `like`, over a weight stored in the same orientation as that of `like`."""
    as_linear = op.program.dialect != ATEN or op_of(op.program, like.node) == "linear"
    matrix = op.permute(weight, [1, 0]) if like.turned == as_linear else weight
    if as_linear:
        return op.linear(x, matrix, bias=bias)
    return op.matmul(x, matrix) if bias is None else op.addmm(bias, x, matrix)


@dataclass(frozen=True)
class ProductGroup:
    """Products that a single one can replace, and the node before which that one is inserted."""

    members: tuple[ProductNode, ...]
    anchor: Node

    @property
    def nodes(self) -> list[Node]:
        return [m.node for m in self.members]

    @property
    def weights(self) -> list[Node]:
        return [m.weight for m in self.members]

    @property
    def biases(self) -> list[Node]:
        return [m.bias for m in self.members if m.bias is not None]

    @property
    def sizes(self) -> list[int]:
        return [m.out for m in self.members]

    def covered(self) -> list[Node]:
        """Inner nodes that only the members use."""
        dead = set(self.nodes)
        for node in sorted({n for m in self.members for n in m.inner}, reverse=True):
            if all(user in dead for user in node.users):
                dead.add(node)
        return [n for n in dead if n not in self.nodes]

    def site(self, program: Program, **plan: Any) -> Match:
        """The site at which a rule replaces the members; `plan` is what else its `rewrite` needs."""
        return Match.at(program, *self.nodes, covers=self.covered(), before=self.anchor, group=self, **plan)


Read = Callable[[Program, Node], "ProductNode | None"]


@dataclass
class Run:
    """Products with no write to their operands, and no region boundary, between them."""

    members: list[ProductNode]
    disturbed_by: Node | None = None
    """The node that separates this run from the one before it (from the one after it, for the first run)."""


def runs_with_one_key(
    program: Program, read: Read, key: Callable[[Program, ProductNode], Any], among: Iterable[Node]
) -> Iterator[Run]:
    """Products among some nodes, in graph order, with equal keys, cut into the runs that `undisturbed` gives. A product
    whose key is None is left out.

    The graph may be rewritten between one run and the next, so members are read again when their turn comes: an input
    or a weight may be the result of layers that have been joined meanwhile.
    """
    nodes: dict[Any, list[Node]] = {}
    for node in among:
        member = read(program, node)
        common = key(program, member) if member is not None else None
        if common is not None:
            nodes.setdefault(common, []).append(node)
    for alike in nodes.values():
        if len(alike) > 1:
            for run in undisturbed(program, read_again(program, alike, read)):
                yield Run(read_again(program, [m.node for m in run.members], read), run.disturbed_by)


def read_again(program: Program, nodes: Iterable[Node], read: Read) -> list[ProductNode]:
    """The products at these nodes, read from the graph as it is now."""
    return [m for n in nodes if not n._erased and (m := read(program, n)) is not None]


def undisturbed(program: Program, members: Sequence[ProductNode]) -> list[Run]:
    """Members in graph order, cut at region boundaries and where an operand is written in place."""
    aliasing = program.aliasing
    runs: list[Run] = []
    memory: set[Node] = set()
    """The memory that the members of the last run read."""
    for member in members:
        read = {aliasing.memory(n) for n in member.operands}
        disturber = _disturber(program, runs[-1].members, member, memory) if runs else None
        if runs and disturber is None:
            runs[-1].members.append(member)
            memory |= read
            continue
        if len(runs) == 1:
            runs[0].disturbed_by = disturber
        runs.append(Run([member], disturber))
        memory = read
    return runs


def _disturber(program: Program, run: Sequence[ProductNode], member: ProductNode, memory: set[Node]) -> Node | None:
    """The region boundary, or the write to an operand of either, between the run and the member; None if none."""
    aliasing = program.aliasing
    first, last = run[0].node, run[-1].node
    written = (writer for writer, at in aliasing.memory_written_between(last, member.node) if at in memory)
    return (
        aliasing.barrier_between(last, member.node)
        or aliasing.written_between(member.operands, first, member.node)
        or next(written, None)
    )


def placed(members: Sequence[ProductNode]) -> ProductGroup | None:
    """The largest group with a position after all of its operands and before all users of its results."""
    first, last = members[0].node, members[-1].node
    early = tuple(m for m in members if all(n < first for n in m.operands))
    late = tuple(m for m in members if all(last < user for user in m.node.users))
    late = tuple(m for m in late if all(n < last for n in m.operands))
    best = early if len(early) >= len(late) else late
    if len(best) < 2:
        return None
    return ProductGroup(best, first if best is early else last)


def surely_copied(program: Program, group: ProductGroup) -> list[bool]:
    """For each member: is it certain, without a look at what reads it, that `copied_pieces` copies its piece?"""
    aliasing = program.aliasing
    return [aliasing.is_output(m.node) or aliasing.written(m.node) for m in group.members]


def copied_pieces(program: Program, group: ProductGroup, shape: Sequence[Any], dim: int) -> list[bool]:
    """For each member: must its piece of the joined result be copied, because its memory or strides are visible?"""
    example = tensor_of(group.members[0].node)
    memo, key = program.fact_memo.examples, None
    if is_static((*shape, *group.sizes)):
        key = ("pieces", example.dtype, example.device, tuple(shape), tuple(group.sizes), dim)
    pieces = None if key is None else memo.get(key)
    if pieces is None:
        with program.computing(group.anchor):
            pieces = example.new_empty(list(shape)).split(group.sizes, dim)
        if key is not None:
            memo[key] = pieces
    members = zip(group.members, pieces, surely_copied(program, group))
    return [sure or _is_seen(program, m.node, piece) for m, piece, sure in members]


def _is_seen(program: Program, node: Node, piece: torch.Tensor) -> bool:
    try:
        follow(program, {node: piece})
    except Refused:
        return True
    return False


def take_pieces(op: Emitter, whole: Any, group: ProductGroup, dim: int, copied: Sequence[bool]) -> list[Any]:
    split = op.split(whole, group.sizes, dim=dim)
    pieces = [op.getitem(split, i) for i in range(len(group.members))]
    members = (tensor_of(m.node) for m in group.members)
    return [copied_as(op, p, member) if c else p for p, c, member in zip(pieces, copied, members)]


def joining(program: Program, group: ProductGroup) -> list[Part]:
    """Concatenating weights and biases on each call; nothing where that is computed once."""
    if program.computed_once(*group.weights, *group.biases):
        return []
    return [read_and_written(*map(tensor_of, nodes), times=2) for nodes in (group.weights, group.biases) if nodes]


def products(x: Node, outs: Iterable[Any], training: bool = False) -> list[Part]:
    """The products of x (..., k) with weights of these sizes, one after the other; in training, with their
    gradients."""
    value, sizes = tensor_of(x), list(map(size_hint, outs))
    m, k, dtype = elements(value.shape[:-1]), size_hint(value.shape[-1]), value.dtype
    parts: list[Part] = []
    for n in sizes:
        parts.append(Product.sized(m, n, k, dtype))
        if training:  # of the input, and of the weight
            parts += [Product.sized(m, k, n, dtype), Product.sized(n, k, m, dtype)]
    if training:  # the gradients of the input are added up
        parts += (len(sizes) - 1) * [read_and_written(value, times=3)]
    return parts


def pieces(program: Program, group: ProductGroup, copied: Sequence[bool]) -> list[Part]:
    """Copying pieces and, in training, concatenating their gradients and splitting those of the weights. Inductor's
    code for a CPU copies all pieces in one call."""
    results = [tensor_of(m.node) for m, c in zip(group.members, copied) if c]
    parts: list[Part] = [read_and_written(piece, times=2) for piece in results]
    if results and results[0].device.type == "cpu" and program.options.codegen == "inductor":
        parts = [read_and_written(*results, times=2)]
    if program.is_training:
        parts += [read_and_written(*map(tensor_of, nodes), times=2) for nodes in (group.nodes, group.weights)]
    return parts
