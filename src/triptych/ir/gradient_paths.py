"""Which inputs a value passes its gradient on to.

Autograd gives zeros to an input whose values do not matter, as long as some path leads from it to the result, and
None to an input without a path. An optimizer tells the two apart: it decays a weight whose gradient is zero and skips
one whose gradient is None. A rewrite before autograd must therefore keep the set of inputs that have a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .calls import Call
from .effects import Effects, node_operands
from .facts import fact
from .modules import attribute, called_module
from .program import TORCH, Program
from .refusal import Refusal
from .text import RULE

Sources = int
"""A set of inputs that require a gradient: one bit for each."""

METADATA = frozenset(
    "shape size dtype device layout ndim dim numel stride storage_offset itemsize element_size requires_grad".split()
)

WALKS = 32
"""How often a program is walked to see whether an input that a rewrite cuts off has another path to the output.
After that, a rewrite that cuts one off is declined without a walk: the work stays linear in the size of the program."""


class GradientPaths:
    """The sources of every value of a program before autograd, and the inputs that the outputs depend on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._bits: dict[object, Sources] = {}
        self._names: list[str] = []
        self._grad_off: dict[Node, bool] = {}
        """For each node of the last walk: is it in a region without gradients?"""
        self._sources: dict[Node, Sources] = {}
        self._written: dict[Node, Sources] = {}
        """The sources of in-place writes, by the memory that they write."""
        self._is_stale = False
        self.walks = 0
        self.reaching: Sources = 0
        """The inputs with a gradient path to an output or to a written input."""
        self.active = program.dialect == TORCH and _follows_gradients(program)
        if self.active:
            self._sources, self._written, self.reaching = self._walk({})

    def problem(
        self, pairs: Sequence[tuple[Node, Node]], new_nodes: Iterable[Node], is_write: bool = False
    ) -> Refusal | None:
        """Why the first of each pair may not be replaced by the second; None if the same inputs keep their gradients.

        `new_nodes` are those that the rewrite adds, in order. `is_write`: the first of each pair is an in-place write,
        and the second replaces the contents of the written memory from there on.
        """
        if not self.active:
            return None
        self._refresh()
        for node in new_nodes:
            self._sources[node] = self._of(node, self._sources, self._written, self._stands_off(node))
        lost = added = 0
        for was, now in pairs:
            before, after = self.of(was), self.of(now)
            if bool(before) != bool(after):
                sentence = (
                    "the value would start to require a gradient"
                    if after
                    else "the value would no longer require a gradient"
                )
                return Refusal(sentence, at=was)
            lost |= before & ~after
            added |= after & ~before
        if extra := added & ~self.reaching:
            return self._changed(extra, pairs, wanted="None", found="zeros")
        lost_path = lost & self.reaching
        if lost_path and (lost_inputs := lost_path if is_write else lost_path & ~self._reaching_after(dict(pairs))):
            return self._changed(lost_inputs, pairs, wanted="zeros", found="None")
        self._is_stale |= bool(lost | added)
        return None

    def _changed(self, inputs: Sources, pairs: Sequence[tuple[Node, Node]], wanted: str, found: str) -> Refusal:
        """The refusal: the gradient of an input would change. It names the first pair that differs in the inputs."""
        at = next(was for was, now in pairs if (self.of(was) ^ self.of(now)) & inputs)
        sentence = f"the gradient of {self._name(inputs)} would be {{found}} instead of {{wanted}}"
        return Refusal(sentence, at, wanted, found)

    def of(self, node: Node) -> Sources:
        if node not in self._sources:
            self._sources[node] = self._of(node, self._sources, self._written, self._stands_off(node))
        return self._sources[node] | self._in_memory(node, self._written)

    def _refresh(self) -> None:
        """Recomputes the sources of all values after a rewrite that changed those of one."""
        if self._is_stale:
            self._sources, self._written, _ = self._walk({})
            self._is_stale = False

    def _reaching_after(self, replaced: Mapping[Node, Node]) -> Sources:
        self.walks += 1
        return self._walk(replaced)[2] if self.walks <= WALKS else 0

    def _walk(self, replaced: Mapping[Node, Node]) -> tuple[dict[Node, Sources], dict[Node, Sources], Sources]:
        """The sources of all values, of written memory, and of the outputs; an operand in `replaced` is read as its
        replacement."""
        sources: dict[Node, Sources] = {}
        written: dict[Node, Sources] = {}
        aliasing = self.program.aliasing
        reaching: Sources = 0
        is_off, outside = not torch.is_grad_enabled(), False
        switches = _private.region_functions()
        for node in self.program.graph.nodes:
            if node.op == "output":
                reaching |= self._joined(node_operands(node.args), sources, written, replaced)
                break
            switch = switches.get(node.target) if node.op == "call_function" else None
            if switch == "set_grad_enabled":
                is_off = not node.args[0]
            elif switch == "enter_inference_mode":
                is_off, outside = bool(node.args[0]) or is_off, is_off
            elif switch == "exit_inference_mode":
                is_off = outside
            self._grad_off[node] = is_off
            sources[node] = self._of(node, sources, written, is_off, replaced)
            if not aliasing.any_write:
                continue
            for target in () if is_off else _differentiable_writes(aliasing.effects(node), node):
                stored = self._joined(node.all_input_nodes, sources, written, replaced)
                memory = aliasing.memory(target)
                written[memory] = written.get(memory, 0) | stored
                if aliasing.is_input(target):
                    reaching |= stored
        return sources, written, reaching

    def _of(
        self,
        node: Node,
        sources: Mapping[Node, Sources],
        written: Mapping[Node, Sources],
        is_off: bool,
        replaced: Mapping[Node, Node] = {},  # noqa: B006 (never written)
    ) -> Sources:
        if node.op in ("placeholder", "get_attr"):
            return self._own(node)
        carries = not is_off and self._may_carry(node)
        if not carries:
            return 0
        reached = self._joined(self._operands(node), sources, written, replaced)
        if node.op == "call_module":
            reached |= self._of_module(node)
        if not reached and carries and RULE not in node.meta and _requires_grad(fact(node)):
            reached = self._bit(node, node.name)  # `torch.ones(4, requires_grad=True)`
        return reached

    def _may_carry(self, node: Node) -> bool:
        """Can a gradient flow through the value? The fact of a captured value says so. That of a value added by a rule
        does not, so its operation and dtype decide."""
        value = fact(node)
        if RULE not in node.meta and value is not None:
            return _requires_grad(value)
        call = self.program.call(node)
        if call is not None and (_cuts(call.op) or _reads_metadata(call)):
            return False
        return value is None or any(v.dtype.is_floating_point or v.dtype.is_complex for v in _tensors(value))

    def _operands(self, node: Node) -> Iterable[Node]:
        """The operands that may get a gradient. `x.expand_as(y)` is read as `expand` of x: y only gives a shape."""
        call = self.program.call(node)
        if call is None or call.op.startswith("higher"):
            return node.all_input_nodes
        return node_operands(call.args["self"] if call.op == "to_like" else call.args)

    def _joined(
        self,
        nodes: Iterable[Node],
        sources: Mapping[Node, Sources],
        written: Mapping[Node, Sources],
        replaced: Mapping[Node, Node],
    ) -> Sources:
        reached = 0
        for node in nodes:
            read = replaced.get(node, node)
            reached |= sources[read] if read in sources else self.of(read)
            if written:
                reached |= self._in_memory(read, written)
        return reached

    def _in_memory(self, node: Node, written: Mapping[Node, Sources]) -> Sources:
        return written.get(self.program.aliasing.memory(node), 0) if written else 0

    def _stands_off(self, node: Node) -> bool:
        """Is a node in a region without gradients? A new node is in the same region as the next node that the last walk
        has seen."""
        one = node
        while one not in self._grad_off and one.op != "output":
            one = one.next
        return self._grad_off.get(one, False)

    def _own(self, node: Node) -> Sources:
        if node.op == "placeholder":
            value = fact(node)
            return self._bit(node, node.name) if value is None or _requires_grad(value) else 0
        try:
            tensor = attribute(self.program.gm, node.target)
        except AttributeError:
            return 0
        return self._of_tensor(tensor, str(node.target))

    def _of_module(self, node: Node) -> Sources:
        module = called_module(node)
        if module is None:
            return self._bit(node, node.name)
        reached = 0
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            reached |= self._of_tensor(tensor, f"{node.target}.{name}")
        return reached

    def _of_tensor(self, tensor: Any, name: str) -> Sources:
        """The bit is keyed by the tensor: one weight may be read by a `get_attr` node and by a called module."""
        return self._bit(id(tensor), name) if _requires_grad(tensor) else 0

    def _bit(self, key: object, name: str) -> Sources:
        if key not in self._bits:
            self._bits[key] = 1 << len(self._bits)
            self._names.append(name)
        return self._bits[key]

    def _name(self, sources: Sources) -> str:
        return self._names[sources.bit_length() - 1]


