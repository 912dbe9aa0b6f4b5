"""normalization_pass_aten: one canonical spelling per operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.calls import Call
from ..ir.canonical import OWN_PARAMETERS, index_step, index_steps
from ..ir.facts import fact, tensor_fact
from ..ir.program import ATEN
from ..ir.traits import is_pointwise
from ..match.pattern import Tensor
from ..passes.base import Pass, PassRun
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from ..rewrite.rule import Rule
from ..rewrite.spelling import Spelling
from ..testing import declines, fires
from .masked_writes import as_copy, as_masked_fill, masked_write, writes_all, writes_by_mask
from .module_calls import function_of_module
from .spellings import respell, wanted_spelling


class AddmmToLinear(Rule):
    """addmm(b, x, w.t()) -> linear(x, w, b), for a bias vector"""

    interior_may_be_used = True

    def pattern(self, op, b: Tensor, x: Tensor, w: Tensor):
        return op.addmm(b, x, op.permute(w, [1, 0]))

    def check(self, m, b):
        m.require(m.program.dialect != ATEN, "linear is no operation of an ATen graph")
        m.require(b.rank == 1, "the bias is no vector")

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
                 dialects=["torch"], because="no vector"),
        declines(lambda b, x, w: torch.addmm(b, x, w.t()), "f32[8]", "f32[4, 16]", "f32[8, 16]",
                 dialects=["aten"], because="ATen"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (AddmmToLinear(),)


def _masked_write(x: Any, mask: Any) -> Any:
    y = x + 1
    y[mask] = -2.0
    return y


def _whole_write(x: Any, bias: Any) -> Any:
    y = x + 1
    y[:, 0:] = y[:, 0:].view(4, 2, 4).add(bias).view(4, 8)
    return y * 2


ELEMENTWISE = frozenset(["masked_fill", "tril", "triu"])
"""Written in place as pointwise operations are, and torch does not call them so."""


def _may_make_new(call: Call) -> bool:
    return call.op.endswith("_") and (is_pointwise(call.op[:-1]) or call.op[:-1] in ELEMENTWISE)


def _returns(run: PassRun, write: Node, written: Node) -> bool:
    """Does the call write this operand and return it?"""
    call = run.program.call(write)
    if call is None or not call.mutates or not _may_make_new(call) or call.args.get("self") is not written:
        return False
    return tensor_fact(write) is not None and not run.program.aliasing.surely_apart(write, written)


def _made_new(op: Emitter, call: Call) -> Any:
    """What is written in place, as a new value: computed in the wider dtype, and rounded to that of the memory."""
    made = getattr(op, call.op[:-1])(**call.args)
    written = tensor_fact(call.args["self"]) if "self" in call.args else None
    if written is None or not made.is_float or not written.dtype.is_floating_point or made.dtype == written.dtype:
        return made
    return op.to(made, dtype=written.dtype)


def _slices_written(run: PassRun, node: Node) -> bool:
    """Are there writes to the results of `tensor_split`? They are slices, which may be written, one by one."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name == "tensor_split" and any(run.program.aliasing.written(piece) for piece in node.users)


def _write_a_piece(x: Any) -> Any:
    pieces = torch.tensor_split(x * 2, 2)
    pieces[1].add_(1)
    return pieces[0] + pieces[1]


