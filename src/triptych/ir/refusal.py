"""Why something cannot be done at a place of the graph, as data: the node at fault, what was wanted, what was found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Node

if TYPE_CHECKING:
    from .program import Value


@dataclass(frozen=True, eq=False)
class Refusal:
    """The text is built only when it is read, because most refusals never are.

    `wanted` and `found` are text, or values of any kind (a dtype, a shape, a node) that are formatted then.
    """

    sentence: str = ""
    """The reason in words; `{at}`, `{wanted}` and `{found}` in it are replaced by these fields."""
    at: Node | Value | None = None
    """The value at fault; None if it is the value that the rule would replace."""
    wanted: Any = None
    found: Any = None
    matched: int | None = None
    """How many nodes of a pattern matched before one did not; None if all of them matched."""

    @property
    def node(self) -> Node | None:
        return _node(self.at)

    @property
    def reason(self) -> str:
        """The sentence, followed by what was wanted and found unless the sentence mentions them."""
        compared = {"wanted": self.wanted, "found": self.found}
        texts = {name: words(value) for name, value in compared.items() if value is not None}
        sentence, is_compared = self.sentence, any(f"{{{name}}}" in self.sentence for name in texts)
        for name, text in {"at": words(self.at), **texts}.items():
            sentence = sentence.replace(f"{{{name}}}", text)
        added = "" if is_compared else ", ".join(f"{name} {text}" for name, text in texts.items())
        return ": ".join(part for part in (sentence, added) if part)

    def __str__(self) -> str:
        return self.reason

    def blaming(self, node: Node) -> Refusal:
        """The same refusal with `node` as the node at fault."""
        return replace(self, at=node)


def _node(value: Any) -> Node | None:
    node = value if isinstance(value, Node) else getattr(value, "node", None)  # a symbolic size has another `node`
    return node if isinstance(node, Node) else None


def words(value: Any) -> str:
    """A value as a reason prints it."""
    if isinstance(value, str):
        return value
    if (node := _node(value)) is not None:
        return node.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(words, value)) + "]"
    return str(value)
