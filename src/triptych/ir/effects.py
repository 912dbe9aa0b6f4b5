"""The effects of a node besides computing its value: which memory it writes, which operands its result may alias,
whether it draws random numbers, and whether it must stay although nobody uses it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .calls import Call, of_a_library, op_parameters, overload_called, read
from .facts import fact, sharing
from .modules import called_module
from .operations import with_trait
from .schema import overloads, packet_tags, same_constant
from .traits import is_view


@dataclass(slots=True)
class Effects:
    """Nobody changes one. It is not declared frozen for the reason that `Call` gives."""

    writes: tuple[Node, ...] = ()
    """Operands whose memory is changed."""
    aliases: tuple[Node, ...] = ()
    """Operands whose memory the result may share."""
    may_copy: bool = False
    """The result shares the operand's memory in some cases only (`reshape`, `to`): the facts say whether it does."""
    random: bool = False
    kept: bool = False
    """The node has an effect beyond its result, so dead-code elimination must not remove it."""
    barrier: bool = False
    """Opens or closes a region (autocast, grad mode, profiler): nothing may be moved over it."""

    @property
    def pure(self) -> bool:
        return not self.random and self.only_draws

    @property
    def only_draws(self) -> bool:
        """May draw random numbers, and has no other effect."""
        return not (self.writes or self.kept or self.barrier)


PURE = Effects()
BARRIER = Effects(kept=True, barrier=True)


def effects(node: Node, call: Callable[[Node], Call | None] = read) -> Effects:
    """The effects of a node besides computing its value; `call` reads which operation it is."""
    if node.op == "call_function":
        target = node.target
        if isinstance(target, _private.OpOverload):
            return _from_schema(node, target)
        if of_a_library(target) and (overload := overload_called(node)) is not None:
            return _from_schema(node, overload)
        if target in _regions():
            return BARRIER
        if isinstance(target, _private.HigherOrderOperator):
            return _higher_order(node)
        if target is _private.InvokeQuant:
            return PURE  # an object with the options of a higher-order operator
        return _from_call(node, call(node))
    if node.op == "call_method":
        return _from_call(node, call(node))
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
        return
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        if isinstance(item, Node):
            yield item
        elif isinstance(item, (list, tuple, dict, slice)):  # no iterator for each number
            yield from node_operands(item)


@dataclass(frozen=True)
class _SchemaEffects:
    names: tuple[str, ...]
    """Of the arguments, by position."""
    written: tuple[int, ...]
    aliased: tuple[int, ...]
    may_copy: bool
    random: bool
    kept: bool
    barrier: bool
    plain: bool


KEPT_NAMES = ("assert", "sym_constrain", "record_function", "_print", "check", "wait_tensor")

WAIT = "_c10d_functional::wait_tensor"

RESIZE_STORAGE = "inductor::resize_storage_bytes_"

SYMMETRIC_MEMORY = "symm_mem"
"""The namespace of operators through which ranks read and write each other's memory, some while they compute: all ranks
must call these in the same order."""

SPARSE_TENSOR_OF = re.compile(r"_?sparse_(coo|csr|csc|bsr|bsc|compressed)_tensor")
"""Operators that build a sparse tensor from indices and values. It shares their memory, which no schema says."""

KEEPS_STATISTICS = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm")


