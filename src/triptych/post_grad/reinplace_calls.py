"""Calls custom operators and user Triton kernels that write their operands on the operands, not on copies."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _private
from ..ir.effects import node_operands
from ..ir.facts import fact, same_strides, tensor_of
from ..ir.overwriting import LaterUses, Operands, Overwrite, overwrite
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..kernels.capture import no_constants
from ..rewrite.edits import WriteInPlace
from ..rewrite.emit import STRIDES_RELIED_ON, Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten

# ---- for examples: `x * 2` stands for an operator, or a kernel, that doubles x in place ----


@functools.cache
def _double() -> Any:
    @torch.library.custom_op("triptych_examples::double", mutates_args=("x",))
    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    return torch.ops.triptych_examples.double.default


class _DoubleKernel:
    """Stands for a Triton kernel in examples, on any device: it has the attributes that a graph needs."""

    arg_names = ("x",)

    def __getitem__(self, grid: Any) -> Any:
        return lambda x: x.mul_(2)


DOUBLE_KERNEL = _DoubleKernel()


def _as_operator(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        kwargs = {"_x_base_index": 0, "_all_bases": [node.args[0]]}
        _replace(graph, node, _private.auto_functionalized_v2, (_double(),), kwargs, 1, (None, fact(node)))


def _as_kernel(graph: Graph) -> None:
    table = _private.kernel_side_table
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        kwargs = {
            "kernel_idx": table.add_kernel(DOUBLE_KERNEL), "constant_args_idx": no_constants(),
            "grid": [(1,)], "tma_descriptor_metadata": {}, "kwargs": {"x": node.args[0]}, "tensors_to_clone": ["x"],
        }  # fmt: skip
        functional = _private.triton_kernel_wrapper_functional
        _replace(graph, node, functional, (), kwargs, "x", {"x": fact(node)})


def _replace(
    graph: Graph, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, value: Any
) -> None:
    with graph.inserting_before(node):
        call = graph.call_function(target, args, kwargs)
        result = graph.call_function(operator.getitem, (call, key))
    call.meta["val"], result.meta["val"] = value, fact(node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _used_again(x: Any) -> Any:
    y = x.relu()
    return y * 2, y + 1


def _written_back(x: Any) -> Any:
    x.mul_(2)
    return x.sum()


OPERATOR: dict[str, Any] = {"dialects": ("aten",), "prepare": _as_operator}
KERNEL: dict[str, Any] = {"dialects": ("aten",), "prepare": _as_kernel}


# ---- the rules ----


@dataclass(frozen=True)
class _Call:
    """A functionalised call: which operands it writes, and which it only reads."""

    node: Node
    written: dict[Any, Any]
    """The operands that are written, by the key under which the call returns the new value of each."""
    read: Sequence[Node]
    """The operands that are only read."""

    def plan(self, later: LaterUses) -> Match:
        """A match with the operands that can be written in place, or with the reason why there are none."""
        program = later.program
        elements = {u.args[1]: u for u in self.node.users if u.target is operator.getitem and u.args[0] is self.node}
        if len(elements) != len(self.node.users):
            return Match.at(program, self.node, problem="the results are used as a whole")
        plans: dict[Any, Overwrite] = {}
        refusal = Refusal("it writes no tensor")
        operands = Operands(program, self.written.values(), self.read, inlines=False)
        for key, destination in self.written.items():
            if destination is None:
                continue
            plan = overwrite(later, elements.get(key), destination, operands)
            if isinstance(plan, Refusal):
                refusal = plan
            else:
                plans[key] = plan
        if not plans:
            return Match.at(program, self.node, problem=refusal)
        return Match.at(program, self.node, call=self, plans=plans, taken=elements)


def _operands(op: Emitter, call: _Call, plans: dict[Any, Overwrite]) -> dict[Any, Any]:
    """The tensors that the call is to write: the operands themselves where that is proved safe, otherwise copies."""
    return {key: value if value is None or key in plans else _copied(op, value) for key, value in call.written.items()}


def _copied(op: Emitter, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copied(op, v) for v in value]
    copy = op.call(aten.clone.default, value).node
    if not same_strides(tensor_of(value), tensor_of(copy)):
        raise Refused("a copy of {at} would have different strides", at=value)
    return copy


def _result(m: Match, outputs: dict[Any, Any], written: dict[Any, Any]) -> WriteInPlace:
    plans = m.bindings["plans"]
    now = {**outputs, **written}
    results = [(node, now[key]) for key, node in m.bindings["taken"].items()]
    copies_back = [p.copy_back for p in plans.values() if p.copy_back is not None]
    return WriteInPlace(m.root.node, results, copies_back)


class ReinplaceCustomOperators(Rule):
    """_, y = auto_functionalized(f, x) -> f(x), y is x

    An operator that writes x is called on x itself, not on a copy, where x meets the conditions of
    `reinplace_indexed_writes`. Operands for which this cannot be proved, and lists of tensors, are copied as before.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        names = ("auto_functionalized", "auto_functionalized_v2")
        if not any(_is_call_of(n, names) for n in program.graph.nodes):
            return
        later = LaterUses(program)
        for node in later.walk():
            if not _is_call_of(node, names):
                continue
            if not isinstance(node.args[0], _private.OpOverload):
                yield Match.at(program, node, problem="it does not call an operator")
                continue
            yield _functionalised(node).plan(later)

    def rewrite(self, op, m):
        node, call = m.root.node, m.bindings["call"]
        function = node.args[0]
        written = _operands(op, call, m.bindings["plans"])
        kwargs = dict(node.kwargs)
        if _takes_bases(node):
            del kwargs["_all_bases"]
            bases = list(written.values())
            views = _private.views_of_bases(
                function, kwargs
            )  # removes the arguments that describe the views from `kwargs`
            kwargs.update({name: _regenerated(op, view, bases) for name, view in views.items()})
        else:
            kwargs.update(zip(_written_names(function), written.values()))
        result = op.call(function, **kwargs).node
        count = len(function._schema.returns)
        outputs = {
            key: result if count == 1 else op.call(operator.getitem, result, key).node
            for key in m.bindings["taken"]
            if key not in written
        }
        return _result(m, outputs, written)

    examples = [
        fires(lambda x: x.relu() * 2, "f32[4, 8]", **OPERATOR),
        fires(_written_back, "f32[4, 8]", **OPERATOR),
        declines(_used_again, "f32[4, 8]", because="is used afterwards", **OPERATOR),
        declines(lambda x: x * 2, "f32[4, 8]", because="is an input", **OPERATOR),
    ]


