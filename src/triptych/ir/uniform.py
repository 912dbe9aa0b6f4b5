"""Values that hold one number everywhere: which ones, and which number, exactly as torch would compute it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .calls import Call
from .facts import fact, known, numel, tensor_fact
from .program import Program

SAME_VALUE = frozenset(
    "reshape permute expand squeeze unsqueeze slice select alias detach clone contiguous diagonal repeat "
    "tile flip roll lift_fresh_copy unfold as_strided narrow".split()
)
"""The result holds what the operand holds, in another shape or order."""

EXACT = frozenset(
    "add sub mul div neg abs square sqrt reciprocal eq ne lt le gt ge logical_and logical_or logical_xor "
    "logical_not bitwise_and bitwise_or bitwise_xor bitwise_not where masked_fill maximum minimum clamp relu "
    "floor ceil round trunc sign isnan isinf isfinite remainder fmod floor_divide".split()
)
"""Pointwise operations whose rounding IEEE fixes: one element computed here is each one computed there."""

FILLED = {
    "full": "fill_value",
    "full_like": "fill_value",
    "new_full": "fill_value",
    "scalar_tensor": "s",
    "fill": "value",
}
ZEROS_AND_ONES = {"new_zeros": 0, "new_ones": 1}


class Uniforms:
    """Which values of a program hold one number; asked from the first node to the last.

    The numbers are real tensors: to be used under `without_dispatch_modes`, not inside a fake mode.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[Node, torch.Tensor] = {}

    def value(self, node: Any) -> torch.Tensor | None:
        """The number as a tensor without dims, in the value's dtype; None if it is not known to be one."""
        return self.known.get(node) if isinstance(node, Node) else None

    def look(self, node: Node) -> torch.Tensor | None:
        """Find out about a node whose operands were looked at before."""
        call = self.program.call(node)
        found = tensor_fact(node)
        if call is None or call.mutates or found is None or not _plain(found):
            return None
        value = self._compute(node, call, found)
        if value is None or value.dtype != found.dtype or value.numel() != 1:
            return None
        if self.program.aliasing.written(node) or not self.program.aliasing.effects(node).pure:
            return None
        self.known[node] = value.reshape(())
        return self.known[node]

    def _compute(self, node: Node, call: Call, found: torch.Tensor) -> torch.Tensor | None:
        op, args = call.op, call.args
        if op in FILLED:
            return self._filled(args.get(FILLED[op]), found.dtype)
        if op in ZEROS_AND_ONES:
            return self._filled(ZEROS_AND_ONES[op], found.dtype)
        if op == "tensor":
            return self._filled(next(iter(args.get("operands", ())), None), found.dtype)
        if op in SAME_VALUE:
            return self._same(args.get("self"))
        if op == "to":
            operand = self.value(args.get("self"))
            return None if operand is None else operand.to(found.dtype)
        if op == "getitem":
            return self._piece(args)
        if op == "tensor_getitem":
            return self.value(args["self"]) if _basic_index(args["index"]) else None
        if op == "cat":
            return self._all_equal(args.get("tensors"))
        if op in ("amax", "amin", "any", "all"):
            return self._reduced(op, args.get("self"), found.dtype)
        if op in ("where", "masked_fill") and (value := self._either(call)) is not None:
            return value
        if op in EXACT:
            return self._evaluate(node)
        return None

    def _filled(self, number: Any, dtype: torch.dtype) -> torch.Tensor | None:
        if isinstance(number, Node):
            value = self.value(number)
            return None if value is None else value.to(dtype)
        if not isinstance(number, (bool, int, float)):
            return None
        try:
            return torch.full((), number, dtype=dtype, device="cpu")
        except RuntimeError:  # the number does not fit: left for run time to raise
            return None

    def _same(self, operand: Any) -> torch.Tensor | None:
        if isinstance(operand, Node) and operand.op == "get_attr":
            return self._constant(operand)
        return self.value(operand)

    def _constant(self, node: Node) -> torch.Tensor | None:
        """A number that tracing turned into an attribute: nobody outside can change it."""
        owner = self.program.gm
        if not str(node.target).startswith("_tensor_constant") or not isinstance(owner, GraphModule):
            return None
        held = getattr(owner, str(node.target), None)
        if not isinstance(held, torch.Tensor) or type(held) is not torch.Tensor or held.numel() != 1:
            return None
        if held.device.type != "cpu" or self.program.aliasing.written(node):
            return None
        return held.detach().clone().reshape(())

    def _piece(self, args: dict[str, Any]) -> torch.Tensor | None:
        whole = self.program.call(args["self"]) if isinstance(args["self"], Node) else None
        if (
            whole is None
            or whole.op not in ("split", "unbind")
            or self.program.aliasing.written(args["self"])
        ):
            return None
        return self.value(whole.args.get("self"))

    def _all_equal(self, operands: Any) -> torch.Tensor | None:
        if not isinstance(operands, (list, tuple)):
            return None
        values = [self.value(o) for o in operands]
        first = values[0] if values else None
        if first is None or not all(v is not None and same_bits(v, first) for v in values):
            return None
        return first

    def _reduced(self, op: str, operand: Any, dtype: torch.dtype) -> torch.Tensor | None:
        value, found = self.value(operand), tensor_fact(operand)
        if value is None or found is None or not known(numel(found.shape) > 0):
            return None
        return value if op.startswith("am") else value.bool().to(dtype)

    def _either(self, call: Call) -> torch.Tensor | None:
        """Both branches hold the same: whatever the mask says."""
        names = ("self", "other") if call.op == "where" else ("self", "value")
        first, second = (self.value(call.args.get(n)) for n in names)
        if first is None or second is None or not same_bits(first, second):
            return None
        return first

    def _evaluate(self, node: Node) -> torch.Tensor | None:
        """The operation itself on one element of each operand: rounding and type promotion are torch's."""
        unknown = False

        def element(operand: Node) -> Any:
            nonlocal unknown
            value, found = self.value(operand), tensor_fact(operand)
            if value is None or found is None:
                unknown = True
                return None
            return value.reshape([1] * found.dim())

        with torch.no_grad():
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), element)
            if unknown:
                return None
            try:
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                result = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception:  # a division of integers by zero, say: left for run time to raise
                return None
        return result if isinstance(result, torch.Tensor) else None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same dtype and number; 0.0 and -0.0 are not the same, one NaN is as good as another."""
    if left.dtype != right.dtype:
        return False
    a, b = left.item(), right.item()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def _plain(value: torch.Tensor) -> bool:
    """Strided memory of real numbers: what `full` can make."""
    return value.layout == torch.strided and not value.dtype.is_complex and not value.is_quantized


def _basic_index(index: Any) -> bool:
    """Numbers, slices, None and `...` only pick; a tensor as index could also be out of range."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        p is None or p is Ellipsis or isinstance(p, (int, slice)) and not isinstance(p, bool) for p in parts
    )


def never_negative_zero(uniforms: Uniforms, node: Any) -> bool:
    """No element can be -0.0, so that adding 0.0 changes nothing."""
    program = uniforms.program
    while isinstance(node, Node):
        found, call = tensor_fact(node), program.call(node)
        if found is not None and not found.dtype.is_floating_point:
            return True
        value = uniforms.value(node)
        if value is not None:
            return not (value.item() == 0 and math.copysign(1, value.item()) < 0)
        if call is None or call.mutates or fact(node) is None or program.aliasing.written(node):
            return False
        if call.op in ("exp", "sigmoid", "abs", "softmax", "square", "rand", "rand_like", "exp2", "cosh"):
            return True
        if call.op == "mul" and call.args.get("self") is call.args.get("other"):
            return True
        if call.op not in SAME_VALUE and call.op != "to":
            return False
        node = call.args.get("self")
    return False
