"""`fused_int_mm_mul`: a product of int8 matrices is scaled by the kernel that computes it.

Quantized layers multiply int8 matrices and scale the int32 result: by a number for each row, which quantized the
activation, and one for each column, which quantized the weight. torch's kernel writes the int32 product, and another
one reads it again. Ours scales and rounds each tile while it is in registers.

Whether this pays is measured on the device, because the library's kernel may be the quicker one for the product alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..cost import size_hint
from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..kernels.int_mm_mul import LARGEST_INNER, NAME_OF, multiplies_int8
from ..kernels.registry import KERNEL_DTYPES
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule
from .int_mm_mul_cost import modelled, site_of, timed
from .neighbours import generates_products, made_by_pointwise

LEAST_ROWS, MULTIPLE = 17, 8
"""On a GPU, torch multiplies int8 matrices of at least this many rows, and of sizes that are a multiple of this."""
LARGEST_FLOAT = torch.finfo(torch.float32).max

int_mm = torch.ops.aten._int_mm
A, B = "i8[8, 16]", "i8[16, 6]"
ATEN: dict[str, Any] = {"dialects": ("aten",)}
ALWAYS: dict[str, Any] = {"settings": {"always": True}, **ATEN}


@dataclass
class Chain:
    """A product and the operations after it that its kernel can compute: multiplications by scales, and casts."""

    program: Program
    product: Node
    nodes: list[Node] = field(default_factory=list)
    scales: list[Node | float] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    """What the product is rounded to, and then the result of each multiplication."""
    expanded: list[Node] = field(default_factory=list)
    """The scales after they were expanded to the shape of the product, which the kernel does itself."""
    shape: Any = None
    """The shape of the result, if it is a view of the scaled matrix."""
    problem: Refusal | None = None
    """Why the kernel cannot compute the first multiplication."""

    @staticmethod
    def read(program: Program, product: Node) -> Chain | None:
        """The chain that begins with a product; None if no multiplication follows."""
        chain = Chain(program, product, [product])
        calls = [program.call(user) for user in product.users]
        if len(calls) > 1 and any(call is not None and call.op in ("to", "mul") for call in calls):
            users = list(product.users)
            chain.problem = Refusal("the int32 product {at} is used elsewhere, by {found}", product, found=users[-1])
            return chain
        while (step := chain._next()) is not None and chain._add(*step):
            pass
        if chain.scales:
            chain._add_cast_of_view()
        return chain if chain.scales or chain.problem else None

    def _next(self) -> tuple[Node, Call] | None:
        """The only node that uses the last value, as a call."""
        users = list(self.nodes[-1].users)
        call = self.program.call(users[0]) if len(users) == 1 else None
        return None if call is None or call.mutates else (users[0], call)

    def _add(self, node: Node, call: Call) -> bool:
        """Adds a cast or a multiplication; False if the chain ends before it."""
        if call.op == "mul" and set(call.args) == {"self", "other"}:
            problem = self._add_scale(node, call)
            if problem is not None:
                self.problem = None if self.scales else problem
                return False
        elif call.op != "to" or set(call.args) != {"self", "dtype"} or not self._add_cast(call.args["dtype"]):
            return False
        self.nodes.append(node)
        return True

    def _add_cast(self, dtype: torch.dtype) -> bool:
        if dtype not in KERNEL_DTYPES or (self.dtypes and self.dtypes[-1] != torch.float32):
            return False  # a value of 16 bits, which would be rounded twice
        self.dtypes[-1:] = [dtype]
        return True

    def _add_cast_of_view(self) -> None:
        """At the end, `view(y).to(dtype)` is `view(y.to(dtype))`."""
        view = self._next()
        if view is None or view[1].op != "reshape":
            return
        self.nodes.append(view[0])
        cast = self._next()
        if cast is not None and cast[1].op == "to" and self._add(*cast):
            self.shape = view[1].args["shape"]
        else:
            self.nodes.pop()

    def _add_scale(self, node: Node, call: Call) -> Refusal | None:
        """Adds a multiplication, or says why the kernel cannot compute it."""
        value, result = self.nodes[-1], tensor_of(node)
        others = [operand for operand in call.args.values() if operand is not value]
        if len(others) != 1:
            return Refusal("the product is multiplied by itself")
        if result.dtype not in KERNEL_DTYPES:
            return Refusal("the scaled product is {found}", found=result.dtype)
        if not known_equal(result.shape, tensor_of(self.product).shape):
            return Refusal("the scale gives the product another shape, {found}", found=tuple(result.shape))
        scale = others[0]
        if isinstance(scale, Node):
            scale = self._before_expand(scale)
            problem = self._why_not(scale, result)
        else:
            problem = None if _is_float32(scale) else Refusal("{found} is no number of float32", found=scale)
        if problem is not None:
            return problem
        self.dtypes = self.dtypes or [result.dtype]  # to which torch converts the int32 product
        self.scales.append(scale)
        self.dtypes.append(result.dtype)
        return None

    def _before_expand(self, scale: Node) -> Node:
        call = self.program.call(scale)
        if call is None or call.op != "expand":
            return scale
        self.expanded.append(scale)
        return self._before_expand(call.args["self"])

    def _why_not(self, scale: Node, result: torch.Tensor) -> Refusal | None:
        """Why the kernel cannot multiply by a tensor."""
        given = tensor_fact(scale)
        if given is None or given.dtype not in KERNEL_DTYPES:
            return Refusal("the scale {at} is {found}", scale, found=None if given is None else given.dtype)
        if given.dtype != result.dtype and result.dtype != torch.float32:
            # one number beside a matrix of 16 bits: a CPU multiplies by it as it is, a GPU rounds it first
            sentence = "the scale {at} is {found}, which some devices round to {wanted} first"
            return Refusal(sentence, scale, wanted=result.dtype, found=given.dtype)
        if given.device != result.device:
            return Refusal("the scale {at} is on {found}", scale, found=given.device)
        is_matrix = given.dim() == 2 and not any(known_equal(size, 1) for size in given.shape)
        if is_matrix and made_by_pointwise(self.program, scale):
            return Refusal("the scale {at} is a matrix that is computed where it is read, and would be written", scale)
        return None


def _is_float32(value: Any) -> bool:
    """A number in the range of float32."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (not math.isfinite(value) or abs(value) <= LARGEST_FLOAT)


