"""Emits the chunks of a region, one after the other, and joins their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import kernels  # noqa: F401  (registers triptych::after)
from ..cost.device import HALF
from ..ir.calls import Call
from ..ir.facts import fact, known_equal, numel, tensor_of
from ..ir.program import Program, Value
from ..ir.traits import is_gemm, is_pointwise
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .region import Region
from .rows import COPIES, ONE_DIM, REDUCTIONS, SAME_ORDER, RowRules, Rows, Summed, reduced_dims, tensor_operands
from .sizes import Size, Span, shape_of, spans

PARTITIONER_TAG = "partitioner_tag"
"""The tag with which AOTAutograd marks nodes that were traced in the backward. Copies that the chunks compute for a
seed of one do not keep it."""


class Builder:
    """Writes the chunks of a region with one emitter.

    Facts of single chunks are computed without guards. A chunk makes the calls of the region on fewer rows, or on none,
    and torch has looked at the sizes of all rows already. What depends on a size of 0 or 1, such as the strides of a
    dim with one entry, no later value of a chunk depends on.
    """

    def __init__(self, program: Program, op: Emitter, region: Region, chunks: int) -> None:
        self.program, self.op, self.region = program, op, region
        self.spans = spans(region.units, chunks)
        self.rules = RowRules(program.call, region.units)
        self.copies: dict[Node, Node] = {}
        """Values from outside the region that are computed again for the chunks: those of the backward, for a seed of
        one, and those that stand after the chunks in the graph."""
        self.merged: dict[Node, Value] = {}
        """Sliced values with the dims of their rows merged."""
        self.read: dict[tuple[Node, Rows | None], Value] = {}
        """Values from outside the region as the current chunk reads them."""
        self.done: list[Value] = []
        """The last results of the previous chunk."""

    def build(self) -> dict[Node, Value]:
        """The outputs of the region, whole; gradients are those for a seed of one."""
        parts: dict[Node, list[Value]] = {}
        sums: dict[Node, Value] = {}
        for span in self.spans:
            chunk: dict[Node, Value] = {}
            self.read.clear()
            for node, rows in self.region.rows.items():
                if isinstance(rows, Summed):
                    sums[node] = self._add(node, chunk, span, sums.get(node))
                    continue
                chunk[node] = self._compute(node, rows, chunk, span)
                if node in self.region.outputs:
                    parts.setdefault(node, []).append(chunk[node])
            has_products = any(is_gemm(self.program.value(node).op or "") for node in sums)
            self.done = [*sums.values(), *([] if has_products else [several[-1] for several in parts.values()])]
        joined = {n: self._joined(n, several) for n, several in parts.items()}
        totals = {n: self._finished_sum(n, total) for n, total in sums.items() if n in self.region.outputs}
        return joined | totals

    # ---- results ----

    def _add(self, node: Node, chunk: dict[Node, Value], span: Span, total: Value | None) -> Value:
        """Adds the part of this chunk to a sum over the rows. A product is accumulated into the total, in its dtype: a
        second copy of a weight's gradient would cost the memory that chunks should save. Other sums in half precision,
        which are small, are accumulated in float32."""
        call = self.program.call(node)
        assert call is not None
        if call.op == "matmul":
            wanted = self.rules.operands(node, self.region.rows[node])
            left, right = (self._operand(call.args[n], wanted[call.args[n]], chunk, span) for n in ("self", "other"))
            with self.program.without_guards():
                return self.op.matmul(left, right) if total is None else self.op.addmm(total, left, right)
        source = call.args["self"]
        rows = self.region.rows[source]
        assert isinstance(rows, Rows)
        dims = reduced_dims(call, len(shape_of(source)))
        left_over = [rows.at, *(rows.chunk_dim(d) for d in dims if d not in rows.dims)]
        how = {"keepdim": True} if call.args.get("keepdim") else {}
        dtype = call.args.get("dtype") or tensor_of(node).dtype
        with self.program.without_guards():
            part = self.op.sum(chunk[source], sorted(left_over), **how, dtype=torch.float32 if dtype in HALF else dtype)
        return part if total is None else self.op.add(total, part)

    def _finished_sum(self, node: Node, total: Value) -> Value:
        call, result = self.program.call(node), tensor_of(node)
        assert call is not None
        if call.op == "mean":
            source = shape_of(call.args["self"])
            total = self.op.div(total, numel([source[d] for d in sorted(reduced_dims(call, len(source)))]))
        if total.dtype != result.dtype:
            total = self.op.to(total, dtype=result.dtype)
        return self._reshaped(total, list(result.shape))

    def _joined(self, node: Node, parts: Sequence[Value]) -> Value:
        rows = self.region.rows[node]
        assert isinstance(rows, Rows)
        with self.program.without_guards():
            whole = self.op.cat(list(parts), rows.at)
        return whole if rows.count == 1 else self.op.reshape(whole, list(shape_of(node)))

    # ---- operands ----

    def _operand(self, operand: Node, wanted: Rows | None, chunk: dict[Node, Value], span: Span) -> Value:
        if operand in chunk:
            return chunk[operand]
        if (operand, wanted) not in self.read:  # of one value a chunk may read both its own rows and all rows
            value = self._rows_of(operand, wanted, span) if wanted else self.program.value(self._outside(operand))
            self.read[operand, wanted] = self._after(value, self._before(operand, wanted, chunk))
        return self.read[operand, wanted]

    def _rows_of(self, operand: Node, rows: Rows, span: Span) -> Value:
        if operand not in self.merged:
            value = self.program.value(self._outside(operand))
            shape = rows.chunk_shape(shape_of(operand), self.region.units * rows.per)
            self.merged[operand] = value if rows.count == 1 else self.op.reshape(value, shape)
        with self.program.without_guards():
            ends = (boundary.entries(rows.per) for boundary in (span.start, span.stop))
            return self.op.slice(self.merged[operand], rows.at, *ends)

    def _before(self, operand: Node, rows: Rows | None, chunk: dict[Node, Value]) -> Sequence[Value]:
        """The values that must be computed before a chunk reads an operand. For a gradient these are the results of the
        chunk's own forward, so that the gradient can be written over the product; for an operand of which the chunk
        reads its rows, they are the results of the previous chunk. The rows are then copied to new memory with the same
        layout in every chunk, so that all chunks can share their kernels."""
        if operand in self.region.seeded:
            return [v for n, v in chunk.items() if n in self.region.outputs and not self.region.is_gradient(n)]
        return self.done if rows is not None else ()

    def _after(self, value: Value, others: Sequence[Value]) -> Value:
        """The value, available only after `others` are computed. Needed only for Inductor, which orders kernels itself;
        other code generators run them in the order of the graph."""
        if not others or self.program.options.codegen != "inductor":
            return value
        with self.program.without_guards():
            return self.op.call(torch.ops.triptych.after.default, value, list(others))

    def _outside(self, node: Node) -> Node:
        """A value from outside the region as the chunks can read it. A value of the backward is computed again for a
        seed of one; a value that stands after the chunks is computed again before them. Raises Refused for random
        draws, of which the backward would see another than the forward."""
        if node not in self.region.seeded and node < self.op.anchor:
            return node
        if not self.program.aliasing.effects(node).pure:
            raise Refused("{at} comes after the first reader of the loss, and cannot be computed twice", at=node)
        if node not in self.copies:
            if node is self.region.seed:
                like = tensor_of(node)
                one = self.op.full(list(like.shape), 1.0, dtype=like.dtype, device=like.device)
                self.copies[node] = one.node
            else:
                self.copies[node] = self._again(node, {n: self._outside(n) for n in tensor_operands(node)}).node
        return self.copies[node]

    def _again(self, node: Node, operands: dict[Node, Node]) -> Value:
        """A copy of a node on other tensors. Numbers that it reads may stand after the chunks."""
        numbers = {n: self._number(n) for n in node.all_input_nodes if n not in operands}
        value = self.op.again(node, operands | numbers)
        value.node.meta.pop(PARTITIONER_TAG, None)
        return value

    def _number(self, node: Node) -> Any:
        """A number from outside the region, such as a size, as the chunks can read it."""
        number = fact(node)
        return self.op.size_node(number) if isinstance(number, torch.SymInt) else self._outside(node)

    # ---- one operation of one chunk ----

    def _compute(self, node: Node, rows: Rows, chunk: dict[Node, Value], span: Span) -> Value:
        call = self.program.call(node)
        assert call is not None
        wanted = self.rules.operands(node, rows)
        now = {n: self._operand(n, w, chunk, span) for n, w in wanted.items()}
        shape = rows.chunk_shape(shape_of(node), span.entries(rows.per))
        with self.program.without_guards():
            return self._on_rows(node, call, rows, wanted, now, shape)

    def _on_rows(
        self,
        node: Node,
        call: Call,
        rows: Rows,
        wanted: dict[Node, Rows | None],
        now: dict[Node, Value],
        shape: list[Size],
    ) -> Value:
        """The call on operands that have the rows of one chunk."""
        if call.op in SAME_ORDER:
            return self._reshaped(now[call.args["self"]], shape)
        if call.op == "expand":
            return self.op.expand(self._without_row_dims(call.args["self"], node, rows, wanted, now), shape)
        if call.op == "full":
            return self.op.full(**{**call.args, "size": shape})
        if call.op == "permute":
            (source,) = wanted.values()
            assert source is not None
            dims = [d for d in call.args["dims"] if d not in source.dims or d == source.at]
            return self.op.permute(now[call.args["self"]], [source.chunk_dim(d) if d > source.at else d for d in dims])
        if is_pointwise(call.op) or call.op in COPIES or call.op == "addmm":
            aligned = {n: self._without_row_dims(n, node, rows, wanted, now).node for n in now}
            return self._again(node, aligned)
        return self._along_dims(call.op, call.args, wanted, now)

    def _along_dims(
        self, name: str, args: dict[str, Any], wanted: dict[Node, Rows | None], now: dict[Node, Value]
    ) -> Value:
        """An operation that has dims as arguments, renumbered for the merged dims of the rows."""
        given = {key: self._argument(value, now) if isinstance(value, Node) else value for key, value in args.items()}
        rows = wanted[args["self"]]
        if rows is not None and (name in REDUCTIONS or name in ONE_DIM):
            dim: Any = args.get("dim", ONE_DIM.get(name))
            given["dim"] = rows.chunk_dim(dim) if isinstance(dim, int) else [rows.chunk_dim(d) for d in dim]
        return getattr(self.op, name)(**given)

    def _argument(self, node: Node, now: dict[Node, Value]) -> Any:
        return now[node] if node in now else self._number(node)

    def _without_row_dims(
        self, operand: Node, node: Node, rows: Rows, wanted: dict[Node, Rows | None], now: dict[Node, Value]
    ) -> Value:
        """The operand; if it is broadcast along the merged dims, reshaped to have a single dim there, as the chunk."""
        value, call = now[operand], self.program.call(node)
        if wanted[operand] is not None or rows.count == 1 or (call is not None and call.op == "addmm"):
            return value
        shape = shape_of(operand)
        at = rows.at - len(shape_of(node)) + len(shape)
        if at + rows.count <= 0:
            return value
        return self._reshaped(value, [*shape[: max(at, 0)], 1, *shape[at + rows.count :]])

    def _reshaped(self, value: Value, shape: list[Size]) -> Value:
        return value if known_equal(value.shape, shape) else self.op.reshape(value, shape)
