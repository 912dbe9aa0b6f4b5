"""Unwraps what `torch.compile` returned: the model itself, and the settings to compile it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .. import _private
from ..backend import compile_fx
from ..options import Options

OptionsLike = Mapping[str, Any] | Options | None


@dataclass(frozen=True)
class CompileSettings:
    """What `torch.compile` takes beside the model."""

    backend: str | Callable[..., Any] = "triptych"
    options: OptionsLike = None
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool | None = None

    def over(self, own: CompileSettings | None) -> CompileSettings:
        """These settings, with those of the compiled model (`own`) where these are not given.

        `options` and `mode` are taken over only from the same backend: to another one they mean something else.
        """
        if own is None:
            return self
        if callable(own.backend) and self.backend == CompileSettings.backend:  # a user's backend replaces the default
            return replace(self, backend=own.backend).over(own)
        options, mode = self.options, self.mode
        if self.backend == own.backend:
            if isinstance(own.options, Mapping) and (options is None or isinstance(options, Mapping)):
                options = {**own.options, **(options or {})}
            mode = own.mode if mode is None else mode
        dynamic = own.dynamic if self.dynamic is None else self.dynamic
        fullgraph = own.fullgraph if self.fullgraph is None else self.fullgraph
        return CompileSettings(self.backend, options, mode, dynamic, fullgraph)


def unwrapped(model: Any) -> tuple[Any, CompileSettings | None]:
    """The model inside what `torch.compile` returned, and its settings; any other model as it is.

    `torch.compile` would call the wrapper itself, not compile it.
    """
    if isinstance(model, nn.Module) and hasattr(model, "dynamo_ctx"):
        return model._orig_mod, _settings(model.dynamo_ctx)
    if isinstance(model, nn.Module) and model._compiled_call_impl is not None:  # model.compile(...)
        return model, _settings_of_function(model._compiled_call_impl)
    if (original := getattr(model, "_torchdynamo_orig_callable", None)) is not None:
        return original, _settings_of_function(model)
    return model, None


def _settings_of_function(function: Any) -> CompileSettings | None:
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    context = next((one for one in cells if isinstance(one, _private.DynamoContext)), None)
    return None if context is None else _settings(context)


def _settings(context: Any) -> CompileSettings:
    backend = _private.innermost_backend(context.callback)
    kwargs = getattr(backend, "kwargs", {})
    compiler: Any = getattr(backend, "compiler_fn", backend)
    if compiler is compile_fx:
        compiler = "triptych"
    elif not hasattr(compiler, "compile_fn"):  # an attribute that `make_backend` sets
        compiler = getattr(backend, "compiler_name", "") or ""
    return CompileSettings(
        backend=compiler,
        # Inductor's wrapper has turned the mode into options
        options=kwargs.get("options") or getattr(backend, "config", None),
        mode=kwargs.get("mode"),
        dynamic=getattr(backend, "dynamic", None),
        fullgraph=getattr(context, "fullgraph", None),
    )
