"""A graph as readable text: one line per node, with shapes, source line and the rule that created it.

    relu: f32[8, 64] = relu(x)  # model.py:31  <- fuse_linear
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _private
from .facts import fact

DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip

TABLES_OF_KERNELS = ("kernel_idx", "constant_args_idx", "tma_descriptor_metadata")
"""Arguments of a Triton kernel launch that are indices into side tables, which differ from run to run."""

RULE = "triptych_rule"
"""Meta key of a node: the name of the rule that created it."""
EARLIER_RULE = "triptych_earlier_rule"
"""Meta key of a node that AOTAutograd traced: the name of the rule that wrote, in stage 1, what it was traced from."""


def rule_of(node: Node) -> str:
    """The rule that wrote a node, in this stage or an earlier one; empty if the program has it as it was captured."""
    return str(node.meta.get(RULE) or node.meta.get(EARLIER_RULE) or "")


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def type_of(value: Any) -> str:
    """`f32[8, 64]`, `cuda:0` added where it is not the CPU; a tuple of results in brackets."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(s) for s in value.shape)
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{dtype_name(value.dtype)}[{sizes}]{device}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(type_of(v) for v in value) + ")"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(value).__name__}({value})"
    return type(value).__name__


def target_name(node: Node) -> str:
    """A short name of the operation, as it is spelled in this graph."""
    target = node.target
    if isinstance(target, _private.OpOverload):
        name = str(target).removesuffix(".default")
        return name
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", str(target))


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, torch.Size)):
        return "[" + ", ".join(_argument(v) for v in value) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(_argument(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_argument(v)}" for k, v in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, slice):
        parts = [value.start, value.stop] + ([value.step] if value.step is not None else [])
        return ":".join("" if p is None else _argument(p) for p in parts)
    if isinstance(value, str):
        return repr(value)
    return str(value)


FUNCTION_MODES = ("torch/utils/_device.py", "torch/overrides.py")
"""Where torch calls the user's functions anew, if a default device or another function mode is on."""


@functools.lru_cache(4096)
def _last_frame(trace: str) -> str:
    frames = [(p.replace("\\", "/"), line) for p, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]
    for path, line in reversed(frames):
        if not path.endswith(FUNCTION_MODES):
            return f"{path.rpartition('/')[2]}:{line}"
    return ""


def source_line(node: Node) -> str:
    """The user's source line, as `file.py:31`, or nothing."""
    trace = node.meta.get("stack_trace")
    return _last_frame(trace) if isinstance(trace, str) else ""


def call_text(node: Node) -> str:
    """What a node computes, as one expression: the right-hand side of its line."""
    if node.op == "output":
        return _argument(node.args[0] if node.args else None)
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"self.{node.target}"
    named = {k: v for k, v in node.kwargs.items() if k not in TABLES_OF_KERNELS}
    parts = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in named.items()]
    if "kernel_idx" in node.kwargs:
        parts.insert(0, _kernel_name(node.kwargs["kernel_idx"]))
    if node.op == "call_method":
        return f"{parts[0]}.{node.target}({', '.join(parts[1:])})"
    if node.op == "call_module":
        return f"self.{node.target}({', '.join(parts)})"
    return f"{target_name(node)}({', '.join(parts)})"


def _kernel_name(index: Any) -> str:
    """The name of a Triton kernel that a node launches."""
    kernel = _private.kernel_side_table.id_to_kernel.get(index)
    while hasattr(kernel, "fn"):  # autotuners and compiled functions wrap the kernel
        kernel = kernel.fn
    return "an unknown kernel" if kernel is None else getattr(kernel, "__name__", type(kernel).__name__)


def type_text(node: Node) -> str:
    """The type of a node's value, or nothing if it is not known."""
    value = None if node.op == "output" else fact(node)
    return "" if value is None else type_of(value)


def line(node: Node) -> str:
    """One node as one line."""
    return join_line(node, type_text(node), call_text(node))


def join_line(node: Node, type_: str, call: str) -> str:
    """The line of a node whose type and expression are written already."""
    if node.op == "output":
        return f"return {call}"
    source, rule = source_line(node), rule_of(node)
    start = f"{node.name}: {type_} = {call}" if type_ else f"{node.name} = {call}"
    return start + (f"  # {source}" if source else "") + (f"  <- {rule}" if rule else "")


def lines(graph: Graph) -> list[str]:
    return [line(node) for node in graph.nodes]


def text(program: GraphModule | Graph) -> str:
    graph = program.graph if isinstance(program, GraphModule) else program
    return "\n".join(lines(graph))
