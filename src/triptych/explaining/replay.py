"""Eager against compiled: one program run both ways from the same seed, and what differs."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import _private
from ..arguments import require_model
from ..errors import VerificationError
from ..options import Options
from ..passes.session import Session
from ..verify.numerics import compare, compare_strides
from ..verify.running import Result
from ..verify.tolerances import Tolerance, difference
from .explain import cut_off, name_of, observed_backend
from .model_state import preserved, roots

OptionsLike = Mapping[str, Any] | Options | None


@dataclass(frozen=True)
class Failure:
    """How a compiled program fails where eager does not."""

    kind: str
    """One of "differs", "check" and "command", or "raises" with the class of the error."""
    message: str
    trace: str = ""

    def __str__(self) -> str:
        return self.message


def options_for_checks(options: OptionsLike) -> Options:
    """The user's options, with eager's random stream unless they say otherwise, and with errors raised, not handled."""
    given_options = Options.make(options)
    eagers_draws = True if given_options.fallback_random is None else given_options.fallback_random
    return replace(given_options, fallback_random=eagers_draws, on_error="raise")


class Subject:
    """A model with its inputs and the results of running it in eager."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        train: bool = False,
        dynamic: bool | None = None,
        tolerance: float | None = None,
        verdict: Callable[..., Any] | None = None,
    ) -> None:
        """`verdict(compiled)` says whether the compiled model is good, in place of the comparison with eager."""
        require_model(model, "a comparison with eager")
        # somebody else's compiled wrapper around the model would be called, not compiled
        self.model = getattr(model, "_orig_mod", model)
        self.args, self.kwargs = args, kwargs or {}
        self.train, self.dynamic, self.tolerance = train, dynamic, tolerance
        self.name = name_of(self.model)
        self.verdict = verdict
        if verdict is None:
            self.eager = self._run(self.model)
            self.exact = None if tolerance is not None else self._run_in_float64()

    def check(self, options: Options, limit: int | None = None) -> tuple[Failure | None, list[Session]]:
        """Compile with at most `limit` rewrites, run, and compare with eager."""
        sessions: list[Session] = []
        try:
            with observed_backend("triptych", options, rewrite_limit=limit) as (backend, sessions):
                compiled = torch.compile(self.model, backend=backend, dynamic=self.dynamic)
                if self.verdict is not None:
                    with preserved(self.model, (self.args, self.kwargs)):
                        good = self.verdict(compiled)
                    return (None if good else Failure("check", "the check says no")), sessions
                result = self._run(compiled)
        except Exception as error:
            return _raised(error), sessions
        try:
            self._compare(result)
        except VerificationError as error:
            return Failure("differs", str(error)), sessions
        return None, sessions

    def _compare(self, result: Result) -> None:
        if self.tolerance is None:
            compare(self.eager, result, self.exact)
            compare_strides(self.eager, result)
            return
        for kind, name, want in self.eager.values():
            _require_close(name, want, getattr(result, kind).get(name), self.tolerance)

    def _run(self, function: Callable[..., Any]) -> Result:
        return run_model(function, self.model, self.args, self.kwargs, self.train)

    def _run_in_float64(self) -> Result | None:
        """The same run in float64, if that is possible: it shows how large a difference rounding explains."""
        if not isinstance(self.model, nn.Module) and any(True for _ in roots(self.model)):
            return None  # its weights cannot be reached for a copy
        with contextlib.suppress(Exception), _default_dtype(torch.float64):
            model = copy.deepcopy(self.model).double() if isinstance(self.model, nn.Module) else self.model
            args, kwargs = _private.pytree.tree_map(_wide, (self.args, self.kwargs))
            return run_model(model, model, args, kwargs, self.train)
        return None


def run_model(
    function: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
) -> Result:
    """Call `function`, which runs `model`, from a fixed seed: outputs, writes and gradients by name.

    The model, its inputs and the random state are afterwards as they were.
    """
    args, kwargs = _private.pytree.tree_map(cut_off, (args, kwargs))
    named = dict(_tensors(model, args, kwargs))
    grads = {name: tensor.grad for name, tensor in named.items() if tensor.is_leaf}
    with preserved(model, (args, kwargs)), torch.set_grad_enabled(train):
        versions = {name: tensor._version for name, tensor in named.items()}
        torch.manual_seed(0)
        try:
            returned = _private.pytree.tree_leaves(function(*args, **kwargs))
            result = Result({f"output {i}": _copied(value) for i, value in enumerate(returned)})
            if train:
                result.gradients = _gradients(returned, named)
            for name, tensor in named.items():
                if name.startswith("input") or tensor._version != versions[name]:
                    result.written[name] = _copied(tensor)
            written_grads = {n: t.grad for n, t in named.items() if t.is_leaf and t.grad is not grads[n]}
            result.written |= {f"gradient written to {n}": _copied(g) for n, g in written_grads.items()}
        finally:
            for name, grad in grads.items():
                named[name].grad = grad
    return result


def run_repro(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    options: OptionsLike = None,
    train: bool = False,
    dynamic: bool | None = None,
) -> int:
    """Runs a written reproduction: prints whether it still fails, and returns the exit code, 1 if it does."""
    subject = Subject(model, tuple(args), train=train, dynamic=dynamic)
    failure, _ = subject.check(options_for_checks(options))
    if failure is None:
        print("compiled and eager agree")
        return 0
    print(failure.trace + f"compiled is not as eager: {failure}")
    return 1


def _require_close(name: str, want: Any, got: Any, tolerance: float) -> None:
    """Raise unless values agree within the user's tolerance, relative to the value and to the largest of its tensor."""
    if (want is None) != (got is None):
        raise VerificationError(f"{name} is {'gone' if got is None else 'there and was not'}")
    if not isinstance(want, Tensor):
        return
    if want.dtype != got.dtype or want.shape != got.shape:
        raise VerificationError(f"{name} is {got.dtype}{list(got.shape)}, and was {want.dtype}{list(want.shape)}")
    if problem := difference(want, got, Tolerance(tolerance, tolerance)):
        raise VerificationError(f"{name} differs: {problem}")


def _raised(error: Exception) -> Failure:
    inner = getattr(error, "inner_exception", None) or error  # Dynamo's wrapper says only that a backend failed
    text = str(inner).partition("\nSet TORCHDYNAMO_VERBOSE")[0].strip()
    return Failure(f"raises {type(inner).__name__}", f"{type(inner).__name__}: {text}", _trace(error))


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _tensors(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    leaves = _private.pytree.tree_leaves((args, kwargs))
    yield from ((f"input {i}", leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    for number, module in enumerate(roots(model)):
        owner = f"module {number}." if number else ""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{owner}{name}", tensor


def _gradients(returned: list[Any], named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Gradients of the sum of all outputs, weighted by random numbers: the plain sum of a softmax has no gradient."""
    roots = [t for t in returned if isinstance(t, Tensor) and t.requires_grad]
    wanted = {f"gradient of {n}": t for n, t in named.items() if t.requires_grad and t.is_leaf}
    if not roots or not wanted:
        return {}
    seeds = []
    for number, root in enumerate(roots):
        generator = torch.Generator().manual_seed(number)
        dtype = torch.complex128 if root.is_complex() else torch.float64
        drawn = torch.randn(root.shape, generator=generator, dtype=dtype)
        seeds.append(drawn.to(root.device, root.dtype))
    # settings are per thread, and the backward graph is compiled where it first runs
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(roots, list(wanted.values()), seeds, allow_unused=True)
    return {name: _copied(gradient) for name, gradient in zip(wanted, gradients)}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    dtype = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
