"""Compile a model once, watch every pass, and tell what happened."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from .. import _private
from ..arguments import hint_to_unpack, require_keywords, require_model, require_switches
from ..backend import compile_fx
from ..errors import TriptychError, UnknownName
from ..options import Options
from ..passes.session import Session, watching
from .compiled_model import CompileSettings, OptionsLike, unwrapped
from .explanation import Explanation
from .frames import FrameLog
from .fresh_compiles import compiled_anew, forgotten
from .model_state import preserved
from .profile import Subject, profile_in_turns

BACKENDS = ("triptych", "inductor")

_one_at_a_time = threading.RLock()


def explain(
    model: Callable[..., Any],
    *args: Any,
    train: bool = False,
    options: OptionsLike = None,
    backend: str | Callable[..., Any] = "triptych",
    stock: bool = False,
    profile: bool = False,
    dynamic: bool | None = None,
    fullgraph: bool | None = None,
    mode: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """What each pass does to `model(*args, **kwargs)`; with `train` also to its gradient.

    The model is compiled anew and run once. Afterwards its parameters, buffers, gradients and inputs, the random state
    and the code that was compiled from it before are as they were. `backend="inductor"` shows Inductor's own passes at
    work on the same model; `options` are then Inductor's. With `stock`, the model is compiled by Inductor with its own
    passes as well: the summary and the page compare the two. With `profile`, the compiled program runs some more times,
    and `explanation.profile` has what each kernel launch takes; with `stock` too, both take turns.

    `dynamic`, `fullgraph` and `mode` are those of `torch.compile`. If the model is compiled already, arguments that are
    not given here are taken from that call of `torch.compile`: `dynamic` and `fullgraph`, and, if the backend is the
    same, also `mode` and `options`.
    """
    require_model(model, "explain")
    require_switches("explain", train=train, stock=stock, profile=profile, dynamic=dynamic, fullgraph=fullgraph)
    require_keywords(explain, model, kwargs)
    wanted = [CompileSettings(backend, options, mode, dynamic, fullgraph)]
    if stock:
        # `mode` is torch.compile's, so Inductor's as well; `options` are not
        wanted.append(CompileSettings("inductor", None, mode, dynamic, fullgraph))
    with hint_to_unpack(model, args):
        explanations = (profiled_runs if profile else plain_runs)(model, args, kwargs, train, wanted)
    explanations[0].stock = explanations[1] if stock else None
    return explanations[0]


def plain_runs(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, wanted: Sequence[CompileSettings]
) -> list[Explanation]:
    """The explanation of each way to compile the model."""
    return [observed_run(model, args, kwargs, train=train, settings=one).explanation for one in wanted]


def profiled_runs(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, wanted: Sequence[CompileSettings]
) -> list[Explanation]:
    """The same with measured times, for which all of them take turns."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(observed(model, args, kwargs, train=train, settings=one)) for one in wanted]
        subjects = [Subject(run.again, run.explanation.sessions) for run in runs]
        for run, measured in zip(runs, profile_in_turns(subjects)):
            run.explanation.profile = measured
    return [run.explanation for run in runs]


@dataclass
class Run:
    """One call of a model: what it returned and, from a training step, the gradient of every leaf it used."""

    outputs: Any
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class ObservedRun(Run):
    explanation: Explanation
    again: Callable[[contextlib.AbstractContextManager[Any]], Run]
    """Runs it once more, inside a context manager that times it, while the compiled code is there."""


def observed_run(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool = False,
    settings: CompileSettings,
) -> ObservedRun:
    """An explanation together with what the compiled model computed."""
    with observed(model, args, kwargs, train=train, settings=settings) as run:
        return run


