"""`B2B_GEMM_PASS`: two products with a pointwise function between them in one kernel, if the middle matrix is far
larger than all the others.

The kernel computes a few columns of the middle matrix at a time and immediately multiplies them by C, so the middle
matrix is never written to memory. Sums are taken in another order, and the middle matrix is not rounded to 16 bits
before the function is applied.

Whether this pays is measured on the device, and the measurement is cached: the time of the two products and one pass
over the middle matrix is compared with that of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import can_measure, device_model, measured, size_hint
from ..ir.facts import known_equal, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..kernels.b2b_gemm import LARGEST_END
from ..kernels.pointwise import OPERATIONS, Operand, Pointwise, Step
from ..kernels.registry import KERNEL_DTYPES
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_STEPS = 40
FAR_LARGER = 4
"""The middle matrix must have at least this many times the elements of all the other matrices together."""

ALWAYS: dict[str, Any] = {"settings": {"always": True}, "dialects": ("aten",)}
SMALL = ("f32[9, 4]", "f32[4, 40]", "f32[40, 3]")
TURNED = ("f32[3, 40]", "f32[40, 4]", "f32[4, 9]")


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())


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
        product = Product.read(self.program, node)
        if product is not None:
            is_first, self.product = self.product is None, product
            return 0 if is_first else None
        call, result = self.program.call(node), tensor_fact(node)
        if call is None or call.mutates or result is None or result.dtype not in (*FLOATS, torch.bool):
            return None
        args = call.args
        if call.op == "to" and set(args) == {"self", "dtype"} and isinstance(args["self"], Node):
            return self.read(args["self"]) if args["dtype"] in FLOATS else None  # every step computes in float32
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
        return self._add(call.op, *(self._operand(args[name]) for name in operation.parameters))

    def _operand(self, value: Any) -> Operand | None:
        if isinstance(value, Node):
            return self.read(value)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _add(self, name: str, *operands: Operand | None) -> int | None:
        given = tuple(o for o in operands if o is not None)
        if len(given) < len(operands):
            return None
        self.steps.append(Step(name, given))
        return len(self.steps)


@dataclass(frozen=True)
class FusedProducts(Rule):
    """mm(f(mm(A, B) + bias), C) -> triptych.b2b_gemm(A, B, C, bias, f), where f is pointwise; up to rounding

    mm(A, f(mm(B, C))) is the transpose of mm(f(mm(C^T, B^T)), A^T).
    """

    always: bool = False
    """On every device, whatever it costs: for tests of the rewrite itself."""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        for node in list(program.graph.nodes):
            outer = None if node._erased else Product.read(program, node)
            if outer is None or not (self.always or _on_gpu(node)):
                continue
            for turned, side in ((False, outer.a), (True, outer.b)):
                middle = Middle.read(program, side)
                if middle is not None:
                    yield self._site(program, outer, middle, turned)
                    break

    def _site(self, program: Program, outer: Product, middle: Middle, turned: bool) -> Match:
        inside = {*middle.nodes, outer.node}
        for node in middle.nodes:
            if (user := next((u for u in node.users if u not in inside), None)) is not None:
                problem = Refusal("{at} is used elsewhere, by {found}", at=node, found=user)
                return Match.at(program, outer.node, problem=problem)
        inner = middle.product
        if inner.bias is not None:
            bias, result = tensor_of(inner.bias), tensor_of(inner.node)
            is_row = bias.dim() == 1 and known_equal(bias.shape[0], result.shape[1])
            if turned or not is_row or bias.dtype != result.dtype:
                problem = Refusal("the bias {at} is no number for each column of the middle matrix", at=inner.bias)
                return Match.at(program, outer.node, problem=problem)
        matrices = (inner.b, inner.a, outer.a) if turned else (inner.a, inner.b, outer.b)
        return Match.at(
            program, outer.node, covers=middle.nodes, matrices=matrices, turned=turned, bias=inner.bias,
            added=outer.bias, function=middle.function,
        )  # fmt: skip

    def check(self, m, matrices, turned, bias, function):
        shapes = [tuple(matrix.shape) for matrix in matrices]
        (rows, inner), (_, columns), (_, ends) = (shape[::-1] if turned else shape for shape in shapes)
        m.require(
            all(isinstance(s, int) and 0 < s <= LARGEST_END for s in (inner, ends)),
            "the ends have {found} columns", wanted=f"1 to {LARGEST_END}", found=(inner, ends),
        )  # fmt: skip
        if self.always:
            return
        root, has_bias = m.root, bias is not None
        site = _Site(size_hint(rows), inner, size_hint(columns), ends, root.dtype, root.device, has_bias, str(function))
        others = (inner + ends) * (site.rows + site.columns)
        far_larger = site.rows * site.columns >= FAR_LARGER * others
        m.require(far_larger, "the middle matrix is not far larger than the others")
        # the cost model does not know how efficient the kernel is
        m.pays(*_modelled(site), measure=lambda: _timed(site), error=math.inf)

    def rewrite(self, op, m, matrices, turned, bias, added, function):
        given = [op.permute(matrix, [1, 0]) if turned else matrix for matrix in matrices]
        result = op.call(torch.ops.triptych.b2b_gemm.default, *given, bias, str(function), turned)
        result = op.permute(result, [1, 0]) if turned else result
        return result if added is None else op.add(result, m["added"])

    examples = [
        fires(lambda a, b, c: F.relu(a @ b) @ c, *SMALL, **ALWAYS),
        fires(lambda a, b, c: _gelu(a @ b) @ c, *SMALL, **ALWAYS),
        fires(lambda a, b, c: (lambda x: x * x.tanh())(a @ b) @ c, *SMALL, **ALWAYS),
        fires(
            lambda a: F.relu(a[:, :1].expand(a.shape[0], 4).exp() @ torch.ones(4, 40)) @ torch.ones(40, 3), "f32[9, 2]",
            **ALWAYS, dynamic=True,
        ),
        declines(lambda a, b, c: F.relu(a @ b) @ c, *SMALL, **ALWAYS, dynamic=True, because="the ends have"),
        fires(lambda a, b, c: a @ (lambda x: x / (1 + (-x).exp()))(b @ c), *TURNED, **ALWAYS),
        fires(lambda a, b, c: (a @ b).clamp(-1, 2).square() @ c, "bf16[9, 4]", "bf16[4, 40]", "bf16[40, 3]", **ALWAYS),
        fires(lambda a, b, c: (lambda x: torch.where(x > 0, x, x * 0.1))(a @ b) @ c, *SMALL, **ALWAYS),
        fires(
            lambda x, w, v, c, d: F.linear(F.relu(F.linear(x, w, v)), c, d),
            "f32[9, 4]", "f32[40, 4]", "f32[40]", "f32[3, 40]", "f32[3]", **ALWAYS,
        ),
        declines(lambda a, b, c: F.relu(a @ b) @ c, *SMALL, dialects=("aten",)),  # on a GPU only
        declines(lambda a, b, c: (y := F.relu(a @ b), y @ c), *SMALL, because="used elsewhere", **ALWAYS),
        declines(lambda a, b, c: (a @ b) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: (a @ b + b[0]).relu() @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: (a @ b).softmax(-1) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: ((a @ b) * (a @ b * 2)) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b) @ c, "f64[9, 4]", "f64[4, 40]", "f64[40, 3]", **ALWAYS),
        declines(
            lambda a, b, c: F.relu(a @ b) @ c, "f32[9, 300]", "f32[300, 40]", "f32[40, 3]", because="the ends", **ALWAYS
        ),
        declines(
            lambda v, a, b, c: F.relu(torch.addmm(v, a, b, beta=2)) @ c, "f32[40]", *SMALL, **ALWAYS
        ),
        declines(
            lambda v, a, b, c: F.relu(torch.addmm(v, a, b)) @ c, "f32[9, 1]", *SMALL, because="no number", **ALWAYS
        ),
    ]  # fmt: skip


def _on_gpu(node: Node) -> bool:
    fact = tensor_fact(node)
    return fact is not None and fact.device.type == "cuda"


# ---- what it costs ----


@dataclass(frozen=True)
class _Site:
    rows: int
    inner: int
    columns: int
    ends: int
    dtype: torch.dtype
    device: torch.device
    has_bias: bool
    function: str

    @property
    def bytes(self) -> int:
        return 3 * self.rows * self.columns * self.dtype.itemsize

    def matrices(self) -> list[torch.Tensor]:
        shapes = (self.rows, self.inner), (self.inner, self.columns), (self.columns, self.ends)
        return [torch.randn(shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def bias(self) -> torch.Tensor | None:
        return torch.randn(self.columns, dtype=self.dtype, device=self.device) if self.has_bias else None


def _timed(site: _Site) -> tuple[float, float] | None:
    """Seconds of the two products with one pass over the middle matrix between them, and of the kernel."""
    if not can_measure(site.device, site.bytes):
        return None
    sizes = f"{site.rows}x{site.inner}x{site.columns}x{site.ends} {site.dtype} bias={site.has_bias}"
    precise = f" tf32={torch.backends.cuda.matmul.allow_tf32}" if site.dtype == torch.float32 else ""
    before = measured(f"b2b_gemm apart {sizes}{precise}", site.device, lambda: _apart(site))
    after = measured(f"b2b_gemm fused {sizes}{precise} {site.function}", site.device, lambda: _fused(site))
    return None if before is None or after is None else (before, after)


def _modelled(site: _Site) -> tuple[float, float]:
    model = device_model(site.device)
    first = model.gemm(site.rows, site.columns, site.inner, site.dtype)
    second = model.gemm(site.rows, site.ends, site.columns, site.dtype)
    written = model.copy(2 * site.rows * site.columns * site.dtype.itemsize)
    return first + written + second, first + second  # unmeasured: assume that only the memory traffic is saved


def _apart(site: _Site) -> Callable[[], Any]:
    (a, b, c), bias = site.matrices(), site.bias()
    first = (lambda: torch.mm(a, b)) if bias is None else (lambda: torch.addmm(bias, a, b))
    return lambda: torch.mm(first().relu_(), c)


def _fused(site: _Site) -> Callable[[], Any]:
    matrices, bias = site.matrices(), site.bias()
    return lambda: torch.ops.triptych.b2b_gemm(*matrices, bias, site.function, False)


@dataclass(frozen=True)
class B2bGemmPass(Pass):
    """Two products with a pointwise function between them in one kernel that never writes the matrix between them.

    A training step keeps that matrix for its backward, so there the two products stay as they are.
    """

    name = "B2B_GEMM_PASS"

    def rules(self) -> Sequence[Rule]:
        return (FusedProducts(),)
