"""The table of operations: each row is about something, and every operation that the code names is known."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx import Graph

import triptych
import triptych.pipeline  # all emitters
from triptych.ir.calls import OPERATORS, op_parameters, read
from triptych.ir.canonical import CANONICAL
from triptych.ir.operations import OPERATIONS, TRAITS, operation
from triptych.ir.schema import overloads
from triptych.match.pattern import PatternBuilder
from triptych.rewrite.dialects import ATEN_FORMS, TORCH_FORMS
from triptych.rewrite.emit import Emitter

SOURCES = sorted(Path(triptych.__file__).parent.rglob("*.py"))
READ_BY_PYTHON = {"getattr", "setitem", "not", "data_ptr", "untyped_storage", "to_like", "tensor"}
"""Calls without a schema that have no parameters of ours either: rules do not build them."""


def is_known(name: str) -> bool:
    return bool(op_parameters(name)) or name in READ_BY_PYTHON or bool(overloads(name.removesuffix("_")))


@pytest.mark.parametrize("name", OPERATIONS)
def test_row(name):
    row = operation(name)
    assert is_known(name), "neither torch nor the table gives its parameters"
    assert set(row.traits.split()) <= set(TRAITS)
    assert row.alias_parameters is None or row.aliases
    for alias in row.aliases.split():
        assert alias not in OPERATIONS and alias in CANONICAL
    if isinstance(row.torch, str):
        assert hasattr(torch.Tensor, row.torch)


def test_forms_are_of_known_operations():
    assert all(map(is_known, (*TORCH_FORMS, *ATEN_FORMS)))


def names_used(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Operations that code names: `op.NAME(...)` and `getattr(op, "NAME")` in a pattern or a rewrite, and `call.op`
    compared with strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "op":
            yield node.attr, node.lineno
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "op":
            if not (isinstance(node.left.value, ast.Name) and node.left.value.id == "call"):
                continue
            for constant in (c for right in node.comparators for c in ast.walk(right)):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value, node.lineno


def test_every_operation_that_code_names_is_known():
    """A misspelt name in a comparison is never equal to anything: no test of the rule itself would notice."""
    own = {"program", "anchor", "made", *dir(PatternBuilder), *dir(str)}  # some call a name `op`
    kinds = [Emitter]
    for kind in kinds:
        kinds += kind.__subclasses__()
        own |= set(dir(kind))
    named = [(path, name, line) for path in SOURCES for name, line in names_used(ast.parse(path.read_text("utf-8")))]
    unknown = [f"{path.name}:{line} {name}" for path, name, line in named if name not in own and not is_known(name)]
    assert not unknown
    assert len(named) > 300


SPECIAL = {"add": (2, 3), "and": (6, 3), "floordiv": (7, 2), "mod": (7, 3), "sub": (7, 3), "pow": (2, 3), "xor": (6, 3)}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_methods_read_as_the_operator_does(name):
    """`x.__mod__(y)`, `y.__rmod__(x)` and, where there is one, `x.__imod__(y)` are what `x % y` is."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    function = getattr(operator, f"__{name}__")
    plain = read(graph.call_function(function, (x, y)))
    assert plain is not None and plain.op == OPERATORS[function]
    for method, operands in ((f"__{name}__", (x, y)), (f"__r{name}__", (y, x))):
        call = read(graph.call_method(method, operands))
        assert call is not None and (call.op, call.args) == (plain.op, plain.args), method
        left, right = (torch.tensor(v) for v in (SPECIAL[name] if operands[0] is x else SPECIAL[name][::-1]))
        assert getattr(left, method)(right) == function(*SPECIAL[name])
    if (in_place := operation(plain.op).in_place_operator) is not None:
        call = read(graph.call_method(f"__{in_place.__name__.strip('_')}__", (x, y)))
        assert call is not None and (call.op, call.args, call.mutates) == (f"{plain.op}_", plain.args, True)
