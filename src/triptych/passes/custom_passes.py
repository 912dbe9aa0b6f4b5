"""The user's own passes in a hook: functions of the graph, rules, and passes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from torch.fx import GraphModule

from .. import _private
from ..errors import TriptychError
from ..options import ADD_RULES, Options
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .returned_graphs import take_over


@dataclass(frozen=True)
class CustomRules(Pass):
    """The user's own rules, run together until none of them fires."""

    given: tuple[Rule, ...] = ()
    name: ClassVar[str] = "custom_rules"

    def rules(self) -> Sequence[Rule]:
        return self.given


def custom_steps(options: Options, hook: str, stage: str) -> list[Pass | Callable[..., Any]]:
    """The steps to run in a hook, in the order given: consecutive rules together, and an instance for each class.

    In the hook `add_rules`, only the rules that name this stage.
    """
    steps: list[Pass | Callable[..., Any]] = []
    for one in options.custom_passes(hook):
        if hook == ADD_RULES and stage not in one.stages:
            continue
        one = instance_of(one)
        if isinstance(one, Rule):
            if steps and isinstance(last := steps[-1], CustomRules):
                steps[-1] = CustomRules((*last.given, one))
                continue
            one = CustomRules((one,))
        steps.append(one)
    return steps


def instance_of(custom: Any) -> Any:
    """An instance of a rule or a pass that is given as its class. Another class is called as a function is."""
    if not (isinstance(custom, type) and issubclass(custom, (Rule, Pass))):
        return custom
    try:
        inspect.signature(custom.__init__).bind(None)
    except TypeError as error:
        message = f"{custom.__name__} cannot be created ({error}): give an instance, not the class"
        raise TriptychError(message) from error
    return custom()


def name_of(custom: Any) -> str:
    return getattr(custom, "__name__", type(custom).__name__)


def call_custom(custom: Callable[..., Any], gm: GraphModule, is_inference: bool) -> Any:
    """Call a function on the graph or, if its annotation says so, on the module; tell it `is_inference` if it asks.
    Returns what it returned."""
    asks = "is_inference" in inspect.signature(custom).parameters
    subject = gm if wants_module(custom) else gm.graph
    try:
        with _private.without_dispatch_modes():  # a tensor that the function creates is a real one
            returned = custom(subject, **({"is_inference": is_inference} if asks else {}))
            take_over(gm, returned)
            return returned
    except AttributeError as error:
        if error.obj is not gm.graph or not hasattr(gm, str(error.name)):
            raise
        raise TriptychError(
            f"it asked the graph for {error.name!r}, which only the module has; a function gets the torch.fx.Graph, "
            "or the module if its first parameter is annotated as torch.fx.GraphModule"
        ) from error


def wants_module(custom: Callable[..., Any]) -> bool:
    """Is the first parameter annotated as a GraphModule, or as a class that it inherits from? Otherwise the function
    gets the graph, as functions in Inductor's hooks do."""
    annotation = _first_annotation(custom)
    if isinstance(annotation, str):  # it contains a name that the function's module does not define
        return re.search(r"\b(GraphModule|Module)\b", annotation) is not None
    kinds = get_args(annotation) or (annotation,)  # `GraphModule | None`
    return any(kind in GraphModule.__mro__ and kind is not object for kind in kinds)


def _first_annotation(custom: Callable[..., Any]) -> Any:
    try:
        signature = inspect.signature(custom, eval_str=True)
    except Exception:  # whatever evaluating an annotation raises
        signature = inspect.signature(custom)
    first = next(iter(signature.parameters.values()), None)
    return None if first is None else first.annotation
