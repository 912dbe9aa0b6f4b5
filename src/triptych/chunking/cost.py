"""What chunks save in memory and cost in time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.fx import Node

from ..cost import Moved, Part, Product, Work, bytes_of, read_and_written, size_hint
from ..cost.decision import choose
from ..cost.device import HALF
from ..ir.facts import tensor_of
from ..ir.program import Program
from .region import Region
from .rows import Rows, Summed
from .sizes import most_chunks, shape_of, spans

MOST_CHUNKS = 16
"""Upper limit: each chunk reads the weight once more."""
MOST_IN_HALF_PRECISION = 8
"""Upper limit for products in half precision, where a sum over chunks is rounded coarsely after each chunk."""
PART_OF_WEIGHT = 4
"""The weight is this many times as large as the product of one chunk: then the weight and its gradient, which are in
memory anyway, are most of the peak."""
PASSES = 3
"""How often a loss reads or writes the product: the maximum and the sum, the loss, the gradient."""


def inner_size(program: Program, product: Node) -> int:
    call = program.call(product)
    assert call is not None
    return _sizes(call.args["self" if call.op == "matmul" else "mat1"])[1]


def _sizes(node: Node) -> list[int]:
    """The sizes of a value; of symbols, what they were when the program was captured."""
    return [size_hint(size) for size in shape_of(node)]


class ChunkCost:
    """A region whole and in chunks, and the memory that chunks save."""

    def __init__(self, program: Program, region: Region, chunks: int) -> None:
        self.program, self.region, self.chunks = program, region, chunks
        self.result = tensor_of(region.product)

    @property
    def whole(self) -> Work:
        # the number of chunks follows from the model, so it decides about them too, and alike in every process
        return Work.of(self.result.device, self._parts(1), held=self.saved_bytes, by_clock=False)

    @property
    def in_chunks(self) -> Work:
        scaled = [tensor_of(n) for n in self.region.outputs if self.region.is_gradient(n)]
        parts = [*self._parts(self.chunks), *(read_and_written(t, times=2) for t in scaled)]
        return Work.of(self.result.device, parts, by_clock=False)

    @property
    def pays(self) -> bool:
        return choose(self.whole, self.in_chunks, tune="off").pays

    @property
    def saved_bytes(self) -> int:
        """The size of the product of all rows less that of the largest chunk. As much again is saved, but not counted,
        for its gradient, where that is not written over the product itself."""
        units = size_hint(self.region.units)
        largest = max(size_hint(span.entries(1)) for span in spans(self.region.units, self.chunks))
        return bytes_of(self.result) * (units - largest) // units

    def _parts(self, chunks: int) -> Iterator[Part]:
        for node in self._product_nodes():
            yield from self._product(node, chunks)
        yield from [Moved(bytes_of(self.result) / chunks)] * (PASSES * chunks)

    def _product_nodes(self) -> list[Node]:
        calls = {n: self.program.call(n) for n in self.region.rows}
        return [n for n, call in calls.items() if call is not None and call.op in ("matmul", "addmm")]

    def _product(self, node: Node, chunks: int) -> list[Part]:
        (rows, columns), inner, kind = _sizes(node), inner_size(self.program, node), self.region.rows[node]
        if isinstance(kind, Summed):
            inner = math.ceil(inner / chunks)
        elif isinstance(kind, Rows) and kind.at == 0:
            rows = math.ceil(rows / chunks)
        else:
            columns = math.ceil(columns / chunks)
        result = tensor_of(node)
        products = [Product.sized(rows, columns, inner, result.dtype)] * chunks
        # each chunk but the first reads the sum so far, which no product hides
        sums = [read_and_written(result)] * (chunks - 1) if isinstance(kind, Summed) else []
        return [*products, *sums]


def least_memory(program: Program, region: Region) -> ChunkCost:
    """The cost for the best number of chunks: as many as memory asks for, of whole units; fewer where that is too slow;
    at least two."""
    rows, inner = _sizes(region.product)[0], inner_size(program, region.product)
    most = MOST_IN_HALF_PRECISION if tensor_of(region.product).dtype in HALF else MOST_CHUNKS
    chunks = max(2, min(math.ceil(PART_OF_WEIGHT * rows / inner), most, most_chunks(region.units)))
    while True:
        cost = ChunkCost(program, region, len(spans(region.units, chunks)))
        if cost.pays or chunks // 2 < 2:
            return cost
        chunks //= 2