@functools.cache
def _schema_effects(overload: _private.OpOverload) -> _SchemaEffects:
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
    communicates = "c10d" in name or name.startswith(f"{SYMMETRIC_MEMORY}::")
    kept = no_result or any(part in name for part in KEPT_NAMES) or communicates
    barrier = name.startswith("profiler::") or communicates
    if name == WAIT:
        aliased = [0]  # it returns its operand, which the schema does not say
    if name == RESIZE_STORAGE:
        written = [0]  # the old contents are lost, which the schema does not say either
    makes_sparse = SPARSE_TENSOR_OF.match(name.partition("::")[2]) is not None
    if makes_sparse:
        aliased = [i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
    may_copy = vague or makes_sparse or _private.is_composite(overload)
    plain = not (written or aliased or may_copy or random or kept or barrier or name in KEEPS_STATISTICS)
    names = tuple(argument.name for argument in schema.arguments)
    return _SchemaEffects(names, tuple(written), tuple(aliased), may_copy, random, kept, barrier, plain)


def _from_schema(node: Node, overload: _private.OpOverload) -> Effects:
    known = _schema_effects(overload)
    if known.plain:
        return PURE

    def operands(indices: tuple[int, ...]) -> tuple[Node, ...]:
        nodes: list[Node] = []
        args = node.args
        for i in indices:
            value = args[i] if i < len(args) else node.kwargs.get(known.names[i])
            if isinstance(value, Node):
                nodes.append(value)
            else:
                nodes.extend(node_operands(value))
        return tuple(nodes)

    writes = operands(known.written)
    if overload._schema.name in KEEPS_STATISTICS:
        writes += _running_stats(read(node))
    random, may_copy = known.random, known.may_copy
    if random and ((call := read(node)) is not None):
        random, may_copy = not _drops_nothing(call), may_copy and returned_operand(call) is None
    aliases = operands(known.aliased) or (_shared(node) if may_copy else ())
    return Effects(writes, aliases, may_copy, random, known.kept, known.barrier)


def _shared(node: Node) -> tuple[Node, ...]:
    """Operands that share memory with the result although no schema says so: `diff` of an empty tensor returns it."""
    operands = tuple(node_operands((node.args, node.kwargs)))
    shared = [any(word != "apart" for words in sharing(fact(node), [fact(o)]) for word in words) for o in operands]
    return tuple(o for o, is_shared in zip(operands, shared) if is_shared)


def _running_stats(call: Call | None) -> tuple[Node, ...]:
    """Norms in training change their running statistics, which the schemas do not say."""
    if call is None or not any(call.get(flag) for flag in ("training", "train", "use_input_stats")):
        return ()
    stats = (call.args.get("running_mean"), call.args.get("running_var"))
    return tuple(s for s in stats if isinstance(s, Node))


@functools.cache
def _op_may_alias(op: str) -> bool:
    return is_view(op) or op in ("getattr", "to_like", "einsum") or "maybe_aliasing_or_mutating" in packet_tags(op)


RETURN_OPERAND = with_trait("returns_operand")
DROPOUTS = frozenset("dropout alpha_dropout feature_dropout feature_alpha_dropout".split())

RANDOM_NAMES = ("dropout", "multi_head_attention", "gumbel_softmax")
"""Functions written in Python that draw random numbers, which no schema says."""

PURE_MODULES = ("torch.nn.functional.", "torch.functional.", "torch._tensor.", "torch.special.")
"""Modules whose functions, written in Python, have no side effects; functions of other modules may have any."""


ALWAYS_NEW = ("torch.nn.functional.multi_head_attention_forward",)
"""Functions in `PURE_MODULES` that never return an operand."""


@functools.cache
def _op_is_random(op: str) -> bool:
    return "nondeterministic_seeded" in packet_tags(op) or any(part in op for part in RANDOM_NAMES)


def _draws(call: Call) -> bool:
    return _op_is_random(call.op.removesuffix("_")) and not _drops_nothing(call)


def _drops_nothing(call: Call) -> bool:
    """Attention and dropout are tagged random whatever their arguments; without dropout they draw nothing.

    `native_dropout` with a probability of 0 draws its mask all the same.
    """
    if "dropout_p" in op_parameters(call.op):
        return same_constant(call.get("dropout_p"), 0.0)
    never = call.op.removesuffix("_") in DROPOUTS and same_constant(call.get("p"), 0.0)
    return never or call.get("train") is False


def returned_operand(call: Call | None) -> Node | None:
    """The operand that a call returns itself, neither a copy nor a view of it: `+x`, and dropout that drops nothing.

    The fact of the call may still be a copy: that of dropout is computed by a decomposition.
    """
    if call is None or call.mutates:
        return None
    if call.op in DROPOUTS and _drops_nothing(call):
        return call.args.get("input")
    return call.args.get("self") if call.op in RETURN_OPERAND else None


def _from_call(node: Node, call: Call | None) -> Effects:
    """Effects of a torch-level call, from the schema of its operation; the worst case if the operation is unknown."""
    operands = tuple(node.all_input_nodes)
    if call is None:
        return Effects(writes=operands, aliases=operands, random=True, kept=True)
    if any(part in call.op for part in KEPT_NAMES):
        return Effects(kept=True)
    if not _has_tensor(node):
        return PURE if not call.mutates else Effects(writes=operands[:1], kept=True)
    in_python = call.op.startswith(PURE_MODULES)
    known_operation = in_python or bool(overloads(call.op)) or call.op in (
        "tensor_getitem", "getattr", "to_like", "getitem", "setitem", "not", "tensor", "rdiv"
    )  # fmt: skip
    random = _draws(call)
    if call.mutates:
        target = call.args.get("out", call.args.get("self", operands[:1]))
        written = tuple(node_operands(target)) or operands[:1]
        return Effects(written, written, random=random, kept=True)
    if call.op in ("batch_norm", "instance_norm"):
        return Effects(writes=_running_stats(call), aliases=(), random=False)
    if not known_operation:
        return Effects(writes=operands, aliases=operands, random=True, kept=True)
    if call.op.endswith((".embedding", ".embedding_bag")) and call.args.get("max_norm") is not None:
        return Effects(writes=operands, kept=True)  # rows of the weight are scaled in place
    may_alias = (in_python or _op_may_alias(call.op)) and call.op not in ALWAYS_NEW
    first = operands if in_python or call.op == "einsum" else operands[:1]
    if "maybe_aliasing_or_mutating" in packet_tags(call.op):
        first = operands
    may_copy = returned_operand(call) is None
    return Effects((), first if may_alias else _shared(node), may_copy=may_copy, random=random)


def _has_tensor(node: Node) -> bool:
    value = fact(node)
    if value is None:
        return True
    if isinstance(value, (list, tuple)):
        return any(isinstance(v, torch.Tensor) for v in value) or not value
    return isinstance(value, torch.Tensor)


FUNCTIONALISED = ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")
"""Higher-order operators that run a mutating operator on copies of its operands: the results are new memory."""


def _higher_order(node: Node) -> Effects:
    """Sub-graphs are opaque: they may draw random numbers, and at the torch level write their operands."""
    operands = tuple(node_operands((node.args, node.kwargs)))
    name = node.target.name()  # type: ignore[union-attr]
    if name in FUNCTIONALISED and "val" in node.meta:
        called: Any = node.args[0] if node.args else None
        if name.startswith("triton"):
            return Effects(kept=True)
        is_operator = isinstance(called, _private.OpOverload)
        return Effects(random=not is_operator or torch.Tag.nondeterministic_seeded in called.tags, kept=True)
    if name == "triton_kernel_wrapper_mutation":
        return Effects(writes=operands, kept=True)
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
    module = called_module(node)
    if module is not None and _private.has_hooks(module):
        return Effects(writes=operands, aliases=operands, random=True, kept=True, barrier=True)
    if isinstance(module, torch.nn.modules.dropout._DropoutNd) and not (module.inplace and module.training):
        return Effects(aliases=operands, may_copy=True, random=module.training and module.p != 0)
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return Effects(kept=module.training, barrier=module.training)
    if type(module) is torch.nn.Embedding and module.max_norm is not None:
        return Effects(operands, operands, kept=True, barrier=True)  # rows of the weight are scaled in place
    if type(module) in _PURE_MODULES:
        in_place = bool(getattr(module, "inplace", False))
        return Effects(operands if in_place else (), operands, may_copy=not in_place, kept=in_place)
    if type(module).__name__ == "GuardsFn":
        return Effects(kept=True)  # the input checks of `torch.export`: it reads the inputs and may raise
    return Effects(writes=operands, aliases=operands, random=True, kept=True)
