"""Finds the region after a large product that can be computed in chunks of rows.

The region begins at the product and contains every value that is as large, every value between two such values, and
every value that reads one. It ends where values are small again: some have rows (the loss of each row, the gradient of
the hidden states), and their chunks are concatenated; others are sums over the rows (the gradient of the weight), and
their chunks are added. Nothing else may read a large value.

In a joint graph the region reaches into the backward. Its gradients depend on the gradient of the loss, one number that
is not known in the forward: `seed`. They are computed for a seed of one, in the forward, chunk by chunk, and multiplied
by the seed in the backward. That needs a proof that they are proportional to it (`proportional`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from ..ir.facts import is_tangent, known_equal, tensor_fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.sizes import elements, size_hint
from ..rewrite.refusal import Refused
from . import proportional
from .rows import RowRules, Rows, Summed
from .sizes import Size, quotient, shape_of

MOST_SEEDS = 8
"""Search budget: how many scalars are tried as the one that all gradients of the region depend on."""


@dataclass
class Region:
    """The nodes that are computed chunk by chunk, with their inputs and outputs."""

    product: Node
    units: Size
    rows: dict[Node, Rows | Summed]
    """The nodes of the region in the order of the graph, each with its rows."""
    seed: Node | None = None
    """The scalar that all gradients of the region are proportional to; None without a backward."""
    seeded: frozenset[Node] = frozenset()
    """All nodes that depend on the seed, in the region and outside."""
    sliced: dict[Node, Rows] = field(default_factory=dict)
    """Values from outside of which each chunk reads its own rows."""
    outputs: tuple[Node, ...] = ()
    """The nodes of the region that are read outside."""

    def is_gradient(self, node: Node) -> bool:
        return node in self.seeded


def dependents(nodes: Iterable[Node], stop: Node | None = None) -> set[Node]:
    """The given nodes and all nodes computed from them, except by way of `stop`."""
    work, seen = list(nodes), set(nodes)
    while work:
        for user in work.pop().users:
            if user not in seen and user is not stop:
                seen.add(user)
                work.append(user)
    return seen


def read_region(program: Program, product: Node, tangent_dependent: set[Node]) -> Region:
    """The region of a product; raises Refused with the reason why it has none."""
    first: Refused | None = None
    for seed, units in itertools.product(_seeds(tangent_dependent), _units(program, product)):
        try:
            return _Reader(program, product, units, seed, tangent_dependent).read()
        except Refused as refused:
            first = first or refused
    assert first is not None
    raise first


def _seeds(tangent_dependent: set[Node]) -> list[Node | None]:
    """Scalars of the backward that may be the seed. The earliest comes first, because it leaves most of the backward's
    own arithmetic as it is."""
    scalars = sorted(n for n in tangent_dependent if proportional.is_scalar(n))
    return [*scalars[:MOST_SEEDS]] or [None]


def _units(program: Program, product: Node) -> list[Size]:
    """The numbers of units to try: the number of rows, for units of one row; and the first size of each reshape of the
    product, for units of whole sequences."""
    rows = shape_of(product)[0]
    sizes = [rows]
    for user in product.users:
        call = program.call(user)
        if call is None or call.op != "reshape" or len(shape := shape_of(user)) < 3:
            continue
        is_new = not any(known_equal(shape[0], size) for size in sizes)
        if is_new and 1 < size_hint(shape[0]) < size_hint(rows):
            sizes.append(shape[0])
    return sizes


class _Reader:
    """Reads the region of a product, for one number of units and one seed."""

    def __init__(
        self, program: Program, product: Node, units: Size, seed: Node | None, tangent_dependent: set[Node]
    ) -> None:
        self.program, self.product, self.units, self.seed = program, product, units, seed
        self.rules = RowRules(program.call, units)
        self.tangent_dependent = tangent_dependent
        self.seeded = dependents([seed]) if seed is not None else set()
        self.derived = dependents([product], stop=seed)
        """The nodes that depend on the product, other than through the seed."""
        self.large = elements(shape_of(product)) // 2
        self.rows: dict[Node, Rows | Summed] = {}
        self.refusals: dict[Node, Refusal] = {}
        self.sliced: dict[Node, Rows] = {}
        self.large_sources: dict[Node, bool] = {}
        """For each small value that does not depend on the product: is it computed from a large value?"""

    def read(self) -> Region:
        self._follow_product()
        region = self._needed()
        self._take_in_operands(region)
        nodes = sorted(region)
        self._require_proportional(nodes)
        outputs = tuple(n for n in nodes if any(u not in region for u in n.users))
        rows = {n: self.rows[n] for n in nodes}
        return Region(self.product, self.units, rows, self.seed, frozenset(self.seeded), self.sliced, outputs)

    # ---- forwards from the product ----

    def _follow_product(self) -> None:
        rows = shape_of(self.product)[0]
        per = quotient(rows, self.units)
        if per is None:
            raise Refused("the {found} rows of {at} cannot be split evenly", at=self.product, found=rows)
        self.rows[self.product] = Rows(0, 1, per)
        for node in sorted(self.derived - {self.product}):
            if node.op == "output":
                continue
            try:
                self.rows[node] = self._rows_of(node)
            except Refused as refused:
                self.refusals[node] = refused.refusal

    def _rows_of(self, node: Node) -> Rows | Summed:
        inside = [n for n in node.all_input_nodes if n in self.derived]
        for operand in inside:
            if not isinstance(self.rows.get(operand), Rows):
                raise Refused("{at} needs {found}, which is not known before all rows are", at=node, found=operand)
        if not self.program.aliasing.effects(node).pure:
            raise Refused("{at} draws random numbers or writes to memory", at=node)
        operand = inside[0]
        own = self.rows[operand]
        assert isinstance(own, Rows)
        rows = self.rules.result(node, operand, own)
        for other, wanted in self.rules.operands(node, rows).items():
            if other in self.derived and self.rows.get(other) != wanted:
                raise Refused("{found} has its rows in other dims than {at} can use", at=node, found=other)
        return rows

    def _is_large(self, node: Node) -> bool:
        """Does the value have rows, and at least half the size of the product? A sum over the rows may be as large, but
        it has no rows."""
        return isinstance(self.rows.get(node), Rows) and elements(shape_of(node)) >= self.large

    def _needed(self) -> set[Node]:
        """The large values, the values that read them, and all values between these and the product."""
        large = [n for n in self.rows if self._is_large(n)]
        region = set(large)
        for node in large:
            for user in node.users:
                if user.op == "output":
                    raise Refused("{at}, which is as large as the product, is returned or saved", at=node)
                if user not in self.rows:
                    raise Refused(self.refusals.get(user, Refusal("{at} is read outside", at=user)))
                region.add(user)
        work = list(region)
        while work:
            for operand in work.pop().all_input_nodes:
                if operand in self.derived and operand not in region:
                    region.add(operand)
                    work.append(operand)
        return region

    # ---- backwards to what it reads ----

    def _take_in_operands(self, region: set[Node]) -> None:
        """Classifies the values that the region reads: large ones that only the region reads are computed in chunks
        too; of other values with rows, each chunk reads its own rows; the rest is read whole."""
        waiting = dict.fromkeys(sorted(region, reverse=True))
        while waiting:
            node = max(waiting)  # the last one: all its readers are done
            del waiting[node]
            for operand, wanted in self.rules.operands(node, self.rows[node]).items():
                if operand in self.derived or wanted is None:
                    continue
                if operand in self.rows and self.rows[operand] != wanted or self.sliced.get(operand, wanted) != wanted:
                    raise Refused("{at} is read by rows in two different ways", at=operand)
                if not self._must_be_chunked(operand, wanted):
                    self.sliced[operand] = wanted
                    continue
                self._require_chunkable(operand, wanted)
                self.rows[operand] = wanted
                region.add(operand)
                waiting[operand] = None
        for node in region:
            if node not in self.derived and (reader := next((u for u in node.users if u not in region), None)):
                raise Refused("{at}, which is as large as the product, is read by {found} too", at=node, found=reader)

    def _must_be_chunked(self, node: Node, rows: Rows) -> bool:
        """Is a value that does not depend on the product about as large as it, or computed from such a value?"""
        if node.op == "placeholder":
            return False
        if elements(shape_of(node)) >= self.large:
            return True
        if node not in self.large_sources:
            try:
                sources = self.rules.sources(node, rows)
            except Refused:
                sources = {}
            self.large_sources[node] = any(
                wanted is not None and self._must_be_chunked(operand, wanted) for operand, wanted in sources.items()
            )
        return self.large_sources[node]

    def _require_chunkable(self, node: Node, rows: Rows) -> None:
        if not self.program.aliasing.effects(node).pure:
            raise Refused("{at} draws random numbers or writes to memory", at=node)
        try:
            self.rules.sources(node, rows)
        except Refused as refused:
            raise Refused("{at}, which is as large as the product, cannot be computed in chunks", at=node) from refused

    # ---- gradients ----

    def _require_proportional(self, nodes: list[Node]) -> None:
        """Requires that everything from the seed to the region, and in it, is proportional to the seed and depends on
        no other incoming gradient."""
        for node in (*nodes, *self._between_seed_and(nodes)):
            if node not in self.tangent_dependent:
                continue
            if node not in self.seeded:
                raise Refused("{at} depends on a gradient that is no single number", at=node)
            if node is not self.seed and (problem := proportional.problem(node, self.program.call, self.seeded)):
                raise Refused(problem)

    def _between_seed_and(self, nodes: list[Node]) -> Iterator[Node]:
        """The values of the backward that the region reads, and those that they are computed from, up to the seed."""
        work, seen = list(nodes), set(nodes)
        while work:
            node = work.pop()
            for operand in node.all_input_nodes:
                if operand in seen or operand not in self.tangent_dependent:
                    continue
                seen.add(operand)
                yield operand
                if operand is not self.seed:
                    work.append(operand)


def tangent_dependents(program: Program) -> set[Node]:
    """The backward of a joint graph: all nodes that depend on an incoming gradient."""
    tangents = [n for n in program.graph.find_nodes(op="placeholder") if is_tangent(n) and tensor_fact(n) is not None]
    return dependents(tangents)
