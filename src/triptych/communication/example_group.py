"""A process group for examples: one process plays one rank of several.

If this rank communicates x, rank r is assumed to communicate (r + 1) * x, or, for elements of a single byte, x rolled
by r elements. So every rank has different data, and all results are known: an example fails if it uses the data of the
wrong rank or from the wrong position. The group communicates only when it is waited for, so an example also fails if it
reads a result too early, or overwrites an operand too early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _private

NAME = "triptych_examples"
OTHER = "triptych_examples_too"
"""The same ranks as another group."""
SYMMETRIC = "triptych_examples_symmetric"
"""The same ranks as a group with symmetric memory."""
RANKS = 2
RANK = 1


def register() -> Any:
    """Register the group under its names, again if `destroy_process_group` has removed them."""
    group = _group()
    for name in (NAME, OTHER, SYMMETRIC):
        try:
            _private.resolve_process_group(name)
        except RuntimeError:
            _private.register_process_group(name, group)
    return group


@functools.cache
def _group() -> Any:
    """The group, which exists as long as it is referenced."""
    import torch.distributed as dist

    reductions = {
        dist.ReduceOp.SUM: lambda x: x.sum(0),
        dist.ReduceOp.AVG: lambda x: x.mean(0),
        dist.ReduceOp.MAX: lambda x: x.amax(0),
        dist.ReduceOp.MIN: lambda x: x.amin(0),
    }

    def on_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.element_size() == 1:
            numbers = tensor.contiguous().view(torch.uint8).flatten()
            parts = [numbers.roll(rank).view(tensor.shape) for rank in range(RANKS)]
            return torch.stack(parts).view(tensor.dtype)
        return torch.stack([tensor * (rank + 1) for rank in range(RANKS)])

    def reduced(tensor: torch.Tensor, how: Any) -> torch.Tensor:
        reduce = next(reduce for op, reduce in reductions.items() if how == op)
        return reduce(on_all_ranks(tensor)).to(tensor.dtype)

    def reduce_in_place(tensor: torch.Tensor, how: Any) -> None:
        tensor.copy_(reduced(tensor, how))

    def gather(output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(on_all_ranks(tensor).reshape(output.shape))

    def scatter(output: torch.Tensor, tensor: torch.Tensor, how: Any) -> None:
        output.copy_(reduced(tensor, how).chunk(RANKS)[RANK].reshape(output.shape))

    class Work(dist.Work):
        """Communications that are performed when they are waited for."""

        def __init__(self, communicate: Callable[..., None], *operands: tuple[Any, ...]) -> None:
            super().__init__()
            self.steps = [functools.partial(communicate, *arguments) for arguments in operands]

        def wait(self, timeout: Any = None) -> bool:
            while self.steps:
                self.steps.pop()()
            return True

    class ExampleGroup(dist.ProcessGroup):
        def __init__(self, rank: int, size: int) -> None:
            super().__init__(rank, size)  # type: ignore[call-arg]
            self.works: list[Work] = []

        def start(self, communicate: Callable[..., None], *operands: tuple[Any, ...]) -> Work:
            self.works.append(Work(communicate, *operands))  # C++ can call it only while Python refers to it
            return self.works[-1]

        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            return self.start(reduce_in_place, *((tensor, opts.reduceOp) for tensor in tensors))

        allreduce_coalesced = allreduce

        def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
            return self.start(gather, (output, tensor))

        def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
            return self.start(gather, *zip(outputs, tensors))

        def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
            return self.start(scatter, (output, tensor, opts.reduceOp))

        def reduce_scatter_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
            return self.start(scatter, *((*pair, opts.reduceOp) for pair in zip(outputs, tensors)))

        def size(self) -> int:
            return RANKS

    return ExampleGroup(RANK, RANKS)


def register_symmetric() -> None:
    """Register the group, under one of its names as a group with symmetric memory."""
    register()
    _private.stores_of_symmetric_groups.setdefault(SYMMETRIC, None)
    _symmetric_operators_on_cpu()


@functools.cache
def _symmetric_operators_on_cpu() -> torch.library.Library:
    """The operators that use symmetric memory have kernels only for GPUs. On the CPU, plain collectives and products
    compute them, as in torch's own tests."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", _private.plain_all_gather_matmul)
    library.impl("fused_all_gather_scaled_matmul", _private.plain_all_gather_scaled_matmul)
    library.impl("fused_matmul_reduce_scatter", _private.plain_matmul_reduce_scatter)
    library.impl("fused_scaled_matmul_reduce_scatter", _private.plain_scaled_matmul_reduce_scatter)
    return library


def all_reduce(x: torch.Tensor, reduction: str = "sum", group: str = NAME) -> torch.Tensor:
    register()
    return torch.ops._c10d_functional.all_reduce(x, reduction, group)


def all_gather(x: torch.Tensor, group: str = NAME) -> torch.Tensor:
    register()
    return torch.ops._c10d_functional.all_gather_into_tensor(x, RANKS, group)


def reduce_scatter(x: torch.Tensor, reduction: str = "sum", group: str = NAME) -> torch.Tensor:
    register()
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, reduction, RANKS, group)


def all_gather_along(x: torch.Tensor, dim: int = 0, group: str = SYMMETRIC) -> torch.Tensor:
    """All parts along a dim, as functional collectives write it: gathered along dim 0, split, and concatenated."""
    register_symmetric()
    whole = wait(all_gather(x, group))
    return whole if dim == 0 else torch.cat(whole.chunk(RANKS), dim)


def reduce_scatter_along(
    x: torch.Tensor, dim: int = 0, reduction: str = "sum", group: str = SYMMETRIC
) -> torch.Tensor:
    """This rank's part along a dim, as functional collectives write it."""
    register_symmetric()
    return wait(reduce_scatter(x if dim == 0 else torch.cat(x.chunk(RANKS, dim)), reduction, group))


def wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)
