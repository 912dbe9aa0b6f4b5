"""Which dims of a value hold the rows of a product, followed through operations, forwards and backwards.

The rows are counted in units: a unit is what must stay in one chunk, one row or, where the program slices each
sequence, all rows of a sequence. A value with rows has adjacent dims that, merged, have `units * per` entries, the
entries of unit 0 first. In a chunk these dims are merged into one: a tensor of shape [batch, sequence, classes] becomes
one of shape [rows of the chunk, classes].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, numel, tensor_fact
from ..ir.traits import is_pointwise
from ..rewrite.refusal import Refused
from .sizes import Size, quotient, shape_of

SAME_ORDER = frozenset(("reshape", "unsqueeze", "squeeze", "alias", "detach"))
"""Operations that keep the order of the elements and only change the shape."""
COPIES = frozenset(("clone", "contiguous", "expand"))
"""Operations whose operand is aligned with the result, as in pointwise operations."""
ONE_DIM = {
    "slice": 0, "slice_scatter": 0, "gather": None, "scatter": None, "scatter_add": None,
    "softmax": None, "log_softmax": None, "cumsum": None,
}  # fmt: skip
"""Operations along the dim given by their argument `dim`, with the default of that argument, or None if it has none.
All operands have the rows in the same dims."""
REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin", "logsumexp", "var", "std")
)


@dataclass(frozen=True, eq=False)
class Rows:
    """Dims `at` to `at + count` of a value hold its rows, `per` entries of them for each unit."""

    at: int
    count: int
    per: Size

    def __eq__(self, other: object) -> bool:
        """Provably equal."""
        if not isinstance(other, Rows):
            return NotImplemented
        return (self.at, self.count) == (other.at, other.count) and known_equal(self.per, other.per)

    def __hash__(self) -> int:
        return hash((self.at, self.count))

    @property
    def dims(self) -> range:
        return range(self.at, self.at + self.count)

    def chunk_shape(self, shape: Sequence[Size], entries: Size) -> list[Size]:
        """The shape of a chunk with so many entries in the dims of the rows."""
        return [*shape[: self.at], entries, *shape[self.at + self.count :]]

    def chunk_dim(self, dim: int) -> int:
        """The number that a dim without rows has in a chunk."""
        return dim if dim < self.at else dim - self.count + 1


class Summed:
    """A value that is a sum over the rows: the results of the chunks are added."""

    def __repr__(self) -> str:
        return "summed over the rows"


SUMMED = Summed()


def rows_from(shape: Sequence[Size], at: int, units: Size) -> Rows | None:
    """Rows that begin at a dim: the fewest dims whose sizes multiply to a multiple of the units."""
    entries: Size = 1
    for count, size in enumerate(shape[at:], start=1):
        entries = entries * size
        per = quotient(entries, units)
        if per is not None and not known_equal(per, 0):
            return Rows(at, count, per)
    return None


def tensor_operands(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if tensor_fact(n) is not None]


class RowRules:
    """How the rows pass through an operation, for one number of units."""

    def __init__(self, call_of: Callable[[Node], Call | None], units: Size) -> None:
        self.call_of, self.units = call_of, units

    def result(self, node: Node, operand: Node, rows: Rows) -> Rows | Summed:
        """The rows of the result, if an operand has these rows; raises Refused where it is not computed row by row."""
        call = self.call_of(node)
        if call is None or call.mutates or tensor_fact(node) is None:
            raise self._not_by_row(node)
        result, shape = shape_of(node), shape_of(operand)
        made: Rows | Summed | None = None
        if is_pointwise(call.op) or call.op in COPIES:
            made = self._same_dims(shape, rows, result, rows.at + len(result) - len(shape))
        elif call.op in SAME_ORDER:
            made = self._reshaped(shape, rows, result)
        elif call.op == "permute":
            dims = list(call.args["dims"])
            at = dims.index(rows.at)
            made = Rows(at, rows.count, rows.per) if dims[at : at + rows.count] == list(rows.dims) else None
        elif call.op in ONE_DIM:
            if call.args.get("dim", ONE_DIM[call.op]) in rows.dims:
                raise Refused("{at} works along the rows", at=node)
            made = self._same_dims(shape, rows, result, rows.at)
        elif call.op in REDUCTIONS:
            made = self._reduced(node, call, shape, rows)
        elif call.op in ("matmul", "addmm"):
            made = self._product(call, operand, shape, rows, result)
        if made is None:
            raise self._not_by_row(node)
        return made

    def operands(self, node: Node, rows: Rows | Summed) -> dict[Node, Rows | None]:
        """Each tensor that the node reads, with the rows that it must have where the result has these; None: a chunk
        reads it whole."""
        wanted: dict[Node, Rows | None] = {}
        for operand, its_rows in self._operands(node, rows):
            if wanted.setdefault(operand, its_rows) != its_rows:
                raise Refused("{found} reads {at} by rows in two different ways", at=operand, found=node)
        return wanted

    def _operands(self, node: Node, rows: Rows | Summed) -> Iterator[tuple[Node, Rows | None]]:
        call = self.call_of(node)
        assert call is not None
        result = shape_of(node)
        if isinstance(rows, Summed):
            yield from self._summed_operands(call)
        elif call.op in SAME_ORDER:
            yield call.args["self"], self._reshaped(result, rows, shape_of(call.args["self"]))
        elif call.op == "permute":
            at = list(call.args["dims"])[rows.at]
            yield call.args["self"], Rows(at, rows.count, rows.per)
        elif call.op in REDUCTIONS:
            source = call.args["self"]
            dims = reduced_dims(call, len(shape_of(source)))
            left = [d for d in range(len(shape_of(source))) if d not in dims]
            yield source, Rows(rows.at if call.args.get("keepdim") else left[rows.at], rows.count, rows.per)
        elif call.op == "matmul":
            left, right = call.args["self"], call.args["other"]
            yield left, rows if rows.at == 0 else None
            yield right, rows if rows.at == 1 else None
        elif call.op == "addmm":
            yield call.args["self"], self._aligned(call.args["self"], node, result, rows)
            yield call.args["mat1"], rows if rows.at == 0 else None
            yield call.args["mat2"], rows if rows.at == 1 else None
        elif call.op in ONE_DIM:
            for operand in tensor_operands(node):
                same = self._same_dims(result, rows, shape_of(operand), rows.at)
                if same is None:
                    raise Refused("{at} does not have the rows of its result", at=operand)
                yield operand, same
        else:
            for operand in tensor_operands(node):
                yield operand, self._aligned(operand, node, result, rows)

    def sources(self, node: Node, rows: Rows) -> dict[Node, Rows | None]:
        """Like `operands`, but for any node of the graph: raises Refused where it is not computed row by row."""
        call = self.call_of(node)
        if call is None or call.mutates or tensor_fact(node) is None or not self._has_rule(call.op):
            raise self._not_by_row(node)
        operands = self.operands(node, rows)
        for operand, wanted in operands.items():
            if wanted is not None and self.result(node, operand, wanted) != rows:
                raise self._not_by_row(node)
        return operands

    def _has_rule(self, op: str) -> bool:
        named = (*COPIES, *SAME_ORDER, *ONE_DIM, *REDUCTIONS, "permute", "matmul", "addmm", "full")
        return is_pointwise(op) or op in named

    # ---- one kind of operation each ----

    def _same_dims(self, shape: Sequence[Size], rows: Rows, other: Sequence[Size], at: int) -> Rows | None:
        """The rows of another value that has the same dims at `at`; None if the sizes differ."""
        if at < 0 or not known_equal(other[at : at + rows.count], shape[rows.at : rows.at + rows.count]):
            return None
        return Rows(at, rows.count, rows.per)

    def _aligned(self, operand: Node, node: Node, result: Sequence[Size], rows: Rows) -> Rows | None:
        """The rows of an operand that is broadcast to the result."""
        shape = shape_of(operand)
        at = rows.at - len(result) + len(shape)
        if (same := self._same_dims(result, rows, shape, at)) is not None:
            return same
        if any(not known_equal(size, 1) for size in shape[max(at, 0) : max(at + rows.count, 0)]):
            raise Refused("{at} varies along some of the rows' dims and not along others", at=operand)
        return None

    def _reshaped(self, shape: Sequence[Size], rows: Rows, other: Sequence[Size]) -> Rows | None:
        before, at = numel(shape[: rows.at]), None
        here: Size = 1
        for dim, size in enumerate(other):
            if known_equal(here, before) and (at is None or not known_equal(size, 1)):
                at = dim
            here = here * size
        return None if at is None else rows_from(other, at, self.units)

    def _reduced(self, node: Node, call: Call, shape: Sequence[Size], rows: Rows) -> Rows | Summed | None:
        dims = reduced_dims(call, len(shape))
        if dims.isdisjoint(rows.dims):
            gone = 0 if call.args.get("keepdim") else sum(d < rows.at for d in dims)
            return Rows(rows.at - gone, rows.count, rows.per)
        if dims.issuperset(rows.dims) and call.op in ("sum", "mean"):
            return SUMMED
        raise Refused("{at} reduces over the rows", at=node)

    def _product(
        self, call: Call, operand: Node, shape: Sequence[Size], rows: Rows, result: Sequence[Size]
    ) -> Rows | Summed | None:
        if len(result) != 2 or rows.count != 1:
            return None
        left, right = (call.args[name] for name in (("self", "other") if call.op == "matmul" else ("mat1", "mat2")))
        if operand not in (left, right):  # a bias
            return self._same_dims(shape, rows, result, rows.at + len(result) - len(shape))
        if operand is left and rows.at == 0:
            return Rows(0, 1, rows.per)
        if operand is right and rows.at == 1:
            return Rows(1, 1, rows.per)
        return SUMMED if call.op == "matmul" else None

    def _summed_operands(self, call: Call) -> Iterator[tuple[Node, Rows | None]]:
        """The operands of a matrix product that sums over the rows. A reduction reads only the value whose rows it
        sums, so nothing is yielded for it."""
        if call.op == "matmul":
            for name, at in (("self", 1), ("other", 0)):
                yield call.args[name], rows_from(shape_of(call.args[name])[: at + 1], at, self.units)

    def _not_by_row(self, node: Node) -> Refused:
        return Refused("{at} is not computed row by row", at=node)


def reduced_dims(call: Call, rank: int) -> frozenset[int]:
    dim = call.args.get("dim")
    if dim is None or dim == []:
        return frozenset(range(rank))
    return frozenset([dim] if isinstance(dim, int) else dim)
