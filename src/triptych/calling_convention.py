"""Calling conventions: graphs that take or return nested values are compiled as graphs that return flat tuples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from . import _private
from .ir.alias import Aliasing
from .ir.calls import read
from .ir.effects import effects, returned_operand
from .ir.facts import is_static, storage, tensor_fact

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_flat(gm: GraphModule, example_inputs: Sequence[Any], compile: Compile) -> Callable[..., Any]:
    """Compile a graph as one that returns a flat tuple; the callable takes and returns what the graph did.

    A graph from Dynamo returns a flat tuple already. One from `torch._dynamo.export` has nested inputs and outputs in
    its generated code, and one that was built by hand may return anything.
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


def has_negated_views(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Is an input, or a tensor of the graph's module, a view with the negative bit, whose values are the negated values
    in memory, such as `z.conj().imag`? Dynamo guards this."""
    given = [*_private.pytree.tree_leaves(example_inputs), *gm.parameters(), *gm.buffers()]
    return any(isinstance(value, Tensor) and value.is_neg() for value in given)


def returns_overlap(gm: GraphModule) -> bool:
    """Does the graph write inputs that overlap in memory, and return them or views of them? AOTAutograd merges inputs
    that overlap into one, and would make the views of one of them from the merged input."""
    by_storage: dict[int, list[Node]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (key := storage(tensor_fact(node))) is not None:
            by_storage.setdefault(key, []).append(node)
    shared = [nodes for nodes in by_storage.values() if len(nodes) > 1]
    if not shared:
        return False
    aliasing = Aliasing(gm.graph)
    return any(
        aliasing.written(nodes[0]) and aliasing.is_output(nodes[0]) and _may_overlap([tensor_fact(n) for n in nodes])
        for nodes in shared
    )


def _may_overlap(tensors: Sequence[Any]) -> bool:
    """May two tensors of one storage share an element? False only where each ends before the next one begins."""
    if not all(is_static((*t.shape, *t.stride(), t.storage_offset())) for t in tensors):
        return True
    end = 0
    for tensor in sorted(tensors, key=lambda t: t.storage_offset() * t.itemsize):
        start = tensor.storage_offset() * tensor.itemsize
        if tensor.numel() and start < end:
            return True
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        end = max(end, start + (last + 1) * tensor.itemsize if tensor.numel() else 0)
    return False


def take_plain_tensors(compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Wraps a callable so that it gets tensors of a subclass with `__torch_function__` as plain tensors.

    The captured graph contains what that function did. If operations of the graph ran on the subclass, the function
    would be called again, and AOTAutograd refuses such tensors where it inspects operations that run.
    """
    places = [place for place, value in enumerate(example_inputs) if _has_torch_function(value)]
    if not places:
        return compiled

    def call(*args: Any) -> Any:
        plain = list(args)
        for place in places:
            plain[place] = args[place].as_subclass(Tensor)
        return compiled(*plain)

    return call


def _has_torch_function(value: Any) -> bool:
    """Does its class override calls of functions, but not calls of operators, which AOTAutograd would trace?"""
    kind = type(value)
    return (
        issubclass(kind, Tensor)
        and kind is not Tensor
        and kind.__torch_function__ is not _private.disabled_torch_function
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def keep_identities(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Change a graph that returns a flat tuple so that it returns no value twice.

    Returns a function that wraps the compiled callable: wherever the graph returned the same tensor object, or two
    different ones, the wrapped callable does so, too. Without it, AOTAutograd may turn a tensor that is returned twice
    into two views of the same memory, and Inductor may turn two views of all of the same memory into one tensor.
    """
    output = gm.graph.output_node()
    returned = output.args[0]
    if not isinstance(returned, (tuple, list)):
        return lambda compiled: compiled
    objects: dict[Node, Node] = {}
    for value in returned:
        if isinstance(value, Node):
            objects.setdefault(_object(value), value)
    nodes = list(objects.values())
    alike = _alike(nodes)
    if len(nodes) == sum(isinstance(r, Node) for r in returned) and not alike:
        return lambda compiled: compiled
    once = [*nodes, *(r for r in returned if not isinstance(r, Node))]
    others = iter(range(len(nodes), len(once)))
    places = [nodes.index(objects[_object(r)]) if isinstance(r, Node) else next(others) for r in returned]
    output.args = (tuple(once),)
    gm.recompile()

    def with_identities(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            results = list(compiled(*args))
            for first, second in alike:
                if results[first] is results[second]:
                    results[second] = results[second].view_as(results[second])
            return tuple(results[place] for place in places)

        return call

    return with_identities


def _object(node: Node) -> Node:
    """The node that computed the tensor object which this node returns: `y.add_(1)` is y, `y.contiguous()` may be y.

    Passes remove calls that return their operand, except in a program that changes the shape of a tensor in place.
    """
    while (operand := _operand_returned(node)) is not None:
        node = operand
    return node


def _operand_returned(node: Node) -> Node | None:
    call = read(node)
    if call is not None and call.mutates and call.op.endswith("_"):
        written = call.args.get("self")
        return written if isinstance(written, Node) else None
    if (operand := returned_operand(call)) is not None:
        return operand
    if node.op == "placeholder" or (value := tensor_fact(node)) is None:
        return None
    # in tracing, the operation returned the same fake tensor object as one of its operands
    return next((operand for operand in effects(node).aliases if tensor_fact(operand) is value), None)


def _alike(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """The positions of pairs of values that are views of the same memory with the same dtype and shape."""
    earlier: dict[Any, int] = {}
    pairs = []
    for place, node in enumerate(nodes):
        if (value := tensor_fact(node)) is None or not is_static(value.shape) or node.op == "placeholder":
            continue
        key = (storage(value), value.dtype, tuple(value.shape))
        if key in earlier:
            pairs.append((earlier[key], place))
        earlier[key] = place
    return pairs


def _is_flat_tuple(returned: Any) -> bool:
    return isinstance(returned, tuple) and not any(isinstance(x, (tuple, list, dict)) for x in returned)


def _is_multi_output(returned: Any) -> bool:
    """Is it one operation that returns several tensors? When it runs, these are a flat tuple."""
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
