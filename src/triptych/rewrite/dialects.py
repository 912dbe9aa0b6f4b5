"""How a dialect writes operations that need more than a single call of a function or method with unchanged arguments.
The simple cases are in the table of `ir/operations.py`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import _private
from ..ir.facts import fact, is_static, known
from ..ir.program import ATEN, Value
from .refusal import Refused

if TYPE_CHECKING:
    from .emit import Emitter

aten = torch.ops.aten

Form = Callable[["Emitter", dict[str, Any]], Value]


def _torch_expand(op: Emitter, a: dict[str, Any]) -> Value:
    rest = {k: v for k, v in a.items() if k not in ("self", "size")}
    # one node may compute all sizes
    sizes = [a["size"]] if isinstance(a["size"], Node) or not a["size"] else a["size"]
    return op.node("call_method", "expand", (a["self"], *sizes), rest)


def _torch_to(op: Emitter, a: dict[str, Any]) -> Value:
    rest = {k: v for k, v in a.items() if k not in ("self", "layout", "pin_memory")}
    if set(rest) == {"dtype"}:
        return op.node("call_method", "to", (a["self"], rest["dtype"]), {})
    return op.node("call_method", "to", (a["self"],), rest)


def _torch_slice(op: Emitter, a: dict[str, Any]) -> Value:
    dim = a.get("dim", 0)
    step = None if a.get("step", 1) == 1 else a["step"]
    index = (*(slice(None),) * dim, slice(a.get("start") or None, a.get("end"), step))
    return op.node("call_function", operator.getitem, (a["self"], index if dim else index[0]), {})


def _torch_batch_norm(op: Emitter, a: dict[str, Any]) -> Value:
    if "cudnn_enabled" in a:
        raise Refused("torch.nn.functional.batch_norm has no argument cudnn_enabled")
    first = (a["input"], a.get("running_mean"), a.get("running_var"))
    plain = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    return op.node("call_function", F.batch_norm, first, {k: a[k] for k, v in plain.items() if k in a and a[k] != v})


def _torch_rdiv(op: Emitter, a: dict[str, Any]) -> Value:
    if isinstance(a["other"], Node):  # `/` would call the division of the other tensor
        return op.node("call_method", "__rdiv__", (a["self"], a["other"]), {})
    return op.node("call_function", operator.truediv, (a["other"], a["self"]), {})


def _torch_dropout(op: Emitter, a: dict[str, Any]) -> Value:
    return op.node("call_function", F.dropout, (a["input"],), {"p": a["p"], "training": a["train"]})


def _torch_squeeze(op: Emitter, a: dict[str, Any]) -> Value:
    dim = a.get("dim")
    kwargs = {} if dim is None else {"dim": dim[0] if len(dim) == 1 else tuple(dim)}
    return op.node("call_function", torch.squeeze, (a["self"],), kwargs)


def _torch_split(op: Emitter, a: dict[str, Any]) -> Value:
    dim = {"dim": a["dim"]} if a.get("dim", 0) else {}
    return op.node("call_function", torch.split, (a["self"], list(a["sizes"])), dim)


TORCH_FORMS: dict[str, Form] = {
    "to": _torch_to,
    "expand": _torch_expand,
    "slice": _torch_slice,
    "dropout": _torch_dropout,
    "squeeze": _torch_squeeze,
    "split": _torch_split,
    "batch_norm": _torch_batch_norm,
    "rdiv": _torch_rdiv,
}


def _aten_getitem(op: Emitter, a: dict[str, Any]) -> Value:
    return op.node("call_function", operator.getitem, (a["self"], a["index"]), {})


def _aten_to(op: Emitter, a: dict[str, Any]) -> Value:
    """Casts and device copies in the form that AOTAutograd leaves: Inductor can lower these, but not the `_to_copy`
    that they come from."""
    rest = {k: v for k, v in a.items() if k not in ("self", "copy", "non_blocking")}
    if set(rest) - {"dtype", "device"}:
        return op.node("call_function", aten._to_copy.default, (a["self"],), rest)
    value = op.program.value(a["self"])
    if "dtype" in rest:
        value = op.node("call_function", torch.ops.prims.convert_element_type.default, (value.node, rest["dtype"]), {})
    if "device" in rest:
        value = op.node("call_function", torch.ops.prims.device_put.default, (value.node, rest["device"]), {})
    return value


def _aten_clamp(op: Emitter, a: dict[str, Any]) -> Value:
    """One bound after the other, the upper one last, as `clamp` does it."""
    value = op.program.value(a["self"])
    if "min" in a:
        value = op.aten("clamp_min", {"self": value.node, "min": a["min"]})
    if "max" in a:
        value = op.aten("clamp_max", {"self": value.node, "max": a["max"]})
    return value


def _aten_reshape(op: Emitter, a: dict[str, Any]) -> Value:
    shape = list(a["shape"])
    if _surely_no_view(fact(a["self"]), shape):
        return _aten_copied_view(op, a["self"], shape)
    try:
        return op.node("call_function", aten.view.default, (a["self"], shape), {})
    except (RuntimeError, ValueError):  # the strides allow no view of this shape
        op.drop_last()
        return _aten_copied_view(op, a["self"], shape)


def _aten_copied_view(op: Emitter, x: Any, shape: list[Any]) -> Value:
    copy = op.node("call_function", aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    return op.node("call_function", aten._unsafe_view.default, (copy.node, shape), {})


def _surely_no_view(value: Any, shape: list[Any]) -> bool:
    """Is a view of this shape certainly impossible? It is tried on a meta tensor, because fake tensors allow some views
    over size-1 dims that real tensors refuse."""
    if not isinstance(value, torch.Tensor) or not is_static((*value.shape, *value.stride(), *shape)):
        return False
    with _private.without_dispatch_modes():
        try:
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta").view(shape)
        except (RuntimeError, ValueError):  # the latter while AOTAutograd is tracing
            return True
    return False


def _aten_matmul(op: Emitter, a: dict[str, Any]) -> Value:
    left, right = fact(a["self"]), fact(a["other"])
    if left is None or right is None:
        raise Refused("matmul of values of unknown rank")
    if left.dim() == 2 and right.dim() == 2:
        return op.node("call_function", aten.mm.default, (a["self"], a["other"]), {})
    if left.dim() == 3 and right.dim() == 3 and known(left.shape[0] == right.shape[0]):
        return op.node("call_function", aten.bmm.default, (a["self"], a["other"]), {})
    raise Refused(f"no single ATen product of ranks {left.dim()} and {right.dim()}")


def _aten_softmax(target: Any) -> Form:
    def form(op: Emitter, a: dict[str, Any]) -> Value:
        x = a["self"]
        if a.get("dtype") is not None and a["dtype"] != fact(x).dtype:
            x = _aten_to(op, {"self": x, "dtype": a["dtype"]}).node
        return op.node("call_function", target, (x, a["dim"], False), {})

    return form


def _aten_split(op: Emitter, a: dict[str, Any]) -> Value:
    return op.node("call_function", aten.split_with_sizes.default, (a["self"], list(a["sizes"]), a.get("dim", 0)), {})


def _aten_squeeze(op: Emitter, a: dict[str, Any]) -> Value:
    if "dim" not in a:
        return op.node("call_function", aten.squeeze.default, (a["self"],), {})
    return op.node("call_function", aten.squeeze.dims, (a["self"], list(a["dim"])), {})


def _aten_slice(op: Emitter, a: dict[str, Any]) -> Value:
    end = a.get("end")
    bounds = (a.get("dim", 0), a.get("start", 0), sys.maxsize if end is None else end, a.get("step", 1))
    return op.node("call_function", aten.slice.Tensor, (a["self"], *bounds), {})


def _aten_sub(op: Emitter, a: dict[str, Any]) -> Value:
    if isinstance(a["self"], Node):
        return op.aten("sub", a)
    return op.node("call_function", aten.rsub.Scalar, (a["other"], a["self"]), {})


def _aten_mul(op: Emitter, a: dict[str, Any]) -> Value:
    if not isinstance(a["self"], Node):
        a = {"self": a["other"], "other": a["self"]}
    return op.aten("mul", a)


def _aten_where(op: Emitter, a: dict[str, Any]) -> Value:
    """A number becomes a tensor without dims: the overloads that take numbers are composite."""
    branches = [a.get("self"), a.get("other")]
    if op.program.has_composites or all(isinstance(b, Node) for b in branches) or None in branches:
        return op.aten("where", a)
    first, second = (fact(b) if isinstance(b, Node) else b for b in branches)
    kind = {"dtype": torch.result_type(first, second), "device": fact(a["condition"]).device}  # type: ignore[arg-type]

    def tensor(branch: Any) -> Any:
        return (
            branch if isinstance(branch, Node) else op.node("call_function", aten.full.default, ([], branch), kind).node
        )

    return op.node("call_function", aten.where.self, (a["condition"], *map(tensor, branches)), {})


def _aten_rdiv(op: Emitter, a: dict[str, Any]) -> Value:
    """As torch computes it: times the reciprocal."""
    reciprocal = op.node("call_function", aten.reciprocal.default, (a["self"],), {})
    return reciprocal if a["other"] == 1 else op.aten("mul", {"self": reciprocal.node, "other": a["other"]})


ATEN_FORMS: dict[str, Form] = {
    "getitem": _aten_getitem,
    "to": _aten_to,
    "clamp": _aten_clamp,
    "reshape": _aten_reshape,
    "matmul": _aten_matmul,
    "softmax": _aten_softmax(aten._softmax.default),
    "log_softmax": _aten_softmax(aten._log_softmax.default),
    "split": _aten_split,
    "squeeze": _aten_squeeze,
    "slice": _aten_slice,
    "sub": _aten_sub,
    "mul": _aten_mul,
    "where": _aten_where,
    "rdiv": _aten_rdiv,
}


def special_form(dialect: str, name: str) -> Form | None:
    return (ATEN_FORMS if dialect == ATEN else TORCH_FORMS).get(name)
