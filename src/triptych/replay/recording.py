"""One CUDA graph with the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .device import Device, Graph
from .inputs import Inputs
from .outputs import Outputs, Role, Run


class Recording:
    """A program recorded with the inputs of one call."""

    def __init__(
        self,
        run: Run,
        given: list[Any],
        roles: Sequence[Role],
        fixed: Collection[int],
        written: Collection[int],
        device: Device,
    ) -> None:
        self.device = device
        self.stream: int | None = None
        self.last_stream: Any = None
        self.inputs = Inputs(given, fixed, written, device)
        self.graph, self.outputs = self._record(run, given, roles)
        self.outputs.nobody_holds_them_now()

    def _record(self, run: Run, given: Sequence[Any], roles: Sequence[Role]) -> tuple[Graph, Outputs]:
        used = self.inputs.for_recording(given)
        # the program empties the list that it is given
        graph, results = self.device.record(lambda: run(list(used)))
        return graph, Outputs(results, roles, used, self.inputs.returned, self.device)

    def is_free(self) -> bool:
        """May it be replayed: does nobody hold what it wrote the last time?"""
        return not self.outputs.are_held()

    def replay(self, given: Sequence[Any]) -> list[Any]:
        if (stream := self.device.stream()) != self.stream:
            # the memory is the same at each replay: one must have ended before the next begins
            self.stream, self.last_stream = stream, self.device.follow(self.last_stream)
        self.inputs.copy_in(given)
        self.graph.replay()
        self.inputs.copy_back(given)
        return self.outputs.take(given)
