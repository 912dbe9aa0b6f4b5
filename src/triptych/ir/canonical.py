"""One name for the many spellings of an operation.

Each function here turns one spelling's arguments into those of the canonical operation, or returns None where the
facts do not suffice (then the spelling keeps its own name). Spellings that differ in their name alone are aliases in
the table of `operations.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .facts import fact, known_equal, number, tensor_fact
from .modules import drops_dim_one
from .operations import OPERATIONS

Args = dict[str, Any]
Adapter = Callable[[Node, Args], "tuple[str, Args] | None"]

CANONICAL: dict[str, Adapter] = {}

SPELLING_OF: dict[str, str] = {}
"""The operation that a spelling is read as, where the facts suffice."""


def spelled(op: str, *names: str) -> Callable[[Adapter], Adapter]:
    """The adapter reads calls under these names as calls of `op`."""

    def register(adapter: Adapter) -> Adapter:
        for name in names:
            CANONICAL[name] = adapter
            SPELLING_OF[name] = op
        return adapter

    return register


def renamed(op: str, *names: str, **params: str) -> None:
    """The spelling differs from `op` in its name and in the names of its parameters only: it is read as `op` itself is,
    with the arguments that `op`'s own adapter makes."""

    def adapter(node: Node, args: Args) -> tuple[str, Args] | None:
        named = {params.get(k, k): v for k, v in args.items()}
        own = CANONICAL.get(op)
        return (op, named) if own is None else own(node, named)

    spelled(op, *names)(adapter)


for _name, _row in OPERATIONS.items():
    if _row.aliases:
        renamed(_name, *_row.aliases.split(), **(_row.alias_parameters or {}))


@spelled("sub", "rsub")
def _reversed_subtract(node: Node, args: Args) -> tuple[str, Args] | None:
    if "alpha" in args:
        return None
    return "sub", {"self": args["other"], "other": args["self"]}


@spelled("clamp", "clamp_min")
def _clamp_min(node: Node, args: Args) -> tuple[str, Args]:
    return "clamp", {"self": args["self"], "min": args["min"]}


@spelled("clamp", "clamp_max")
def _clamp_max(node: Node, args: Args) -> tuple[str, Args]:
    return "clamp", {"self": args["self"], "max": args["max"]}


@spelled("reshape", "view", "reshape", "_unsafe_view")
def _reshape(node: Node, args: Args) -> tuple[str, Args] | None:
    if "dtype" in args:
        return None  # `view(dtype)` reinterprets the bits
    shape = args.get("size", args.get("shape", ()))
    if isinstance(shape, Node):  # `x.view(y.size())`: one node computes the whole shape
        return _reshape_to_result(node, args)
    return "reshape", {"self": args["self"], "shape": _filled_in(node, shape)}


@spelled("reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as")
def _reshape_to_result(node: Node, args: Args) -> tuple[str, Args] | None:
    result = tensor_fact(node)
    if result is None:
        return None
    shape = list(result.shape)
    symbolic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(symbolic) == 1 and not any(isinstance(size, int) and size == 0 for size in shape):
        shape[symbolic[0]] = -1  # one size follows from the others: no node has to compute it
    return "reshape", {"self": args["self"], "shape": shape}


@spelled("expand", "expand")
def _expand(node: Node, args: Args) -> tuple[str, Args] | None:
    if isinstance(args["size"], Node):
        return _expand_as(node, args)
    return "expand", {**args, "size": _filled_in(node, args["size"])}


def _filled_in(node: Node, sizes: Any) -> list[Any]:
    """The sizes, with each -1 replaced by the size of the result where that is a known number."""
    result = tensor_fact(node)
    if result is None or len(sizes) != result.dim():
        return list(sizes)
    return [r if s == -1 and isinstance(r, int) else s for s, r in zip(sizes, result.shape)]


@spelled("expand", "expand_as")
def _expand_as(node: Node, args: Args) -> tuple[str, Args] | None:
    result = tensor_fact(node)
    return None if result is None else ("expand", {"self": args["self"], "size": list(result.shape)})


