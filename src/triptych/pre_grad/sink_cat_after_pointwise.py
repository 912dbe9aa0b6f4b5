"""sink_cat_after_pointwise: one pointwise operation over the joined tensor, instead of one over each part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Moved, Work, bytes_of
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_of
from ..ir.program import Value
from ..ir.schema import same_constant
from ..ir.traits import is_commutative, is_gemm, is_pointwise, is_random
from ..pieces.blocks import Block, neighbours_joined
from ..pieces.plan import plan
from ..pieces.read import way_of
from ..rewrite.emit import Emitter
from ..rewrite.examples import Example, declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

EXACT = frozenset(
    "relu neg abs sign sqrt reciprocal square floor ceil round trunc add sub mul div clamp leaky_relu threshold "
    "nan_to_num isnan isinf isfinite logical_not bitwise_not eq ne lt le gt ge to".split()
)
"""Operations that round as IEEE 754 says, or only select values. Others (`sigmoid`, `gelu`, a `maximum` of zeros, the
gradient of `hardtanh` at NaN) give other bits in a vectorised loop than in the scalar code for the last elements of a
tensor, so that the result depends on the position of an element."""

NOT_SUNK = frozenset("clone fill copy where dropout".split())


class Sink(Rule, ABC):
    """cat([f(a), f(b)], dim) -> f(cat([a, b], dim)); the same for stack"""

    allowed: bool = True
    """The user allows the last bits to differ, or they cannot differ."""

    @abstractmethod
    def takes(self, call: Call) -> bool:
        """Is it one of the operations this rule is for?"""

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim) | op.stack(tensors, dim=dim)

    def check(self, m: Match, tensors: Any) -> None:
        m.applies(isinstance(tensors, (list, tuple)) and len(tensors) > 1, "fewer than two operands")
        calls = [t.call for t in tensors]
        counted = [c.op for c in calls if c is not None and not c.mutates and self.takes(c)]
        name = counted[0] if counted else ""
        m.applies(counted.count(name) > 1, "no pointwise operation on several operands")
        other = next((t for t in tensors if t.call is None or t.call.op != name), None)
        part = f"only {counted.count(name)} of {len(calls)} operands are {name}"
        m.require(counted.count(name) == len(calls), part, at=other)
        repeated = next((t for t, times in Counter(tensors).items() if times > 1), None)
        m.require(repeated is None, f"a {name} would be computed twice", at=repeated)
        for t in tensors:
            m.require_no_other_user(t)
        operands = [Value(m.program, n) for n in _own_operands(m, calls)]
        m.require(_has_dim(operands, m), "dim is out of range, which only a cat of empty 1-D tensors allows")
        _require_no_change(m, operands, tensors)
        m.require(self.allowed, f"the last bits of {name} may depend on an element's position: see the option rounding")
        self._require_profit(m, operands, tensors)
        m.cover(t.node for t in tensors)

    def _require_profit(self, m: Match, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """One kernel saves the launches of the others, but operands that are not adjacent in memory must be copied
        first. With a code generator the result of a GEMM needs no copy."""
        # a code generator computes a pointwise operation into its place in the cat, which then costs nothing
        fused = m.program.options.codegen != "eager"
        reads, writes = ([bytes_of(t) for v in values if (t := v.tensor) is not None] for values in (operands, results))
        if _are_adjacent(m, operands):
            copies = []
        elif fused:  # a GEMM writes into the cat as well
            copies = [2 * r for a, r in zip(operands, reads) if not is_gemm(a.op or "")]
        else:
            copies = [2 * sum(reads)]
        device = tensor_of(m.root.node).device
        apart = Work.of(device, [Moved(r + w) for r, w in zip(reads, writes)])
        joined = Work.of(device, Moved(sum(reads) + sum(writes)), map(Moved, copies))
        m.pays(apart if fused else apart + Moved(2 * sum(writes)), joined)

    def rewrite(self, op: Emitter, m: Match, tensors: Any, dim: Any) -> Any:
        operands = _own_operands(m, [t.call for t in tensors])
        joined = (op.cat if m.root.op == "cat" else op.stack)(operands, dim=dim)
        return op.again(tensors[0].node, {operands[0]: joined.node})


def _has_dim(operands: Sequence[Value], m: Match) -> bool:
    rank = len(operands[0].shape) + (m.root.op == "stack")
    return isinstance(m["dim"], int) and -rank <= m["dim"] < rank


def _are_adjacent(m: Match, operands: Sequence[Value]) -> bool:
    """Are the operands pieces that together make up an existing value, or a part of it that is a view?"""
    ways = [way_of(m.program, v.node) for v in operands]
    dim = m["dim"]
    stacked = m.root.op == "stack"
    blocks = [Block(w.map.unsqueeze(dim) if stacked else w.map, (w,)) for w in ways if w is not None and w.nodes]
    if len(blocks) < len(operands):
        return False
    joined = neighbours_joined(blocks, dim)
    steps = plan(joined[0].map) if len(joined) == 1 else None
    return steps is not None and all(name in ("slice", "select", "unsqueeze", "squeeze") for name, _ in steps)


def _own_operands(m: Match, calls: Sequence[Call]) -> list[Node]:
    """For each call the one operand in which the calls differ. Requires that all other arguments are equal, and that
    none of them is a tensor."""
    arguments = [_tensor_first(c) for c in calls]
    first = arguments[0]
    for value, args in zip(m["tensors"], arguments):
        m.require(args.keys() == first.keys(), "different arguments", at=value, wanted=[*first], found=[*args])
    differing = [k for k in first if not all(_alike(args[k], first[k]) for args in arguments)]
    m.require(differing, "one value joined with itself")
    m.require(len(differing) == 1, "different arguments", wanted="one that differs", found=differing)
    operands = [args[differing[0]] for args in arguments]
    number = next((i for i, n in enumerate(operands) if not isinstance(n, Node)), None)
    if number is not None:
        m.require(False, "different arguments", at=m["tensors"][number], wanted="a tensor", found=operands[number])
    other = next((v for k, v in first.items() if k != differing[0] and isinstance(v, Node)), None)
    m.require(other is None, "another tensor is an operand too", at=other)
    return operands


def _tensor_first(call: Call) -> dict[str, Any]:
    """The arguments, with the tensor first if the operation is commutative: `2 * x` is read as `x * 2`."""
    args = call.args
    if is_commutative(call.op) and not isinstance(args["self"], Node):
        return {**args, "self": args["other"], "other": args["self"]}
    return args


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, Node) or isinstance(right, Node):
        return left is right
    return same_constant(left, right)


def _require_no_change(m: Match, operands: Sequence[Value], results: Sequence[Value]) -> None:
    """Requires that joining the operands is equivalent to joining the results and moves no more bytes: no cast, no
    broadcast, no wider dtype."""
    for a, fa in zip(operands, results):
        m.require(a.known and fa.known, "shape and dtype are not known", at=fa)
        m.require(known_equal(a.shape, fa.shape), "{at} is broadcast", at=a, wanted=fa.shape, found=a.shape)
        dtype, device = operands[0].dtype, operands[0].device
        m.require(a.dtype == dtype, "different dtypes {wanted} and {found}", at=a, wanted=dtype, found=a.dtype)
        m.require(a.device == device, "different devices {wanted} and {found}", at=a, wanted=device, found=a.device)
        converted = "{found} is converted to {wanted} by the concatenation"
        m.require(fa.dtype == m.root.dtype, converted, at=fa, wanted=m.root.dtype, found=fa.dtype)
    narrower = operands[0].dtype.itemsize > m.root.dtype.itemsize
    larger = "elements of {found} would be moved instead of {wanted}"
    m.require(not narrower, larger, at=operands[0], wanted=m.root.dtype, found=operands[0].dtype)


def _eager(examples: Sequence[Example]) -> list[Example]:
    """The examples without code generation: every operation is a separate kernel, with a launch to save."""
    return [replace(e, options={**e.options, "codegen": "eager"}) for e in examples]


class SinkJoin(Sink):
    """cat([f(a), f(b)], dim) -> f(cat([a, b], dim)), for f that rounds alike everywhere; the same for stack"""

    def takes(self, call: Call) -> bool:
        plain = "alpha" not in call.args and (call.op != "to" or call.args.keys() == {"self", "dtype"})
        return call.op in EXACT and plain

    examples = _eager([
        fires(lambda a, b: torch.cat([a.relu(), b.relu()]), "f32[3, 4]", "f32[2, 4]"),
        fires(lambda a, b: torch.cat((F.relu(a), torch.relu(b)), -1), "f32[4, 3]", "f32[4, 2]"),
        fires(lambda a, b: torch.stack([a * 2, 2 * b], dim=1), "f32[3, 4]", "f32[3, 4]"),
        fires(lambda a, b, c: torch.hstack([a.clamp(0, 1), b.clip(0, 1), torch.clamp(c, min=0, max=1)]),
              "f32[3]", "f32[2]", "f32[4]"),
        fires(lambda a, b: torch.cat([1 - a, 1 - b]), "f32[3]", "f32[2]"),
        fires(lambda a, b: torch.cat([a.float(), b.to(torch.float32)]), "bf16[3]", "bf16[2]"),
        fires(lambda a, b: torch.cat([a > 0, torch.gt(b, 0)]), "u8[3]", "u8[2]"),
        fires(lambda a, b: torch.cat([a.relu(), b.relu()], 1), "f32[4, 3]", "f32[4, 2]", dynamic=True),
        fires(lambda a, b: torch.cat([a.neg().relu(), b.neg().relu()]), "f32[3]", "f32[2]"),
        fires(lambda a, b: torch.cat([-a, -b]).add_(1), "f32[3]", "f32[2]", dialects=["torch"]),
        fires(lambda a, b: torch.cat([-a, -b]), "f32[0, 3]", "f32[2, 3]"),
        fires(lambda x: torch.cat([t.sqrt() for t in x.square().chunk(2)]), "f32[4, 3]"),
        fires(lambda a, b: torch.cat([a.t().abs(), b.t().abs()]), "f32[3, 4]", "f32[3, 2]"),
        declines(lambda a, b: torch.cat([a.relu(), b.neg()]), "f32[3]", "f32[2]"),
        declines(lambda a, b, c: torch.cat([a.relu(), b.relu(), c]), "f32[3]", "f32[2]", "f32[2]",
                 because="only 2 of 3"),
        declines(lambda a, b: torch.cat([a * 2, b * 3]), "f32[3]", "f32[2]", because="different arguments"),
        declines(lambda a, b: torch.cat([1 - a, b - 1]), "f32[3]", "f32[2]", because="different arguments"),
        declines(lambda a, b, c: torch.cat([a * c, b * c]), "f32[3]", "f32[3]", "f32[3]", because="another tensor"),
        declines(lambda a, b: torch.cat([a.sigmoid(), b.sigmoid()]), "f32[3]", "f32[2]"),
        declines(lambda a, b: (y := a.relu(), torch.cat([y, b.relu()])), "f32[3]", "f32[2]", because="used elsewhere"),
        declines(lambda a, b: (y := a.relu(), torch.cat([y, b.relu()]), y + 1)[1:], "f32[3]", "f32[2]",
                 because="used elsewhere"),
        declines(lambda a: (y := a.relu(), torch.cat([y, y]))[1], "f32[3]", because="twice"),
        declines(lambda a: torch.cat([a.relu(), a.relu()]), "f32[3]", because="joined with itself", dialects=["torch"]),
        declines(lambda a, b: torch.cat([a.half(), b.half()]), "f32[3]", "f32[2]", because="moved instead"),
        declines(lambda a, b: torch.cat([a.float(), b.float()]), "f16[3]", "bf16[2]", because="different dtypes"),
        declines(lambda a, b: torch.cat([a.relu(), b.relu()]), "f32[3]", "f64[2]", because="converted"),
        declines(lambda a, b: (y := a.relu(), z := b.relu(), a.add_(1), torch.cat([y, z]))[-1], "f32[3]", "f32[2]",
                 dialects=["torch"], because="in between"),
        declines(lambda a, b: torch.cat([a.relu_(), b.relu_()]), "f32[3]", "f32[2]", dialects=["torch"]),
    ]) + [
        # a code generator fuses each with the cat already, which is free
        fires(lambda a, b, w: torch.cat([(a @ w).relu(), (b @ w).relu()]), "f32[3, 4]", "f32[2, 4]", "f32[4, 5]"),
        fires(lambda x: torch.cat([p.relu() for p in x.split(2, 1)], 1), "f32[4, 6]"),
        fires(lambda x: torch.stack([row * 2 for row in x.unbind()[1:]]), "f32[4, 6]"),
        declines(lambda a, b: torch.cat([a.relu(), b.relu()]), "f32[3, 4]", "f32[2, 4]", because="would cost"),
        declines(lambda x: torch.cat([p.relu() for p in reversed(x.split([2, 4], 1))], 1), "f32[4, 6]",
                 because="would cost"),
    ]  # fmt: skip


class SinkJoinUpToRounding(Sink):
    """cat([f(a), f(b)], dim) -> f(cat([a, b], dim)), for any pointwise f; up to rounding"""

    exact = False

    def __init__(self, rounding: bool = True) -> None:
        self.allowed = rounding

    def takes(self, call: Call) -> bool:
        plain = call.op != "to" and call.op not in NOT_SUNK
        return plain and call.op not in EXACT and is_pointwise(call.op) and not is_random(call.op)

    examples = _eager([
        fires(lambda a, b: torch.cat([a.sigmoid(), b.sigmoid()]), "f32[3]", "f32[2]"),
        fires(lambda a, b: torch.cat([F.gelu(a, approximate="tanh"), F.gelu(b, approximate="tanh")], 1),
              "f32[4, 3]", "f32[4, 2]"),
        fires(lambda a, b: torch.stack([F.silu(a), F.silu(b)], -1), "f32[3, 4]", "f32[3, 4]", dynamic=True),
        fires(lambda a, b: torch.cat([a ** 2.5, b ** 2.5]), torch.linspace(0.1, 0.9, 3), torch.linspace(0.1, 0.9, 2)),
        declines(lambda a, b: torch.cat([F.gelu(a), F.gelu(b, approximate="tanh")]), "f32[3]", "f32[2]",
                 because="different arguments", dialects=["torch"]),
        declines(lambda a, b: torch.cat([F.dropout(a), F.dropout(b)]), "f32[3]", "f32[2]", dialects=["torch"]),
        declines(lambda a, b: torch.cat([a.tanh(), b.tanh().relu()]), "f32[3]", "f32[2]"),
        fires(lambda a, b: torch.cat([a.tanh(), b.tanh()]), torch.zeros(3), torch.zeros(2)),
        declines(lambda a, b: torch.cat([a.tanh(), b.tanh()]), "f32[3]", "f32[2]", settings={"rounding": False},
                 because="the option rounding"),
    ])  # fmt: skip


@dataclass(frozen=True)
class SinkCatAfterPointwise(Pass):
    """Replaces a `cat` or `stack` of the results of one pointwise operation by that operation over the joined operands,
    where that pays.

    With the option `rounding`, it also takes operations whose last bits depend on the position of an element in its
    tensor.
    """

    name: ClassVar[str] = "sink_cat_after_pointwise"
    rounding: bool = False

    def rules(self) -> Sequence[Rule]:
        return (SinkJoin(), SinkJoinUpToRounding(self.rounding))
