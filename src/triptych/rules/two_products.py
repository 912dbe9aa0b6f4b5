"""Two products with a pointwise function between them: what is recognised as such, what one kernel for them costs, and
how it is written. `B2B_GEMM_PASS` and `recompute_between_products` share this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import cost
from ..cost import UNKNOWN, DeviceModel, Moved, Part
from ..cost.timing import Run
from ..ir.facts import known_equal, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..kernels.b2b_gemm import LARGEST_END
from ..kernels.pointwise import COMPARISONS, OPERATIONS, Operand, Pointwise, Step
from ..kernels.registry import KERNEL_DTYPES
from ..rewrite.emit import Emitter
from ..rewrite.rule import Match
from .merge_views import keeps_order

NAMES = frozenset({"B2B_GEMM_PASS", "fused_products"})
"""The pass for inference and its rule: whoever removes one of them wants no such kernel in training either."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_STEPS = 40
FAR_LARGER = 4
"""The middle matrix must have at least this many times the elements of all the other matrices together."""


@dataclass(frozen=True)
class Product:
    """`mm(a, b)`, or `addmm(bias, a, b)`."""

    node: Node
    a: Node
    b: Node
    bias: Node | None

    @staticmethod
    def read(program: Program, node: Any) -> Product | None:
        """The node as a product of two matrices with at most a bias; None if it is anything else."""
        call = program.call(node) if isinstance(node, Node) else None
        result = tensor_fact(node)
        if call is None or result is None or result.dim() != 2 or result.dtype not in KERNEL_DTYPES:
            return None
        if call.op == "matmul":
            operands, bias = (call.args["self"], call.args["other"]), None
        elif call.op == "addmm" and set(call.args) == {"self", "mat1", "mat2"}:
            operands, bias = (call.args["mat1"], call.args["mat2"]), call.args["self"]
        else:
            return None
        facts = [tensor_fact(o) for o in operands]
        if any(f is None or f.dim() != 2 or f.dtype != result.dtype for f in facts):
            return None
        return Product(node, *operands, bias)


@dataclass(frozen=True)
class Middle:
    """f(product): a pointwise function of one product."""

    product: Product
    function: Pointwise
    nodes: tuple[Node, ...]

    @staticmethod
    def read(program: Program, value: Any) -> Middle | None:
        reader = _Reader(program)
        result = reader.read(value) if isinstance(value, Node) else None
        if not result or reader.product is None:
            return None
        if not known_equal(tensor_of(value).shape, tensor_of(reader.product.node).shape):
            return None  # other rows: a view of the product has another shape
        return Middle(reader.product, Pointwise(tuple(reader.steps)), tuple(reader.values))


