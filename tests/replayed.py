"""A device without a GPU that behaves as CUDA graphs do, to test on a CPU what replaying guarantees.

Recording computes nothing and leaves its results undefined. A replay reads and writes the memory that was recorded,
whatever the caller passes. What of this a program does not survive, it would not survive on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from triptych.codegen.eager import EagerCodegen, boxed
from triptych.codegen.inductor import InductorCodegen, results_that_leave
from triptych.ir.facts import is_tangent
from triptych.replay.attach import Facts
from triptych.replay.decision import Policy
from triptych.replay.program import Program


class FakeGraph:
    def __init__(self, run: Callable[[], Sequence[Any]], results: Sequence[Any], idle_memory: int) -> None:
        self.run, self.results, self.idle_memory = run, results, idle_memory
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for mine, new in zip(self.results, self.run()):
                if isinstance(mine, Tensor) and mine.data_ptr() != new.data_ptr():
                    base_of(mine).copy_(base_of(new))


def by_address(value: Any) -> Any:
    """Tensors as a graph knows them: memory at an address, whoever has it, and kept alive by nobody."""
    if isinstance(value, list):
        return [by_address(one) for one in value]
    if not isinstance(value, Tensor) or value.data_ptr() == 0:
        return value
    count = 1 + sum((size - 1) * stride for size, stride in zip(value.size(), value.stride()))
    memory = (ctypes.c_char * (count * value.element_size())).from_address(value.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype).as_strided(value.size(), value.stride())
    raw = raw.conj() if value.is_conj() else raw
    return raw._neg_view() if value.is_neg() else raw


def without_owners(run: Any) -> Any:
    """A function that reads the memory of the tensors it closes over, and does not keep them."""
    cells = tuple(CellType(by_address(cell.cell_contents)) for cell in run.__closure__)
    return FunctionType(run.__code__, run.__globals__, closure=cells)


def base_of(x: Tensor) -> Tensor:
    """All of a tensor's memory, from its first element on."""
    elements = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((elements,), (1,), 0)


class FakeDevice:
    """A CPU in place of a GPU. `seconds` are what the device says between two marks, in turn."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.somebody_records = False
        self.seconds: list[float | None] = []
        self.idle_memory, self.in_use, self.peak = 0, 2**30, 2**30

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    def is_capturing(self) -> bool:
        return self.somebody_records

    def lie_at(self, values: list[Any], addresses: list[int], positions: list[int]) -> bool:
        return all(values[i].data_ptr() == addresses[i] for i in positions)

    def stream(self) -> int:
        return 0

    def follow(self, last: Any) -> None:
        return None

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[FakeGraph, Sequence[Any]]:
        given = run.__closure__  # the inputs: a recording must leave them as they are
        tensors = [x for cell in given or () for x in flat(cell.cell_contents)]
        before = [x.clone() for x in tensors]
        random = torch.get_rng_state()
        self.somebody_records = True
        try:
            results = run()
        finally:
            self.somebody_records = False
        torch.set_rng_state(random)
        addresses = {x.untyped_storage().data_ptr() for x in tensors}
        for x in results:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in addresses:
                base_of(x).fill_(float("nan") if x.is_floating_point() else 1)
        with torch.no_grad():
            for x, value in zip(tensors, before):
                if not torch.equal(x, value):
                    x.copy_(value)
        graph = FakeGraph(without_owners(run), results, self.idle_memory)
        self.graphs.append(graph)
        return graph, results

    def mark(self) -> None:
        return None

    def seconds_between(self, first: Any, last: Any) -> float | None:
        return self.seconds.pop(0) if self.seconds else None

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        base_of(made).fill_(1)
        return made

    def memory_in_use(self) -> int:
        return self.in_use

    def total_memory(self) -> int:
        return 2**32

    def peak_memory(self) -> int:
        return self.peak


def static_inputs() -> set[int]:
    """Parameters and buffers, as Inductor is told of them."""
    facts = torch._guards.TracingContext.get().fw_metadata
    return set(facts.static_input_indices or ())


def writes(call: Any, value: Any) -> bool:
    """Does a call of an operator write the value, given by position?"""
    arguments = getattr(getattr(call.target, "_schema", None), "arguments", ())
    return any(
        a.alias_info is not None and a.alias_info.is_write and given is value
        for a, given in zip(arguments, call.args)
    )


def flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from flat(one)


@contextmanager
def replaying_on_a_cpu(monkeypatch: Any, device: FakeDevice | None = None, always: bool = True) -> Iterator[FakeDevice]:
    """Programs that are compiled inside are replayed by a fake device, as those on a GPU are by CUDA."""
    device = device or FakeDevice()

    def replayed(emit: Callable[..., Any]) -> Callable[..., Any]:
        def instead(self: Any, gm: Any, example_inputs: Sequence[Any], graph: str) -> Any:
            facts = Facts(results_that_leave(gm, graph == "backward", graph == "inference"))
            count = len(gm.graph.output_node().args[0])
            placeholders = gm.graph.find_nodes(op="placeholder")
            saved = {i for i, node in enumerate(placeholders) if not is_tangent(node)}
            fixed = saved if graph == "backward" else static_inputs()
            written = {i for i, node in enumerate(placeholders) if any(writes(user, node) for user in node.users)}
            compiled = emit(self, gm, example_inputs, graph)
            program = Program(
                lambda inputs: compiled(inputs), [facts.role(i) for i in range(count)], device,
                fixed=fixed, written=written, policy=Policy(always=always), name=graph,
            )  # fmt: skip
            return boxed(lambda inputs: program(inputs))

        return instead

    with monkeypatch.context() as patch:
        for codegen in (EagerCodegen, InductorCodegen):
            patch.setattr(codegen, "emit", replayed(codegen.emit))
        yield device
