"""A key that changes whenever the result of compiling could: sources, options, the user's passes.

Our passes run before Inductor looks into its cache, so its key already covers what they made of the graph. This
key is a second safeguard, and the key for anybody who keeps their own cache of compiled programs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from types import CodeType, FunctionType
from typing import Any

import torch

from .options import Options


class _Unidentified(Exception):
    """A value for which there is no identity that a cache could rely on."""


def cache_key(options: Options | Mapping[str, Any] | None = None) -> str | None:
    """The key of compiling with these options; None, for "do not cache", where a user's pass has no identity."""
    options = Options.make(options)
    try:
        given = [(f.name, _identity(getattr(options, f.name))) for f in fields(options)]
    except _Unidentified:
        return None
    return _digest(package_version(), torch.__version__, sources_digest(), repr(given))


def pass_identity(custom_pass: Any) -> str | None:
    """What identifies a user's pass: its `uuid`, or its source; None if neither is available.

    The source identifies a plain function only: a closure, a bound object or a partial has state that the source does
    not show. A pass that depends on anything else should define a `uuid()`.
    """
    uuid = getattr(custom_pass, "uuid", None)
    if uuid is not None:
        own = uuid() if callable(uuid) else uuid
        return None if own is None else f"uuid:{own!r}"
    if functions := getattr(custom_pass, "functions", None):  # a rule that `triptych.rule` made of them
        own = [pass_identity(f) for f in functions if f is not None]
        return None if None in own else "functions:" + _digest(*map(str, own), repr(custom_pass.stages))
    if hasattr(custom_pass, "rewrite") or hasattr(custom_pass, "rules"):
        return _class_identity(custom_pass)
    if not isinstance(custom_pass, FunctionType) or custom_pass.__closure__:
        return None
    try:
        source = inspect.getsource(custom_pass)
        defaults = _identity([custom_pass.__defaults__, custom_pass.__kwdefaults__])
    except (OSError, TypeError, _Unidentified):
        return None
    name = f"{custom_pass.__module__}.{custom_pass.__qualname__}"
    # two lambdas of one line have the same source: their code tells them apart
    return "source:" + _digest(name, source, _code(custom_pass.__code__), defaults)


def _class_identity(rule_or_pass: Any) -> str | None:
    """A rule or a pass: the sources of its class and of those it inherits from, and the values that it holds."""
    cls = rule_or_pass if isinstance(rule_or_pass, type) else type(rule_or_pass)
    inherited = [c for c in cls.__mro__ if not c.__module__.startswith(("triptych.", "builtins", "abc"))]
    try:
        sources = [f"{c.__module__}.{c.__qualname__}\0{inspect.getsource(c)}" for c in inherited]
        state = "" if cls is rule_or_pass else _identity(vars(rule_or_pass))
    except (OSError, TypeError, _Unidentified):
        return None
    return "class:" + _digest(cls.__qualname__, *sources, state)


@functools.cache
def sources_digest() -> str:
    """A digest of the sources of the whole package, as they are on disk at the first call."""
    return digest_of_sources(os.path.dirname(__file__))


def digest_of_sources(folder: str) -> str:
    """Covers the name and the content of every Python file. Every process that compiles computes it, so files are read
    without the detours of `pathlib`: some 400 of them take some milliseconds."""
    files = [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names if name.endswith(".py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        with open(file, "rb", buffering=0) as source:
            content = source.read()
        digest.update(f"{file[len(folder) :]}\0{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def package_version() -> str:
    try:
        return importlib.metadata.version("triptych")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def _identity(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, Mapping):
        return repr(sorted((_identity(k), _identity(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return repr([_identity(v) for v in value])
    identity = pass_identity(value)
    if identity is None:
        raise _Unidentified(value)
    return identity


def _code(code: CodeType) -> str:
    return repr((code.co_code, code.co_names, [_constant(c) for c in code.co_consts]))


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    # a set prints in another order in every process
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode("utf-8"))
    return digest.hexdigest()
