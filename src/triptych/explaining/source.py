"""The model that a file defines: `FILE.py` or `FILE.py:NAME`, with the inputs to call it with.

NAME is a module, a function to compile, or a function without parameters that returns a module, or a tuple of a
module or function and its inputs.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from .. import _private
from ..errors import TriptychError, UnknownName
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule

DEFAULT = "model"
MODULE_NAME = "triptych_subject"


class FileFailed(TriptychError):
    """The user's file raised while it was read."""


@dataclass
class Subject:
    """What to compile and how to call it."""

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """How to compile it, where the file says so, as a written reproduction does: options, train, dynamic."""

    def call(self) -> Callable[..., Any]:
        """The model as a function of positional arguments only."""
        if not self.kwargs:
            return self.model
        model, kwargs = self.model, self.kwargs
        return lambda *args: model(*args, **kwargs)


def load(spec: str) -> Subject:
    """The subject that `FILE.py[:NAME]` names; the error for something missing names similar names."""
    path, name = split(spec)
    module = _run(path)
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    if name not in public:
        candidates = [key for key, value in public.items() if _is_model(value, module)]
        hint = "" if name != DEFAULT else f" (say {path.name}:NAME for another name)"
        raise _missing(f"{path.name} defines no {name!r}", name, candidates, hint)
    model = public[name]
    if inspect.isclass(model):
        raise TriptychError(f"{path.name}:{name} is a class: define an instance and name that")
    if not callable(model):
        raise TriptychError(f"{path.name}:{name} is neither a module nor a function but of type {type(model).__name__}")
    if inspect.isfunction(model) and not _needs_arguments(model):
        result = model()
        if isinstance(result, nn.Module):  # a function that creates the model
            public[name] = result
        elif isinstance(result, tuple) and len(result) > 1 and callable(result[0]):  # and its inputs
            public |= {name: result[0], f"{name}_args": result[1] if len(result) == 2 else result[1:]}
        elif _is_plain_data(result):
            returned = f"{path.name}:{name} has no parameters and returned {_described(result)}"
            raise TriptychError(f"{returned}: return a module, or a module and its inputs (`return model, x`)")
    args, kwargs = _inputs(path, name, public)
    return Subject(name, public[name], args, kwargs, _settings(public))


def _is_plain_data(value: Any) -> bool:
    """Is it numbers, strings or lists of them, without a tensor? Such a value is not a model."""
    plain = isinstance(value, (int, float, str, tuple, list, dict))
    return plain and not any(isinstance(leaf, Tensor) for leaf in _private.pytree.tree_leaves(value))


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(member).__name__ for member in value)})"
    return type(value).__name__


def load_rule(spec: str) -> Any:
    """The rule or pass that `FILE.py:NAME` names."""
    path, name = split(spec)
    module = _run(path)
    rules = {key: value for key, value in vars(module).items() if _is_rule(value)}
    if name not in rules:
        raise _missing(f"{path.name} defines no rule {name!r}", name, list(rules))
    return rules[name]


def _is_rule(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (Rule, Pass)) and kind not in (Rule, Pass)


def split(spec: str) -> tuple[Path, str]:
    """`models/mlp.py:tower` -> the file and the name in it."""
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or Path(spec).exists():
        file, name = spec, DEFAULT
    path = Path(file)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path(".")
        # compared without the ending, which all of them share
        siblings = {p.stem: str(p) for p in sorted(folder.glob("*.py"))}
        raise _missing(f"no file {file}", path.stem, siblings)
    return path, name


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path.resolve())
    if spec is None or spec.loader is None:
        raise TriptychError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # so that the file can import its neighbours, and that what it defines can be found again by name
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[MODULE_NAME] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        where = f"{path}:{line}" if line else str(path)
        raise FileFailed(f"{where} raised {type(error).__name__}: {error}") from error
    return module


def _inputs(path: Path, name: str, public: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = [f"{name}_args", f"{name}_example_inputs"]
    wanted = own + ["args", "example_inputs"]
    inputs_key = next((key for key in wanted if key in public), None)
    kwargs = public.get(f"{name}_kwargs", public.get("kwargs", {}))
    if inputs_key is None:
        if kwargs:
            return (), dict(kwargs)
        if isinstance(public[name], nn.Module) or _needs_arguments(public[name]):
            near = [key for key in public if "arg" in key or "input" in key]
            what = f"{path.name} defines no inputs for {name!r}: set args = (...,) or {name}_args = (...,)"
            raise _missing(what, "args", near)
        return (), {}
    value = public[inputs_key]
    if callable(value) and not isinstance(value, Tensor):
        value = value()
    if isinstance(value, dict):
        return (), {**value, **kwargs}
    if isinstance(value, (tuple, list)):
        return tuple(value), dict(kwargs)
    return (value,), dict(kwargs)


def _settings(public: dict[str, Any]) -> dict[str, Any]:
    kinds = {"options": dict, "train": bool, "dynamic": bool}
    return {key: public[key] for key, kind in kinds.items() if isinstance(public.get(key), kind)}


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty for p in positional)


def _is_model(value: Any, module: ModuleType) -> bool:
    """Could it be the model that the user meant? Modules, and functions of the file itself, could."""
    if isinstance(value, nn.Module):
        return True
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _missing(what: str, name: str, known: Iterable[str], hint: str = "") -> TriptychError:
    """An error that names similar names; as a dict, `known` says how to show each of them."""
    shown = known if isinstance(known, dict) else {key: key for key in known}
    near = UnknownName("name", name, shown).near
    names = [repr(shown[key]) for key in near or sorted(shown)[:8]]
    if not names:
        return TriptychError(what + hint)
    listed = f"did you mean {' or '.join(names)}?" if near else f"there is {', '.join(names)}"
    return TriptychError(f"{what}; {listed}{hint}")
