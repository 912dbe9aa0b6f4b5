"""`bmm_to_mm`: a batched product with a batch of one becomes a plain matrix product."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, tensor_fact
from ..ir.program import Program, Value
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Rule


class BmmToMm(Rule):
    """bmm(a, b) -> unsqueeze(mm(squeeze(a), squeeze(b))), where both are batches of one; up to rounding

    The cost model is not asked, because the new form cannot lose: the views cost nothing, and both products are one
    launch that reads and writes the same bytes. A plain product has more and better kernels on a GPU, the rules for
    biases and padding look for plain products, and views around the product that added the batch dim cancel. On a CPU
    the product itself costs the same in both forms.
    """

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor):
        return op.matmul(a, b)

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        left = tensor_fact(call.args.get("self"))
        return left is None or (left.dim() == 3 and known(left.shape[0] == 1))

    def check(self, m, a, b):
        m.applies(a.rank == 3 and b.rank == 3 and known(a.shape[0] == 1) and known(b.shape[0] == 1))

    def rewrite(self, op, a, b):
        return op.unsqueeze(op.matmul(_matrix(op, a), _matrix(op, b)), 0)

    examples = [
        fires(lambda a, b: torch.bmm(a, b), "f32[1, 4, 8]", "f32[1, 8, 2]"),
        fires(lambda a, b: a @ b, "bf16[1, 4, 8]", "bf16[1, 8, 2]"),
        fires(lambda a, b: a.bmm(b.transpose(1, 2)), "f32[1, 4, 8]", "f32[1, 2, 8]"),
        fires(lambda a, b: torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0), "f32[4, 8]", "f32[8, 2]"),
        fires(lambda a, b: torch.bmm(a, b), "f32[1, 4, 0]", "f32[1, 0, 2]"),
        fires(lambda a, b: torch.bmm(a[:1], b[:1]), "f32[3, 4, 8]", "f32[3, 8, 2]", dynamic=True),
        declines(lambda a, b: torch.bmm(a, b), "f32[2, 4, 8]", "f32[2, 8, 2]"),
        declines(lambda a, b: torch.bmm(a, b), "f32[3, 4, 8]", "f32[3, 8, 2]", dynamic=True),
        declines(lambda a, b: a @ b, "f32[1, 4, 8]", "f32[3, 8, 2]", dialects=("torch",)),
        declines(lambda a, b: a @ b, "f32[4, 8]", "f32[8, 2]"),
    ]


def _matrix(op: Emitter, batch: Value) -> Value:
    """The one matrix of a batch. A transpose is applied after the squeeze, so that the squeeze directly follows the
    view that added the batch dim, and the two cancel."""
    call = batch.call
    if call is not None and call.op == "permute" and list(call.args["dims"]) == [0, 2, 1]:
        return op.permute(op.squeeze(call.args["self"], dim=[0]), [1, 0])
    return op.squeeze(batch, dim=[0])
