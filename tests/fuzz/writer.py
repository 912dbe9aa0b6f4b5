"""Writes one random program: statements are drawn by kind, run eagerly, and refused where torch refuses them."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .program import NAMES, SIZES, Program

LARGEST = 1e4
"""Larger results are refused: rounding would soon be all there is to compare."""
ELEMENTS = 3000
RANK = 5

Statement = Callable[["Writer"], "str | None"]
"""Returns an expression, whose results get names, or a whole statement (with `=`, `with`, a method ending in `_`)."""
STATEMENTS: dict[str, list[tuple[Statement, int]]] = {}
WEIGHTS = {
    "views": 5, "pieces": 4, "writes": 3, "pointwise": 5, "reductions": 3, "constants": 2, "products": 4, "layers": 4,
    "attention": 2, "casts": 1, "draws": 1, "control": 1, "nothing": 2,
}  # fmt: skip

KNOWN: frozenset[str] = frozenset({"special attention"})
"""Statement functions and switches that are off because what they find is known.

"special attention": attention over NaN or infinite scores. torch's kernels give such rows zeros, see `fuse_attention`.
"""


def statement(kind: str, weight: int = 2) -> Callable[[Statement], Statement]:
    """Register a function that writes one statement."""

    def register(function: Statement) -> Statement:
        STATEMENTS.setdefault(kind, []).append((function, weight))
        return function

    return register


@dataclass
class Writer:
    chance: random.Random
    seed: int
    train: bool
    dynamic: bool
    avoid: frozenset[str] = frozenset()
    """Names of statement functions and of switches that are off."""
    setup: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    worlds: list[dict[str, Any]] = field(default_factory=list)
    """The values of all names: with the first size, and with the second where sizes are dynamic."""
    order: list[str] = field(default_factory=list)
    """Names that statements may use, in the order of their definition."""
    special: bool = False
    """NaN, infinities and huge numbers may occur."""

    def __post_init__(self) -> None:
        sizes = SIZES if self.dynamic else SIZES[:1]
        self.worlds = [{**NAMES, "N": size} for size in sizes]
        self.special = self.chance.random() < 0.1

    # ---- choices ----

    def pick(self, *options: Any) -> Any:
        if not options:
            raise LookupError
        return self.chance.choice(options)

    def maybe(self, probability: float) -> bool:
        return self.chance.random() < probability

    def __getitem__(self, name: str) -> Tensor:
        return self.worlds[0][name]

    def value(self, wanted: Callable[[Tensor], Any] = lambda _: True, but_not: str = "-") -> str:
        """The name of a value, a late one rather than an early one; raises LookupError where none is as wanted."""
        names = [name for name in self.order if name[0] != but_not and wanted(self[name])]
        if not names:
            raise LookupError
        return names[max(self.chance.randrange(len(names)), self.chance.randrange(len(names)))]

    def floating(self, rank: int = 0, wanted: Callable[[Tensor], Any] = lambda _: True) -> str:
        return self.value(lambda t: t.is_floating_point() and t.dim() >= rank and wanted(t))

    def like(self, name: str) -> str:
        """A value of the same shape and dtype: maybe the same one."""
        shape, dtype = self[name].shape, self[name].dtype
        return self.value(lambda t: t.shape == shape and t.dtype == dtype)

    def dim(self, name: str) -> int:
        """One of its dims, counted from the front or from the back."""
        rank = self[name].dim()
        if not rank:
            raise LookupError
        return self.chance.randrange(-rank, rank)

    def dims(self, name: str, count: int) -> list[int]:
        rank = self[name].dim()
        if rank < count:
            raise LookupError
        return [d - rank if self.maybe(0.4) else d for d in self.chance.sample(range(rank), count)]

    def size(self, number: int) -> str:
        """A size as text: in terms of an argument's shape where it follows from the dynamic size."""
        base = SIZES[0]
        if not self.dynamic or number == 0 or number % base:
            return str(number)
        for name in self.order:
            if name[0] == "x" and base in self[name].shape:
                text = f"{name}.shape[{list(self[name].shape).index(base)}]"
                return text if number == base else f"{number // base} * {text}"
        return str(number)

    def sizes(self, shape: Sequence[int]) -> str:
        return ", ".join(self.size(n) for n in shape)

    # ---- inputs ----

    def shape(self, rank: int | None = None) -> list[int]:
        rank = self.pick(0, 1, 1, 2, 2, 2, 3, 3, 3, 4) if rank is None else rank
        odd = self.maybe(0.06)
        if not odd and rank > 1 and self.order and self.maybe(0.6):
            alike = [list(self[n].shape) for n in self.order if self[n].dim() == rank and self[n].numel()]
            if alike:
                return self.pick(*alike)
        shape = [self.pick(*((0, 1, 1, 5, 13) if odd else (2, 3, 4, 4, 4, 6, 8))) for _ in range(rank)]
        if self.dynamic and rank and not any(self._dynamic_size(n) for n in self.order if n[0] == "x"):
            shape[0] = SIZES[0]
        elif self.dynamic and rank and self.maybe(0.4):
            shape[self.chance.randrange(rank)] = SIZES[0]
        return shape

    def _dynamic_size(self, name: str) -> bool:
        return SIZES[0] in self[name].shape

    def given(self, shape: Sequence[int], kind: str = "float", letter: str = "x") -> str:
        """A new input: an argument (x), a parameter (p) or a buffer (b)."""
        name = f"{letter}{sum(line[0] == letter for line in self.setup)}"
        text = ", ".join("N" if n == SIZES[0] and self.dynamic else str(n) for n in shape)
        if kind == "bool":
            expression = f"torch.rand({text}) > 0.4" if text else "torch.rand(()) > 0.4"
        elif kind == "index":
            expression = f"torch.randint(0, 2, ({text}{',' * (len(shape) == 1)}))"
        elif letter == "p":
            expression = f"nn.Parameter(torch.randn({text}) * 0.5)" if text else "nn.Parameter(torch.randn(()))"
        else:
            expression = self._argument(shape, text, letter)
        self._exec(f"{name} = {expression}", self.setup)
        self.order.append(name)
        return name

    def _argument(self, shape: Sequence[int], text: str, letter: str) -> str:
        """A float tensor, in some layout, or a view of memory that other arguments view too."""
        expression = f"torch.randn({text})" if text else "torch.randn(())"
        dtype = self.pick(*[""] * 9, "float64", "bfloat16", "float16")
        if self.special and shape and shape[-1]:
            number = self.pick("math.nan", "math.inf", "-math.inf", "-0.0", "0.0", "1e30")
            expression += f".index_fill(-1, torch.tensor(0), {number})"
        if dtype and letter == "x":
            expression += f".to(torch.{dtype})"
        wants_gradient = self.train and letter == "x" and self.maybe(0.75)
        if wants_gradient:
            expression += ".requires_grad_()"
        if letter != "x" or not self.maybe(0.3):
            return expression
        rank = len(shape)
        layout = self.pick("transposed", "stepped", "offset", "expanded", "shared", "shared", "computed")
        plain = "N" not in text
        if layout == "transposed" and rank >= 2:
            turned = ", ".join("N" if n == SIZES[0] and self.dynamic else str(n) for n in [*shape[:-2], shape[-1], shape[-2]])
            return f"torch.randn({turned}){'.requires_grad_()' * wants_gradient}.mT"
        if layout == "stepped" and rank and plain:
            wide = ", ".join(str(n) for n in [*shape[:-1], shape[-1] * 2])
            return f"torch.randn({wide}){'.requires_grad_()' * wants_gradient}[..., ::2]"
        if layout == "offset" and rank and plain:
            wide = ", ".join(str(n) for n in [shape[0] + 2, *shape[1:]])
            return f"torch.randn({wide}){'.requires_grad_()' * wants_gradient}[1:-1]"
        if layout == "expanded" and rank and plain:
            narrow = ", ".join(str(n) for n in [1, *shape[1:]])
            return f"torch.randn({narrow}){'.requires_grad_()' * wants_gradient}.expand({text})"
        if layout == "shared" and rank and plain and len(shape) < 4:
            count = torch.Size(shape).numel()
            base = next((line.partition(" ")[0] for line in self.setup if line[0] == "s"), None)
            if base is None:
                base = "s0"
                self._exec(f"s0 = torch.randn(600){'.requires_grad_()' * wants_gradient}", self.setup)
            start = self.pick(0, 0, 3, count // 2)
            if start + count <= 600:
                return f"{base}[{start}:{start + count}].view({text})"
        if layout == "computed" and wants_gradient:
            return f"{expression} * 1"
        return expression

    # ---- statements ----

    def write(self, length: int) -> Program:
        for _ in range(self.pick(1, 2, 2, 3)):
            self.given(self.shape())
        if self.maybe(0.15):
            self.given(self.shape(), self.pick("bool", "index"))
        if self.maybe(0.2):
            self.given(self.shape(), letter="b")
        kinds = [kind for kind in WEIGHTS for _ in range(WEIGHTS[kind])]
        attempts = 0
        while len(self.body) < length and attempts < 6 * length:
            attempts += 1
            self.step(self.pick(*kinds))
        return Program(
            self.seed, tuple(self.setup), tuple(self.body), tuple(self.results()), self.train, self.dynamic
        )

    def step(self, kind: str) -> bool:
        """Add a statement of that kind; False where none is possible here."""
        if kind == "attention" and self.special and "special attention" in self.avoid:
            return False
        functions = [f for f, weight in STATEMENTS[kind] for _ in range(weight) if f.__name__ not in self.avoid]
        marks = len(self.setup), len(self.order), len(self.body)
        try:
            text = self.pick(*functions)(self)
        except LookupError:
            text = None
        if text is not None and self.add(text):
            return True
        self._forget(*marks)
        return False

    def add(self, text: str) -> bool:
        """Run a statement in every world; one that fails, or whose results are of no use, leaves no trace."""
        if _is_statement(text):
            return self._exec(text.removeprefix("!"), self.body)
        before = len(self.order)
        name = f"v{self._count()}"
        try:
            results = self._run(f"{name} = {text}")
        except Exception:
            return False
        first = results[0][name]
        if isinstance(first, (tuple, list)) and len(first) and all(isinstance(t, Tensor) for t in first):
            if len({len(world[name]) for world in results}) != 1 or len(first) > 8:
                return False
            names = [f"v{self._count() + i}" for i in range(len(first))]
            if any(not self._useful(t) for world in results for t in world[name]):
                return False
            for world, result in zip(self.worlds, results):
                world.update(zip(names, result[name]))
            self.body.append(f"{', '.join(names)}{',' * (len(names) == 1)} = {text}")
            self.order += names
        elif isinstance(first, Tensor) and all(self._useful(world[name]) for world in results):
            for world, result in zip(self.worlds, results):
                world[name] = result[name]
            self.body.append(f"{name} = {text}")
            self.order.append(name)
        return len(self.order) > before

    def _count(self) -> int:
        return sum(name[0] == "v" for name in self.order)

    def _run(self, line: str) -> list[dict[str, Any]]:
        spaces = [dict(world) for world in self.worlds]
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for space in spaces:
                exec(line, space)
        return spaces

    def _exec(self, line: str, lines: list[str]) -> bool:
        """Run a line that defines its own names, or writes to what is there."""
        known = {name: self[name].detach().clone() for name in self.order if self[name].numel() < ELEMENTS}
        try:
            results = self._run(line)
        except Exception:
            if lines is self.setup:
                raise
            return False
        fresh = [n for n in results[0] if n not in self.worlds[0] and isinstance(results[0][n], Tensor)]
        useful = all(self._useful(result[n]) for result in results for n in [*fresh, *known])
        if lines is self.body and not useful:
            self._restore(known)
            return False
        for world, result in zip(self.worlds, results):
            world.update({n: result[n] for n in result if isinstance(result[n], Tensor)})
        lines.append(line)
        if lines is self.body:
            self.order += fresh
        return True

    def _restore(self, known: dict[str, Tensor]) -> None:
        """Undo a write that is refused, so that the values stay small for the statements that follow."""
        for name, value in known.items():
            with contextlib.suppress(RuntimeError):
                self[name].data.copy_(value)

    def _useful(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor) or tensor.numel() > ELEMENTS or tensor.dim() > RANK:
            return False
        if self.special or not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            return True
        largest = tensor.detach().abs().max().item()
        return largest < LARGEST or largest == float("inf") and self.maybe(0.5)

    def _forget(self, setup: int, order: int, body: int) -> None:
        for name in self.order[order:]:
            for world in self.worlds:
                world.pop(name, None)
        del self.setup[setup:], self.order[order:], self.body[body:]

    def results(self) -> list[str]:
        """What nobody uses, and some of the rest: an input, a value twice, a view and its base."""
        used = " ".join(line.partition("=")[2] or line for line in self.body)
        unused = [n for n in self.order if n[0] == "v" and f"{n}" not in used.replace(",", " ").replace("(", " ").split()]
        chosen = self.chance.sample(unused, min(len(unused), 4))
        chosen += [self.value() for _ in range(self.pick(0, 0, 1, 2))]
        if not any(name[0] == "v" for name in chosen):
            chosen += [self.order[-1]]
        if self.maybe(0.07):
            chosen += [self.pick(*chosen)]
        return [name for name in chosen if name[0] in "vx"] or [self.order[0]]


def _is_statement(text: str) -> bool:
    """Writes and regions stand alone; an expression gets a name."""
    return text.startswith(("with ", "if ", "for ", "torch._dynamo", "!")) or _assigns(text)


def _assigns(text: str) -> bool:
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "=" and not depth and text[i + 1 : i + 2] != "=" and text[i - 1] not in "=!<>":
            return True
    return False


def write_program(
    seed: int, codegen: str = "eager", route: str | None = None, avoid: frozenset[str] = KNOWN
) -> Program:
    """The program of a seed: always the same. Only a program that the route allows takes it."""
    from . import statements  # noqa: F401  (they register themselves)

    chance = random.Random(seed)
    train = chance.random() < 0.5
    dynamic = chance.random() < 0.12
    writer = Writer(chance, seed, train, dynamic, avoid)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(train):
        torch.manual_seed(seed)
        program = writer.write(chance.choice((2, 3, 4, 5, 6, 8, 10, 12)))
    drawn = chance.choices(("stage", "graph", "compile"), (5, 2, 3))[0]
    route = route or drawn
    if codegen != "eager" or dynamic or program.needs_dynamo:
        route = "compile"
    if route == "graph":  # that one object is returned twice is for Dynamo to remember
        program = replace(program, returned=tuple(dict.fromkeys(program.returned)))
    return replace(program, route=route, codegen=codegen)
