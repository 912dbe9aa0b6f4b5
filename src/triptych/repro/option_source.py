"""Options as Python source, with the user's own passes and rules written out beside them."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import site
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..options import INDUCTOR_PREFIX, Options
from .python_source import OF_THE_FILE, NotPython, literal


class OptionSource:
    """Collects imports and definitions while values are written as expressions."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self.left_out: list[str] = []
        """Options that cannot be written, and why."""
        self._names: dict[str, Any] = {}

    def options(self, options: Options) -> str:
        """A dict of what differs from the defaults."""
        entries: dict[str, Any] = {}
        for one in fields(Options):
            value = getattr(options, one.name)
            if one.name == "on_error":  # left out: a reproduction must raise its error
                continue
            if one.name == "pass_options":
                entries |= value
            elif one.name == "inductor_options":
                entries |= {INDUCTOR_PREFIX + name: setting for name, setting in value.items()}
            elif value != one.default:
                entries[one.name] = value
        written = []
        for name, value in entries.items():
            try:
                written.append(f'"{name}": {self.value(value)}')
            except NotPython as error:
                self.left_out.append(f"{name}: {error}")
        return "{" + ", ".join(written) + "}"

    def value(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self.value, value)) + "]"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
        if inspect.isclass(value) or isinstance(value, FunctionType):
            return self._named(value.__name__, value)
        if is_dataclass(value) and not isinstance(value, type):
            given = ", ".join(f"{f.name}={self.value(getattr(value, f.name))}" for f in fields(value))
            return f"{self.value(type(value))}({given})"
        try:
            return literal(value)
        except NotPython:
            if vars(type(value)).get("__module__") and not getattr(value, "__dict__", {"": 0}):
                return f"{self.value(type(value))}()"  # an object without state is its class
            raise

    def _named(self, name: str, value: Any) -> str:
        """A class or function under a name in the file: imported if that can be done anywhere, else written out."""
        if name in self._names and self._names[name] is not value:
            raise NotPython(f"two different things are called {name}")
        if name in self._names:
            return name
        _require_free(name)
        self._names[name] = value
        if _importable(value):
            alias = "" if value.__name__ == name else f" as {name}"
            self.imports.append(f"from {value.__module__} import {value.__qualname__}{alias}")
            return name
        text = _definition(value)
        if name != value.__name__:
            raise NotPython(f"{value.__name__} is known as {name}")
        for used, meant in _used(text, value).items():
            self._needed(used, meant)
        self.definitions.append(text)
        return name

    def _needed(self, name: str, value: Any) -> None:
        if name in self._names and self._names[name] is value:
            return
        if isinstance(value, ModuleType):
            if getattr(sys.modules.get(name), "__name__", "") != value.__name__:  # else `import torch`, which is there
                _require_free(name)
            self._names[name] = value
            if not _is_installed(value.__name__):
                raise NotPython(f"the module {value.__name__} is not installed")
            self.imports.append(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
        elif inspect.isclass(value) or callable(value) and hasattr(value, "__name__"):
            self._named(name, value)
        else:
            _require_free(name)
            self._names[name] = value
            self.definitions.append(f"{name} = {self.value(value)}")


def _require_free(name: str) -> None:
    if name in OF_THE_FILE:
        raise NotPython(f"{name} is a name that the file uses itself")


def _definition(value: Any) -> str:
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError) as error:
        raise NotPython(f"{value!r} has no source") from error
    if not text.startswith(("def ", "class ", "@")):
        raise NotPython(f"{value.__qualname__} is not defined by a statement of its own")
    return text.rstrip()


def _used(text: str, value: Any) -> dict[str, Any]:
    """The globals and closure variables that a definition uses, by name."""
    scope = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    functions = (value,) if isinstance(value, FunctionType) else filter(inspect.isroutine, vars(value).values())
    for function in functions:
        function = inspect.unwrap(getattr(function, "__func__", function))
        if isinstance(function, FunctionType):
            scope |= function.__globals__
            cells = zip(function.__code__.co_freevars, function.__closure__ or ())
            scope |= {name: cell.cell_contents for name, cell in cells if name != "__class__"}
    tree = ast.parse(text)
    loaded = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return {n: scope[n] for n in sorted(loaded) if n in scope and not hasattr(builtins, n) and n != value.__name__}


def _importable(value: Any) -> bool:
    """Can any process import it under its own name?"""
    module = getattr(value, "__module__", None) or ""
    if "." in getattr(value, "__qualname__", "") or not _is_installed(module):
        return False
    return getattr(sys.modules.get(module), value.__name__, None) is value


def _is_installed(module: str) -> bool:
    """Is this a module of the standard library, of an installed package, or of this one? A module beside the user's
    script is not."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names or top == __name__.partition(".")[0]:
        return top != "__main__"
    spec = importlib.util.find_spec(top) if top in sys.modules and top != "__main__" else None
    if spec is None or spec.origin is None:
        return False
    places = {*site.getsitepackages(), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
    return any(Path(spec.origin).is_relative_to(place) for place in places)
