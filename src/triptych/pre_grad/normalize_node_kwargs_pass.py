"""normalize_node_kwargs_pass: writes the arguments of every call in one canonical form."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import _private
from ..ir.calls import is_torch_function
from ..ir.facts import fact, tensor_fact
from ..ir.operations import operation
from ..ir.program import ATEN, Program
from ..ir.schema import REQUIRED, overloads, same_constant, signature
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule
from ..rewrite.spelling import Spelling
from .spellings import WrittenAs, makes_tensors, wanted_spelling, writes_in_place

DIMS = frozenset("dim dims dim0 dim1 dim2 axis0 axis1 start_dim end_dim source destination".split())


class Arguments(WrittenAs):
    """sum(x, axis=-1, keepdim=False) -> sum(x, dim=1), and the same for the arguments of every call"""

    def sites(self, program: Program) -> Iterator[Match]:
        aten = program.dialect == ATEN
        for node in list(program.graph.nodes):
            if node.op not in ("call_function", "call_method") or not makes_tensors(node):
                continue
            wanted = _aten_arguments(node) if aten else _arguments(program, node)
            if wanted is not None and not wanted.same_arguments(Spelling.of(node)):
                yield Match.at(program, node, wanted=wanted)

    examples = [
        fires(lambda x: torch.sum(x, axis=-1), "f32[4, 8]", dialects=["torch"]),  # type: ignore[call-overload]
        fires(lambda x: x.mean(-1, keepdims=True), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.sum(x, dim=(0, -1), keepdim=False), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, y: torch.cat((x, y), -1), "f32[4, 8]", "f32[4, 2]", dialects=["torch"]),
        fires(lambda e, x: torch.cat((e, x), -1), "f32[0]", "f32[4, 2]", dialects=["torch"]),
        fires(lambda x: x.transpose(-1, 0), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.flatten(start_dim=-2, input=x), "f32[4, 8, 2]", dialects=["torch"]),
        fires(lambda x: F.softmax(x, dim=-1, dtype=None), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, w: F.conv2d(x, w, None, 1, (0, 0), 1, 1), "f32[1, 2, 8, 8]", "f32[3, 2, 3, 3]",
              dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x, w, b), "f32[4, 8]", "f32[2, 8]", "f32[2]", dialects=["torch"]),
        fires(lambda x, y: F.mse_loss(x, y, reduction="mean"), "f32[4]", "f32[4]", dialects=["torch"]),
        fires(lambda x: x.add_(other=1), "f32[4]", dialects=["torch"]),
        fires(lambda x: torch.randn(2, 3) + x, "f32[3]", dialects=["torch"]),
        fires(lambda x: x.sum(-1), "f32[4, 8]", dynamic=True, dialects=["torch"]),
        fires(lambda x: torch.ops.aten.sum.dim_IntList(x, dim=[-1]), "f32[4, 8]", dialects=["aten"]),
        declines(lambda x: torch.sum(x, dim=1), "f32[4, 8]", dialects=["torch"]),
        declines(lambda x: torch.sum(x), "f32[4, 8]", dialects=["torch"]),
        declines(lambda x: torch.sum(x.sin(), dim=0, keepdim=True), "f32[]", dialects=["torch"]),
        declines(lambda x: torch.ops.aten.sum.dim_IntList(x, [1], False), "f32[4, 8]", dialects=["aten"]),
    ]  # fmt: skip


def _arguments(program: Program, node: Node) -> Spelling | None:
    """The call as the emitter would write it, if that calls the same function; else by that function's signature."""
    call = program.call(node)
    if call is not None and call.mutates and not writes_in_place(call):
        return None
    try:
        wanted = wanted_spelling(program, node)
    except Refused:
        wanted = None
    if wanted is not None and wanted.same_function(Spelling.of(node)):
        return wanted
    return _own_arguments(node)


def _own_arguments(node: Node) -> Spelling | None:
    """The arguments by the signature of the called function, where that is not the canonical one."""
    if fact(node) is None:
        return None
    if node.op == "call_method":
        return None if operation(str(node.target)).method_order else _by_schema(node, str(node.target))
    if isinstance(node.target, (_private.OpOverload, _private.OpOverloadPacket)):
        return None
    if not is_torch_function(node.target):
        return None
    if inspect.isfunction(node.target):
        return _by_python_signature(node)
    return _by_schema(node, node.target.__name__)  # type: ignore[union-attr]


def _by_schema(node: Node, name: str) -> Spelling | None:
    for sig in overloads(name):
        bound = sig.bind(node.args, node.kwargs)
        if bound is not None:
            first = itertools.takewhile(lambda p: p.default is REQUIRED and not p.optional, sig.params)
            required = [p.name for p in first if not p.keyword_only]
            bound = {p.name: _from_front(node, p.name, bound[p.name]) for p in sig.params if p.name in bound}
            return _given(node, bound, required)
    return None


def _by_python_signature(node: Node) -> Spelling | None:
    params = inspect.signature(node.target).parameters  # type: ignore[arg-type]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params.values()):
        return None
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    arguments = {k: v for k, v in bound.items() if not same_constant(v, params[k].default)}
    required = [k for k, p in params.items() if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    return _given(node, arguments, required)


def _given(node: Node, bound: Mapping[str, Any], required: list[str]) -> Spelling:
    first = [bound[name] for name in required]
    return Spelling(node.op, node.target, tuple(first), {k: v for k, v in bound.items() if k not in required})


def _aten_arguments(node: Node) -> Spelling | None:
    if not isinstance(node.target, _private.OpOverload):
        return None
    sig = signature(node.target)
    names = [p.name for p in sig.params if not p.keyword_only]
    kwargs = dict(node.kwargs)
    args = [_from_front(node, name, value) for name, value in zip(names, node.args, strict=False)]
    for name in names[len(args) :]:
        if name not in kwargs:
            break
        args.append(_from_front(node, name, kwargs.pop(name)))
    return Spelling(node.op, node.target, tuple(args), kwargs)


def _from_front(node: Node, name: str, value: Any) -> Any:
    """Dims counted from the front, in the rank of the operand that they are dims of."""
    if name not in DIMS:
        return value
    operation = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    operand = node.args[0] if node.args else node.kwargs.get("self", node.kwargs.get("input"))
    tensor = tensor_fact(node if operation in ("cat", "stack", "unsqueeze") else operand)
    if tensor is None:
        return value
    rank = max(tensor.dim(), 1)
    if isinstance(value, (list, tuple)):
        return [d + rank if isinstance(d, int) and d < 0 else d for d in value]
    return value + rank if isinstance(value, int) and value < 0 else value


@dataclass(frozen=True)
class NormalizeNodeKwargsPass(Pass):
    """Writes the arguments of every call in one form: required ones by position, the others by keyword in the order of
    the schema, without defaults, with dims counted from the front and torch's names for numpy's (`axis`, `keepdims`).

    The called function stays the same. In an ATen graph, arguments are given by position, as AOTAutograd writes them,
    and defaults are not left out, because code generators rely on that.
    """

    name: ClassVar[str] = "normalize_node_kwargs_pass"

    def rules(self) -> Sequence[Rule]:
        return (Arguments(),)
