"""The user's own passes in a hook: functions of the graph, rules, and passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule

from ..options import ADD_RULES, Options
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


@dataclass(frozen=True)
class CustomRules(Pass):
    """The user's own rules, run together until none of them fires."""

    given: tuple[Rule, ...] = ()
    name: ClassVar[str] = "custom_rules"

    def rules(self) -> Sequence[Rule]:
        return self.given


def custom_steps(options: Options, hook: str, stage: str) -> list[Pass | Callable[..., Any]]:
    """What to run in a hook, in the order given: neighbouring rules together; classes stand for an instance.

    Of the rules that were added, those that name this stage.
    """
    steps: list[Pass | Callable[..., Any]] = []
    for one in options.custom_passes(hook):
        if hook == ADD_RULES and stage not in one.stages:
            continue
        if isinstance(one, type) and issubclass(one, (Rule, Pass)):
            one = one()
        if isinstance(one, Rule):
            if steps and isinstance(last := steps[-1], CustomRules):
                steps[-1] = CustomRules((*last.given, one))
                continue
            one = CustomRules((one,))
        steps.append(one)
    return steps


def name_of(custom: Any) -> str:
    return getattr(custom, "__name__", type(custom).__name__)


def call_custom(custom: Callable[..., Any], gm: GraphModule, is_inference: bool) -> None:
    """Call a function on the graph or, if it asks for it, on the module; tell it `is_inference` if it asks."""
    asks = "is_inference" in inspect.signature(custom).parameters
    result = custom(gm if _wants_module(custom) else gm.graph, **({"is_inference": is_inference} if asks else {}))
    if isinstance(result, GraphModule) and result is not gm:
        gm.graph = result.graph
    elif isinstance(result, Graph) and result is not gm.graph:
        gm.graph = result


def _wants_module(custom: Callable[..., Any]) -> bool:
    """A pass whose first parameter is called `gm` or is annotated as a GraphModule gets the module."""
    params = list(inspect.signature(custom).parameters.values())
    if not params:
        return False
    first = params[0]
    return first.name in ("gm", "module", "graph_module") or "GraphModule" in str(first.annotation)
