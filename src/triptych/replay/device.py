"""What replaying asks of a device. A test puts a fake in its place, and then needs no GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _private


class Graph(Protocol):
    """What was recorded."""

    idle_memory: int
    """Bytes that are reserved for it and that hold nothing between two replays."""

    def replay(self) -> None: ...


class Device(Protocol):
    device: torch.device

    def is_capturing(self) -> bool:
        """Does somebody else record what the current stream is given?"""
        ...

    def lie_at(self, values: list[Any], addresses: list[int], positions: list[int]) -> bool:
        """Do the tensors at these positions lie at their addresses? There is an address for each value."""
        ...

    def stream(self) -> int:
        """What identifies the current stream."""
        ...

    def follow(self, last: Any) -> Any:
        """Let the current stream wait for what the last one was given, if there is a last one. The current stream."""
        ...

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Graph, Sequence[Any]]:
        """Record what `run` launches, and what it returns, in memory of the graph's own. Nothing is computed."""
        ...

    def mark(self) -> Any:
        """A point in what the current stream is given."""
        ...

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Seconds of the device between two points; None if it has not come to the last one yet."""
        ...

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def memory_in_use(self) -> int:
        """Bytes that tensors take now."""
        ...

    def peak_memory(self) -> int:
        """The most bytes that tensors have taken in this process."""
        ...

    def total_memory(self) -> int:
        """Bytes of the device."""
        ...


class RecordedGraph:
    """A CUDA graph and the memory that is reserved for it."""

    def __init__(self, graph: Any, idle_memory: int) -> None:
        self.idle_memory = idle_memory
        self.replay = graph.replay  # keeps the graph


class Cuda:
    """One GPU."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def lie_at(self, values: list[Any], addresses: list[int], positions: list[int]) -> bool:
        return _private.same_addresses(values, addresses, positions)

    def stream(self) -> int:
        return _private.current_raw_stream(self.index)

    def follow(self, last: Any) -> Any:
        stream = torch.cuda.current_stream(self.index)
        if last is not None:
            stream.wait_stream(last)
        return stream

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Graph, Sequence[Any]]:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        with torch.cuda.device(self.index), torch.cuda.stream(recording_stream(self.index)):
            torch.cuda.synchronize()
            torch.cuda.current_blas_handle()  # this thread's, which cannot be made while recording
            before = self._reserved_beyond_use()
            # a workspace from outside could be freed while the graph still writes to it
            _private.clear_cublas_workspaces()
            gc.disable()  # what it frees may call CUDA
            try:
                # other threads may go on calling CUDA
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    outputs = run()
                    graph.capture_end()
                except BaseException:
                    self._give_up(graph, pool)
                    raise
            finally:
                _private.clear_cublas_workspaces()
                if collects:
                    gc.enable()
            idle = max(self._reserved_beyond_use() - before, 0)
        return RecordedGraph(graph, idle), outputs

    def _reserved_beyond_use(self) -> int:
        return torch.cuda.memory_reserved(self.index) - self.memory_in_use()

    def _give_up(self, graph: Any, pool: Any) -> None:
        """End a recording that failed, so that neither the allocator nor the random generator believes it goes on."""
        try:
            graph.capture_end()
        except RuntimeError:
            for end in (_private.end_allocate_to_pool, _private.release_pool):
                with contextlib.suppress(RuntimeError):
                    end(self.index, pool)
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            torch.empty(1, device=self.device)
            empty.capture_end()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.index))
        return event

    def seconds_between(self, first: Any, last: Any) -> float | None:
        return first.elapsed_time(last) / 1e3 if last.query() else None

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)

    def memory_in_use(self) -> int:
        return torch.cuda.memory_allocated(self.index)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self.index)

    def total_memory(self) -> int:
        return torch.cuda.get_device_properties(self.index).total_memory


@functools.cache
def recording_stream(index: int) -> Any:
    return torch.cuda.Stream(index)
