"""Writes a failing program as a file that anybody can run: the graph as Python, similar inputs, and the options."""

from __future__ import annotations

import hashlib
import os
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from .. import _private
from ..ir.origins import given_tensor
from ..ir.text import text as listing
from ..ir.weights import is_weight
from ..pipeline import Options  # which knows the names that options may have
from .input_source import Input, inputs_like, make_inputs
from .option_source import OptionSource
from .python_source import NotPython, Source, python_source
from .weights import with_weights

WIDTH = 118

USAGE = """\
    python {file}           runs it eagerly and compiled: exit code 1 while they differ, 0 once they agree
    triptych bisect {file}  says which rewrite is at fault
    triptych repro {file}   makes it smaller"""


@dataclass
class Repro:
    """A captured graph with everything that is needed to reproduce its failure."""

    gm: GraphModule
    inputs: list[Input]
    options: Options
    train: bool = False
    dynamic: bool = False
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    """Autocast regions around the whole program, by device."""

    @property
    def weights(self) -> list[int]:
        """The positions of inputs that must be weights of a module, because `freeze` works on weights only."""
        return [i for i, one in enumerate(self.inputs) if one.is_weight] if self.options.freeze else []

    def source(self) -> Source:
        source = python_source(self.gm, "program" if self.weights else "model")
        for device, dtype in reversed(self.autocast.items()):
            inner = [f"    {line}" for line in source.lines]
            source.lines = [f'    with torch.autocast("{device}", dtype={dtype}):', *inner]
        return source

    def all_inputs(self, source: Source) -> dict[str, Input]:
        """The inputs of the function, by name: those of the graph, then the tensors among its attributes."""
        tensors = list(source.tensors.values())
        return dict(zip([*source.parameters, *source.tensors], [*self.inputs, *inputs_like(tensors)], strict=True))

    def subject(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its inputs, as the file makes them."""
        source = self.source()
        inputs = tuple(make_inputs(list(self.all_inputs(source).values())))
        return with_weights(source.function(), inputs, self.weights) if self.weights else (source.function(), inputs)

    def graph_inputs(self) -> list[Any]:
        """The inputs of the graph itself."""
        return make_inputs(self.inputs)

    @property
    def size(self) -> int:
        """Nodes that compute something."""
        return sum(n.op.startswith("call") for n in self.gm.graph.nodes)

    def text(self, failure: str = "", file: str = "repro.py") -> str:
        """The content of the file. Raises NotPython if the graph cannot be written."""
        source = self.source()
        option_source = OptionSource()
        options = option_source.options(self.options)
        imports = ["import sys", "", "import torch", "", *source.imports(), *option_source.imports]
        imports = [*imports, "from triptych.explaining.replay import run_repro"]
        if self.weights:
            imports.append("from triptych.repro.weights import with_weights")
        wanted = [name for name in ("train", "dynamic") if getattr(self, name)]
        settings = "".join(f", {name}={name}" for name in wanted)
        inputs = [f"    {one.expression()},  # {name}" for name, one in self.all_inputs(source).items()]
        notes = [f"option left out, {reason}" for reason in option_source.left_out]
        parts = [
            _heading(failure, file, notes),
            "from __future__ import annotations",
            "\n".join(dict.fromkeys(line for line in imports if line)),
            *(f"\n{text}" for text in option_source.definitions),
            "\n" + source.text(),
            "\n" + "\n".join([f"options = {options}", *(f"{name} = True" for name in wanted), "torch.manual_seed(0)"]),
            "\n".join(["args = (", *inputs, ")"]),
            *([f"model, args = with_weights(program, args, {self.weights})"] if self.weights else ()),
            f'if __name__ == "__main__":\n    sys.exit(run_repro(model, args, options=options{settings}))',
        ]
        return "\n\n".join(parts) + "\n"


def repro_of(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options | Mapping[str, Any] | None = None
) -> Repro:
    """The captured graph with inputs like those it was captured with. Raises NotPython if these cannot be written."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    symbolic = any(_is_symbolic(value) for value in example_inputs)
    autocast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    wants = any(isinstance(v, torch.Tensor) and v.requires_grad for v in example_inputs)
    inputs = inputs_like(example_inputs, [given_tensor(n) for n in placeholders])
    inputs = mark_weights(gm, inputs)
    return Repro(gm, inputs, Options.make(options), wants and torch.is_grad_enabled(), symbolic, autocast)


def mark_weights(gm: GraphModule, inputs: Sequence[Input]) -> list[Input]:
    """The inputs, with those that Dynamo took from a module marked."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [replace(one, is_weight=is_weight(node)) for node, one in zip(placeholders, inputs, strict=True)]


def write_repro(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options | Mapping[str, Any] | None,
    error: BaseException | str | None,
    directory: str | os.PathLike[str],
) -> Path | None:
    """Write a captured program that failed as a file; never raises. None if nothing can be written there.

    The graph is as Dynamo captured it, before any pass; example inputs may be fake. Nothing is run or made smaller:
    `triptych repro FILE` does that.
    """
    failure = error if isinstance(error, str) else "" if error is None else f"{type(error).__name__}: {error}"
    try:
        with _private.without_dispatch_modes():  # the compilation that failed may have left a fake-tensor mode active
            return _write(gm, example_inputs, options, failure, Path(directory))
    except Exception:
        return None


def _write(
    gm: GraphModule, example_inputs: Sequence[Any], options: Any, failure: str, directory: Path
) -> Path | None:
    name = f"triptych_repro_{hashlib.sha256(listing(gm).encode()).hexdigest()[:10]}.py"
    try:
        content = repro_of(gm, example_inputs, options).text(failure, name)
    except Exception as error:  # write at least the listing
        reason = str(error) if isinstance(error, NotPython) else f"{type(error).__name__}: {error}"
        graph = textwrap.indent(listing(gm), "# ")
        content = f"{_heading(failure, name, [f'the program cannot be written as Python: {reason}'])}\n\n{graph}\n"
    return save(directory / name, content)


def save(path: Path, content: str) -> Path:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
    return path


def _heading(failure: str, file: str, notes: Sequence[str] = ()) -> str:
    lines = [line for line in failure.strip().splitlines()[:20] if line.strip()]
    shown = "\n".join(line if len(line) < WIDTH else f"{line[: WIDTH - 4]} ..." for line in lines)
    shown = shown.replace("\\", "\\\\").replace('"""', "'''")
    versions = f"torch {torch.__version__}, triptych {_version()}"
    parts = ["A program that Triptych compiles wrongly.", textwrap.indent(shown, "    "), USAGE.format(file=file)]
    parts += ["\n".join(f"note: {note}" for note in notes), versions]
    return '"""' + "\n\n".join(part for part in parts if part) + '\n"""'


def _version() -> str:
    from .. import __version__

    return __version__


def _is_symbolic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
