"""Writing operations: a canonical call in the dialect of the graph it goes into.

`op.reshape(x, [4, 8])` becomes `torch.reshape(x, [4, 8])` in a torch-level graph and `aten.view` (or a copy and
`aten._unsafe_view`, where the strides do not allow a view) in an ATen graph.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import _private
from ..errors import UnknownName
from ..ir.calls import op_parameters
from ..ir.facts import set_fact
from ..ir.modules import add_constant
from ..ir.operation_names import require_count, unknown_operation
from ..ir.operations import operation, with_trait
from ..ir.program import ATEN, Program, Value
from ..ir.schema import REQUIRED, keyword_only, overloads
from ..ir.text import RULE
from ..ir.traits import is_commutative
from .dialects import special_form
from .refusal import Refused

aten = torch.ops.aten

STRIDES_RELIED_ON = "eager_input_vals"
"""Meta key of a Triton kernel launch: the arguments as fake tensors. The kernel gets the strides of its operands as
numbers, so Inductor must give the operands exactly these strides; without this key it only preserves their order."""

STALE_META = (
    "val", "example_value", "tensor_meta", "unbacked_bindings", STRIDES_RELIED_ON, "arg_kwarg_vals",
)  # fmt: skip
"""Meta keys that describe a node's own value: they are not copied to a new node."""

SIZE_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Pow": operator.pow, "PowByNatural": operator.pow,
}  # fmt: skip
"""The Python operators that compute symbolic sizes, by the class name of the symbolic expression."""

AS_TENSOR_OVERLOAD = with_trait("number_as_tensor")


