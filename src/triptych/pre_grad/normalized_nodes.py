"""The operands of linear layers and matrix products, whatever their spelling, for passes that inspect nodes."""

from __future__ import annotations

from torch.fx import Node

from ..errors import TriptychError
from ..ir.calls import Call, read
from ..ir.facts import tensor_fact


class NormalizedMatmulNode:
    """A product of two tensors: `@`, `torch.matmul`, `mm`, `bmm`, as a function, a method or in ATen."""

    def __init__(self, node: Node) -> None:
        call = read(node)
        if call is None or call.op != "matmul" or call.mutates:
            raise TriptychError(f"{node.name} is not a product of two tensors")
        self.node = node
        self._input, self._other = call.args["self"], call.args["other"]

    def get_input(self) -> Node:
        return self._input

    def get_other(self) -> Node:
        return self._other


class NormalizedLinearNode:
    """A linear layer: `F.linear`, or `addmm(bias, x, weight.t())`; the weight is (out, in) in both."""

    def __init__(self, node: Node) -> None:
        parts = linear_parts(read(node))
        if parts is None:
            raise TriptychError(f"{node.name} is not a linear layer")
        self.node = node
        self._input, self._weight, self._bias = parts

    def get_input(self) -> Node:
        return self._input

    def get_weight(self) -> Node:
        return self._weight

    def get_bias(self) -> Node | None:
        return self._bias


def linear_parts(call: Call | None) -> tuple[Node, Node, Node | None] | None:
    """Input, weight (out, in) and bias of a call that is a linear layer."""
    if call is None or call.mutates:
        return None
    if call.op == "linear":
        return call.args["input"], call.args["weight"], call.args.get("bias")
    if call.op == "addmm" and set(call.args) == {"self", "mat1", "mat2"}:
        bias, weight = tensor_fact(call.args["self"]), turned_matrix(call.args["mat2"])
        if bias is not None and bias.dim() == 1 and weight is not None:
            return call.args["mat1"], weight, call.args["self"]
    return None


def turned_matrix(node: Node) -> Node | None:
    """w if the node is w.t(), else None."""
    call = read(node)
    if call is None or call.op != "permute" or list(call.args["dims"]) != [1, 0]:
        return None
    return call.args["self"]