class _Reader:
    """Reads a pointwise function backwards from its result, operands first."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.product: Product | None = None
        self.steps: list[Step] = []
        self.values: dict[Node, int | None] = {}
        """The index in the pointwise function of each node that was visited; None if the node is not computed from one
        product by operations that the kernel supports."""

    def read(self, node: Node) -> int | None:
        if node not in self.values and len(self.values) <= MOST_STEPS:
            self.values[node] = None
            self.values[node] = self._read(node)
        return self.values.get(node)

    def _read(self, node: Node) -> int | None:
        product = Product.read(self.program, node) or self._with_bias(node)
        if product is not None:
            is_first, self.product = self.product is None, product
            return 0 if is_first else None
        call, result = self.program.call(node), tensor_fact(node)
        if call is None or call.mutates or result is None or result.dtype not in (*FLOATS, torch.bool):
            return None
        args = call.args
        if keeps_order(call):
            return self.read(args["self"])
        if not all(known_equal(getattr(tensor_fact(o), "shape", None), result.shape) for o in node.all_input_nodes):
            return None  # broadcast
        if result.dtype == torch.bool and call.op not in COMPARISONS:
            return None  # `add` and `mul` of conditions are logical operations
        if call.op == "to" and set(args) == {"self", "dtype"} and isinstance(args["self"], Node):
            return self._cast(args["self"], args["dtype"])
        if call.op == "pow" and args.get("exponent") == 2:
            return self._add("mul", self._operand(args["self"]), self._operand(args["self"]))
        if call.op == "clamp" and set(args) <= {"self", "min", "max"}:
            value = self._operand(args["self"])
            for name, bound in (("maximum", args.get("min")), ("minimum", args.get("max"))):
                value = value if bound is None else self._add(name, value, self._operand(bound))
            return value if isinstance(value, int) else None
        operation = OPERATIONS.get(call.op)
        if operation is None or set(args) != set(operation.parameters):
            return None
        return self._add(call.op, *(
            self.read(args[name]) if name == "condition" else self._operand(args[name]) for name in operation.parameters
        ))  # fmt: skip

    def _with_bias(self, node: Node) -> Product | None:
        """`mm(a, b) + bias`, with one number for each column."""
        call, result = self.program.call(node), tensor_fact(node)
        if call is None or result is None or call.op != "add" or set(call.args) != {"self", "other"}:
            return None
        operands = call.args["self"], call.args["other"]
        if not all(isinstance(o, Node) for o in operands):
            return None
        for value, bias in (operands, reversed(operands)):
            inside = [value]
            while (view := self.program.call(inside[-1])) is not None and keeps_order(view):
                inside.append(view.args["self"])
            product, row = Product.read(self.program, inside[-1]), tensor_fact(bias)
            if product is None or product.bias is not None or row is None or row.dim() != 1:
                continue
            of_product = tensor_of(inside[-1])
            columns = of_product.shape[1]
            is_row = row.dtype == of_product.dtype and known_equal((row.shape[0], result.shape[-1]), (columns, columns))
            if is_row and known_equal(result.shape, tensor_of(value).shape) and self.values.keys().isdisjoint(inside):
                # part of the site, but no operands: the function is one of the sum
                self.values.update(dict.fromkeys(inside))
                return Product(inside[-1], product.a, product.b, bias)
        return None

    def _cast(self, node: Node, dtype: torch.dtype) -> int | None:
        """The steps compute in float32, and a cast between them rounds nothing.

        A cast to fewer bits than the product has is not supported: the program may need what it cuts off, as
        `x - x.half().float()` does.
        """
        number = self._number(node)
        if self.product is None or dtype not in (torch.float32, tensor_of(self.product.node).dtype):
            return None
        return number

    def _number(self, node: Node) -> int | None:
        """As `read`; 1.0 and 0.0 for a condition."""
        value, fact = self.read(node), tensor_fact(node)
        return self._add("float", value) if fact is not None and fact.dtype == torch.bool else value

    def _operand(self, value: Any) -> Operand | None:
        if isinstance(value, Node):
            return self._number(value)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _add(self, name: str, *operands: Operand | None) -> int | None:
        given = tuple(o for o in operands if o is not None)
        if len(given) < len(operands):
            return None
        self.steps.append(Step(name, given))
        return len(self.steps)


@dataclass(frozen=True)
class TwoProducts:
    """`mm(f(inner), C)`, or `mm(A, f(inner))`, which is the transpose of the first form."""

    outer: Product
    middle: Middle
    turned: bool
    """The second form."""

    @staticmethod
    def read(program: Program, node: Node) -> TwoProducts | None:
        outer = Product.read(program, node)
        if outer is None:
            return None
        for turned, side in ((False, outer.a), (True, outer.b)):
            middle = Middle.read(program, side)
            if middle is not None:
                return TwoProducts(outer, middle, turned)
        return None

    @property
    def uses_elsewhere(self) -> Iterator[tuple[Node, Node]]:
        """Values between the two products that are needed for more than that, each with the user that needs it."""
        outer = self.outer
        inside = {*self.middle.nodes, outer.node}
        for value in self.middle.nodes:
            if value in (outer.a if self.turned else outer.b, outer.bias):  # `y @ y`
                yield value, outer.node
            yield from ((value, user) for user in value.users if user not in inside)

    def match(self, program: Program, problem: Refusal | None = None, **found: Any) -> Match:
        """The site, as `require_sizes` and `fused` expect it."""
        outer, inner = self.outer, self.middle.product
        problem = problem or self._problem_of_dtypes() or self._problem_of_bias()
        if problem is not None:
            return Match.at(program, outer.node, problem=problem)
        matrices = (inner.b, inner.a, outer.a) if self.turned else (inner.a, inner.b, outer.b)
        return Match.at(
            program, outer.node, covers=self.middle.nodes, matrices=matrices, turned=self.turned, bias=inner.bias,
            added=outer.bias, function=self.middle.function, **found,
        )  # fmt: skip

    def _problem_of_dtypes(self) -> Refusal | None:
        dtypes = [tensor_of(product.node).dtype for product in (self.middle.product, self.outer)]
        return Refusal("the products are {found}", found=dtypes) if dtypes[0] != dtypes[1] else None

    def _problem_of_bias(self) -> Refusal | None:
        inner = self.middle.product
        if inner.bias is None:
            return None
        bias, result = tensor_of(inner.bias), tensor_of(inner.node)
        is_row = bias.dim() == 1 and known_equal(bias.shape[0], result.shape[1])
        if not self.turned and is_row and bias.dtype == result.dtype:
            return None
        return Refusal("the bias {at} is no number for each column of the middle matrix", at=inner.bias)


def used_elsewhere(value: Node, user: Node) -> Refusal:
    return Refusal("{at} is used elsewhere, by {found}", at=value, found=user)


def is_on_gpu(node: Node) -> bool:
    fact = tensor_fact(node)
    return fact is not None and fact.device.type == "cuda"


def fused(op: Emitter, m: Match) -> Value:
    """The site as one call of the kernel."""
    matrices, bias, turned, added = (m[name] for name in ("matrices", "bias", "turned", "added"))
    given = [op.permute(matrix, [1, 0]) if turned else matrix for matrix in matrices]
    result = op.call(torch.ops.triptych.b2b_gemm.default, *given, bias, str(m["function"]), turned)
    result = op.permute(result, [1, 0]) if turned else result
    return result if added is None else op.add(result, added)


# ---- what it costs ----


@dataclass(frozen=True)
class B2bGemm(Part):
    """Our kernel, of which the model only knows that it does not write the matrix between the products."""

    a: cost.Operand
    b: cost.Operand
    c: cost.Operand
    bias: cost.Operand | None
    function: str
    turned: bool = False

    error = UNKNOWN
    products = True

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    @property
    def middle(self) -> cost.Operand:
        (rows, _), (_, columns) = self.a.shape, self.b.shape
        return cost.Operand.contiguous((columns, rows) if self.turned else (rows, columns), self.dtype)

    @property
    def first(self) -> cost.Product:
        """The first of the products that are written."""
        return cost.Product(self.b.mT, self.a.mT) if self.turned else cost.Product(self.a, self.b, self.bias)

    @property
    def second(self) -> cost.Product:
        return cost.Product(self.c.mT, self.middle) if self.turned else cost.Product(self.middle, self.c)

    @property
    def apart(self) -> list[Part]:
        """The two products, with one pass over the middle matrix between them."""
        return [self.first, Moved(2 * self.middle.bytes), self.second]

    @property
    def bytes(self) -> float:
        return self.first.bytes + self.second.bytes - 2 * self.middle.bytes

    @property
    def flops(self) -> float:
        return self.first.flops + self.second.flops

    def seconds(self, model: DeviceModel) -> float:
        # assume that only the memory traffic is saved
        first = cost.Product(self.a, self.b)
        return first.modelled(model) + self.second.modelled(model) - model.launch

    def prepare(self, device: torch.device) -> Run:
        a, b, c = (operand.random(device) for operand in (self.a, self.b, self.c))
        bias = None if self.bias is None else self.bias.random(device)
        return lambda: torch.ops.triptych.b2b_gemm(a, b, c, bias, self.function, self.turned)


def require_sizes(m: Match) -> B2bGemm:
    """The kernel for the site; raises Refused where it does not take these sizes."""
    shapes = [tuple(matrix.shape) for matrix in m["matrices"]]
    (_, inner), _, (_, ends) = (shape[::-1] if m["turned"] else shape for shape in shapes)
    m.require(
        all(isinstance(s, int) and 0 < s <= LARGEST_END for s in (inner, ends)),
        "the ends have {found} columns", wanted=f"1 to {LARGEST_END}", found=(inner, ends),
    )  # fmt: skip
    matrices = [cost.Operand.of(matrix.tensor) for matrix in m["matrices"]]
    a, b, c = (matrix.mT if m["turned"] else matrix for matrix in matrices)
    bias = None if m["bias"] is None else cost.Operand.of(m["bias"].tensor)
    return B2bGemm(a, b, c, bias, str(m["function"]), m["turned"])


def require_far_larger(m: Match, kernel: B2bGemm) -> None:
    (rows, inner), (columns, ends) = kernel.a.shape, kernel.c.shape
    others = (inner + ends) * (rows + columns)
    far_larger = kernel.middle.elements >= FAR_LARGER * others
    m.require(far_larger, "the middle matrix is not far larger than the others")
