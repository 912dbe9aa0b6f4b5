"""The interface of a code generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from .. import _private
from .decompositions import Decompositions, corrected, hardsigmoid_backward_in_double

Compiled = Callable[..., Any]


class CodeGenerator(Protocol):
    """Turns the optimised ATen graphs of one program into callables."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Inductor's settings that hold while the program is traced and partitioned."""
        ...

    @property
    def reuses_saved_tensors(self) -> bool:
        """Whether the backward may overwrite what the forward saved, which rules out a second backward."""
        ...

    def decompositions(self) -> Decompositions:
        """Which operations are broken up, and how, before the joint stage."""
        ...

    def operators_with_kernels(self) -> Iterable[Any]:
        """Operators that it lowers to generated code, instead of calling them."""
        ...

    def emit(self, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Compiled:
        """The callable of one graph: "forward", "backward" or "inference"."""
        ...


def portable_decompositions() -> Decompositions:
    """Inductor's decompositions, without those that only Inductor can lower, and without those of random operations.

    Other code generators get graphs of ATen and standard prims, with eager's random stream.
    """
    aten = torch.ops.aten
    with _private.inductor_config.patch(fallback_random=True):
        table = dict(_private.select_decomp_table())
    softmax_backward = aten._softmax_backward_data.default
    table[softmax_backward] = _private.decomposition_table[softmax_backward]
    # decompositions whose results have other strides than those of the operator, which the caller sees
    for op in (
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.channel_shuffle.default,
        aten.log_sigmoid_forward.default,
        aten.index_select.default,
    ):
        table.pop(op, None)
    # a cat of one tensor several times becomes contiguous, whatever the tensor's strides: the caller sees the strides
    table.pop(aten.cat.default, None)
    # it adds real views of complex tensors, for kernels without complex numbers; PyTorch's own kernel supports them
    table.pop(aten.add.Tensor, None)
    # in half precision the operator's own kernel rounds more often than the decomposition
    table.pop(aten.round.decimals, None)
    # in half precision the steps of the decompositions are rounded, each by itself
    table.pop(aten._foreach_lerp.Scalar, None)
    table.pop(aten._foreach_lerp.ScalarList, None)
    # in half precision the decomposition rounds the coordinates that it reads from
    table.pop(aten.grid_sampler_2d.default, None)
    hardsigmoid_backward = aten.hardsigmoid_backward.default
    table[hardsigmoid_backward] = hardsigmoid_backward_in_double(table[hardsigmoid_backward])
    # as `alias` the result would be a view, and require a gradient where the operand does
    table.pop(aten.detach.default, None)
    return corrected(table)
