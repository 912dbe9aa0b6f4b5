"""What chunks save in memory and cost in time."""

from __future__ import annotations

import math

from torch.fx import Node

from ..cost import bytes_of, device_model, size_hint
from ..cost.decision import Decision
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
    """Seconds of a region whole and in chunks, and the memory that chunks save."""

    def __init__(self, program: Program, region: Region, chunks: int) -> None:
        self.program, self.region, self.chunks = program, region, chunks
        self.model = device_model(tensor_of(region.product).device)

    @property
    def before(self) -> float:
        return self._products(1) + self._losses(1)

    @property
    def after(self) -> float:
        scaled = [tensor_of(n) for n in self.region.outputs if self.region.is_gradient(n)]
        return self._products(self.chunks) + self._losses(self.chunks) + sum(
            self.model.copy(2 * bytes_of(t)) for t in scaled
        )

    @property
    def pays(self) -> bool:
        return Decision(self.before, self.after, saves=self.saved_bytes).pays

    @property
    def saved_bytes(self) -> int:
        """The size of the product of all rows less that of the largest chunk. As much again is saved, but not counted,
        for its gradient, where that is not written over the product itself."""
        units = size_hint(self.region.units)
        largest = max(size_hint(span.entries(1)) for span in spans(self.region.units, self.chunks))
        return bytes_of(tensor_of(self.region.product)) * (units - largest) // units

    def _product_nodes(self) -> list[Node]:
        calls = {n: self.program.call(n) for n in self.region.rows}
        return [n for n, call in calls.items() if call is not None and call.op in ("matmul", "addmm")]

    def _products(self, chunks: int) -> float:
        seconds = 0.0
        for node in self._product_nodes():
            call = self.program.call(node)
            assert call is not None
            left = call.args["self" if call.op == "matmul" else "mat1"]
            (rows, inner), columns = _sizes(left), _sizes(node)[1]
            kind = self.region.rows[node]
            if isinstance(kind, Summed):
                inner = math.ceil(inner / chunks)
            elif isinstance(kind, Rows) and kind.at == 0:
                rows = math.ceil(rows / chunks)
            else:
                columns = math.ceil(columns / chunks)
            seconds += chunks * self.model.gemm(rows, columns, inner, tensor_of(node).dtype)
            if isinstance(kind, Summed):  # each chunk but the first reads the sum so far, which no product hides
                seconds += (chunks - 1) * self.model.copy(bytes_of(tensor_of(node)))
        return seconds

    def _losses(self, chunks: int) -> float:
        moved = bytes_of(tensor_of(self.region.product))
        return PASSES * chunks * self.model.copy(moved / chunks)


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
