"""`recompute_between_products`: `B2B_GEMM_PASS` for the forward of a training step, whose backward then computes the
middle matrix again.

The partitioner never recomputes a product: it has the forward save the matrix between two products, or what the
function between them is applied to, so the forward would write it all the same. Here the forward gets the kernel while
forward and backward are still one graph. The values between the two products then belong to the backward alone, and
they are marked so that the partitioner does not have the forward compute and save them after all.

What that costs: without the kernel, the forward computes both products, with a pass over the middle matrix between
them, and the backward reads what was written anyway. With it, the forward runs the kernel, and the backward computes
the first product once more. The function costs the backward nothing where only pointwise kernels read its values, since
these compute it from the product; where a product reads its result, the result is written once more.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from ..cost import Moved, Work
from ..ir.effects import effects
from ..ir.facts import POLICY, known_equal, numel, tensor_fact, tensor_of
from ..ir.halves import Halves
from ..ir.program import Program
from ..ir.readers import readers
from ..ir.refusal import Refusal
from ..ir.schema import argument_key
from ..ir.traits import is_pointwise, is_reduction
from ..rewrite.edits import Annotate, ReplaceAll, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule
from ..rules import two_products
from ..rules.two_products import TwoProducts, require_far_larger, require_sizes

BACKWARD_HOOK = "has_backward_hook"
"""Meta key of a value with a backward hook, under compiled autograd: the partitioner saves it, whatever it is told."""

ALWAYS: dict[str, Any] = {"settings": {"always": True}, "dialects": ("joint",)}


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype).requires_grad_()


A, B, C = _ones(9, 4), _ones(4, 40), _ones(40, 3)
BIAS, LAST = _ones(40), _ones(3)
HALVES = [t.detach().bfloat16().requires_grad_() for t in (A, B, C)]


def _checkpointed(a: Any, b: Any, c: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda a: F.relu(a @ b) @ c, a, use_reentrant=False).sin()


def _with_hooks(graph: torch.fx.Graph) -> None:
    """Marks products as Dynamo marks values with a backward hook."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.meta[BACKWARD_HOOK] = True


@dataclass(frozen=True)
class RecomputeBetweenProducts(Rule):
    """mm(f(mm(A, B) + bias), C), whose backward reads a value in between -> triptych.b2b_gemm(A, B, C, bias, f) in the
    forward; the backward computes the values in between again; up to rounding

    The forward applies f to numbers that are not rounded to 16 bits, the backward to rounded ones, as without the rule.
    """

    always: bool = False
    """On every device, whatever it costs: for tests of the rewrite itself."""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        if not program.is_joint or not two_products.NAMES.isdisjoint(program.options.remove_passes):
            return
        graph = _Joint(program)
        for node in list(program.graph.nodes):
            if node._erased or not (self.always or two_products.is_on_gpu(node)):
                continue
            found = TwoProducts.read(program, node)
            if found is not None and not graph.halves.is_backward(node) and any(found.uses_elsewhere):
                yield found.match(program, graph.problem(found), found=found)

    def check(self, m, found):
        kernel = require_sizes(m)
        if self.always:
            return
        require_far_larger(m, kernel)
        device, middle = m.root.device, kernel.middle.bytes
        again = kernel.first, Moved(_written_again(m.program, found) * middle, launches=0)
        m.pays(Work.of(device, kernel.apart, held=middle), Work.of(device, kernel, again))

    def rewrite(self, op, m, found):
        kernel = Replacement((m.root.node,), two_products.fused(op, m), op, m.nodes, self)
        again = [Annotate(node, POLICY, CheckpointPolicy.MUST_RECOMPUTE) for node in found.middle.nodes]
        return Together([ReplaceAll([kernel], is_one=True), *again])

    examples = [
        fires(lambda a, b, c: F.relu(a @ b) @ c, A, B, C, **ALWAYS),
        fires(lambda a, b, c: F.gelu(a @ b) @ c, A, B, C, **ALWAYS),
        fires(lambda x, w, v, c, d: F.linear(F.silu(F.linear(x, w, v)), c, d), A, _ones(40, 4), BIAS, _ones(3, 40),
              LAST, **ALWAYS),
        fires(lambda a, b, c: a @ torch.tanh(b @ c), _ones(3, 40), _ones(40, 4), _ones(4, 9), **ALWAYS),
        fires(lambda a, b, c: F.relu(a @ b) @ c, *HALVES, **ALWAYS),
        # only the operand of the first product gets a gradient: the backward reads a comparison of the middle matrix
        fires(lambda a, b, c: F.relu(a @ b) @ c, A, B.detach(), C.detach(), **ALWAYS),
        fires(lambda a: F.relu(a[:, :1].expand(a.shape[0], 4).exp() @ torch.ones(4, 40)) @ torch.ones(40, 3), A,
              **ALWAYS, dynamic=True),
        declines(lambda a, b: (y := F.relu(a @ b)) @ y, A, _ones(4, 9), because="used elsewhere, by mm", **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b).float() @ c, *HALVES[:2], C, because="the products are", **ALWAYS),
        declines(lambda a, b, c: ((y := F.relu(a @ b)) @ c, y.sum()), A, B, C, because="relu is used elsewhere, by sum",
                 **ALWAYS),
        declines(lambda a, b, c: (F.relu(a @ b) @ c, (a @ b).sum()), A, B, C,
                 because="the forward computes it a second time", **ALWAYS),
        declines(_checkpointed, A, B, C, because="in a checkpointed region", **ALWAYS),
        # the backward reads nothing in between: a matter for B2B_GEMM_PASS, after the partition
        declines(lambda a, b, c, d: F.relu(a @ b) @ c + d, A.detach(), B.detach(), C.detach(), LAST, **ALWAYS),
        declines(lambda a, b, c: ((y := F.relu(a @ b)) @ c, y), A, B, C, because="relu is used elsewhere, by output",
                 **ALWAYS),
        declines(lambda a, b, c: F.dropout(F.relu(a @ b), 0.5) @ c, A, B, C, **ALWAYS),
        declines(lambda a, b, c: (a @ b).softmax(-1) @ c, A, B, C, **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b) @ c, _ones(9, 300), _ones(300, 40), C, because="the ends", **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b) @ c, A, B, C, prepare=_with_hooks, because="a backward hook", **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b) @ c, A, B, C, dialects=("joint",)),  # on a GPU only
        declines(lambda a, b, c: F.relu(a @ b) @ c, A, B, C, **ALWAYS, options={"remove_passes": ["B2B_GEMM_PASS"]}),
        declines(lambda a, b, c: F.relu(a @ b) @ c, A, B, C, **ALWAYS, options={"remove_passes": ["fused_products"]}),
    ]  # fmt: skip


