"""One attention found and built: from a softmax to the product before it, to the one behind it, and in their place
`scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from ..batching.build import copied_as
from ..ir.facts import known, known_equal, numel, same_layout, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import NotConcerned, Refused
from .contraction import BROADCAST, Contraction, contraction_of
from .layout import BatchStep, Layout, permuted, reshaped
from .scores import Scores, padded


class Attention:
    """What stands around one softmax; `build` emits what takes its place."""

    def __init__(self, program: Program, softmax: Node, path: Sequence[Node], draws: bool) -> None:
        self.program, self.softmax, self.path, self.draws = program, softmax, path, draws
        self.dropout = 0.0
        self.empty_rows_are_zero = False
        self.after, self.last = self._downwards()
        self.covered: list[Node] = []

    # ---- below the softmax ----

    def _downwards(self) -> tuple[list[Node], Node]:
        """The operations between the softmax and the product with the values, and that product."""
        node = self.softmax
        passed: list[Node] = []
        while True:
            users = list(node.users)
            if len(users) != 1:
                raise Refused(f"the probabilities {node.name} are used {len(users)} times")
            node = users[0]
            if contraction_of(self.program, node) is not None:
                return passed, node
            call = self.program.call(node)
            if call is None or call.mutates or call.op not in BELOW:
                raise NotConcerned("no product with values follows")
            if call.args.get("self", call.args.get("input")) is not (passed[-1] if passed else self.softmax):
                raise NotConcerned("no product with values follows")
            passed.append(node)

    def _follow_probabilities(self, op: Emitter, layout: Layout) -> tuple[Layout, list[BatchStep]]:
        steps: list[BatchStep] = []
        before = self.softmax
        for node in self.after:
            call = self.program.call(node)
            assert call is not None
            if call.op == "dropout":
                self._take_dropout(call)
            elif call.op == "masked_fill":
                self._take_zeros(call)
            elif call.op == "permute":
                layout, step = permuted(layout, call.args["dims"])
                steps += [step] if step is not None else []
            elif call.op in ("reshape", "unsqueeze", "squeeze"):
                layout, step = reshaped(layout, _shape(before), _shape(node))
                steps.append(step)
            before = node
        return layout, steps

    def _take_dropout(self, call: Any) -> None:
        rate, train = call.args["p"], call.get("train")
        if not isinstance(rate, (int, float)) or not isinstance(train, bool):
            raise Refused("a dropout rate that is not a number")
        if train and rate and not self.draws:
            raise Refused("dropout would draw other numbers than eager")
        if train and self.dropout:
            raise Refused("dropout twice")
        if train:
            self.dropout = float(rate)

    def _take_zeros(self, call: Any) -> None:
        """Probabilities set to zero by the mask that the scores had: it changes rows without a key only."""
        masks = [c.args["mask"] for n in self.path if (c := self.program.call(n)) is not None and c.op == "masked_fill"]
        if call.args["value"] != 0 or [call.args["mask"]] != masks or self.dropout:
            raise Refused("probabilities are masked otherwise than the scores")
        self.empty_rows_are_zero = True

    # ---- building ----

    def build(self, op: Emitter, same_strides: bool) -> Value:
        """What takes the place of the product with the values; laid out as that was, if it must be."""
        product = contraction_of(self.program, self.path[0])
        values = contraction_of(self.program, self.last)
        assert product is not None and values is not None
        product, scores = self._scores(op, product)
        layout, more = self._follow_probabilities(op, scores.layout)
        probabilities = self.after[-1] if self.after else self.softmax
        if values.right is probabilities and values.left is not probabilities:
            values = values.swapped()
        self._check_values(values, layout)
        q, k = self._queries_and_keys(op, product, scores)
        for step in more:
            q, k = apply_step(op, q, step), apply_step(op, k, step)
        batch = [values.left_axes[d] for d in layout.batch]
        (summed,) = values.summed
        (width,) = values.only_right
        sizes = dict(zip(values.left_axes, _shape(probabilities)))
        v = arranged(op, self.program, values.right, values.right_axes, [*batch, summed, width], sizes)
        bias, keep = (self._mask_like(op, m, scores.layout, more, q.rank) for m in (scores.bias, scores.keep))
        made = self._attend(op, q, k, v, scores, bias, keep)
        wanted = [*batch, values.left_axes[layout.query], width]
        order = [wanted.index(a) for a in values.result_axes]
        self.covered = [*self.path, *scores.covered, self.softmax, *self.after, self.last]
        result = made if order == sorted(order) else op.permute(made, order)
        old = tensor_fact(self.last)
        assert old is not None
        result = result if result.dtype == old.dtype else op.to(result, dtype=old.dtype)
        if same_strides and not same_layout(old, tensor_fact(result.node)):  # type: ignore[arg-type]
            return copied_as(op, result, old)
        return result

    def _scores(self, op: Emitter, product: Contraction) -> tuple[Contraction, Scores]:
        axes = product.result_axes
        softmax = self.program.call(self.softmax)
        assert softmax is not None
        dim = softmax.args["dim"]
        for oriented in (product, product.swapped()):
            if len(oriented.only_right) != 1 or len(oriented.summed) != 1 or not oriented.only_left:
                continue
            key, query = axes.index(oriented.only_right[0]), axes.index(oriented.only_left[-1])
            batch = tuple(d for d in range(len(axes)) if d not in (key, query))
            scores = Scores(self.program, op, Layout(batch, query, key), _shape(oriented.node))
            scores.scale = float(oriented.alpha) if isinstance(oriented.alpha, (int, float)) else math.nan
            if math.isnan(scores.scale):
                raise Refused("a product times something that is not a number")
            if oriented.added is not None:
                if not isinstance(oriented.beta, (int, float)):
                    raise Refused("a sum times something that is not a number")
                scores._plus(oriented.added)
                if oriented.beta != 1 and scores.bias is not None:
                    scores.bias = op.mul(scores.bias, oriented.beta)
            for above, node in zip(self.path, self.path[1:]):
                scores.follow(node, above)
            if scores.layout.key == dim:
                return oriented, scores
        raise Refused("the softmax is not over the keys")

    def _check_values(self, values: Contraction, layout: Layout) -> None:
        if values.alpha != 1 or values.added is not None:
            raise Refused("something is added to the product with the values")
        if len(values.summed) != 1 or len(values.only_right) != 1:
            raise Refused("the values are not multiplied as in attention")
        if values.left_axes[layout.key] != values.summed[0]:
            raise Refused("the values are not summed over the keys")
        if BROADCAST in values.left_axes or set(values.left_axes) - set(values.result_axes) != set(values.summed):
            raise Refused("the probabilities are stretched")

    def _queries_and_keys(self, op: Emitter, product: Contraction, scores: Scores) -> tuple[Value, Value]:
        axes, sizes = product.result_axes, dict(zip(product.result_axes, _shape(product.node)))
        first = first_layout(product)
        batch = [axes[d] for d in first.batch]
        (summed,) = product.summed
        q = arranged(op, self.program, product.left, product.left_axes, [*batch, axes[first.query], summed], sizes)
        k = arranged(op, self.program, product.right, product.right_axes, [*batch, axes[first.key], summed], sizes)
        for number in range(len(scores.steps) + 1):
            for at, factor in scores.factors:
                if at == number:
                    q, k = self._multiplied(op, q, k, factor, scores)
            if number < len(scores.steps):
                step = scores.steps[number]
                q, k = apply_step(op, q, step), apply_step(op, k, step)
        return q, k

    def _multiplied(self, op: Emitter, q: Value, k: Value, factor: Value, scores: Scores) -> tuple[Value, Value]:
        """A factor of the scores goes to the queries if it is the same for all keys, else to the keys."""
        if not factor.is_tensor or factor.rank == 0:
            return self._scaled(op, q, factor), k
        if scores.layout.order != sorted(scores.layout.order) or scores.layout.rank != q.rank:
            raise Refused("a factor of scores whose axes stand in another order")
        factor = padded(op, factor, q.rank)
        *_, queries, keys = factor.shape
        if known(keys == 1):
            return self._scaled(op, q, factor), k
        if known(queries == 1):
            dims = [*range(q.rank - 2), q.rank - 1, q.rank - 2]
            return q, self._scaled(op, k, op.permute(factor, dims))
        raise Refused("a factor that varies with query and key")

    def _scaled(self, op: Emitter, value: Value, factor: Value) -> Value:
        made = op.mul(value, factor)
        return made if made.dtype == value.dtype else op.to(made, dtype=value.dtype)

    def _mask_like(
        self, op: Emitter, value: Value | None, layout: Layout, more: Sequence[BatchStep], rank: int
    ) -> Value | None:
        """A bias or mask with its axes as Q, K and V have them."""
        if value is None:
            return None
        if any(step.order is not None for step in more):
            raise Refused("probabilities whose axes change places")
        value = padded(op, value, layout.rank)
        if layout.order != sorted(layout.order):
            value = op.permute(value, layout.order)
        if more:
            if not all(known(s == 1) for s in value.shape[:-2]):
                full = [*_batch_sizes(self.softmax, layout), *value.shape[-2:]]
                value = op.expand(value, full)
                value = op.reshape(value, [*(more[-1].sizes or ()), *value.shape[-2:]])
            else:
                value = op.reshape(value, [*[1] * (rank - 2), *value.shape[-2:]])
        return value

    def _attend(
        self, op: Emitter, q: Value, k: Value, v: Value, scores: Scores, bias: Value | None, keep: Value | None
    ) -> Value:
        if not (q.dtype == k.dtype == v.dtype):
            raise Refused(f"queries, keys and values of {q.dtype}, {k.dtype} and {v.dtype}")
        sizes = [q.shape[:-2], k.shape[:-2], v.shape[:-2]]
        if not all(known_equal(s, sizes[0]) for s in sizes):
            raise Refused("batch axes that do not line up")
        batch = list(q.shape[:-2])
        q4, k4, v4 = (four_axes(op, x, batch) for x in (q, k, v))
        rows = None
        if keep is not None:
            keep = four_axes(op, keep, batch, broadcast=True)
            rows = self._rows_with_a_key(op, keep)
            if rows is not None:
                keep = op.logical_or(keep, op.logical_not(rows))
        if bias is not None:
            if bias.dtype != q.dtype:
                raise Refused(f"a bias of {bias.dtype} for queries of {q.dtype}")
            bias = four_axes(op, bias, batch, broadcast=True)
        mask = keep
        if bias is not None:
            mask = bias if keep is None else op.where(keep, bias, -math.inf)
        made = op.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=mask, dropout_p=self.dropout, scale=scores.scale
        )
        if rows is not None:
            made = op.where(rows, made, self._without_keys(op, v4, scores))
        wanted = [*batch, q.shape[-2], v.shape[-1]]
        return made if known_equal(wanted, made.shape) else op.reshape(made, wanted)

    def _without_keys(self, op: Emitter, v: Value, scores: Scores) -> Any:
        """What eager gives a query of which all keys are masked: all scores are equal, or none is a number."""
        if self.empty_rows_are_zero:
            return 0.0
        if scores.fill == -math.inf:
            return math.nan
        if self.dropout or scores.added_to_masked:
            raise Refused("queries may be without a key, and then all their scores count")
        return op.mean(v, dim=[2], keepdim=True)

    def _rows_with_a_key(self, op: Emitter, keep: Value) -> Value | None:
        """Which queries have any key left; None if all have. The others get what eager gives them."""
        return op.any(keep, dim=-1, keepdim=True)


BELOW = ("to", "clone", "dropout", "masked_fill", "reshape", "permute", "unsqueeze", "squeeze")


def first_layout(product: Contraction) -> Layout:
    axes = product.result_axes
    key, query = axes.index(product.only_right[0]), axes.index(product.only_left[-1])
    return Layout(tuple(d for d in range(len(axes)) if d not in (key, query)), query, key)


def _shape(node: Node) -> list[Any]:
    known_value = tensor_fact(node)
    assert known_value is not None
    return list(known_value.shape)


def _batch_sizes(node: Node, layout: Layout) -> list[Any]:
    shape = _shape(node)
    return [shape[d] for d in layout.batch]


def arranged(
    op: Emitter, program: Program, node: Node, axes: Sequence[str], wanted: Sequence[str], sizes: dict[str, Any]
) -> Value:
    """An operand with its axes in the wanted order; those it lacks are stretched to their size."""
    node, axes = without_permutes(program, node, axes)
    value = Value(program, node)
    if BROADCAST in axes:
        value = op.reshape(value, [s for s, a in zip(value.shape, axes) if a != BROADCAST])
        axes = [a for a in axes if a != BROADCAST]
    present = [a for a in wanted if a in axes]
    order = [list(axes).index(a) for a in present]
    if order != sorted(order):
        value = op.permute(value, order)
    if len(present) == len(wanted):
        return value
    of = dict(zip(present, value.shape))
    value = op.reshape(value, [of.get(a, 1) for a in wanted])
    return op.expand(value, [of.get(a, sizes.get(a)) for a in wanted])


def without_permutes(program: Program, node: Node, axes: Sequence[str]) -> tuple[Node, list[str]]:
    """The value that an operand is a permute of, and its axes there."""
    axes = list(axes)
    while (call := program.call(node)) is not None and call.op == "permute" and not call.mutates:
        before: list[str] = [""] * len(axes)
        for axis, dim in zip(axes, call.args["dims"]):
            before[dim] = axis
        node, axes = call.args["self"], before
    return node, axes


def apply_step(op: Emitter, value: Value, step: BatchStep) -> Value:
    rank = value.rank
    if step.order is not None:
        return op.permute(value, [*step.order, rank - 2, rank - 1])
    assert step.sizes is not None
    return op.reshape(value, [*step.sizes, *value.shape[-2:]])


def four_axes(op: Emitter, value: Value, batch: Sequence[Any], broadcast: bool = False) -> Value:
    """(batch, heads, rows, columns); a mask keeps axes of size one."""
    rank = len(batch)
    value = padded(op, value, rank + 2)
    own = list(value.shape)
    if rank == 2:
        return value
    if rank < 2:
        return op.reshape(value, [*[1] * (2 - rank), *own])
    lead, rest = own[: rank - 1], own[rank - 1 :]
    if broadcast and not all(known(s == 1) for s in lead) and not known_equal(lead, batch[:-1]):
        value = op.expand(value, [*batch[:-1], *rest])
        lead = list(batch[:-1])
    return op.reshape(value, [numel(lead), *rest])
