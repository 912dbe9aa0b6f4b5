"""Masks that a forward would keep for its backward, beside the values they are comparisons of."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .ir.effects import effects

COMPARISONS = frozenset(getattr(torch.ops.aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne"))


def compute_masks_again(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """A boolean value that is kept for the backward, though it is a comparison of another one that is kept as well, is
    computed there; of one that is kept as a view (a permuted relu), the value itself is kept.

    The partitioner takes a view for another value, and then keeps both. A comparison costs nothing in a kernel that
    reads its operand anyway; written to memory and read again it takes longer than all the rest.
    """
    output = forward.graph.output_node()
    kept = _returned(output)[results:]
    inputs = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    for mask in [n for n in kept if isinstance(n, Node) and _is_comparison(n)]:
        (compared,) = mask.all_input_nodes
        views = [n for n in kept if isinstance(n, Node) and compared in _behind_views(n) and n.name in inputs]
        written = any(compared in effects(user).writes for user in compared.users)
        if not views or written or mask.name not in inputs:
            continue
        held = compared if compared in views else views[0]
        _take_from(backward, compared, held, mask, inputs)
        _return_instead(output, {held: compared, mask: None}, results)
        for node in (mask, *_behind_views(held)):
            if not node.users and node.op == "call_function":
                forward.graph.erase_node(node)
        kept = _returned(output)[results:]
    forward.recompile()
    backward.recompile()


def _returned(output: Node) -> list[Any]:
    returned: Any = output.args[0]
    return list(returned)


def _is_comparison(node: Node) -> bool:
    return node.op == "call_function" and node.target in COMPARISONS and len(node.all_input_nodes) == 1


def _behind_views(node: Node) -> list[Node]:
    """A value, what it is a view of, and so on; only views by numbers."""
    chain = [node]
    while node.op == "call_function" and effects(node).aliases and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        chain.append(node)
    return chain


def _take_from(backward: GraphModule, source: Node, held: Node, mask: Node, inputs: dict[str, Node]) -> None:
    """Let the backward take `source`, and make of it the view `held` and the comparison `mask` that it took."""
    graph, taken = backward.graph, inputs.pop(held.name)
    chain = _behind_views(held)
    chain = list(reversed(chain[: chain.index(source)]))
    if chain:
        with graph.inserting_before(taken):
            inputs[source.name] = graph.placeholder(source.name)
        inputs[source.name].meta = dict(source.meta)
    else:
        inputs[source.name] = taken
    made = {source: inputs[source.name]}
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in (*chain, mask):
        with graph.inserting_before(first):
            made[node] = graph.node_copy(node, made.__getitem__)
    replaced = {mask: inputs.pop(mask.name), **({held: taken} if chain else {})}
    for node, placeholder in replaced.items():
        placeholder.replace_all_uses_with(made[node], propagate_meta=False)
        graph.erase_node(placeholder)


def _return_instead(output: Node, instead: dict[Node, Node | None], results: int) -> None:
    """Change what a forward returns for its backward; None: nothing."""
    returned = _returned(output)
    changed = [instead.get(n, n) if i >= results and isinstance(n, Node) else n for i, n in enumerate(returned)]
    stays = [i for i, n in enumerate(changed) if n is not None or returned[i] is None]
    output.args = (tuple(changed[i] for i in stays),)
    if isinstance(described := output.meta.get("desc"), (list, tuple)) and len(described) == len(changed):
        output.meta["desc"] = [described[i] for i in stays]
