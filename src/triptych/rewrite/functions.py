"""`triptych.rule`: a rule made of two functions, a pattern and its replacement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch.fx import GraphModule, Node, map_arg, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from ..arguments import require_callable, require_sequence, require_switches
from ..errors import TriptychError, UnknownName
from ..ir.calls import read
from ..ir.computed_facts import compute_facts
from ..ir.facts import fact
from ..ir.program import ATEN, Value
from ..match.pattern import Capture, Constant, ListOf, Operation, Pattern, Tensor, restriction
from .emit import STRIDES_RELIED_ON, Emitter
from .rule import Rule

Function = Callable[..., Any]


def rule(
    pattern: Function,
    replacement: Function,
    *,
    name: str = "",
    check: Callable[..., None] | None = None,
    example_inputs: Sequence[Any] = (),
    exact: bool = False,
    stages: Sequence[str] = Rule.stages,
    examples: Sequence[Any] = (),
) -> Rule:
    """A rule that replaces what matches `pattern` by what `replacement` computes. Both take the same parameters.

    They are plain PyTorch functions:

        triptych.rule(lambda x, y: torch.relu(x + y), lambda x, y: torch.ops.mine.add_relu(x, y))

    or, if their first parameter is called `op`, written in the language of rules:

        triptych.rule(lambda op, x: op.neg(op.neg(x)), lambda op, x: x)

    A parameter stands for any tensor, unless it is annotated otherwise (`n: int`). Sizes and dims in the pattern must
    be in the program as they are written; with `example_inputs`, one tensor for each parameter, the pattern is read for
    tensors of their rank, so that `x.t()` or `sum(-1)` matches any spelling. `check(m, x, ...)` may say with
    `m.require(condition, reason)` what else must hold. Results may differ by rounding unless `exact` is set.
    """
    for function in (pattern, replacement):
        require_callable(function, "rule", "two functions, a pattern and a replacement")
    require_sequence(example_inputs, "rule")
    require_switches("rule", exact=exact)
    wanted = _parameters(pattern)
    if wanted != _parameters(replacement):
        actual = _parameters(replacement)
        raise TriptychError(f"pattern and replacement take different parameters: {wanted} and {actual}")
    body: dict[str, Any] = {
        "__doc__": f"{_text(pattern)} -> {_text(replacement)}",
        "exact": exact,
        "stages": stages if isinstance(stages, str) else tuple(stages),  # a string is refused, not taken apart
        "examples": examples if isinstance(examples, str) else list(examples),
        "functions": (pattern, replacement, check),
        "pattern": _pattern_method(pattern, example_inputs),
        "rewrite": _rewrite_method(replacement),
        "mixed_dtypes": True,
    }
    if check is not None:
        body["check"] = _check_method(check)
    shown = name or _own_name(pattern)
    for method in ("pattern", "check", "rewrite"):
        if method in body:
            body[method].__qualname__ = f"{method} of rule {shown}"
    body["rule_name"] = classmethod(lambda cls: shown)
    rule_class: type[Rule] = type("FunctionRule", (Rule,), body)
    rule_class.of_user = True
    _require_names(replacement)
    return rule_class()


def _require_names(replacement: Function) -> None:
    """An attribute that a module does not have, such as `torch.sofmax`, is an error now. Whatever else cannot be traced
    without operands may do with them."""
    if next(iter(inspect.signature(replacement).parameters), "") == "op":
        return
    try:
        symbolic_trace(replacement)
    except AttributeError as error:
        if type(getattr(error, "obj", None)) is ModuleType:
            raise _untraceable(replacement, error) from error
    except Exception:
        return


def _parameters(function: Function) -> list[str]:
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError as error:
        own = getattr(function, "__name__", str(function))
        raise TriptychError(f"{own} has no parameters that can be read: say lambda x: {own}(x)") from error
    return names[1:] if names[:1] == ["op"] else names


def _own_name(pattern: Function) -> str:
    own = getattr(pattern, "__name__", "")
    return own if own.isidentifier() else "rule_of_functions"


def _text(function: Function) -> str:
    own = getattr(function, "__name__", "")
    return f"{own if own.isidentifier() else 'f'}({', '.join(_parameters(function))})"


def _method(parameters: Sequence[str], body: Callable[..., Any], first: Sequence[str] = ("op",)) -> Any:
    """A method with these named parameters: the signature of a rule's method decides which captures it is given."""

    def method(self: Rule, *args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [inspect.Parameter(n, kind) for n in ("self", *first, *parameters)]
    method.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return method


def _pattern_method(pattern: Function, example_inputs: Sequence[Any]) -> Any:
    if next(iter(inspect.signature(pattern).parameters), "") == "op":

        def in_rules_language(self: Rule, *args: Any) -> Any:
            return pattern(*args)

        in_rules_language.__signature__ = _with_self(pattern)  # type: ignore[attr-defined]
        return in_rules_language
    return _method([], lambda op: _as_pattern(pattern, example_inputs))


def _with_self(function: Function) -> inspect.Signature:
    signature = inspect.signature(function, eval_str=True)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[own, *signature.parameters.values()])


