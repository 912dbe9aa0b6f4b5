"""Edits of a forward and its backward together: the values that the forward saves and the backward reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from ..ir.effects import effects
from ..ir.partitioned import Backward, backward_of
from .edits import SoundByRule

if TYPE_CHECKING:
    from .emit import Emitter
    from .rewriter import Rewriter


def behind_views(node: Node) -> list[Node]:
    """A value, the value that it is a view of, and so on; only through views that have no other node as an argument."""
    chain = [node]
    while node.op == "call_function" and effects(node).aliases and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        chain.append(node)
    return chain


@dataclass(frozen=True)
class KeepInstead(SoundByRule):
    """The forward saves `source` for the backward, instead of its view `held` and of `computed`; the backward then
    recomputes both from it."""

    source: Node
    held: Node
    computed: Node

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        program = rewriter.program
        backward = backward_of(program.gm)
        assert backward is not None
        self._take(backward)
        output = program.graph.output_node()
        rewriter.set_arguments(output, (self._kept(output, backward.results),), {})
        rewriter.erase_unused((self.computed, *behind_views(self.held)))
        backward.gm.recompile()

    def _take(self, backward: Backward) -> None:
        """Make `source` an input of the backward, which recomputes its former inputs from it."""
        graph, inputs = backward.gm.graph, backward.inputs
        old_input, chain = inputs[self.held.name], behind_views(self.held)
        chain = list(reversed(chain[: chain.index(self.source)]))
        new_input = old_input
        if chain:
            with graph.inserting_before(old_input):
                new_input = graph.placeholder(self.source.name)
            new_input.meta = dict(self.source.meta)
        copies = {self.source: new_input}
        first = next(n for n in graph.nodes if n.op != "placeholder")
        for node in (*chain, self.computed):
            with graph.inserting_before(first):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        replaced = {self.computed: inputs[self.computed.name], **({self.held: old_input} if chain else {})}
        for node, placeholder in replaced.items():
            placeholder.replace_all_uses_with(copies[node], propagate_meta=False)
            graph.erase_node(placeholder)

    def _kept(self, output: Node, results: int) -> tuple[Any, ...]:
        """The values that the forward returns now; updates their descriptions in the meta of the output."""
        returned: Any = output.args[0]
        instead = {self.held: self.source, self.computed: None}
        changed = [instead.get(n, n) if i >= results and isinstance(n, Node) else n for i, n in enumerate(returned)]
        stays = [i for i, n in enumerate(changed) if n is not None or returned[i] is None]
        if isinstance(described := output.meta.get("desc"), (list, tuple)) and len(described) == len(changed):
            output.meta["desc"] = [described[i] for i in stays]
        return tuple(changed[i] for i in stays)
