"""Inductor's own passes, watched from outside, in the same records as ours."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from .. import _private
from ..codegen.lowered import lowering_noted
from ..errors import TriptychError, UnknownName
from ..ir.graph_copies import snapshot
from ..options import MODES, Options
from ..passes.node_lines import node_lines
from ..passes.record import Listing, PassRecord
from ..passes.session import Session, open_session

STAGES = ("pre_grad", "joint", "post_grad")
UNNAMED = "(steps without a name)"


@dataclass
class _Stage:
    """One stage at work on one graph."""

    session: Session
    stage: str
    graph: str
    gm: GraphModule
    seen: list[str]
    """The structure of the graph when it was last looked at, to compare with."""
    listing: Listing
    since: float
    depth: int = 0
    """Observers nest: a pass opens one, and the pattern matcher that it calls another."""

    def note(self, name: str, gm: GraphModule, began: float, ended: float) -> None:
        """Record what ran since the graph was last looked at."""
        now = structure(gm.graph)
        changed = now != self.seen
        first = len(self.listing.deltas)
        last = self.listing.add(node_lines(gm.graph, self.listing.latest)) if changed else first
        self.session.records.append(
            PassRecord(
                self.stage, name, self.graph, len(self.seen), len(now),
                rewrites=int(changed), seconds=ended - began, changed=changed,
                listing=self.listing, versions=(first, last),
            )  # fmt: skip
        )
        self.seen, self.gm = now, gm
        self.since = time.perf_counter()


@dataclass
class _Watch:
    """What is being compiled right now."""

    session: Session
    graph: str
    """Forward or backward, in the post-grad stage."""
    stages: list[_Stage] = field(default_factory=list)


_current: ContextVar[_Watch | None] = ContextVar("triptych_inductor_watch", default=None)
"""Per thread: Inductor's stages are patched for the whole process, and other threads may compile with them."""


@contextlib.contextmanager
def observed_inductor(
    options: Mapping[str, Any] | Options | None, mode: str | None = None
) -> Iterator[Callable[..., Any]]:
    """A backend that compiles as plain Inductor does and records every pass; `options` are Inductor's."""
    if isinstance(options, Options):
        raise TriptychError("backend='inductor' takes Inductor's options as a dict, not triptych.Options")
    known = _private.inductor_config.get_config_copy()
    for name in options or {}:
        if name not in known:
            raise UnknownName("option of Inductor", name, known)
    if mode is not None:
        if mode not in MODES:
            raise UnknownName("mode", mode, MODES)
        options = {**_private.list_mode_options(mode), **(options or {})}
    driver = _private.inductor_driver

    def inner_compile(gm: GraphModule, example_inputs: Any, *, session: Session, **kwargs: Any) -> Any:
        graph = "backward" if kwargs.get("is_backward") else "forward"
        with _now(session, graph), lowering_noted(session, graph, gm):
            return driver.compile_fx_inner(gm, example_inputs, **kwargs)

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        session = open_session(Options())
        session.graphs["dynamo"] = snapshot(gm)
        inner = functools.partial(inner_compile, session=session)
        with _now(session, ""):
            patches = {**_private.TRACK_NODES_OF_KERNELS, **(options or {})}
            return driver.compile_fx(gm, example_inputs, inner, config_patches=patches)

    def keep_source(source: str) -> None:
        if (watch := _current.get()) is not None:
            watch.session.kernels[watch.graph] = source

    with contextlib.ExitStack() as patches:
        for stage in STAGES:
            original = getattr(_private, f"inductor_{stage}")
            patches.enter_context(_replaced(driver, original.__name__, _staged(stage, original)))
        patches.enter_context(_replaced(GraphTransformObserver, "__enter__", _entered()))
        patches.enter_context(_replaced(GraphTransformObserver, "__exit__", _left()))
        keep = _replaced(_private.GraphLowering, "save_output_code", staticmethod(keep_source))
        patches.enter_context(keep)
        yield backend


def _staged(stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A stage of Inductor, wrapped so that it is recorded; Inductor calls it again for the graphs inside a graph."""

    @functools.wraps(original)
    def run(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        watch = _current.get()
        if watch is None:
            return original(gm, *args, **kwargs)
        outer = watch.stages[-1] if watch.stages else None
        graph = (watch.graph or stage) if outer is None else f"{outer.graph}.{_inner_name(outer.gm, gm)}"
        session = watch.session
        listing = session.open_listing(f"{stage}/{graph}", node_lines(gm.graph))
        current = _Stage(session, stage, graph, gm, structure(gm.graph), listing, time.perf_counter())
        watch.stages.append(current)
        try:
            result = original(gm, *args, **kwargs)
        finally:
            watch.stages.pop()
        _catch_up(current, gm if result is None else result)
        if outer is None:
            session.graphs[graph] = snapshot(current.gm)
        else:
            outer.since = time.perf_counter()
        return result

    return run


def _entered() -> Callable[..., Any]:
    original = GraphTransformObserver.__enter__

    def enter(self: GraphTransformObserver) -> Any:
        if (stage := _innermost_stage()) is not None:
            if stage.depth == 0:
                _catch_up(stage, self.gm)
                stage.since = time.perf_counter()
            stage.depth += 1
        return original(self)

    return enter


def _left() -> Callable[..., Any]:
    original = GraphTransformObserver.__exit__

    def leave(self: GraphTransformObserver, *raised: Any) -> None:
        ended = time.perf_counter()
        original(self, *raised)
        if (stage := _innermost_stage()) is not None:
            stage.depth -= 1
            if stage.depth == 0:
                stage.note(self.passname, self.gm, stage.since, ended)

    return leave


def _catch_up(stage: _Stage, gm: GraphModule) -> None:
    """Some of Inductor's steps have no name; if the graph has changed since it was last looked at, record that."""
    ended = time.perf_counter()
    if structure(gm.graph) != stage.seen:
        stage.note(UNNAMED, gm, stage.since, ended)


def structure(graph: Graph) -> list[str]:
    """The nodes as text, without facts about their values: a graph has changed if and only if this differs."""
    return [f"{n.name} {n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]


def _inner_name(outer: GraphModule, inner: GraphModule) -> str:
    return next((name for name, module in outer.named_modules() if module is inner), "inner")


def _innermost_stage() -> _Stage | None:
    watch = _current.get()
    return watch.stages[-1] if watch is not None and watch.stages else None


@contextlib.contextmanager
def _now(session: Session, graph: str) -> Iterator[None]:
    token = _current.set(_Watch(session, graph))
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
