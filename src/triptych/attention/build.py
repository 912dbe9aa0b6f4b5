"""One attention found and built: from a softmax to the product before it, to the one behind it, and in their place
`scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..cost import size_hint
from ..ir.calls import Call
from ..ir.facts import known, same_layout, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.copying import copied_as
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .contraction import BROADCAST, Contraction, contraction_of
from .layout import VIEWS, BatchStep, Layout, viewed
from .masks import is_number
from .operands import ONE_QUERY, apply_step, arranged, shape_of
from .probabilities import Probabilities
from .scores import Scores
from .sdpa import attend


@dataclass(frozen=True)
class Reading:
    """One way to read a product as queries and keys."""

    product: Contraction
    """Queries left, keys right."""
    query: str | None
    key: str

    @property
    def layout(self) -> Layout:
        axes = self.product.result_axes
        batch = tuple(d for d, a in enumerate(axes) if a not in (self.query, self.key))
        return Layout(batch, None if self.query is None else axes.index(self.query), axes.index(self.key))


class Attention:
    """What stands around one softmax; `build` emits what takes its place."""

    def __init__(
        self,
        program: Program,
        softmax: Node,
        path: Sequence[Node],
        after: Sequence[Node],
        last: Node,
        draws: bool,
        lowest_score: float,
    ) -> None:
        self.program, self.softmax, self.path, self.after, self.last = program, softmax, path, after, last
        self.draws, self.lowest_score = draws, lowest_score
        self.covered: list[Node] = []
        values = contraction_of(program, last)
        assert values is not None
        self.probabilities = after[-1] if after else softmax
        self.values = values.swapped() if values.right is self.probabilities else values
        if self.values.right is self.probabilities:
            raise Refused("probabilities times themselves")
        self.reading = self._reading()

    # ---- what is what ----

    def _reading(self) -> Reading:
        softmax = self.program.call(self.softmax)
        assert softmax is not None
        dim = softmax.args.get("dim")
        reasons = []
        for reading in self._readings():
            try:
                if self._behind_views(reading.layout, self.path).key == dim:
                    layout = self._behind_views(reading.layout, [*self.path, self.softmax, *self.after])
                    self._check_values(layout)
                    return reading
                reasons.append("the softmax is not over the keys")
            except Refused as refused:
                reasons.append(refused.reason)
        raise Refused(reasons[0] if reasons else "the scores are not a product of queries and keys")

    def _readings(self) -> Iterator[Reading]:
        product = contraction_of(self.program, self.path[0])
        assert product is not None
        sizes = dict(zip(product.result_axes, shape_of(product.node)))
        for oriented in (product, product.swapped()):
            if len(oriented.summed) != 1:
                continue
            for key in reversed(oriented.only_right):
                own = oriented.only_left
                # of several axes that keys do not have, the longest holds the queries: keys are stretched over the rest
                queries = sorted(reversed(own), key=lambda a: -size_hint(sizes[a])) if own else [None]
                yield Reading(oriented, queries[0], key)

    def _behind_views(self, layout: Layout, nodes: Sequence[Node]) -> Layout:
        for before, node in zip(nodes, nodes[1:]):
            call = self.program.call(node)
            if call is not None and call.op in VIEWS:
                layout, _ = viewed(self.program, layout, before, node)
        return layout

    def _check_values(self, layout: Layout) -> None:
        values = self.values
        if not _is_plain(values.alpha) or not _is_plain(values.beta):
            raise Refused("a product times something that is not a number")
        if len(values.summed) != 1 or len(values.only_right) != 1:
            raise Refused("the values are not multiplied as in attention")
        if values.left_axes[layout.key] != values.summed[0]:
            raise Refused("the values are not summed over the keys")
        if BROADCAST in values.left_axes or set(values.left_axes) - set(values.result_axes) != set(values.summed):
            raise Refused("the probabilities are stretched")

    # ---- building ----

    def build(self, op: Emitter, same_strides: bool) -> Value:
        """What takes the place of the product with the values; laid out as that was, if it must be."""
        scores = self._scores(op)
        below = Probabilities(self.program, op, scores.layout, scores, self.draws)
        for before, node in zip([self.softmax, *self.after], self.after):
            below.follow(node, before)
        if scores.sink is not None and not below.sink_is_dropped:
            raise Refused("the sink counts as a value")
        layout, values = below.layout, self.values
        q, k = self._queries_and_keys(op, scores)
        for step in below.steps:
            q, k = apply_step(op, q, step), apply_step(op, k, step)
        batch = [values.left_axes[d] for d in layout.batch]
        (summed,), (width,) = values.summed, values.only_right
        sizes = dict(zip(values.left_axes, shape_of(self.probabilities)))
        v = arranged(op, self.program, values.right, values.right_axes, [*batch, summed, width], sizes)
        outside, v = self._factors_below(op, below, v)
        made = attend(op, self.program, q, k, v, scores, below, self._masks(op, scores, below))
        for factor in outside:
            made = op.mul(made, factor)
        if below.factor != 1:
            made = op.mul(made, below.factor)
        query = ONE_QUERY if layout.query is None else values.left_axes[layout.query]
        wanted = [*batch, query, width]
        if layout.query is None:
            made, wanted = op.reshape(made, [*made.shape[:-2], made.shape[-1]]), [*batch, width]
        order = [wanted.index(a) for a in values.result_axes]
        self.covered = [*self.path, *scores.covered, self.softmax, *self.after, self.last]
        result = made if order == sorted(order) else op.permute(made, order)
        old = tensor_fact(self.last)
        assert old is not None
        result = self._added(op, result)
        result = result if result.dtype == old.dtype else op.to(result, dtype=old.dtype)
        if same_strides and not same_layout(old, tensor_fact(result.node)):  # type: ignore[arg-type]
            return copied_as(op, result, old)
        return result

    def _added(self, op: Emitter, result: Value) -> Value:
        """What `baddbmm` and its like add to the product with the values."""
        alpha, added, beta = self.values.alpha, self.values.added, self.values.beta
        result = result if alpha == 1 else op.mul(result, alpha)
        if added is None:
            return result
        return op.add(result, added if beta == 1 else op.mul(added, beta))

    def _scores(self, op: Emitter) -> Scores:
        product, softmax = self.reading.product, self.program.call(self.softmax)
        made, result = tensor_fact(product.node), tensor_fact(self.softmax)
        assert made is not None and result is not None and softmax is not None
        scores = Scores(self.program, op, self.reading.layout, list(made.shape), made.dtype, made.dtype)
        scores.summed_in, scores.lowest_score = made.dtype, self.lowest_score
        if not is_number(product.alpha) or not _is_plain(product.beta):
            raise Refused("a product times something that is not a number")
        scores.factor(product.alpha)
        if product.added is not None:
            scores.plus(product.added, product.beta)
        for above, node in zip(self.path, self.path[1:]):
            scores.follow(node, above)
        if isinstance(softmax.args.get("dtype"), type(made.dtype)):
            scores.cast(softmax.args["dtype"])
        if any(f is g for f in scores.factors for g in scores.uneven):
            raise Refused("scores that were shifted are multiplied by what varies with the key")
        return scores

    def _queries_and_keys(self, op: Emitter, scores: Scores) -> tuple[Value, Value]:
        product, layout = self.reading.product, self.reading.layout
        axes = product.result_axes
        sizes: dict[str, Any] = {**dict(zip(axes, shape_of(product.node))), ONE_QUERY: 1}
        batch = [axes[d] for d in layout.batch]
        (summed,) = product.summed
        query = self.reading.query or ONE_QUERY
        q = arranged(op, self.program, product.left, product.left_axes, [*batch, query, summed], sizes)
        k = arranged(op, self.program, product.right, product.right_axes, [*batch, self.reading.key, summed], sizes)
        for number in range(len(scores.steps) + 1):
            for at, factor in scores.factors:
                if at == number:
                    q, k = self._multiplied(op, q, k, factor)
            if number < len(scores.steps):
                step = scores.steps[number]
                q, k = apply_step(op, q, step), apply_step(op, k, step)
        return q, k

    def _multiplied(self, op: Emitter, q: Value, k: Value, factor: Value) -> tuple[Value, Value]:
        """A factor of the scores goes to the queries if it is the same for all keys, else to the keys."""
        if not factor.is_tensor or factor.rank == 0 or known(factor.shape[-1] == 1):
            return _scaled(op, q, factor), k
        if known(factor.shape[-2] == 1):
            return q, _scaled(op, k, _transposed(op, factor))
        raise Refused("a factor that varies with query and key")

    def _factors_below(self, op: Emitter, below: Probabilities, v: Value) -> tuple[list[Value], Value]:
        """Factors of the probabilities: those of a query go to its result, those of a key to its value."""
        outside = []
        for at, factor in below.factors:
            for step in below.steps[at:]:
                if not all(known(s == 1) for s in factor.shape[:-2]):
                    raise Refused("a factor of probabilities whose axes change")
                factor = op.reshape(factor, [*[1] * len(step.sizes or step.order or ()), *factor.shape[-2:]])
            if known(factor.shape[-1] == 1):
                outside.append(factor)
            else:
                v = _scaled(op, v, _transposed(op, factor))
        return outside, v

    def _masks(self, op: Emitter, scores: Scores, below: Probabilities) -> list[Value | None]:
        """Bias, mask, what fills it, and the sink, with their axes as Q, K and V have them."""
        return [
            None if held is None else self._as_operands(op, scores.aligned(held), scores.layout, below.steps)
            for held in (scores.bias, scores.keep, scores.floor, scores.sink)
        ]

    def _as_operands(self, op: Emitter, value: Value, layout: Layout, steps: Sequence[BatchStep]) -> Value:
        for step in steps:
            if step.order is not None:
                value = apply_step(op, value, step)
            elif all(known(s == 1) for s in value.shape[:-2]):
                value = op.reshape(value, [*[1] * len(step.sizes or ()), *value.shape[-2:]])
            else:
                if step is not steps[0]:
                    raise Refused("probabilities whose axes change twice")
                shape = shape_of(self.softmax)
                value = op.expand(value, [*[shape[d] for d in layout.batch], *value.shape[-2:]])
                value = apply_step(op, value, step)
        return value


def _is_plain(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)


def _scaled(op: Emitter, value: Value, factor: Value) -> Value:
    made = op.mul(value, factor)
    return made if made.dtype == value.dtype else op.to(made, dtype=value.dtype)


def _transposed(op: Emitter, value: Value) -> Value:
    return op.permute(value, [*range(value.rank - 2), value.rank - 1, value.rank - 2])


def softmax_call(program: Program, node: Node) -> Call | None:
    """A softmax over one known dim of a floating-point tensor."""
    call = program.call(node)
    if call is None or call.op != "softmax" or call.mutates or not isinstance(call.args.get("dim"), int):
        return None
    operand, result = tensor_fact(call.args.get("self")), tensor_fact(node)
    if operand is None or result is None or not operand.dtype.is_floating_point or operand.dim() == 0:
        return None
    return call