@contextlib.contextmanager
def observed(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool = False,
    settings: CompileSettings,
) -> Iterator[ObservedRun]:
    """The same, with the compiled code still there inside."""
    require_model(model, "explain")
    model, own = unwrapped(model)
    settings = settings.over(own)
    backend = settings.backend
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "custom")
    log = FrameLog(own_thread_only=True)
    with observed_backend(backend, settings.options, mode=settings.mode) as (compiler, sessions):
        compiled = torch.compile(
            model, backend=compiler, dynamic=settings.dynamic, fullgraph=bool(settings.fullgraph)
        )
        log.start()
        try:
            run = run_once(compiled, args, kwargs, train=train, of=model)
        finally:
            log.stop()
        # a copy: what is compiled inside from now on is none of it
        explanation = Explanation(
            list(sessions), backend=name, train=train, model=name_of(model), frames=log.frames
        )

        def again(timed: contextlib.AbstractContextManager[Any]) -> Run:
            return run_once(compiled, args, kwargs, train=train, of=model, timed=timed)

        yield ObservedRun(run.outputs, run.gradients, explanation, again)


def run_once(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    of: Any = None,
    timed: contextlib.AbstractContextManager[Any] | None = None,
) -> Run:
    """Call it, backward too if `train`, and leave the state of the model (`of`) as it was. The call and the backward
    run inside `timed`."""
    args, kwargs = _private.pytree.tree_map(cut_off, (args, kwargs))
    with preserved(of if of is not None else function, (args, kwargs)):
        with timed or contextlib.nullcontext():
            with torch.set_grad_enabled(train):
                outputs = function(*args, **kwargs)
            return Run(outputs, _gradients(outputs) if train else [])


def cut_off(value: Any) -> Any:
    """Detaches an input that autograd has a history of: our backward must not run through that history and free it."""
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _gradients(outputs: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The gradient of the sum of all floating-point outputs; `.grad` fields are not touched."""
    roots = [
        t
        for t in _private.pytree.tree_leaves(outputs)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad
    ]
    leaves = _leaves(roots)
    if not leaves:
        raise TriptychError("train=True needs a floating-point output that requires a gradient")
    # settings are per thread, and the backward graph is compiled where it first runs
    with torch.autograd.set_multithreading_enabled(False):
        seeds = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    return list(zip(leaves, gradients, strict=True))


def _leaves(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    seen = set()
    waiting: list[Any] = [root.grad_fn for root in roots]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if function.name() == "torch::autograd::AccumulateGrad":
            leaves.append(function.variable)
        waiting += [before for before, _ in function.next_functions]
    return leaves


@contextlib.contextmanager
def _compiler(
    backend: str | Callable[..., Any], options: Any, mode: str | None = None
) -> Iterator[Callable[..., Any]]:
    """The backend to compile with. It is a new object each time, since Dynamo uses it as the key of what it caches."""
    if backend == "triptych":
        yield _bound(compile_fx, options=Options.make(options, mode))
    elif backend == "inductor":
        from .inductor import observed_inductor

        with observed_inductor(options, mode) as compiler:
            yield compiler
    elif callable(backend):
        arguments = {"options": options, "mode": mode}
        yield _bound(backend, **{name: value for name, value in arguments.items() if value})
    else:
        raise UnknownName("backend", str(backend), BACKENDS)


def _bound(backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A new function with the backend's name, which Dynamo puts into its messages."""

    @functools.wraps(backend)
    def compiler(gm: GraphModule, example_inputs: Any) -> Any:
        return backend(gm, example_inputs, **options)

    return compiler


@contextlib.contextmanager
def observed_backend(
    backend: str | Callable[..., Any], options: Any, rewrite_limit: int | None = None, mode: str | None = None
) -> Iterator[tuple[Callable[..., Any], list[Session]]]:
    """A backend, and the sessions of what it compiles inside the block. No compiled graph is loaded from a cache, and
    none stays in Dynamo's.

    `rewrite_limit`: all sessions together make at most this many rewrites. Threads take turns, because at the end the
    compiled code is dropped from Dynamo, and another thread might be about to run it.
    """
    with (
        _one_at_a_time,
        _compiler(backend, options, mode) as compiler,
        watching(rewrite_limit) as sessions,
        compiled_anew(),
        forgotten(compiler),
    ):
        yield compiler, sessions


def name_of(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "")
