"""Tensors that depend on shapes alone, evaluated on the CPU by torch itself, under a size limit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ... import _private
from ..facts import fact, is_static, numel
from ..operations import with_trait
from ..program import Program
from ..traits import is_gemm, is_view

EXACT, SAME_ELEMENTS = with_trait("exact"), with_trait("same_elements")
ROUND_ALIKE = EXACT | SAME_ELEMENTS | with_trait("copies_elements")
"""Operations with the same result on every device: rounded as IEEE demands, or only moving elements."""

UNKNOWN_CONTENTS = ("empty", "resize", "set_")
ELEMENTS = 4 * 1024 * 1024


class ShapeOnly:
    """Values of nodes that depend on no input, no weight and no random draw; each is computed once."""

    def __init__(self, program: Program, limit: int = ELEMENTS) -> None:
        self.program, self.limit = program, limit
        self.left = 4 * limit
        """Budget: how many elements may still be computed, over all nodes."""
        self._values: dict[Node, Any] = {}

    def value(self, node: Node) -> torch.Tensor | None:
        """The elements of a tensor, on the CPU whatever its device; None if it depends on more than shapes."""
        if node not in self._values:
            self._compute(node)
        value = self._values[node]
        return value if isinstance(value, torch.Tensor) else None

    def _compute(self, asked: Node) -> None:
        work = [asked]
        while work:
            node = work[-1]
            if node in self._values:
                work.pop()
                continue
            constant = self._constant(node)
            if constant is not None or not self._allowed(node):
                self._values[node] = constant
                continue
            waiting = [n for n in node.all_input_nodes if n not in self._values]
            known_missing = any(n in self._values and self._values[n] is None for n in node.all_input_nodes)
            if waiting and not known_missing:
                work.append(waiting[0])  # one at a time: an unknown operand makes the node unknown
                continue
            self._values[node] = None if known_missing else self._evaluate(node)

    def _constant(self, node: Node) -> Any:
        """Values that need no computation: static sizes, buffers, and constants that tracing stored as attributes."""
        known = fact(node)
        if isinstance(known, (bool, int, float)) or isinstance(known, torch.Size) and is_static(known):
            return known
        if node.op == "placeholder" and self.program.buffers is not None:
            contents = self.program.buffers.contents(node, self.program.aliasing)
            return None if contents is None or contents.value.numel() > self.limit else contents.value
        if node.op != "get_attr" or not str(node.target).startswith("_tensor_constant"):
            return None
        owner = self.program.gm
        attribute = getattr(owner, str(node.target), None) if isinstance(owner, GraphModule) else None
        if type(attribute) is not torch.Tensor or attribute.numel() > self.limit or attribute.device.type != "cpu":
            return None
        if self.program.aliasing.written(node):
            return None
        with _private.plain_torch():
            return attribute.detach()

    def _allowed(self, node: Node) -> bool:
        """Is it a small pure torch call on static shapes, with the same result on the CPU as on its device?"""
        call = self.program.call(node)
        if node.op not in ("call_function", "call_method") or call is None or call.mutates:
            return False
        value = fact(node)
        results = value if isinstance(value, (list, tuple)) else (value,)
        if not results or not all(isinstance(r, torch.Tensor) and is_plain(r) and is_static(r.shape) for r in results):
            return False
        if is_gemm(call.op) or call.op.startswith(("higher_order", "new_empty", *UNKNOWN_CONTENTS)):
            return False
        if isinstance(node.target, _private.OpOverload) and node.target.namespace not in ("aten", "prims"):
            return False
        aliasing = self.program.aliasing
        if not aliasing.effects(node).pure or aliasing.written(node):
            return False
        rounds = any(r.dtype.is_floating_point for r in results) and call.op not in ROUND_ALIKE
        if rounds and any(r.device.type != "cpu" for r in results):
            return False
        size = 0 if is_view(call.op) else sum(numel(r.shape) for r in results)
        if size > min(self.limit, self.left):
            return False
        self.left -= size
        return True

    def _evaluate(self, node: Node) -> Any:
        with _private.plain_torch(), torch.no_grad():  # computed for real, also inside a compile
            return self._result(node)

    def _result(self, node: Node) -> Any:
        call = self.program.call(node)
        known = fact(node)
        assert call is not None
        try:
            if call.op == "to":
                result = self._values[call.args["self"]].to(known.dtype)
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
                args, kwargs = _on_cpu(args), {k: _on_cpu(v, k == "device") for k, v in kwargs.items()}
                if node.op == "call_method":
                    result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # it will raise at run time, too
            return None
        results = result if isinstance(result, (list, tuple)) else (result,)
        wanted = known if isinstance(known, (list, tuple)) else (known,)
        same = len(results) == len(wanted) and all(
            isinstance(r, torch.Tensor) and r.dtype == w.dtype and r.shape == w.shape for r, w in zip(results, wanted)
        )
        return result if same else None


def is_plain(value: torch.Tensor) -> bool:
    """Is it a strided tensor of real numbers, and not quantized?"""
    return value.layout == torch.strided and not value.dtype.is_complex and not value.is_quantized


def _on_cpu(value: Any, is_device: bool = False) -> Any:
    if isinstance(value, torch.device) or is_device:
        return torch.device("cpu") if value is not None else None
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_on_cpu(v) for v in value)
    return value


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype and number; 0.0 and -0.0 differ, all NaNs are equal."""
    if left.dtype != right.dtype:
        return False
    a, b = left.item(), right.item()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def distinct(value: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """The elements without those that an expand repeats; the last `keep` dims stay as they are."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride())):
        if stride == 0 and size > 1 and dim < value.dim() - keep:
            value = value.narrow(dim, 0, 1)
    return value
