"""The profiled step as a trace in Chrome's format, which perfetto and chrome://tracing open.

Each event of a launch has as its arguments where the launch comes from: program, graph, passes and rules, module,
source lines, nodes, and what it was estimated to take. Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import TriptychError
from .profile import Moment, Profile, TimedLaunch

if TYPE_CHECKING:
    from .explanation import Explanation

MICROSECONDS = 1e6
HOW = "this explanation has no profile: explain(..., profile=True) measures one (on the command line --profile)"


def trace_data(explanation: Explanation) -> dict[str, Any]:
    """The profile of an explanation, and that of stock Inductor if there is one, each as a process."""
    if explanation.profile is None:
        raise TriptychError(HOW)
    both = [one for one in (explanation, explanation.stock) if one is not None and one.profile is not None]
    events = [event for number, one in enumerate(both, 1) for event in _process(one, number)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(explanation: Explanation, pid: int) -> Iterator[dict[str, Any]]:
    profile = explanation.profile
    assert profile is not None
    name = f"{explanation.model or 'model'}, {explanation.backend}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    lanes = list(dict.fromkeys(moment.lane for moment in profile.step))
    for tid, lane in enumerate(lanes, 1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": lane}}
    for moment in profile.step:
        yield _event(profile, moment, pid, lanes.index(moment.lane) + 1)


def _event(profile: Profile, moment: Moment, pid: int, tid: int) -> dict[str, Any]:
    timed = profile.launches[moment.launch] if moment.launch >= 0 else None
    return {
        "ph": "X",
        "cat": "step" if moment.lane == "step" else "kernel",
        "name": moment.name,
        "pid": pid,
        "tid": tid,
        "ts": moment.start * MICROSECONDS,
        "dur": moment.seconds * MICROSECONDS,
        "args": {} if timed is None else _arguments(timed),
    }


def _arguments(timed: TimedLaunch) -> dict[str, Any]:
    launch = timed.launch
    arguments = {
        "launch": launch.name,
        "program": timed.program,
        "graph": launch.graph,
        "pass": ", ".join(launch.passes),
        "rule": ", ".join(launch.rules),
        "module": launch.module,
        "source": ", ".join(launch.sources),
        "nodes": ", ".join(launch.nodes),
    }
    estimate = {} if launch.cost is None else {"estimated_us": launch.cost.seconds * MICROSECONDS}
    return {name: value for name, value in arguments.items() if value != ""} | estimate
