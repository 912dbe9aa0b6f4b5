"""The table of operations: what we know of an operation that its schema in torch does not say.

The reader (`calls.py`), the matcher, the emitter and the analyses read this table, so that an operation is described
in one place. An operation without a row is known by its schema alone, which is enough for most. To describe another
one, add a row. If a spelling of it has other arguments, add a function to `canonical.py` that converts them. If a
dialect needs more than a call of one function or method to write it, add a function to `rewrite/dialects.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .schema import REQUIRED

TRAITS: dict[str, str] = {
    "commutative": "the two operands can be swapped, and the result has the same bits",
    "gemm": "a matrix product, a convolution, or made of them",
    "reduction": "combines the elements along some dims",
    "view": "the result may share the operand's memory",
    "pointwise": "each element of the result comes from the operands' elements at the same position",
    "exact": "pointwise, and IEEE fixes the rounding: an element gives the same bits wherever in a tensor it stands",
    "same_elements": "the result has elements of the operand, in another shape or order",
    "copies_elements": "the result has elements of its operands, or a given number",
    "never_negative": "no element of the result is less than 0, though it may be -0.0 or NaN",
    "never_negative_zero": "no element of the result is -0.0",
    "saves_result": "autograd computes the gradient from the result",
    "returns_operand": "the result is the operand itself, neither a copy nor a view of it",
    "reads_layout": "the result depends on the operand's strides, storage offset or address",
    "rounds_on_gpu": "exact on a CPU; fast forms on a GPU may round differently",
    "number_as_tensor": "AOTAutograd writes a number operand into the `.Tensor` overload, and so does the emitter",
}
"""What a row can say. `traits.py` adds what torch's schemas and tags say, such as `view` and most of `pointwise`."""


@dataclass(frozen=True)
class Operation:
    """A row of the table."""

    traits: str = ""
    """Names out of `TRAITS`."""
    parameters: Mapping[str, Any] | None = None
    """The parameters with their defaults, where several schemas are read as one operation, or no schema has it."""
    aliases: str = ""
    """Other names in torch for the same operation."""
    alias_parameters: Mapping[str, str] | None = None
    """Parameters that the aliases call by another name."""
    operator: Callable[..., Any] | None = None
    """The Python operator that calls it."""
    in_place_operator: Callable[..., Any] | None = None
    """The Python operator that calls its in-place form."""
    torch: Callable[..., Any] | str | None = None
    """What a torch-level graph calls, if not the function of the same name in `torch`; a string names a method."""
    method_order: tuple[int, ...] | None = None
    """The order of the parameters as a method, where the tensor is not the first parameter of the schema."""
    neutral: int | None = None
    """The number n for which `f(x, n)` is x, for integers; for booleans it is `bool(n)`. `neutral_problem` of
    `rules/neutral.py` says for which floats it does not hold."""
    absorbing: int | None = None
    """The number n for which `f(x, n)` is n for every x, for integers; for booleans it is `bool(n)`."""