class Emitter:
    """`op` in a rewrite: calling an operation by name inserts a node for it into the graph."""

    def __init__(self, program: Program, anchor: Node, rule: str) -> None:
        self.program = program
        self.anchor = anchor
        self.rule = rule
        self.made: list[Node] = []
        self._others: list[Emitter] = []

    def at(self, anchor: Node, rule: str = "") -> Emitter:
        """An emitter that inserts nodes at another position of the graph; it is discarded with this one."""
        other = Emitter(self.program, anchor, rule or self.rule)
        self._others.append(other)
        return other

    def __getattr__(self, name: str) -> Callable[..., Value]:
        params = op_parameters(name)
        if not params:
            raise unknown_operation(name)

        def build(*args: Any, **kwargs: Any) -> Value:
            require_count(name, args, list(params))
            bound = {**dict(zip(params, args)), **kwargs}
            for key in kwargs:
                if key not in params:
                    raise UnknownName(f"parameter of {name}", key, params)
            plain = {k: self._plain(v) for k, v in bound.items() if not (v is None and params[k] is None)}
            form = special_form(self.program.dialect, name)
            if form is not None:
                return form(self, plain)
            return self.aten(name, plain) if self.program.dialect == ATEN else self._torch(name, plain)

        return build

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """A node that calls one particular function, for operations without a canonical name."""
        return self.node("call_function", target, self._plain(args), self._plain(kwargs))

    def call_returning(self, value: Any, target: Any, *args: Any) -> Value:
        """Like `call`, for a caller that knows the fact of the result; it is computed if `value` is None."""
        return self.node("call_function", target, self._plain(args), {}, value)

    def attribute(self, path: str) -> Node:
        """A tensor of the graph's module, such as a parameter: an earlier node that reads it, or a new one."""
        for node in self.program.graph.find_nodes(op="get_attr", target=path):
            if node < self.anchor:
                return node
        return self.node("get_attr", path, (), {}).node

    def constant(self, value: torch.Tensor) -> Node:
        """A tensor that is known at compile time. It becomes a buffer of the graph's module, so that it is copied to
        its device only once."""
        names = (f"constant_{number}" for number in self.program.constant_numbers)
        name = next(n for n in names if not hasattr(self.program.gm, n))
        add_constant(self.program.gm, name, value)
        return self.attribute(name)

    def again(self, node: Node, operands: Mapping[Node, Node]) -> Value:
        """A copy of the call that a node makes, with the same spelling and source line, on other operands."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: operands.get(n, n))
        value = self.node(node.op, node.target, args, kwargs)
        value.node.meta |= {k: v for k, v in node.meta.items() if k not in (*STALE_META, RULE)}
        return value

    # ---- making nodes ----

    def _plain(self, value: Any) -> Any:
        """The argument with values replaced by their nodes, and symbolic sizes by nodes that compute them."""
        if isinstance(value, Value):
            return value.node
        if isinstance(value, (list, torch.Size)):
            return [self._plain(v) for v in value]
        if isinstance(value, tuple):
            return tuple(self._plain(v) for v in value)
        if isinstance(value, dict):
            return {k: self._plain(v) for k, v in value.items()}
        if isinstance(value, torch.SymInt):
            return self.size_node(value)
        return value

    def size_node(self, size: torch.SymInt) -> Any:
        """A node that computes a size, or the number if the size is constant."""
        if size.node.is_constant():
            return int(size)
        return self._expression(size.node.expr)

    def _expression(self, expr: Any) -> Any:
        """A node that computes a symbolic size: an existing one, or else new arithmetic on existing ones."""
        if expr.is_Integer:
            return int(expr)
        for node, dim in self.program.size_sources(expr, self.anchor):
            if dim is None:
                return node
            if self.program.dialect == ATEN:
                return self.node("call_function", aten.sym_size.int, (node, dim), {}).node
            return self.node("call_method", "size", (node, dim), {}).node
        combine = SIZE_ARITHMETIC.get(type(expr).__name__)
        if combine is not None:
            parts = [self._expression(part) for part in expr.args]
            return functools.reduce(lambda a, b: self.node("call_function", combine, (a, b), {}).node, parts)
        raise Refused(f"no node computes the size {expr}")

    def node(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None
    ) -> Value:
        """A new node; its fact is computed unless it is given."""
        graph = self.program.graph
        with graph.inserting_before(self.anchor):
            node = graph.create_node(kind, target, args, kwargs)
        self.made.append(node)
        node.meta = {k: v for k, v in self.anchor.meta.items() if k not in STALE_META}
        node.meta[RULE] = self.rule
        if value is None:
            value = self.program.compute(node)
        if value is not None:
            set_fact(node, value, self.program.fact_key)
        self.program.added(node)
        return Value(self.program, node)

    def drop_last(self) -> None:
        """Erase the newest node: its value could not be computed, and another form is tried."""
        node = self.made.pop()
        self.program.erased(node)
        self.program.graph.erase_node(node)

    def discard(self) -> None:
        """Erase all nodes that this emitter and those created by `at` have made, users before their operands."""
        emitters = [self]
        for emitter in emitters:
            emitters += emitter._others
        for node in sorted((n for e in emitters for n in e.made if not n._erased), reverse=True):
            self.program.erased(node)
            self.program.graph.erase_node(node)
        for emitter in emitters:
            emitter.made.clear()

    # ---- the two dialects ----

    def _torch(self, name: str, bound: dict[str, Any]) -> Value:
        row = operation(name)
        if _number_first(bound):
            if is_commutative(name) and set(bound) == {"self", "other"}:
                bound = {"self": bound["other"], "other": bound["self"]}
            elif row.operator is not None and name != "div" and len(bound) == 2:  # `3 / x` is `rdiv`, not `div`
                return self.node("call_function", row.operator, tuple(bound.values()), {})
        dim = bound.get("dim")
        if isinstance(dim, list) and len(dim) == 1:
            bound = {**bound, "dim": dim[0]}
        if name.endswith("_") and hasattr(torch.Tensor, name):
            return self.node("call_method", name, *_split_arguments(name, bound))
        target = row.torch or getattr(torch, name, None) or getattr(F, name, None)
        args, kwargs = _split_arguments(name, bound)
        if target is not None and not isinstance(target, str):
            if "tensors" in bound and _takes_any_number(target):
                args = tuple(a for arg in args for a in (arg if isinstance(arg, list) else (arg,)))
            return self.node("call_function", target, args, kwargs)
        if hasattr(torch.Tensor, target or name):
            return self.node("call_method", target or name, args, kwargs)
        return self.aten(name, bound)

    def aten(self, name: str, bound: dict[str, Any]) -> Value:
        packets = overloads(name)
        if not packets and "." in name:
            namespace, _, rest = name.partition(".")
            packet = getattr(getattr(torch.ops, namespace), rest)
            return self.node("call_function", packet.default, *_split_arguments(name, bound))
        if name in AS_TENSOR_OVERLOAD and isinstance(bound.get("self"), Node):
            packets = tuple(s for s in packets if s.overload._overloadname == "Tensor") + packets
        for sig in packets:
            if sig.mutates or set(bound) - set(sig.by_name):
                continue
            as_tensor = name in AS_TENSOR_OVERLOAD and sig.overload._overloadname == "Tensor"
            if sig.bind((), bound, check=not as_tensor) is None:
                continue
            if _private.is_composite(sig.overload) and not self.program.has_composites:
                continue
            # by position up to the first argument left out, by keyword from there
            by_position = list(itertools.takewhile(lambda p: not p.keyword_only and p.name in bound, sig.params))
            args = tuple(bound[p.name] for p in by_position)
            by_name = {p.name: bound[p.name] for p in sig.params[len(args) :] if p.name in bound}
            return self.node("call_function", sig.overload, args, by_name)
        raise Refused(f"{name} has no form in an ATen graph for these arguments")


def _number_first(bound: dict[str, Any]) -> bool:
    return not isinstance(bound.get("self"), Node) and any(isinstance(v, Node) for v in bound.values())


def _split_arguments(name: str, bound: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Required arguments are passed by position, the rest by keyword."""
    by_keyword = keyword_only(name)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = True
    for key, default in op_parameters(name).items():
        positional &= default is REQUIRED and key not in by_keyword
        if key not in bound:
            continue
        if positional:
            args.append(bound[key])
        else:
            kwargs[key] = bound[key]
    return tuple(args), kwargs


@functools.cache
def _takes_any_number(target: Any) -> bool:
    """`torch.einsum(how, *tensors)`: a function written in Python that takes its tensors one by one."""
    if not inspect.isfunction(target):
        return False
    return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(target).parameters.values())