def _as_pattern(function: Function, example_inputs: Sequence[Any]) -> Any:
    """The operations that a plain function calls, as a pattern."""
    traced = _traced(function)
    if example_inputs:
        compute_facts(traced, example_inputs, "example_value", None, False)
    notes = inspect.signature(function, eval_str=True).parameters
    patterns: dict[Node, Pattern] = {}

    def of(value: Any) -> Pattern:
        if isinstance(value, Node):
            return patterns[value]
        if isinstance(value, (list, tuple)):
            return ListOf(tuple(of(v) for v in value))
        return Constant(value)

    for node in traced.graph.nodes:
        if node.op == "output":
            returned = node.args[0]
            return tuple(of(r) for r in returned) if isinstance(returned, (list, tuple)) else of(returned)
        if node.op == "placeholder":
            note = notes[node.name].annotation
            patterns[node] = Capture(node.name, restriction(Tensor if note is inspect.Parameter.empty else note))
            continue
        call = read(node) if node.op != "get_attr" else None
        if call is None or call.mutates:
            raise TriptychError(f"a pattern cannot contain {node.format_node()}")
        patterns[node] = Operation(call.op, {key: of(value) for key, value in call.args.items()})
    raise TriptychError("the pattern returns nothing")


def _traced(function: Function) -> GraphModule:
    try:
        return symbolic_trace(function)
    except Exception as error:
        raise _untraceable(function, error) from error


def _untraceable(function: Function, error: Exception) -> TriptychError:
    near: list[str] = []
    if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), ModuleType):
        near = UnknownName("name", str(error.name), dir(error.obj)).near
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    own = getattr(function, "__name__", str(function))
    return TriptychError(f"{own} could not be traced for a rule: {error}{hint}")


def _rewrite_method(replacement: Function) -> Any:
    parameters = _parameters(replacement)
    if next(iter(inspect.signature(replacement).parameters), "") == "op":
        return _method(parameters, lambda op, **given: replacement(op, **given))
    return _method(parameters, lambda op, **given: _emit(op, replacement, given))


def _emit(op: Emitter, function: Function, values: Mapping[str, Any]) -> Any:
    """Insert the operations of a plain function into the graph, as they are or, in an ATen graph, as ATen operators."""
    in_order = [values[name] for name in _parameters(function)]
    operands = [value.node if isinstance(value, Value) else value for value in in_order]
    traced = in_aten(op, function, operands) if op.program.dialect == ATEN else _traced(function)
    return put(op, traced, operands)


def put(op: Emitter, traced: GraphModule, operands: Iterable[Any]) -> Any:
    """Insert a traced graph into the program, with these operands for its inputs; returns the results of that graph."""
    inputs = iter(operands)
    now: dict[Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            now[node] = next(inputs)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: now[n])
        if node.op == "output":
            returned = args[0]
            return tuple(returned) if isinstance(returned, (list, tuple)) else returned
        if node.op == "get_attr":
            now[node] = op.constant(getattr(traced, str(node.target)))
        else:
            now[node] = op.node(node.op, node.target, args, kwargs).node
            if STRIDES_RELIED_ON in node.meta:
                now[node].meta[STRIDES_RELIED_ON] = node.meta[STRIDES_RELIED_ON]
    return None


def in_aten(op: Emitter, function: Function, operands: Sequence[Any]) -> GraphModule:
    """The ATen operators that a function calls on operands such as these."""
    facts = [fact(value) if isinstance(value, Node) else value for value in operands]
    with op.program.computing(op.anchor):
        return make_fx(function)(*facts)


def _check_method(check: Callable[..., None]) -> Any:
    names = list(inspect.signature(check).parameters)
    return _method(names[1:], lambda m, **given: check(m, **given), first=("m",))
