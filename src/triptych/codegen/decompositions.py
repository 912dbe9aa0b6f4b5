"""Corrections to torch's decompositions, for those that do something else than the operator itself.

Each correction says what torch's decomposition does wrong. A correction returns `NotImplemented` to leave an operator
whole: its own kernel then runs, and raises what it raises in eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _private
from ..ir.facts import is_contiguous, is_static, known_equal

Decomposition = Callable[..., Any]
Decompositions = dict[Any, Decomposition]


def corrected(table: Decompositions) -> Decompositions:
    """A copy of `table` with the corrections for the operators that it decomposes."""
    aten = torch.ops.aten
    corrections: dict[Any, Callable[[Decomposition], Decomposition]] = {
        aten.addmm.default: nothing_read_at_factor_zero,
        aten.addmv.default: nothing_read_at_factor_zero,
        aten.addr.default: outer_product_in_layout_of_bias,
        aten.add.Tensor: complex_add_of_nothing,
        aten.bernoulli.default: bernoulli_in_stream_of_eager,
        aten.binary_cross_entropy.default: lambda how: in_layout_of_operands(probabilities_checked_on_cpus(how)),
        aten.cat.default: repetition_in_memory_format,
        aten.clamp.default: clamp_in_dtype_of_bounds,
        aten._foreach_lerp.ScalarList: foreach_lerp_in_float32,
        aten.fmax.default: in_layout_of_operands,
        aten.fmin.default: in_layout_of_operands,
        aten.index_add.default: index_add_of_matching_shapes,
        aten.index_fill.int_Scalar: index_fill_in_strides_of_a_copy,
        aten.index_fill.int_Tensor: index_fill_in_strides_of_a_copy,
        aten.index_select.default: index_select_of_no_negatives,
        aten.lerp.Scalar: lerp_in_float32,
        aten.lerp.Tensor: lambda decomposition: in_layout_of_operands(lerp_in_float32(decomposition)),
        aten.max_unpool2d.default: max_unpool2d_in_memory_format,
        aten.put.default: in_strides_of_a_copy,
        aten.roll.default: roll_in_memory_format,
        aten.round.decimals: lambda _: round_decimals,
        aten.soft_margin_loss_backward.default: lambda _: soft_margin_loss_backward,
        aten._softmax_backward_data.default: softmax_backward_of_its_dtype,
        aten.special_xlog1py.default: in_layout_of_operands,
        aten.xlogy.Tensor: in_layout_of_operands,
    }
    corrections.update({op: batch_norm_in_memory_format(op) for op in table if _is_batch_norm(op)})
    table = {op: corrections[op](fn) if op in corrections else fn for op, fn in table.items()}
    dropout = aten.native_dropout.default
    return {**table, dropout: dropout_of_everything(table.get(dropout))}


def batch_norm_in_memory_format(overload: Any) -> Callable[[Decomposition], Decomposition]:
    """The operators for CPUs and those of cuDNN return a tensor in the memory format of their input, forward and
    backward; the decompositions return one with the strides of the input."""
    is_cudnn = "cudnn" in overload._schema.name
    place = next(i for i, argument in enumerate(overload._schema.arguments) if argument.name in ("input", "self"))

    def correct(decomposition: Decomposition) -> Decomposition:
        @functools.wraps(decomposition)
        def batch_norm(*args: Any, **kwargs: Any) -> Any:
            results = decomposition(*args, **kwargs)
            x = args[place]
            if results[0] is None or not is_static(x.shape) or not (is_cudnn or x.device.type == "cpu"):
                return results
            return results[0].contiguous(memory_format=_private.memory_format_of(x)), *results[1:]

        return batch_norm

    return correct


def _is_batch_norm(overload: Any) -> bool:
    if not isinstance(overload, _private.OpOverload):
        return False
    return "batch_norm" in overload._schema.name and not overload._schema.is_mutable


def bernoulli_in_stream_of_eager(decomposition: Decomposition) -> Decomposition:
    """Leaves the operator whole where eager's stream is to be kept. The decomposition draws float32 numbers, whatever
    the dtype of the probabilities is; for float64, eager draws float64 numbers."""

    def bernoulli(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if _private.inductor_config.fallback_random else decomposition(*args, **kwargs)

    return bernoulli


def nothing_read_at_factor_zero(decomposition: Decomposition) -> Decomposition:
    """With beta=0 the operator does not read its bias, which may be uninitialised, and with alpha=0 most kernels do not
    read the product: which of them do depends on dtype and size. The decomposition multiplies by 0, and NaN stays."""

    @functools.wraps(decomposition)
    def product(*args: Any, beta: Any = 1, alpha: Any = 1, **kwargs: Any) -> Any:
        return NotImplemented if beta == 0 or alpha == 0 else decomposition(*args, beta=beta, alpha=alpha, **kwargs)

    return product


def clamp_in_dtype_of_bounds(decomposition: Decomposition) -> Decomposition:
    """A bound may widen the dtype, as a float does beside integers, and an integer beside booleans; the decomposition
    converts the result back where the bound is a symbol."""

    @functools.wraps(decomposition)
    def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> Any:
        symbols: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0}
        for bound in (min, max):
            if type(bound) in symbols:
                x = x.to(torch.result_type(x, symbols[type(bound)]))
        return decomposition(x, min, max)

    return clamp


def complex_add_of_nothing(decomposition: Decomposition) -> Decomposition:
    """The decomposition adds real views of the complex tensors; Inductor cannot lower such a view of an empty one."""

    @functools.wraps(decomposition)
    def add(x: Any, y: Any, *, alpha: Any = None) -> Any:
        tensors = [t for t in (x, y) if isinstance(t, torch.Tensor)]
        if any(isinstance(size, int) and size == 0 for t in tensors for size in t.shape):
            return NotImplemented
        return decomposition(x, y, alpha=alpha)

    return add


def repetition_in_memory_format(decomposition: Decomposition) -> Decomposition:
    """For one tensor several times, the operator returns a tensor in the memory format of that tensor; the
    decomposition returns a copy of a view, whose strides may be in another order."""

    @functools.wraps(decomposition)
    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        first, *others = tensors
        is_repetition = bool(others) and all(other is first for other in others)
        return NotImplemented if is_repetition and not is_plain(first) else decomposition(tensors, dim)

    def is_plain(x: torch.Tensor) -> bool:
        return is_contiguous(x) and is_static(x.shape) and _private.memory_format_of(x) is torch.contiguous_format

    return cat


def dropout_of_everything(decomposition: Decomposition | None) -> Decomposition:
    """With p=1 eager draws no numbers. The operator does, so that later draws from the random stream would differ."""

    def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
        if p == 1 and train is not False:
            return x * torch.zeros((), dtype=x.dtype, device=x.device), torch.zeros_like(x, dtype=torch.bool)
        return NotImplemented if decomposition is None else decomposition(x, p, train)

    return native_dropout


def hardsigmoid_backward_in_double(decomposition: Decomposition) -> Decomposition:
    """The operator rounds 1/6 to float32, in double precision too; the decomposition does not."""

    @functools.wraps(decomposition)
    def hardsigmoid_backward(grad_output: torch.Tensor, x: torch.Tensor) -> Any:
        return NotImplemented if x.dtype is torch.float64 else decomposition(grad_output, x)

    return hardsigmoid_backward


def in_layout_of_operands(decomposition: Decomposition) -> Decomposition:
    """The result of a pointwise operator has the layout of the first operand that has one; the result of the
    decomposition has the layout of whichever operand it reads first."""

    @functools.wraps(decomposition)
    def pointwise(*args: Any, **kwargs: Any) -> Any:
        result = decomposition(*args, **kwargs)
        operands = [x for x in args if isinstance(x, torch.Tensor)]
        return result if result is NotImplemented else _laid_out_by(result, operands)

    return pointwise


def _laid_out_by(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result in the layout that a pointwise operator gives it; a loss that is reduced to a number has no layout."""
    if all(known_equal((x.shape, x.stride()), (result.shape, result.stride())) for x in operands):
        return result
    total = functools.reduce(torch.add, operands)  # only its layout is used, which is the one that is wanted
    if not known_equal(total.shape, result.shape) or known_equal(total.stride(), result.stride()):
        return result
    return torch.ops.prims.copy_strided(result, total.stride())


