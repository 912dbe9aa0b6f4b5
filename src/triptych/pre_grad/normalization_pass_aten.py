"""normalization_pass_aten: one canonical spelling per operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.canonical import index_step, index_steps
from ..ir.facts import fact, tensor_fact
from ..ir.operations import operation
from ..ir.program import ATEN, Program
from ..match.pattern import Tensor
from ..rewrite.edits import Respell
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule
from ..rewrite.spelling import Spelling
from .in_place_writes import OutOfPlace, TakeResults
from .masked_writes import MaskedWrite
from .module_calls import ModuleToFunction
from .spellings import WrittenAs, require_certain, torch_level_nodes, wanted_spelling


class AddmmToLinear(Rule):
    """addmm(b, x, w.t()) -> linear(x, w, b), for a bias vector"""

    interior_may_be_used = True

    def pattern(self, op, b: Tensor, x: Tensor, w: Tensor):
        return op.addmm(b, x, op.permute(w, [1, 0]))

    def check(self, m, b):
        m.require(m.program.dialect != ATEN, "linear is not an operation of ATen graphs")
        m.require(b.rank == 1, "the bias is not a vector", at=b, wanted="1 dim", found=f"{b.rank} dims")

    def rewrite(self, op, b, x, w):
        return op.linear(x, w, bias=b)

    examples = [
        fires(lambda b, x, w: torch.addmm(b, x, w.t()), "f32[8]", "f32[4, 16]", "f32[8, 16]",
              dialects=["torch"]),
        fires(lambda b, x, w: b.addmm(x, mat2=w.T), "f64[8]", "f64[4, 16]", "f64[8, 16]", dialects=["torch"]),
        fires(lambda b, x, w: torch.addmm(b, x, w.t()), "f32[8]", "f32[4, 16]", "f32[8, 16]",
              dialects=["torch"], dynamic=True),
        declines(lambda b, x, w: torch.addmm(b, x, w.t(), alpha=2), "f32[8]", "f32[4, 16]", "f32[8, 16]"),
        declines(lambda b, x, w: torch.addmm(b, x, w), "f32[8]", "f32[4, 16]", "f32[16, 8]"),
        declines(lambda b, x, w: torch.addmm(b, x, w.t()), "f32[4, 8]", "f32[4, 16]", "f32[8, 16]",
                 dialects=["torch"], because="not a vector"),
        declines(lambda b, x, w: torch.addmm(b, x, w.t()), "f32[8]", "f32[4, 16]", "f32[8, 16]",
                 dialects=["aten"], because="ATen"),
    ]  # fmt: skip


class OperandsListed(Rule):
    """cat(x.chunk(2)) -> cat([piece, piece])"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            call = program.call(node)
            whole = call.args.get("tensors") if call is not None else None
            if isinstance(whole, Node) and isinstance(fact(whole), (list, tuple)):
                yield Match.at(program, node, whole=whole)

    def rewrite(self, op, m, whole):
        node = m.root.node
        pieces: Any = [op.getitem(whole, i).node for i in range(len(whole.fact))]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: pieces if n is whole.node else n)
        wanted = Spelling(node.op, node.target, args, kwargs)
        require_certain(m.program, node, wanted)
        return Respell(node, wanted)

    examples = [
        fires(lambda x: torch.cat(x.chunk(2)), "f32[4, 8]", dialects=["modules"]),
        declines(lambda x, y: torch.cat([x, y]), "f32[4, 8]", "f32[4, 8]"),
    ]