class _Joint:
    """What is known of a joint graph, computed when a first site asks for it.

    Rewrites only take uses away from values between products, and the nodes that they add belong to the forward: it
    stays true that what is a node of the backward here is one.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    @functools.cached_property
    def halves(self) -> Halves:
        return Halves.of(self.program.graph)

    @functools.cached_property
    def equal(self) -> dict[Node, list[Node]]:
        """For each node, all nodes that compute the same from the same inputs: the partitioner makes them one."""
        first: dict[Any, Node] = {}
        same: dict[Node, Node] = {}
        members: dict[Node, list[Node]] = defaultdict(list)
        for node in self.program.graph.nodes:
            key: Any = node
            if node.op == "call_function" and effects(node).pure:
                arguments = map_arg((node.args, node.kwargs), same.__getitem__)
                key = (node.target, argument_key(arguments))
            same[node] = first.setdefault(key, node)
            members[same[node]].append(node)
        return {node: members[one] for node, one in same.items()}

    def problem(self, found: TwoProducts) -> Refusal | None:
        """Why the forward must keep the middle matrix, or may have to."""
        product = found.middle.product.node
        for used, user in found.uses_elsewhere:
            if not self.halves.is_backward(user):
                return two_products.used_elsewhere(used, user)
        twin = next((n for n in self.equal[product] if n is not product and not self.halves.is_backward(n)), None)
        if twin is not None:
            return Refusal("the forward computes it a second time, as {found}", product, found=twin)
        spare = list(self._spare_readers(found))
        nodes = (*found.middle.nodes, found.outer.node, *spare)
        if checkpointed := next((n for n in nodes if n.meta.get(POLICY) is not None), None):
            return Refusal("{at} is in a checkpointed region, which says itself what is computed again", checkpointed)
        if hooked := next((n for n in found.middle.nodes if n.meta.get(BACKWARD_HOOK)), None):
            return Refusal("{at} has a backward hook, for which the partitioner saves it", hooked)
        size = numel(tensor_of(product).shape)
        for node in spare:
            if (value := tensor_fact(node)) is None or not known_equal(numel(value.shape), size):
                return Refusal("{at} may be saved instead, and the forward would compute the product for it", node)
        return None

    def _spare_readers(self, found: TwoProducts) -> Iterator[Node]:
        """What is computed from values between the products, and not from gradients, for the backward alone."""
        work = [user for _, user in found.uses_elsewhere]
        seen = set(work)
        while work:
            node = work.pop()
            if node in self.halves.spare:
                yield node
                work += (new := [u for u in node.users if u not in seen])
                seen.update(new)


# ---- what it costs ----


def _written_again(program: Program, found: TwoProducts) -> int:
    """How many times the backward reads or writes a matrix of the middle one's size to apply the function again.

    A kernel of the backward that is pointwise or a reduction applies it to the product as it reads that. For a reader
    of another kind, such as a product, a kernel writes the result: one that runs anyway, or one that must read the
    product for this alone.
    """
    inside = {*found.middle.nodes, found.outer.node}
    fusible, others = False, False
    for node in found.middle.nodes:
        for reader in readers(program, node):
            if reader not in inside:
                call = program.call(reader)
                can_fuse = call is not None and (is_pointwise(call.op) or is_reduction(call.op))
                fusible |= can_fuse
                others |= not can_fuse and node is not found.middle.product.node
    return 0 if not others else 1 if fusible else 2


@dataclass(frozen=True)
class RecomputeBetweenProductsPass(Pass):
    """In the forward of a training step, fuses two products with a pointwise function between them into one kernel
    that never writes the matrix between them, where it pays that the backward computes that matrix again."""

    name = "recompute_between_products"

    def rules(self) -> Sequence[Rule]:
        return (RecomputeBetweenProducts(),)
