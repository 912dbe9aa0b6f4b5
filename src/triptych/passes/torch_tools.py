"""What torch's own tools see of a compile: logs that TORCH_LOGS turns on, the profiler, the trace, provenance."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule, traceback

from .. import _private
from .session import Session

log = logging.getLogger("triptych")


def log_graph(kind: str, title: str, gm: GraphModule) -> None:
    """Print a graph where `TORCH_LOGS=kind` asks for it, in the log that Inductor uses."""
    log = _private.getArtifactLogger("torch._inductor.compile_fx", kind)
    if log.isEnabledFor(logging.DEBUG):
        graph = _private.lazy_format_graph_code(title, gm, include_stride=True, include_device=True, colored=True)
        log.debug("%s", graph)


def log_compiled(session: Session, graph: str) -> None:
    """One line for a graph that was compiled: what the passes did since the last such line of the program."""
    if log.isEnabledFor(logging.INFO):
        log.info("the %s graph was compiled: %s", graph, _what_passes_did(session))


def log_loaded(session: Session) -> None:
    """One line for a program that AOTAutograd has loaded: only stage 1 ran over it."""
    if log.isEnabledFor(logging.INFO):
        cache = "loaded from AOTAutograd's cache, so stages 2 and 3 did not run"
        log.info("the program was %s: %s", cache, _what_passes_did(session))


def _what_passes_did(session: Session) -> str:
    records = session.records[session.logged :]
    session.logged = len(session.records)
    changed = len({(record.stage, record.name) for record in records if record.changed})
    declined, seconds = (sum(r.declined for r in records), sum(r.seconds for r in records))
    ran = len({(record.stage, record.name) for record in records})
    rewrites = sum(record.rewrites for record in records)
    written = f"{rewrites} rewrite{'s' * (rewrites != 1)}"
    counts = f"{changed} of {ran} passes changed something, {written}, {declined} declined"
    return f"{counts}, {seconds:.2f} s in passes"


def timed_stage(stage: str) -> contextlib.AbstractContextManager[Any]:
    """Time a stage for torch's table of compile times, its profiler and its trace."""
    return _private.dynamo_timed(f"triptych.{stage}")


def timed_pass(stage: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """The same for a pass, only while profiling or tracing: most passes take less time than timing them would."""
    if _private.trace_log.handlers or _private.profiler_enabled():
        return _private.dynamo_timed(f"triptych.{stage}.{name}")
    return contextlib.nullcontext()


@contextlib.contextmanager
def provenance() -> Iterator[Callable[[GraphModule], None]]:
    """Inside, Inductor's setting `trace.provenance_tracking_level` works: its notes say which node of the pre-grad
    graph a node of the final graph comes from. Call the function that it yields with the pre-grad graph."""
    debug = _private.inductor_debug
    level = _private.inductor_config.trace.provenance_tracking_level

    def note(gm: GraphModule) -> None:
        debug._pre_grad_graph_id = id(gm.graph)
        if level == 1 and hasattr(debug, "_inductor_pre_grad_node_stack_trace"):
            traces = {n.name: n.stack_trace for n in gm.graph.nodes if n.stack_trace}
            debug._inductor_pre_grad_node_stack_trace.update(traces)

    with traceback.preserve_node_meta(level == 1), debug.reset_provenance_globals():
        yield note
