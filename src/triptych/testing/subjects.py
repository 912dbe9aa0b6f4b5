"""Everything that carries examples: all rules and passes of the three stages, and the rules that they share."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from .. import attention, joint, post_grad, pre_grad, rules
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


def subjects() -> Iterator[Rule | type[Pass]]:
    """Rules and passes, by the modules they are written in."""
    for package in (attention, rules, pre_grad, joint, post_grad):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            module = importlib.import_module(info.name)
            for member in list(vars(module).values()):
                if not inspect.isclass(member) or member.__module__ != module.__name__:
                    continue
                if issubclass(member, Rule) and not inspect.isabstract(member):
                    yield member()
                elif issubclass(member, Pass):
                    yield member