def _rank(value: Any) -> int | None:
    known = tensor_fact(value)
    return None if known is None else known.dim()


def _joined_on(dim_for_rank: Callable[[int], int | None], *names: str) -> None:
    """Registers further names of `cat`. A call that first adds a dim to its operands is not read as `cat`."""

    @spelled("cat", *names)
    def joined(node: Node, args: Args) -> tuple[str, Args] | None:
        tensors = args["tensors"]
        ranks = {_rank(t) for t in tensors} if isinstance(tensors, list) else set()
        rank = ranks.pop() if len(ranks) == 1 else None
        dim = dim_for_rank(rank) if rank else None
        return None if dim is None else ("cat", {"tensors": tensors, **({"dim": dim} if dim else {})})


_joined_on(lambda rank: min(rank - 1, 1), "hstack")
_joined_on(lambda rank: 0 if rank >= 2 else None, "vstack", "row_stack")
_joined_on(lambda rank: 1 if rank >= 2 else None, "column_stack")
_joined_on(lambda rank: 2 if rank >= 3 else None, "dstack")


@spelled("permute", "permute")
def _permute(node: Node, args: Args) -> tuple[str, Args]:
    return "permute", {"self": args["self"], "dims": list(args["dims"])}


@spelled("permute", "transpose", "swapaxes", "swapdims")
def _transpose(node: Node, args: Args) -> tuple[str, Args] | None:
    rank = _rank(args["self"])
    if rank is None:
        return None
    first, second = list(args.values())[1:3]
    dims = list(range(rank))
    if rank:
        dims[first], dims[second] = dims[second], dims[first]
    return "permute", {"self": args["self"], "dims": dims}


@spelled("permute", "t", "T", "numpy_T")
def _reverse_dims(node: Node, args: Args) -> tuple[str, Args] | None:
    rank = _rank(args["self"])
    return None if rank is None else ("permute", {"self": args["self"], "dims": list(reversed(range(rank)))})


@spelled("permute", "mT", "matrix_transpose")
def _matrix_transpose(node: Node, args: Args) -> tuple[str, Args] | None:
    rank = _rank(args["self"])
    if rank is None or rank < 2:
        return None
    return "permute", {"self": args["self"], "dims": [*range(rank - 2), rank - 1, rank - 2]}


@spelled("permute", "movedim", "moveaxis")
def _movedim(node: Node, args: Args) -> tuple[str, Args] | None:
    rank = _rank(args["self"])
    if rank is None:
        return None
    source, destination = args["source"], args["destination"]
    if rank == 0:
        return "permute", {"self": args["self"], "dims": []}
    sources = [s % rank for s in ([source] if isinstance(source, int) else source)]
    places = [d % rank for d in ([destination] if isinstance(destination, int) else destination)]
    dims: list[Any] = [None] * rank
    for s, d in zip(sources, places):
        dims[d] = s
    rest = iter(d for d in range(rank) if d not in sources)
    return "permute", {"self": args["self"], "dims": [next(rest) if d is None else d for d in dims]}


@spelled("squeeze", "squeeze")
def _squeeze(node: Node, args: Args) -> tuple[str, Args]:
    dim = args.get("dim")
    return "squeeze", {"self": args["self"], **({} if dim is None else {"dim": [dim] if _is_number(dim) else dim})}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt, Node))


@spelled("to", "to", "_to_copy", "prims.convert_element_type", "prims.device_put", "type_as")
def _to(node: Node, args: Args) -> tuple[str, Args]:
    arguments = {k: v for k, v in args.items() if v is not None and k not in ("a", "other")}
    if "a" in args:
        arguments["self"] = args["a"]
    other = tensor_fact(args.get("other"))
    if other is not None:
        arguments |= {"dtype": other.dtype, "device": other.device}
    elif "other" in args:
        return "to_like", args
    if isinstance(arguments.get("dtype"), (torch.device, str)):  # `x.to(x.device)`: the type selects the overload
        arguments["device"] = arguments.pop("dtype")
    if isinstance(arguments.get("device"), str):
        arguments["device"] = torch.device(arguments["device"])
    source, result = tensor_fact(arguments.get("self")), tensor_fact(node)
    if source is not None and result is not None:  # drop arguments that change nothing
        if source.device == result.device:
            arguments.pop("device", None)
        if source.layout == result.layout:
            arguments.pop("layout", None)
    if arguments.get("pin_memory") is False:
        del arguments["pin_memory"]
    return "to", arguments