def index_select_of_no_negatives(decomposition: Decomposition) -> Decomposition:
    """The operator refuses negative indices; the decomposition counts them from the end."""

    @functools.wraps(decomposition)
    def index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        if x.ndim == 0 or index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
            return decomposition(x, dim, index)
        dim = dim % x.ndim
        places = index.to(torch.int64).reshape(-1, *[1] * (x.ndim - dim - 1))
        return torch.gather(x, dim, places.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))

    return index_select


def index_add_of_matching_shapes(decomposition: Decomposition) -> Decomposition:
    """The operator refuses a source of another dtype or shape; the decomposition converts and broadcasts it."""

    @functools.wraps(decomposition)
    def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
        if x.dtype != source.dtype or x.ndim != source.ndim:
            return NotImplemented
        others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
        if not all(known_equal(x.shape[axis], source.shape[axis]) for axis in others):
            return NotImplemented
        # with a 0-dim index, the decomposition returns a result without that dim
        return decomposition(x, dim, index.reshape(-1), source, alpha=alpha)

    return index_add


def in_strides_of_a_copy(decomposition: Decomposition) -> Decomposition:
    """The strides of the operator's result are in the order of its operand's; the result of the decomposition is
    contiguous."""

    @functools.wraps(decomposition)
    def copy(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = decomposition(x, *args, **kwargs)
        strides = torch.empty_like(x).stride()
        return result if known_equal(result.stride(), strides) else torch.ops.prims.copy_strided(result, strides)

    return copy


def index_fill_in_strides_of_a_copy(decomposition: Decomposition) -> Decomposition:
    """The operator fills a copy of its operand, which keeps the order of its strides. The decomposition of torch 2.13
    loses that order where the operand has gaps; that of 2.11 writes in place to keep it, which AOTAutograd refuses."""
    return in_strides_of_a_copy(lambda x, *args, **kwargs: decomposition(x.contiguous(), *args, **kwargs))


def lerp_in_float32(decomposition: Decomposition) -> Decomposition:
    """On 16-bit numbers the operator computes in float32; the decomposition rounds at every step, and refuses a weight
    that the dtype cannot represent."""

    @functools.wraps(decomposition)
    def lerp(start: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
        if start.dtype not in (torch.float16, torch.bfloat16):
            return decomposition(start, end, weight)
        wide = weight.float() if isinstance(weight, torch.Tensor) else weight
        return decomposition(start.float(), end.float(), wide).to(start.dtype)

    return lerp


def foreach_lerp_in_float32(decomposition: Decomposition) -> Decomposition:
    """As `lerp_in_float32`. With one weight for all tensors, Inductor computes the decomposition in one kernel, and so
    in float32; with a weight for each, every step is a kernel of its own."""

    @functools.wraps(decomposition)
    def lerp(starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weights: Sequence[Any]) -> Any:
        if all(start.dtype not in (torch.float16, torch.bfloat16) for start in starts):
            return decomposition(starts, ends, weights)
        return [torch.lerp(start, end, weight) for start, end, weight in zip(starts, ends, weights)]

    return lerp


def max_unpool2d_in_memory_format(decomposition: Decomposition) -> Decomposition:
    """The operator keeps the memory format of its input; the decomposition returns a contiguous tensor."""

    @functools.wraps(decomposition)
    def max_unpool2d(x: Any, indices: Any, output_size: Any) -> Any:
        unpooled = decomposition(x, indices, output_size)
        return unpooled.contiguous(memory_format=_private.memory_format_of(x))

    return max_unpool2d


def roll_in_memory_format(decomposition: Decomposition) -> Decomposition:
    """Along given dims, the operator for CPUs keeps the memory format of its operand; the decomposition returns a
    contiguous tensor."""

    @functools.wraps(decomposition)
    def roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
        rolled = decomposition(x, shifts, dims)
        keeps_format = dims and x.device.type == "cpu" and is_static(x.shape)
        return rolled.contiguous(memory_format=_private.memory_format_of(x)) if keeps_format else rolled

    return roll


def outer_product_in_layout_of_bias(decomposition: Decomposition) -> Decomposition:
    """With beta=0 the operator does not read its bias, but its result has the layout of the bias; the decomposition
    ignores the bias."""

    @functools.wraps(decomposition)
    def addr(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        result = decomposition(bias, x, y, beta=beta, alpha=alpha)
        return _laid_out_by(result, [bias, x.unsqueeze(1), y.unsqueeze(0)]) if beta == 0 else result

    return addr


def probabilities_checked_on_cpus(decomposition: Decomposition) -> Decomposition:
    """The operator for CPUs refuses numbers outside 0 to 1; the decomposition computes with them. The operator is left
    whole, on contiguous operands: for others, torch's fake tensors do not know the strides of its result."""

    @functools.wraps(decomposition)
    def binary_cross_entropy(x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = MEAN) -> Any:
        operands = [operand for operand in (x, target, weight) if operand is not None]
        if any(operand.device.type != "cpu" for operand in operands):
            return decomposition(x, target, weight, reduction)
        if all(map(is_contiguous, operands)):
            return NotImplemented
        x, target, *rest = (operand.contiguous() for operand in operands)
        return torch.ops.aten.binary_cross_entropy(x, target, *(rest or [None]), reduction)

    return binary_cross_entropy


def round_decimals(x: torch.Tensor, decimals: int = 0) -> torch.Tensor:
    """The operator divides by a power of ten; the decomposition multiplies by its inverse. It cannot be left whole:
    Inductor has no other way to lower it."""
    power = 10.0 ** abs(decimals)
    if decimals < 0:
        return torch.round(x / power) * power
    return torch.round(x * power) / power


def softmax_backward_of_its_dtype(decomposition: Decomposition) -> Decomposition:
    """The operator changes the dtype where a softmax of float16 was computed in float32, and nowhere else; the
    decomposition converts to whatever it is given."""

    @functools.wraps(decomposition)
    def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        narrows = grad.dtype is torch.float32 and input_dtype is torch.float16
        return decomposition(grad, output, dim, input_dtype if narrows else grad.dtype)

    return softmax_backward


MEAN = 1
"""The reduction of a loss to its mean, as operators number them."""


def soft_margin_loss_backward(grad_output: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    """The decomposition subtracts 1 from sigmoid(target * x), which cancels all digits where that is close to 1."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    score, sign = x.to(wide), target.to(wide)
    gradient = -sign * grad_output.to(wide) * torch.sigmoid(-sign * score)
    return (gradient / x.numel() if reduction == MEAN else gradient).to(x.dtype)
