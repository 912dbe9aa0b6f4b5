"""What a node does beside computing: what it writes, what its result may share memory with, whether it draws
random numbers, and whether it must stay although nobody uses it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from .calls import Call, read
from .facts import fact
from .schema import overloads, packet_tags


@dataclass(frozen=True)
class Effects:
    writes: tuple[Node, ...] = ()
    """Operands whose memory is changed."""
    aliases: tuple[Node, ...] = ()
    """Operands whose memory the result may share."""
    may_copy: bool = False
    """The result shares the operand's memory in some cases only (`reshape`, `to`): the facts tell which."""
    random: bool = False
    kept: bool = False
    """Has an effect that no user shows: dead-code elimination leaves it."""
    barrier: bool = False
    """Opens or closes a region (autocast, grad mode, profiler): nothing may be moved over it."""

    @property
    def pure(self) -> bool:
        return not (self.writes or self.random or self.kept or self.barrier)


PURE = Effects()
BARRIER = Effects(kept=True, barrier=True)


def effects(node: Node) -> Effects:
    if node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return _from_schema(node, target)
        if target in _regions():
            return BARRIER
        if isinstance(target, _private.higher_order_operator()):
            return _higher_order(node)
        return _from_call(node)
    if node.op == "call_method":
        return _from_call(node)
    if node.op == "call_module":
        return _from_module(node)
    return PURE


@functools.cache
def _regions() -> dict[Any, str]:
    return _private.region_functions()


def node_operands(value: Any) -> Iterator[Node]:
    """All nodes inside an argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from node_operands(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from node_operands(item)
    elif isinstance(value, slice):
        yield from node_operands((value.start, value.stop, value.step))


@dataclass(frozen=True)
class _SchemaEffects:
    written: tuple[int, ...]
    aliased: tuple[int, ...]
    may_copy: bool
    random: bool
    kept: bool
    barrier: bool
    plain: bool


KEPT_NAMES = ("assert", "sym_constrain", "record_function", "_print", "check", "wait_tensor")


@functools.cache
def _schema_effects(overload: torch._ops.OpOverload) -> _SchemaEffects:
    schema = overload._schema
    tags = overload.tags
    returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}
    written, aliased = [], []
    vague = torch.Tag.maybe_aliasing_or_mutating in tags
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        is_tensor = "Tensor" in str(argument.type)
        if info is not None and info.is_write:
            written.append(i)
        if is_tensor and (vague or (info is not None and (info.before_set & returned or "*" in info.after_set))):
            aliased.append(i)
    name = schema.name
    random = torch.Tag.nondeterministic_seeded in tags
    no_result = not schema.returns
    kept = no_result or any(part in name for part in KEPT_NAMES) or "c10d" in name
    barrier = name.startswith("profiler::") or "c10d" in name
    plain = not (written or aliased or random or kept or barrier or name.startswith("aten::batch_norm"))
    may_copy = vague or _private.is_composite(overload)
    return _SchemaEffects(tuple(written), tuple(aliased), may_copy, random, kept, barrier, plain)


def _from_schema(node: Node, overload: torch._ops.OpOverload) -> Effects:
    known = _schema_effects(overload)
    if known.plain:
        return PURE
    names = [a.name for a in overload._schema.arguments]

    def operands(indices: tuple[int, ...]) -> tuple[Node, ...]:
        found: list[Node] = []
        for i in indices:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(names[i])
            found.extend(node_operands(value))
        return tuple(found)

    writes = operands(known.written)
    if overload._schema.name == "aten::batch_norm":
        writes += _running_stats(read(node))
    return Effects(writes, operands(known.aliased), known.may_copy, known.random, known.kept, known.barrier)


def _running_stats(call: Call | None) -> tuple[Node, ...]:
    """Batch norm in training changes its running statistics, which its schema does not say."""
    if call is None or not call.args.get("training", call.args.get("train", False)):
        return ()
    stats = (call.args.get("running_mean"), call.args.get("running_var"))
    return tuple(s for s in stats if isinstance(s, Node))


@functools.cache
def _op_may_alias(op: str) -> bool:
    if op in ("tensor_getitem", "getattr", "to", "to_like", "getitem", "einsum", "reshape", "permute", "split"):
        return True
    if "maybe_aliasing_or_mutating" in packet_tags(op):
        return True
    return any(r.alias_info is not None for s in overloads(op) if not s.mutates for r in s.overload._schema.returns)


@functools.cache
def _op_is_random(op: str) -> bool:
    return "nondeterministic_seeded" in packet_tags(op) or "dropout" in op or "multi_head_attention" in op


def _from_call(node: Node) -> Effects:
    """Torch-level calls: the schema of the operation they spell, else the worst."""
    call = read(node)
    operands = tuple(node_operands((node.args, node.kwargs)))
    if call is None:
        return Effects(writes=operands, aliases=operands, random=True, kept=True)
    if not _has_tensor(node):
        return PURE if not call.mutates else Effects(writes=operands[:1], kept=True)
    known_operation = bool(overloads(call.op)) or call.op in (
        "tensor_getitem", "getattr", "to_like", "getitem", "setitem", "not", "rdiv"
    )  # fmt: skip
    random = _op_is_random(call.op.removesuffix("_"))
    if call.mutates:
        target = call.args.get("out", call.args.get("self", operands[:1]))
        written = tuple(node_operands(target)) or operands[:1]
        return Effects(written, written, random=random, kept=True)
    if call.op == "batch_norm":
        return Effects(writes=_running_stats(call), aliases=(), random=False)
    if not known_operation and not call.op.startswith("torch."):
        return Effects(writes=operands, aliases=operands, random=True, kept=True)
    may_alias = call.op.startswith("torch.") or _op_may_alias(call.op)
    first = operands if call.op.startswith("torch.") or call.op == "einsum" else operands[:1]
    if "maybe_aliasing_or_mutating" in packet_tags(call.op):
        first = operands
    return Effects((), first if may_alias else (), may_copy=True, random=random)


def _has_tensor(node: Node) -> bool:
    value = fact(node)
    if value is None:
        return True
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) for v in value) or not value
    return isinstance(value, torch.Tensor)


def _higher_order(node: Node) -> Effects:
    """Sub-graphs are opaque: they may draw random numbers, and at the torch level write their operands."""
    operands = tuple(node_operands((node.args, node.kwargs)))
    functional = "val" in node.meta and "mutation" not in str(node.target)
    return Effects(writes=() if functional else operands, aliases=operands, random=True, kept=True)


_PURE_MODULES = (
    torch.nn.Linear, torch.nn.Identity, torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Tanh, torch.nn.Sigmoid,
    torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.Softmax, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d,
    torch.nn.Embedding, torch.nn.Flatten, torch.nn.Unflatten, torch.nn.LeakyReLU, torch.nn.ELU, torch.nn.Hardtanh,
    torch.nn.MaxPool2d, torch.nn.AvgPool2d, torch.nn.AdaptiveAvgPool2d,
)  # fmt: skip


def _from_module(node: Node) -> Effects:
    operands = tuple(node_operands((node.args, node.kwargs)))
    owner = node.graph.owning_module
    module = owner.get_submodule(str(node.target)) if isinstance(owner, GraphModule) else None
    if isinstance(module, torch.nn.Dropout):
        return Effects(aliases=operands, random=module.training)
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return Effects(kept=module.training, barrier=module.training)
    if isinstance(module, _PURE_MODULES):
        in_place = bool(getattr(module, "inplace", False))
        return Effects(operands if in_place else (), operands, kept=in_place)
    return Effects(writes=operands, aliases=operands, random=True, kept=True)
