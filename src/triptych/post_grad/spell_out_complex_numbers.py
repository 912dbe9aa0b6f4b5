"""`spell_out_complex_numbers`: rewrites complex constants that Python could not read back from a graph's code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _private
from ..ir.program import Program
from ..rewrite.edits import SetArguments
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

EAGER: dict[str, Any] = {"dialects": ("aten",), "options": {"codegen": "eager"}}


class SpellOutComplexNumbers(Rule):
    """f(x, (1+nanj)) -> f(x, complex(1, nan)), where the code of the graph is run by Python

    The code of a graph contains constants as `repr` writes them: `(1+nanj)` is an undefined name, and `(-0+1j)` has
    lost the sign of its zero.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "eager":
            return
        for node in list(program.graph.nodes):
            if _holds_misread(node.args) or _holds_misread(node.kwargs):
                yield Match.at(program, node)

    def rewrite(self, op, m):
        def spelled(value: Any) -> Any:
            return op.call(complex, value.real, value.imag).node if _is_misread(value) else value

        node = m.root.node
        args, kwargs = _private.pytree.tree_map(spelled, (node.args, node.kwargs))
        return SetArguments(node, args, kwargs)

    examples = [
        fires(lambda x: x * complex(2, -0.0), "c64[4]", **EAGER),
        fires(lambda x: x + complex(-0.0, 1), "c64[4]", **EAGER),
        declines(lambda x: x * (1 + 2j), "c64[4]", **EAGER),
        declines(lambda x: x * math.nan, "f32[4]", **EAGER),
        declines(lambda x: x + complex(-0.0, 1), "c64[4]", dialects=("aten",)),
    ]


def _holds_misread(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_misread, value))
    return any(map(_holds_misread, value.values())) if isinstance(value, dict) else _is_misread(value)


def _is_misread(value: Any) -> bool:
    if not isinstance(value, complex):
        return False
    parts = (value.real, value.imag)
    return not all(map(math.isfinite, parts)) or any(part == 0 and math.copysign(1, part) < 0 for part in parts)


@dataclass(frozen=True)
class SpellOutComplexNumbersPass(Pass):
    """Writes complex constants as calls of `complex` if Python would not read their text as the same number."""

    name = "spell_out_complex_numbers"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (SpellOutComplexNumbers(),)
