"""Calling conventions: graphs that take or return nested values, compiled as ones of flat tuples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from . import _private

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_flat(gm: GraphModule, example_inputs: Sequence[Any], compile: Compile) -> Callable[..., Any]:
    """Compile a graph as one that returns a flat tuple; the callable has the graph's own form again.

    A graph from Dynamo has that form already. One from `torch._dynamo.export` keeps nested inputs and outputs in
    its generated code, one made by hand returns what it likes.
    """
    nested = gm.graph._codegen
    if isinstance(nested, _private.PyTreeCodeGen):
        gm.graph.set_codegen(CodeGen())
        gm.recompile()
        inner = compile_flat(gm, nested.process_inputs(*example_inputs), compile)

        def call_nested(*args: Any) -> Any:
            return nested.process_outputs(inner(*nested.process_inputs(*args)))

        return call_nested

    output = gm.graph.output_node()
    returned = _plain(output.args[0])
    if _is_flat_tuple(returned) or _is_multi_output(returned):
        return compile(gm, example_inputs)

    leaves, spec = _private.pytree.tree_flatten(returned)
    output.args = (tuple(leaves),)
    gm.recompile()
    compiled = compile(gm, example_inputs)

    def call(*args: Any) -> Any:
        return _private.pytree.tree_unflatten(compiled(*args), spec)

    return call


def return_each_once(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a graph that returns a flat tuple return no value twice; what comes back gives its callable the old form.

    Of one tensor returned twice, AOTAutograd may make two: two views of the same memory.
    """
    output = gm.graph.output_node()
    returned = output.args[0]
    if not isinstance(returned, (tuple, list)):
        return lambda compiled: compiled
    nodes = list(dict.fromkeys(r for r in returned if isinstance(r, Node)))
    if len(nodes) == sum(isinstance(r, Node) for r in returned):
        return lambda compiled: compiled
    once = [*nodes, *(r for r in returned if not isinstance(r, Node))]
    others = iter(range(len(nodes), len(once)))
    places = [nodes.index(r) if isinstance(r, Node) else next(others) for r in returned]
    output.args = (tuple(once),)
    gm.recompile()

    def with_repeated(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            results = compiled(*args)
            return tuple(results[place] for place in places)

        return call

    return with_repeated


def _is_flat_tuple(returned: Any) -> bool:
    return isinstance(returned, tuple) and not any(isinstance(x, (tuple, list, dict)) for x in returned)


def _is_multi_output(returned: Any) -> bool:
    """One operation that returns several tensors: a flat tuple once it runs."""
    schema = getattr(returned.target, "_schema", None) if isinstance(returned, Node) else None
    return schema is not None and len(schema.returns) > 1


def _plain(value: Any) -> Any:
    """FX's immutable lists and dicts as Python's own, which is what the graph returns when it runs."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if isinstance(value, tuple):
        return tuple(_plain(x) for x in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