def _differentiable_writes(seen: Effects, node: Node) -> Iterable[Node]:
    """The operands that the node writes in a way that autograd follows: `x.add_(y)`, `x[i] = y`. Writes to the running
    statistics of a batch norm, and those of a custom operator to operands that it does not return, carry no gradient.
    """
    return seen.writes if fact(node) is None else [target for target in seen.writes if target in seen.aliases]


def _follows_gradients(program: Program) -> bool:
    """Does any value that the program computes require a gradient, or could it?"""
    computed = [n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    if not computed:
        return False
    if any(_requires_grad(fact(n)) for n in computed):
        return True
    return torch.is_grad_enabled() and all(fact(n) is None for n in computed)


def _cuts(op: str) -> bool:
    """Does the operation block gradients? `detach` does, and constructors that only read an operand's metadata."""
    return op == "detach" or op.startswith("new_") or (op.endswith("_like") and op != "to_like")


def _reads_metadata(call: Call) -> bool:
    """`x.shape`, `x.size(0)`: metadata of a tensor, not its elements."""
    name = call.args.get("index") if call.op == "getattr" else call.op
    return isinstance(name, str) and name in METADATA


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, torch.Tensor)]


def _requires_grad(value: Any) -> bool:
    return any(v.requires_grad for v in _tensors(value))