@spelled("to", "cpu", "cuda")
def _to_device(node: Node, args: Args) -> tuple[str, Args] | None:
    result = tensor_fact(node)
    if result is None or args.get("rest") or set(args) - {"self", "rest"}:
        return None
    return "to", {"self": args["self"], "device": result.device}


@spelled("to", "type")
def _type(node: Node, args: Args) -> tuple[str, Args] | None:
    rest = args.get("rest", ())
    if len(rest) != 1 or not isinstance(rest[0], torch.dtype) or set(args) - {"self", "rest"}:
        return None
    return "to", {"self": args["self"], "dtype": rest[0]}


@spelled("feature_dropout", *(f"torch.nn.functional.dropout{n}d" for n in (1, 2, 3)))
def _feature_dropout(node: Node, args: Args) -> tuple[str, Args] | None:
    name = str(getattr(node.target, "__name__", ""))
    if args["training"] is not False and not drops_dim_one(name, args["input"]):
        return None
    return "feature_dropout", {"input": args["input"], "p": args["p"], "train": args["training"]}


CAST_METHODS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip

for _method, _dtype in CAST_METHODS.items():

    def _cast(node: Node, args: Args, dtype: torch.dtype = _dtype) -> tuple[str, Args] | None:
        plain = not args.get("rest") and set(args) <= {"self", "rest"}
        return ("to", {"self": args["self"], "dtype": dtype}) if plain else None

    spelled("to", _method)(_cast)


@spelled("split", "split", "split_with_sizes", "chunk", "tensor_split")
def _split(node: Node, args: Args) -> tuple[str, Args] | None:
    pieces = fact(node)
    source = tensor_fact(args["self"])
    if not isinstance(pieces, (list, tuple)) or source is None:
        return None
    dim = args.get("dim", 0)
    sizes = [piece.shape[dim] for piece in pieces]
    if not known_equal(sum(sizes), source.shape[dim]):
        return None  # `tensor_split` at indices that do not ascend: the pieces overlap
    return "split", {"self": args["self"], "sizes": sizes, **({} if dim == 0 else {"dim": dim})}


def _half_to_float(args: Args) -> Args:
    wide = {"dtype": torch.float32} if args.get("half_to_float") else {}
    return {"self": args["self"], "dim": args["dim"], **wide}


@spelled("softmax", "_softmax")
def _softmax(node: Node, args: Args) -> tuple[str, Args]:
    return "softmax", _half_to_float(args)


@spelled("log_softmax", "_log_softmax")
def _log_softmax(node: Node, args: Args) -> tuple[str, Args]:
    return "log_softmax", _half_to_float(args)


@spelled("slice", "slice")
def _slice(node: Node, args: Args) -> tuple[str, Args] | None:
    return _plain_slice(args["self"], args.get("dim", 0), args.get("start"), args.get("end"), args.get("step", 1))


@spelled("slice", "narrow")
def _narrow(node: Node, args: Args) -> tuple[str, Args] | None:
    start, length = args["start"], args["length"]
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    end = start + length
    return _plain_slice(args["self"], args["dim"], start, None if start < 0 and end == 0 else end, 1)