OPERATIONS: dict[str, Operation] = {
    # arithmetic
    "add": Operation("commutative exact number_as_tensor", operator=operator.add, in_place_operator=operator.iadd,
                     neutral=0),
    "sub": Operation("exact number_as_tensor", aliases="subtract", operator=operator.sub,
                     in_place_operator=operator.isub, neutral=0),
    "mul": Operation("commutative exact number_as_tensor", aliases="multiply", operator=operator.mul,
                     in_place_operator=operator.imul, neutral=1, absorbing=0),
    "div": Operation("exact rounds_on_gpu number_as_tensor", aliases="divide true_divide", operator=operator.truediv,
                     in_place_operator=operator.itruediv, neutral=1),
    # `3 / x`, which torch computes as `x.reciprocal() * 3`; `div(3, x)` would round differently
    "rdiv": Operation("pointwise", {"self": REQUIRED, "other": REQUIRED}),
    "floor_divide": Operation("exact rounds_on_gpu", operator=operator.floordiv, neutral=1),
    "remainder": Operation("exact rounds_on_gpu", operator=operator.mod),
    "fmod": Operation("exact rounds_on_gpu"),
    "pow": Operation("saves_result", operator=operator.pow),
    "neg": Operation("exact", aliases="negative", operator=operator.neg),
    "positive": Operation("returns_operand", operator=operator.pos),
    "abs": Operation("exact never_negative never_negative_zero", aliases="absolute", operator=operator.abs),
    "square": Operation("exact never_negative never_negative_zero"),
    "reciprocal": Operation("exact rounds_on_gpu saves_result"),
    "sqrt": Operation("exact rounds_on_gpu saves_result never_negative"),
    "maximum": Operation("commutative exact number_as_tensor"),
    "minimum": Operation("commutative exact number_as_tensor"),
    "clamp": Operation("exact", {"self": REQUIRED, "min": None, "max": None}, aliases="clip"),
    "floor": Operation("exact"),
    "ceil": Operation("exact"),
    "round": Operation("exact"),
    "trunc": Operation("exact"),
    "sign": Operation("exact"),
    "signbit": Operation("exact"),
    # comparisons and logic
    "eq": Operation("commutative exact", operator=operator.eq),
    "ne": Operation("commutative exact", operator=operator.ne),
    "lt": Operation("exact", operator=operator.lt),
    "le": Operation("exact", operator=operator.le),
    "gt": Operation("exact", operator=operator.gt),
    "ge": Operation("exact", operator=operator.ge),
    "isnan": Operation("exact"),
    "isinf": Operation("exact"),
    "isfinite": Operation("exact"),
    "isneginf": Operation("exact"),
    "isposinf": Operation("exact"),
    "not": Operation(operator=operator.not_),
    "logical_not": Operation("exact"),
    "logical_and": Operation("commutative exact", neutral=1, absorbing=0),
    "logical_or": Operation("commutative exact", neutral=0, absorbing=1),
    "logical_xor": Operation("commutative exact"),
    "bitwise_not": Operation("exact", operator=operator.invert),
    "bitwise_and": Operation("commutative exact", operator=operator.and_, in_place_operator=operator.iand,
                             neutral=-1, absorbing=0),
    "bitwise_or": Operation("commutative exact", operator=operator.or_, in_place_operator=operator.ior,
                            neutral=0, absorbing=-1),
    "bitwise_xor": Operation("commutative exact", operator=operator.xor, in_place_operator=operator.ixor,
                             neutral=0),
    "where": Operation("pointwise exact", method_order=(1, 0, 2)),
    "masked_fill": Operation("exact"),
    # functions of one element
    "exp": Operation("saves_result never_negative never_negative_zero"),
    "exp2": Operation("saves_result never_negative never_negative_zero"),
    "expm1": Operation("saves_result"),
    "rsqrt": Operation("saves_result"),
    "tan": Operation("saves_result"),
    "tanh": Operation("saves_result"),
    "cosh": Operation("never_negative never_negative_zero"),
    "polygamma": Operation(method_order=(1, 0)),
    "sigmoid": Operation("saves_result never_negative never_negative_zero", aliases="special_expit"),
    "softplus": Operation("never_negative"),
    "relu": Operation("exact saves_result never_negative", torch=F.relu),
    "gelu": Operation(torch=F.gelu),
    "silu": Operation(torch=F.silu),
    "elu": Operation("saves_result"),
    "celu": Operation("saves_result"),
    "selu": Operation("saves_result"),
    "threshold": Operation("saves_result"),
    "dropout": Operation("pointwise"),
    "rand": Operation("never_negative never_negative_zero"),
    "rand_like": Operation("never_negative never_negative_zero"),
    # reductions and normalisations along dims
    "sum": Operation("reduction"),
    "mean": Operation("reduction"),
    "prod": Operation("reduction"),
    "any": Operation("reduction"),
    "all": Operation("reduction"),
    "var": Operation("reduction"),
    "std": Operation("reduction"),
    "var_mean": Operation("reduction"),
    "amax": Operation("reduction saves_result"),
    "amin": Operation("reduction saves_result"),
    "argmax": Operation("reduction"),
    "argmin": Operation("reduction"),
    "logsumexp": Operation("reduction saves_result"),
    "norm": Operation("reduction saves_result"),
    "cumprod": Operation("saves_result"),
    "softmax": Operation("saves_result never_negative never_negative_zero",
                         {"self": REQUIRED, "dim": REQUIRED, "dtype": None},
                         aliases="special_softmax", torch=F.softmax),
    "log_softmax": Operation("saves_result", {"self": REQUIRED, "dim": REQUIRED, "dtype": None},
                             aliases="special_log_softmax", torch=F.log_softmax),
    "layer_norm": Operation(torch=F.layer_norm),
    "batch_norm": Operation("", {
        "input": REQUIRED, "weight": None, "bias": None, "running_mean": None, "running_var": None,
        "training": REQUIRED, "momentum": REQUIRED, "eps": REQUIRED, "cudnn_enabled": None,
    }),
    # matrix products
    "matmul": Operation("gemm", {"self": REQUIRED, "other": REQUIRED}, aliases="mm bmm",
                        alias_parameters={"mat2": "other"}, operator=operator.matmul),
    "addmm": Operation("gemm"),
    "addbmm": Operation("gemm"),
    "baddbmm": Operation("gemm"),
    "linear": Operation("gemm", torch=F.linear),
    "einsum": Operation("gemm"),
    "convolution": Operation("gemm"),
    "conv1d": Operation("gemm"),
    "conv2d": Operation("gemm"),
    "conv3d": Operation("gemm"),
    "scaled_dot_product_attention": Operation("gemm saves_result", torch=F.scaled_dot_product_attention),
    # the same elements in another shape, order or dtype
    "identity": Operation("returns_operand", {"self": REQUIRED}),
    "alias": Operation("same_elements", aliases="prims.view_of", alias_parameters={"a": "self"}),
    "detach": Operation("same_elements"),
    "clone": Operation("same_elements"),
    "contiguous": Operation("same_elements", torch="contiguous"),
    "lift_fresh_copy": Operation("same_elements"),
    "to": Operation("pointwise copies_elements", {
        "self": REQUIRED, "dtype": None, "device": None, "layout": None, "non_blocking": False, "copy": False,
        "memory_format": None, "pin_memory": None,
    }),
    "prims.convert_element_type": Operation("pointwise"),
    "prims.fma": Operation("pointwise", {"a": REQUIRED, "b": REQUIRED, "c": REQUIRED}),  # Inductor registers it
    "reshape": Operation("same_elements", {"self": REQUIRED, "shape": REQUIRED}),
    "permute": Operation("same_elements", {"self": REQUIRED, "dims": REQUIRED}),
    "expand": Operation("same_elements", {"self": REQUIRED, "size": REQUIRED, "implicit": False},
                        aliases="broadcast_to"),
    "squeeze": Operation("same_elements", {"self": REQUIRED, "dim": None}),
    "unsqueeze": Operation("same_elements"),
    "repeat": Operation("same_elements"),
    "tile": Operation("same_elements"),
    "flip": Operation("same_elements"),
    "roll": Operation("same_elements"),
    "unfold": Operation("same_elements", torch="unfold"),  # `F.unfold` is another function
    "as_strided": Operation("copies_elements reads_layout"),  # it may read memory beyond its operand
    "as_strided_copy": Operation("reads_layout"),
    "as_strided_scatter": Operation("reads_layout"),
    "view": Operation("reads_layout"),
    "view_as_real": Operation("reads_layout"),
    "view_as_complex": Operation("reads_layout"),
    # parts of tensors, and tensors joined from parts
    "slice": Operation("same_elements", {"self": REQUIRED, "dim": 0, "start": 0, "end": None, "step": 1}),
    "select": Operation("same_elements", {"self": REQUIRED, "dim": REQUIRED, "index": REQUIRED}),
    "narrow": Operation("same_elements"),
    "diagonal": Operation("same_elements"),
    "split": Operation("copies_elements", {"self": REQUIRED, "sizes": REQUIRED, "dim": 0}),
    "unbind": Operation("copies_elements"),
    "getitem": Operation("view copies_elements", {"self": REQUIRED, "index": REQUIRED}, operator=operator.getitem,
                         torch=operator.getitem),
    "tensor_getitem": Operation("view copies_elements", {"self": REQUIRED, "index": REQUIRED}, torch=operator.getitem),
    "setitem": Operation(operator=operator.setitem),
    "getattr": Operation(operator=getattr),
    "index": Operation("copies_elements"),
    "index_select": Operation("copies_elements"),
    "gather": Operation("copies_elements"),
    "tril": Operation("copies_elements"),
    "triu": Operation("copies_elements"),
    "cat": Operation("copies_elements", aliases="concat concatenate"),
    "stack": Operation("copies_elements"),
    # constants
    "full": Operation("copies_elements", {
        "size": REQUIRED, "fill_value": REQUIRED, "dtype": None, "layout": None, "device": None, "pin_memory": None,
    }),
    "full_like": Operation("copies_elements", {
        "self": REQUIRED, "fill_value": REQUIRED, "dtype": None, "layout": None, "device": None, "pin_memory": None,
        "memory_format": None,
    }),
    "fill": Operation("pointwise"),
    # where a tensor is in memory
    "stride": Operation("reads_layout"),
    "sym_stride": Operation("reads_layout"),
    # up to torch 2.11 these two have no schema that the dispatcher knows
    "storage_offset": Operation("reads_layout", {"self": REQUIRED}),
    "is_contiguous": Operation("reads_layout", {"self": REQUIRED, "memory_format": torch.contiguous_format}),
    "sym_storage_offset": Operation("reads_layout"),
    "data_ptr": Operation("reads_layout"),
    "untyped_storage": Operation("reads_layout"),
    "set_": Operation("reads_layout"),
    "resize_": Operation("reads_layout"),
}  # fmt: skip

NO_ROW = Operation()


def operation(name: str) -> Operation:
    """The row of an operation; an empty row if the table has none."""
    return OPERATIONS.get(name, NO_ROW)


def with_trait(trait: str) -> frozenset[str]:
    """The operations whose rows name a trait."""
    return frozenset(name for name, row in OPERATIONS.items() if trait in row.traits.split())