@dataclass(frozen=True)
class NormalizationPassAten(Pass):
    """One canonical spelling per operation: functions, methods, operators, modules and attributes that mean
    the same are written the same, so that passes and people see equal things as equal.

    In-place forms stay in-place where anybody else sees the memory they write. ATen graphs have one spelling already
    and are left alone.
    """

    name: ClassVar[str] = "normalization_pass_aten"

    def rules(self) -> Sequence[Rule]:
        return RULES

    def run(self, run: PassRun) -> None:
        if run.program.dialect == ATEN:
            return
        for node in list(run.program.graph.nodes):
            self._writes_in_a_row(run, node)
        for node in list(run.program.graph.nodes):
            if node.op == "call_module":
                self._module(run, node)
            self._operands(run, node)
            self._index(run, node)
            self._spelling(run, node)
            self._out_of_place(run, node)
            if not node._erased:
                masked_write(run, node)
        run.run_rules(self.rules())

    def _writes_in_a_row(self, run: PassRun, node: Node) -> None:
        """x.add_(1); x.mul_(2) -> x.add_(1).mul_(2), where x is new memory: each write has few users of its own"""
        if not run.program.aliasing.written(node) or not run.program.aliasing.is_fresh(node):
            return
        writes = {user for user in node.users if _returns(run, user, node)}
        if len(writes) > 1 and run.attempt("take_results", node, lambda: run.rewriter.take_results(node, writes)):
            run.fired("take_results")

    def _module(self, run: PassRun, node: Node) -> None:
        op = run.rewriter.emitter(node)
        try:
            wanted = function_of_module(op, node)
            if wanted is not None:
                run.rewriter.respell(node, wanted)
                run.fired("module_to_function")
        except Refused as refused:
            op.discard()
            run.declined("module_to_function", node, refused.reason)

    def _operands(self, run: PassRun, node: Node) -> None:
        """cat(x.chunk(2)) -> cat([piece, piece])"""
        call = run.program.call(node)
        whole = call.args.get("tensors") if call is not None else None
        if not isinstance(whole, Node) or not isinstance(fact(whole), (list, tuple)):
            return
        op = run.rewriter.emitter(node)
        pieces: Any = [op.getitem(whole, i).node for i in range(len(fact(whole)))]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: pieces if n is whole else n)
        if not respell(run, "operands_listed", node, Spelling(node.op, node.target, args, kwargs)):
            op.discard()

    def _index(self, run: PassRun, node: Node) -> None:
        """x[:, 1:3, 0] -> x[:, 1:3] and then select(..., 2, 0)"""
        call = run.program.call(node)
        if call is None or call.op != "tensor_getitem":
            return
        known = tensor_fact(call.args["self"])
        steps = index_steps(known.dim(), call.args["index"]) if known is not None else None
        if steps is None or len(steps) < 2:
            return

        def make(op: Emitter) -> Any:
            made = call.args["self"]
            for dim, entry in steps:
                step = index_step(made, dim, entry)
                if step is None:
                    raise Refused("the bounds of a slice are not known")
                name, args = step
                made = getattr(op, name)(**args).node
            return made

        run.replace("index_in_steps", node, make)

    def _spelling(self, run: PassRun, node: Node) -> None:
        if node._erased:
            return
        try:
            wanted = wanted_spelling(run.program, node)
        except Refused as refused:
            run.declined("one_spelling", node, refused.reason)
            return
        if wanted is None:
            return
        written = Spelling.of(node)
        call = run.program.call(node)
        ours = call is not None and call.op in OWN_PARAMETERS
        if call is not None and call.op == "split" and _slices_written(run, node):
            run.declined("one_spelling", node, "autograd lets nobody write to the pieces of a split")
            return
        if not wanted.same_function(written) or (ours and not wanted.same_arguments(written)):
            respell(run, "one_spelling", node, wanted)

    def _out_of_place(self, run: PassRun, node: Node) -> None:
        """x.relu_() -> relu(x), x[mask] = 0 -> masked_fill(x, mask, 0), x[:] = y -> y, where nobody else sees x"""
        call = run.program.call(node) if not node._erased else None
        if call is None or not call.mutates:
            return
        by_mask, whole = writes_by_mask(call), writes_all(call)
        if by_mask is None and not whole and not _may_make_new(call):
            return
        what, op = "out_of_place", run.rewriter.emitter(node, "out_of_place")

        def edit() -> None:
            try:
                if by_mask is not None:
                    made = as_masked_fill(op, call, *by_mask)
                else:
                    made = as_copy(op, call) if whole else _made_new(op, call)
            except Refused:
                op.discard()
                raise
            except Exception as error:
                op.discard()
                raise Refused(f"has no form that makes a new value: {error}") from error
            run.rewriter.write_to_new_memory(node, made, op)

        if run.attempt(what, node, edit):
            run.fired(what)

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
        fires(lambda x: (x[:, 1:3, 0], x[..., None, 2], x[-1]), "f32[2, 4, 8]", dialects=["torch"]),
        fires(lambda x: torch.zeros(4) + torch.ones_like(x), "f32[4]", dialects=["torch"]),
        # written values stay written: the in-place form becomes another in-place form
        fires(lambda x: F.relu(x, inplace=True), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.view(-1).add_(1), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: x.relu().mul_(2), "f32[4]", dialects=["torch"]),
        fires(lambda x: F.dropout(x.relu(), 0.5), "f32[64]", dialects=["torch"]),
        # but a write that nobody else sees makes a new value
        fires(lambda x: F.relu(x + 1, inplace=True), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: (x * 2).view(-1).sigmoid_(), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, y: torch.exp(x).add_(y), "bf16[4, 8]", "f32[8]", dialects=["torch"]),
        fires(lambda x: torch.exp(x).add_(1, alpha=3).clamp_(max=2).t(), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, y: x.exp().mul_(y), "f32[4, 8]", "f64[8]", dialects=["torch"]),
        fires(lambda x: (lambda y: (y.relu_(), y))(x * 2), "f32[4]", dialects=["torch"]),
        fires(lambda x, y: (x * 2).masked_fill_(y, 0), "f32[4, 8]", "bool[8]", dialects=["torch"]),
        fires(_masked_write, "f32[4, 8]", "bool[4]", dialects=["torch"]),
        fires(_whole_write, "f32[4, 8]", "f32[4]", dialects=["torch"]),
        fires(_masked_write, "f32[4, 8]", "bool[4, 8]", dialects=["torch"], dynamic=True),
        fires(lambda x, m: x.index_put((m,), x.new_tensor(2)), "f32[4, 8]", "bool[4]", dialects=["torch"]),
        fires(lambda x: (lambda y: (y.sum(), y.relu_(), y.exp(), y))(x * 2), "f32[4]", dialects=["torch"]),
        declines(lambda x: torch.split(x, [4, 4], dim=1), "f32[4, 8]", dialects=["torch"]),
        fires(_write_a_piece, "f32[4]", dialects=["torch"]),
        declines(lambda x, w: torch.matmul(x, w), "f32[4, 8]", "f32[8]", dialects=["torch"]),
        declines(lambda x: torch.flatten(x), "f32[8]", dialects=["torch"], because="share"),
        declines(lambda x: x.chunk(2), "f32[4]", dialects=["torch"], dynamic=True, because="more than one operation"),
        declines(lambda x: x.view(torch.int32), "f32[4]", dialects=["torch"]),
        declines(lambda x: 3 / x, "f32[4]", dialects=["torch"]),
        declines(lambda x, i: x[i], "f32[4]", "i64[2]", dialects=["torch"]),
        declines(lambda x: x.t(), "f32[4, 8]", dialects=["aten"]),
    ]  # fmt: skip
