"""Takes compiled graphs over from Inductor where it would hand them to its CUDA graphs.

For this, functions of `torch._inductor.output_code` are replaced while a program is compiled or loaded. Other threads
may compile meanwhile, also without us: for them the functions do what they did. All releases from 2.11 on have them;
torch 2.13 has a setting for it (`cudagraph_policy`), which says nothing of parts of a graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import _private


@dataclass(frozen=True)
class Handover:
    """What happens to graphs that are compiled or loaded."""

    finish: Callable[[Any], None]
    """Is given each graph."""
    attach: Callable[[Any], Any] | None
    """Is given each graph that is to be a CUDA graph, instead of torch's CUDA graph trees."""
    is_quiet: bool
    """Is Inductor to be silent about why other graphs are not?"""


class OfThread(threading.local):
    handover: Handover | None = None


current = OfThread()
lock = threading.Lock()
originals: dict[str, Any] = {}
"""The replaced functions of Inductor, while there are any."""
users = 0
"""How many threads compile with them replaced."""


@contextlib.contextmanager
def compiled_graphs(
    finish: Callable[[Any], None], attach: Callable[[Any], Any] | None, is_quiet: bool
) -> Iterator[None]:
    """Inside, what this thread compiles with Inductor, or loads from a cache, is handed over."""
    before, current.handover = current.handover, Handover(finish, attach, is_quiet)
    replace_functions()
    try:
        yield
    finally:
        put_functions_back()
        current.handover = before


def replace_functions() -> None:
    global users
    with lock:
        users += 1
        if users == 1:
            module = vars(_private.output_code)
            originals.update({name: module[name] for name in REPLACEMENTS})
            module.update({name: replacement(originals[name]) for name, replacement in REPLACEMENTS.items()})


def put_functions_back() -> None:
    global users
    with lock:
        users -= 1
        if users == 0:
            vars(_private.output_code).update(originals)


def realign_and_finish(realign: Any) -> Any:
    def instead(is_replayed: Any, compiled: Any, *rest: Any) -> None:
        realign(is_replayed, compiled, *rest)
        if current.handover is not None:
            current.handover.finish(compiled)

    return instead


def hand_over(original: Any) -> Any:
    def instead(inputs: Any, compiled: Any, *rest: Any) -> None:
        if current.handover is None or current.handover.attach is None:
            original(inputs, compiled, *rest)
            return
        current.handover.attach(compiled)
        # as Inductor does for a graph that is called: kernels want aligned inputs
        realign = originals["maybe_realign_inputs"]
        realign(_private.BoxedBool(False), compiled, compiled.inputs_to_check, compiled.mutated_input_idxs)

    return instead


def be_quiet(original: Any) -> Any:
    def instead(message: str) -> None:
        if current.handover is None or not current.handover.is_quiet:
            original(message)

    return instead


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "maybe_realign_inputs": realign_and_finish,
    "cudagraph_post_compile": hand_over,
    "cudagraph_partition_post_compile": hand_over,
    "log_cudagraph_skip_and_bump_counter": be_quiet,
}