def _functionalised(node: Node) -> _Call:
    function: Any = node.args[0]
    first = max(1, len(function._schema.returns))
    if _takes_bases(node):
        bases: Any = node.kwargs.get("_all_bases", ())
        written = list(bases)
        read = [v for k, v in node.kwargs.items() if k != "_all_bases"]
    else:
        names = _written_names(function)
        written = [node.kwargs[name] for name in names]
        read = [v for k, v in node.kwargs.items() if k not in names]
    return _Call(node, dict(enumerate(written, first)), list(node_operands(read)))


def _takes_bases(node: Node) -> bool:
    """Is it the second form of `auto_functionalized`, in which written operands are views of separate bases?"""
    return node.target.name().endswith("_v2")  # type: ignore[union-attr]


def _written_names(function: Any) -> list[str]:
    return [a.name for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _regenerated(op: Emitter, view: Any, bases: Sequence[Any]) -> Any:
    """Recreates an operand as a view of its base tensor."""
    if view is None:
        return None
    if isinstance(view, list):
        return [_regenerated(op, v, bases) for v in view]
    base = bases[view.base_index]
    if hasattr(view, "storage_offset"):
        return op.call(aten.as_strided.default, base, view.size, view.stride, view.storage_offset).node
    if hasattr(view, "dim"):
        return op.call(aten.slice.Tensor, base, view.dim, view.start, view.end).node
    return base


class ReinplaceTritonKernels(Rule):
    """y = triton_kernel_wrapper_functional(kernel, x)["x"] -> triton_kernel_wrapper_mutation(kernel, x), y is x

    A user's Triton kernel that writes x is launched on x itself, under the same conditions as in
    `reinplace_custom_operators`.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        names = ("triton_kernel_wrapper_functional",)
        if not any(_is_call_of(n, names) for n in program.graph.nodes):
            return
        later = LaterUses(program)
        for node in later.walk():
            if _is_call_of(node, names):
                yield _launched(node).plan(later)

    def rewrite(self, op, m):
        node, call = m.root.node, m.bindings["call"]
        written = _operands(op, call, m.bindings["plans"])
        settings = {k: v for k, v in node.kwargs.items() if k != "tensors_to_clone"}
        launch = op.call(
            _private.triton_kernel_wrapper_mutation, **{**settings, "kwargs": {**settings["kwargs"], **written}}
        )
        if STRIDES_RELIED_ON in node.meta:
            args, kwargs = node.meta[STRIDES_RELIED_ON]
            launch.node.meta[STRIDES_RELIED_ON] = (
                args, {k: v for k, v in kwargs.items() if k != "tensors_to_clone"}
            )  # fmt: skip
        return _result(m, {}, written)

    examples = [
        fires(lambda x: x.relu() * 2, "f32[4, 8]", **KERNEL),
        fires(_written_back, "f32[4, 8]", **KERNEL),
        declines(_used_again, "f32[4, 8]", because="is used afterwards", **KERNEL),
        declines(lambda x: x * 2, "f32[4, 8]", because="is an input", **KERNEL),
    ]


def _launched(node: Node) -> _Call:
    operands: Any = node.kwargs["kwargs"]
    names: Any = node.kwargs["tensors_to_clone"]
    read = [v for k, v in operands.items() if k not in names]
    return _Call(node, {name: operands[name] for name in names}, list(node_operands(read)))


def _is_call_of(node: Node, names: Sequence[str]) -> bool:
    return isinstance(node.target, _private.HigherOrderOperator) and node.target.name() in names