def _plain_slice(value: Any, dim: Any, start: Any, end: Any, step: Any) -> tuple[str, Args] | None:
    """Bounds counted from the front and inside the tensor; an end at the size is left out."""
    known = tensor_fact(value)
    if known is None:
        return None
    size = known.shape[dim]
    start = 0 if start is None else start
    end = None if isinstance(end, int) and end >= sys.maxsize else end
    if isinstance(size, int):
        if not all(isinstance(v, (int, type(None))) for v in (start, end)):
            return None
        start = min(max(start + size if start < 0 else start, 0), size)
        end = size if end is None else min(max(end + size if end < 0 else end, 0), size)
        end = None if end == size else max(end, start)
    args = {"self": value, "dim": dim % max(known.dim(), 1), "start": start, "end": end, "step": step}
    defaults = OPERATIONS["slice"].parameters or {}
    return "slice", {k: v for k, v in args.items() if isinstance(v, Node) or v is not defaults[k] and v != defaults[k]}


def index_steps(rank: int, index: Any) -> list[tuple[int, Any]] | None:
    """An index as a list of steps. Each is a dim of the value that the steps before it give, and what is done there: a
    number (select), a slice, or None (a new dim).

    Returns None if tensors, lists or masks are among the indices, or if a number is not known.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(e is None or e is Ellipsis or isinstance(e, slice) or type(e) is int for e in entries):
        return None
    indexed_dims = sum(e is not None and e is not Ellipsis for e in entries)
    steps: list[tuple[int, Any]] = []
    dim = 0
    for entry in entries:
        if entry is Ellipsis:
            dim += rank - indexed_dims
            continue
        whole = isinstance(entry, slice) and (entry.start, entry.stop, entry.step) == (None, None, None)
        if not whole:
            steps.append((dim, entry))
        dim += type(entry) is not int
    return steps


@spelled("getitem", "getitem")
def _getitem(node: Node, args: Args) -> tuple[str, Args] | None:
    """An index of a tensor with a single step is read as select, slice or unsqueeze. An index of a tuple stays."""
    value, index = args["self"], args["index"]
    known = fact(value) if isinstance(value, Node) else None
    if not isinstance(known, torch.Tensor):
        return None
    steps = index_steps(known.dim(), index)
    if steps == [] and isinstance(index, slice):
        steps = [(0, index)]
    if steps is None or len(steps) != 1:
        return "tensor_getitem", args
    return index_step(value, *steps[0]) or ("tensor_getitem", args)


def index_step(value: Node, dim: int, entry: Any) -> tuple[str, Args] | None:
    """The operation that one step of an index performs; None where its bounds are not known."""
    known = tensor_fact(value)
    if entry is None:
        return "unsqueeze", {"self": value, "dim": dim}
    if isinstance(entry, slice):
        return _plain_slice(value, dim, entry.start, entry.stop, 1 if entry.step is None else entry.step)
    size = known.shape[dim] if known is not None else None
    if entry < 0 and not isinstance(size, int):
        return None
    return "select", {"self": value, "dim": dim, "index": entry % size if entry < 0 else entry}


@spelled("select", "select")
def _select(node: Node, args: Args) -> tuple[str, Args]:
    known, index = tensor_fact(args["self"]), args["index"]
    if known is not None and isinstance(index, int) and index < 0:
        size = number(known.shape[args["dim"]])
        if isinstance(size, int):
            args = {**args, "index": index + size}
    return "select", args


@spelled("permute", "getattr")
def _getattr(node: Node, args: Args) -> tuple[str, Args] | None:
    adapter = {"T": _reverse_dims, "mT": _matrix_transpose}.get(args["index"])
    return adapter(node, {"self": args["self"]}) if adapter and tensor_fact(args["self"]) is not None else None


def _filled_with(value: int, name: str) -> None:
    @spelled("full", name)
    def filled(node: Node, args: Args) -> tuple[str, Args] | None:
        # `full` infers the dtype from the number, `zeros` takes the default dtype: it is read from the result
        result = tensor_fact(node)
        return None if result is None else ("full", {**args, "fill_value": value, "dtype": result.dtype})

    @spelled("full_like", f"{name}_like")
    def filled_like(node: Node, args: Args) -> tuple[str, Args]:
        return "full_like", {**args, "fill_value": value}


_filled_with(0, "zeros")
_filled_with(1, "ones")
