"""What a pass is: a name, a purpose, options, and rules in the order in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..options import Options
from .driver import Tally, run_rules
from .rewriter import Rewriter
from .rule import Rule


@dataclass(frozen=True)
class Pass:
    """Subclass as a frozen dataclass: the docstring is the purpose, the fields are the options."""

    name: ClassVar[str] = ""
    default: ClassVar[bool] = True
    """The pass runs unless it is removed; if False, it runs only if added by name."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Names that, added in place of the pass's own, run a part of it; each can be removed, too."""
    part_examples: ClassVar[Mapping[str, Any]] = {}
    """For each part, an example on which it fires if it is added alone."""
    required: ClassVar[bool] = False
    """Later steps depend on the pass: it runs with all passes off and beyond a limit of rewrites, a bisection does not
    count it, and it cannot be removed."""
    changes_interface: ClassVar[bool] = False
    """The pass changes inputs or outputs of the graph, which the compile flow accounts for. It cannot be verified by
    running the graph before and after it."""
    exact: ClassVar[bool] = True
    """Results are bit-identical. In a pass made of rules, each rule declares this itself."""
    examples: ClassVar[list[Any]] = []
    """For passes that are not made of rules; rules carry their own."""

    @classmethod
    def purpose(cls) -> str:
        return (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")

    @classmethod
    def details(cls) -> str:
        """The docstring after the purpose: which properties are not preserved, and what the options mean."""
        rest = (inspect.getdoc(cls) or "").partition("\n\n")[2]
        return "\n\n".join(paragraph.replace("\n", " ") for paragraph in rest.split("\n\n"))

    @classmethod
    def option_fields(cls) -> dict[str, Any]:
        """The pass's own options with their defaults."""
        return {f.name: f.default for f in fields(cls)}

    def rules(self) -> Sequence[Rule]:
        return ()

    @classmethod
    def rules_of_part(cls, part: str) -> list[Rule]:
        """The rules whose rewrites are counted under the name of a part."""
        return [rule for rule in cls().rules() if rule.counts_as(part)]

    def run(self, rewriter: Rewriter, *, strict: bool = False, tally: Tally | None = None) -> Tally:
        """Run the rules, less those that the user removed by name."""
        removed = rewriter.program.options.remove_passes
        rules = [rule for rule in self.rules() if rule.name not in removed]
        return run_rules(rewriter, rules, strict=strict, tally=tally)


def pass_with_options(cls: type[Pass], options: Options) -> Pass:
    """The pass with the values of its `pass_name.option` entries. Passes of two stages may have one name: each takes
    the options that it has."""
    keys = {name: f"{cls.name}.{name}" for name in cls.option_fields()}
    return cls(**{name: options.pass_options[key] for name, key in keys.items() if key in options.pass_options})
