"""A process group for examples: one process plays one rank of several.

Where this rank communicates x, rank r is taken to communicate (r + 1) x. So every rank has other data, what arrives is
known, and data of the wrong rank or at the wrong place shows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _private

NAME = "triptych_examples"
OTHER = "triptych_examples_too"
"""The same ranks as another group."""
RANKS = 2
RANK = 1


@functools.cache
def register() -> Any:
    """Make the group known by its names, once; it lives as long as somebody has it."""
    import torch.distributed as dist

    reductions = {
        dist.ReduceOp.SUM: lambda x: x.sum(0),
        dist.ReduceOp.AVG: lambda x: x.mean(0),
        dist.ReduceOp.MAX: lambda x: x.amax(0),
        dist.ReduceOp.MIN: lambda x: x.amin(0),
    }

    def on_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor * (rank + 1) for rank in range(RANKS)])

    def reduced(tensor: torch.Tensor, opts: Any) -> torch.Tensor:
        reduce = next(reduce for op, reduce in reductions.items() if opts.reduceOp == op)
        return reduce(on_all_ranks(tensor)).to(tensor.dtype)

    def done(result: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return _private.work_from_future(future)

    class ExampleGroup(dist.ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            for tensor in tensors:
                tensor.copy_(reduced(tensor, opts))
            return done(tensors)

        allreduce_coalesced = allreduce

        def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
            output.copy_(on_all_ranks(tensor).reshape(output.shape))
            return done([output])

        def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
            for output, tensor in zip(outputs, tensors):
                self._allgather_base(output, tensor)
            return done(outputs)

        def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
            output.copy_(reduced(tensor, opts).chunk(RANKS)[RANK].reshape(output.shape))
            return done([output])

        def reduce_scatter_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
            for output, tensor in zip(outputs, tensors):
                self._reduce_scatter_base(output, tensor, opts)
            return done(outputs)

        def size(self) -> int:
            return RANKS

    group = ExampleGroup(RANK, RANKS)  # type: ignore[call-arg]
    for name in (NAME, OTHER):
        _private.register_process_group(name, group)
    return group


def all_reduce(x: torch.Tensor, reduction: str = "sum", group: str = NAME) -> torch.Tensor:
    register()
    return torch.ops._c10d_functional.all_reduce(x, reduction, group)


def all_gather(x: torch.Tensor) -> torch.Tensor:
    register()
    return torch.ops._c10d_functional.all_gather_into_tensor(x, RANKS, NAME)


def reduce_scatter(x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    register()
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, reduction, RANKS, NAME)


def wait(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)