@dataclass(frozen=True)
class FusedIntMmMul(Rule):
    """to(_int_mm(a, b), dtype) * scale -> triptych::int_mm_mul(a, b, [scale], dtypes)

    So with further scales and casts that follow. Each scale is one number, one for each row or column, or a matrix. All
    roundings are those of the operations that are replaced.
    """

    always: bool = False
    """On every device, whatever it costs: for tests of the rewrite itself."""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of("_int_mm"):
            call = None if node._erased else program.call(node)
            if call is None or call.op != "_int_mm" or call.mutates:
                continue
            chain = Chain.read(program, node)
            if chain is not None:
                about: dict[str, Any] = {"problem": chain.problem, "about": node}
                root = node if chain.problem else chain.nodes[-1]
                a, b = call.args["self"], call.args["mat2"]
                yield Match.at(program, root, covers=chain.nodes, **about, a=a, b=b, chain=chain)

    def check(self, m, a, b, chain):
        m.require(a.dtype == b.dtype == torch.int8, "the matrices are {found}", found=(a.dtype, b.dtype))
        inner = a.shape[1]
        fits = known(inner <= LARGEST_INNER)
        m.require(fits, "sums of {found} products need not fit in int32", wanted=LARGEST_INNER, found=inner)
        m.leave_behind(chain.expanded)
        if self.always:
            return
        generated = generates_products(m.program.options)
        m.require(not generated, "if the best kernel for the product is a generated one, it scales the result too")
        m.require(a.device.type == "cuda" and multiplies_int8(a.device), "on a GPU only, which has a kernel for it")
        sizes = tuple(map(size_hint, (a.shape[0], inner, b.shape[1])))
        takes = sizes[0] >= LEAST_ROWS and all(size % MULTIPLE == 0 for size in sizes[1:])
        m.require(takes, "torch does not multiply matrices of these sizes on a GPU, {found}", found=sizes)
        site = site_of(m, a.tensor, b.tensor, chain.scales, chain.dtypes)
        # the cost model does not know how efficient the kernel is
        m.pays(*modelled(site), measure=lambda: timed(site), error=math.inf)

    def rewrite(self, op, m, a, b, chain):
        scales = [
            scale if isinstance(scale, Node) else op.full([], float(scale), dtype=torch.float32, device=a.device)
            for scale in chain.scales
        ]
        dtypes = [NAME_OF[dtype] for dtype in chain.dtypes]
        result = op.call(torch.ops.triptych.int_mm_mul.default, a, b, scales, dtypes)
        return result if chain.shape is None else op.reshape(result, list(chain.shape))

    examples = [
        fires(lambda a, b, s, t: (int_mm(a, b) * s * t).bfloat16(), A, B, "f32[8, 1]", "f32[6]", **ALWAYS),
        fires(lambda a, b, s: int_mm(a, b) * s, A, B, "f32[6]", **ALWAYS),
        fires(lambda a, w, s: s * int_mm(a, w.t()).float(), A, "i8[6, 16]", "f32[1, 6]", **ALWAYS),
        fires(lambda a, b, s: int_mm(a, b) * s, A, B, "bf16[8, 1]", **ALWAYS),
        fires(lambda a, b, s: int_mm(a, b).to(torch.bfloat16) * s, A, B, "f32[8, 6]", **ALWAYS),
        fires(lambda a, b, s: int_mm(a, b) * s, A, B, "f16[]", **ALWAYS),
        fires(lambda a, b, s: int_mm(a, b).half() * 0.1 * s, A, B, "f16[6]", **ALWAYS),
        fires(lambda a, b, s: (int_mm(a, b) * s.expand(8, 6)).view(2, 4, 6).half(), A, B, "f32[8, 1]", **ALWAYS),
        fires(lambda a, b, s: (int_mm(a, b) * s).relu() * s, A, B, "f32[6]", **ALWAYS),
        fires(lambda a, b, s: (y := int_mm(a, b) * s, y.half()), A, B, "f32[6]", **ALWAYS),
        fires(lambda a, b, s: (int_mm(a, b) * s).half().float(), A, B, "f32[6]", **ALWAYS),
        fires(lambda a, b, s, t: int_mm(a, b) * (s * t), A, B, "f32[8, 1]", "f32[6]", options={"codegen": "eager"},
              **ALWAYS),
        fires(lambda a, b, s: int_mm(a, b) * s, "i8[0, 16]", B, "f32[6]", **ALWAYS),
        fires(lambda a, s: (int_mm(a, torch.ones(16, 6, dtype=torch.int8)) * s).half(), A, "f32[8, 1]", dynamic=True,
              **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b) * s, A, B, "f32[6]", because="on a GPU only", **ATEN),
        declines(lambda a, b, s: int_mm(a, b) * s, A, B, "f32[6]", options={"mode": "max-autotune"},
                 because="a generated one", **ATEN),
        declines(lambda a, b, s: (y := int_mm(a, b), y * s), A, B, "f32[6]", because="used elsewhere", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b) * s, A, B, "i32[6]", because="the scaled product is", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b) * s, A, B, "f64[6]", because="the scaled product is", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b).float() * s, A, B, "i32[6]", because="the scale", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b).half() * s, A, B, "f32[]", because="some devices round", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b) * s, A, B, "f32[2, 1, 6]", because="another shape", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b) * s, "i8[1, 16]", B, "f32[8, 1]", because="another shape", **ALWAYS),
        declines(lambda a, b, s, t: int_mm(a, b) * (s * t), A, B, "f32[8, 1]", "f32[6]", because="would be written",
                 **ALWAYS),
        declines(lambda a, b: (y := int_mm(a, b).float()) * y, A, B, because="by itself", **ALWAYS),
        declines(lambda a, b: int_mm(a, b).float() * 1e39, A, B, because="no number of float32", **ALWAYS),
        declines(lambda a, b: int_mm(a, b) * 3, A, B, because="the scaled product is", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b) * s, "i8[2, 131072]", "i8[131072, 2]", "f32[2]", because="fit in int32",
                 **ALWAYS),
        declines(lambda a, b, s: (int_mm(a, b) + 1) * s, A, B, "f32[6]", **ALWAYS),
        declines(lambda a, b, s: int_mm(a, b).double() * s, A, B, "f32[6]", **ALWAYS),
        declines(lambda a, b, s: (a @ b) * s, "f32[4, 8]", "f32[8, 8]", "f32[8]", **ALWAYS),
    ]  # fmt: skip
