"""How much memory the values of a graph take at most, when its nodes run in their order."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from triptych.ir.facts import tensor_fact
from triptych.ir.program import Program
from triptych.ir.sizes import bytes_of, elements


def peak_bytes(gm: GraphModule) -> int:
    """The largest sum of memory in use; a view takes none of its own, inputs and results stay to the end."""
    memory = Program(gm).aliasing.memory
    nodes = list(gm.graph.nodes)
    sizes: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        if (tensor := tensor_fact(node)) is not None:
            sizes[memory(node)] = max(sizes.get(memory(node), 0), bytes_of(tensor))
            last[memory(node)] = i
        for operand in node.all_input_nodes:
            last[memory(operand)] = i
    held = [memory(n) for n in nodes if n.op == "placeholder"]
    last.update(dict.fromkeys(held, len(nodes)))
    live: set[Node] = set()
    peak = 0
    for i, node in enumerate(nodes):
        if tensor_fact(node) is not None:
            live.add(memory(node))
        peak = max(peak, sum(sizes[n] for n in live))
        live = {n for n in live if last[n] > i}
    return peak


def largest_value(gm: GraphModule) -> int:
    """The number of elements of the largest value that the graph computes or takes, views included."""
    return max(elements(t.shape) for n in gm.graph.nodes if (t := tensor_fact(n)) is not None)