class IndexInSteps(Rule):
    """x[:, 1:3, 0] -> select(x[:, 1:3], 2, 0)"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            call = program.call(node)
            if call is None or call.op != "tensor_getitem":
                continue
            known = tensor_fact(call.args["self"])
            steps = index_steps(known.dim(), call.args["index"]) if known is not None else None
            if steps is not None and len(steps) > 1:
                yield Match.at(program, node, steps=_Steps(call.args["self"], steps))

    def rewrite(self, op, m, steps):
        value = steps.indexed
        for dim, entry in steps.entries:
            step = index_step(value, dim, entry)
            if step is None:
                raise Refused("the bounds of a slice are not known")
            name, args = step
            value = getattr(op, name)(**args).node
        return value

    examples = [
        fires(lambda x: (x[:, 1:3, 0], x[..., None, 2], x[-1]), "f32[2, 4, 8]", dialects=["torch"]),
        declines(lambda x: x[-1], "f32[2, 4, 8]", dialects=["torch"]),
        declines(lambda x, i: x[i], "f32[4]", "i64[2]", dialects=["torch"]),
    ]


@dataclass(frozen=True)
class _Steps:
    """An index as a sequence of steps: its entries, each with its dim."""

    indexed: Node
    entries: Sequence[tuple[int, Any]]


def _write_a_piece(x: Any) -> Any:
    pieces = torch.tensor_split(x * 2, 2)
    pieces[1].add_(1)
    return pieces[0] + pieces[1]


class OneSpelling(WrittenAs):
    """x.chunk(3, -1) -> split(x, [3, 3, 2], dim=1), and every function, method and operator in one canonical form"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            try:
                wanted = wanted_spelling(program, node)
            except Refused as refused:
                yield Match.at(program, node, problem=refused.refusal)
                continue
            if wanted is None:
                continue
            written, call = Spelling.of(node), program.call(node)
            ours = call is not None and operation(call.op).parameters is not None
            if call is not None and call.op == "split" and _slices_written(program, node):
                yield Match.at(program, node, problem="autograd forbids in-place writes to the pieces of a split")
            elif not wanted.same_function(written) or (ours and not wanted.same_arguments(written)):
                yield Match.at(program, node, wanted=wanted)

    examples = [
        fires(lambda x: x.chunk(3, -1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.split(x, 3, 1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.split((2, 6), dim=-1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.tensor_split(x, [1, 1, 5], dim=1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.unbind(-1), "f32[4, 3]", dialects=["torch"]),
        fires(lambda x, y: torch.concat((x, y), axis=1),  # type: ignore[call-arg]
              "f32[4, 8]", "f32[4, 2]", dialects=["torch"]),
        fires(lambda x, y: torch.hstack((x, y)), "f32[4, 8]", "i64[4, 2]", dialects=["torch"]),
        fires(lambda x: x.view(2, -1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.t().reshape(32), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.flatten(1), "f32[4, 8, 2]", dialects=["torch"]),
        fires(lambda x: x.flatten(1).relu(), "f32[4, 8, 2]", dialects=["torch"], dynamic=True),
        fires(lambda x: x.unflatten(-1, (2, -1)), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.squeeze(-1).unsqueeze(0), "f32[4, 1]", dialects=["torch"]),
        fires(lambda x: (x.T, x.mT, x.transpose(0, -1), x.movedim(0, 1)), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: (x.clip(0, 1), x.clamp_min(0), torch.clamp_max(x, 1)), "f32[4]", dialects=["torch"]),
        fires(lambda x: x.clamp_min(0.5), "i64[4]", dialects=["torch"]),
        fires(lambda x: (x.relu(), torch.relu(x), x.sigmoid(), F.tanh(x)), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, w: (x @ w, x.mm(w), torch.mm(x, w)), "f32[4, 8]", "f32[8, 2]", dialects=["torch"]),
        fires(lambda x, w: torch.bmm(x, w), "bf16[2, 4, 8]", "bf16[2, 8, 2]", dialects=["torch"]),
        fires(lambda x: x.detach() * 2, "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: (x + 1, 2 * x, x ** 2, x < 0, -x), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.float() + x.to("cpu"), "f16[4]", dialects=["torch"]),
        fires(lambda x: torch.zeros(4) + torch.ones_like(x), "f32[4]", dialects=["torch"]),
        # an in-place form becomes another in-place form
        fires(lambda x: F.relu(x, inplace=True), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.view(-1).add_(1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: (x * 2).view(-1).sigmoid_(), "f32[4, 8]", dialects=["torch"]),
        fires(_write_a_piece, "f32[4]", dialects=["torch"]),  # tensor_split stays: its pieces may be written
        fires(lambda x: F.dropout(x.relu(), 0.5), "f32[64]", dialects=["torch"]),
        declines(lambda x: torch.split(x, [4, 4], dim=1), "f32[4, 8]", dialects=["torch"]),
        declines(lambda x, w: torch.matmul(x, w), "f32[4, 8]", "f32[8]", dialects=["torch"]),
        declines(lambda x: torch.flatten(x), "f32[8]", dialects=["torch"], because="share"),
        declines(lambda x: x.chunk(2), "f32[4]", dialects=["torch"], dynamic=True, because="more than one operation"),
        declines(lambda x: x.view(torch.int32), "f32[4]", dialects=["torch"]),
        declines(lambda x: 3 / x, "f32[4]", dialects=["torch"]),
        declines(lambda x, i: x[i], "f32[4]", "i64[2]", dialects=["torch"]),
        declines(lambda x: x.t(), "f32[4, 8]", dialects=["aten"]),
    ]  # fmt: skip


def _slices_written(program: Program, node: Node) -> bool:
    """Are results of `tensor_split` written in place? They are separate slices, which autograd allows to be written,
    unlike the pieces of a split."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "tensor_split" and any(program.aliasing.written(piece) for piece in node.users)


RULES: Sequence[Rule] = (
    TakeResults(),
    ModuleToFunction(),
    OperandsListed(),
    IndexInSteps(),
    OneSpelling(),
    OutOfPlace(),
    MaskedWrite(),
    AddmmToLinear(),
)


@dataclass(frozen=True)
class NormalizationPassAten(Pass):
    """Writes each operation in one canonical spelling: functions, methods, operators, modules and attributes with the
    same meaning then look the same to later passes and to readers.

    An in-place operation stays in place where anything else can see the memory that it writes. ATen graphs have one
    spelling already and are left alone.
    """

    name: ClassVar[str] = "normalization_pass_aten"

    def rules(self) -> Sequence[Rule]:
        return RULES
