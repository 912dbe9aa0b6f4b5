"""`triptych passes`: the passes with their examples, and the operations that rules can name."""

from __future__ import annotations

import dataclasses
import json
from textwrap import dedent, shorten
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .cli_base import JSON, Failed, command, complete, rule_and_pass_names, stage_names
from .errors import ALL_PASSES, TriptychError, UnknownName

if TYPE_CHECKING:
    from .ir.operation_names import OperationInfo
    from .passes.catalogue import ExampleInfo, PassInfo
    from .testing.gallery import Exhibit

GALLERY_WIDTH = 160
"""Width of the table with examples, if it is not printed on a terminal."""


@command(
    "passes",
    "The passes, or one of them; the operations that rules can name.",
    "triptych passes --stage pre_grad",
    "triptych passes fuse_attention",
    "triptych passes --operations permute",
)
@click.argument("name", required=False, shell_complete=complete(rule_and_pass_names))
@click.option("--stage", shell_complete=complete(stage_names), help="Only this stage, such as pre_grad or joint.")
@click.option("--run/--no-run", "run", default=True, help="Run an example of each pass, or only list them.")
@click.option("--operations", is_flag=True, help="List the operations that a rule can name, or the one called NAME.")
@JSON
def passes(name: str | None, stage: str | None, run: bool, operations: bool, as_json: bool) -> None:
    """List the passes in the order in which they run, each alone on an example of its own.

    Shown are the size of the graph before and after, and whether results and gradients are eager's. With a NAME, one
    pass or rule: purpose, formula, examples, options.
    """
    import triptych

    from .testing.gallery import DIFFERS

    if operations:
        _operations(triptych.list_operations(name), as_json)
        return
    infos = triptych.list_passes(stage)
    if name is not None:
        chosen = [info for info in infos if info.name == name]
        if not chosen:  # a rule by its own name, as tables show it: its pass, with that rule alone
            of_rule = ((info, tuple(rule for rule in info.rules if rule.name == name)) for info in infos)
            chosen = [dataclasses.replace(info, rules=rules) for info, rules in of_rule if rules]
        if not chosen and name in stage_names():
            raise TriptychError(f"{name} is a stage: triptych passes --stage {name} lists its passes")
        if not chosen:
            names = {n for info in infos for n in (info.name, *(rule.name for rule in info.rules))}
            raise UnknownName("pass or rule", name, names, lister=ALL_PASSES)
        infos = chosen
    if name is not None and not as_json:
        _pass_page(infos)
        return
    shown: list[Exhibit | None] = _gallery(infos) if run else [None] * len(infos)
    if as_json:
        data = [{**dataclasses.asdict(i), "run": e and dataclasses.asdict(e)} for i, e in zip(infos, shown)]
        click.echo(json.dumps(data, indent=2, default=repr))
    else:
        _pass_table(infos, shown, run)
    wrong = sorted({i.name for i, e in zip(infos, shown) if e is not None and DIFFERS in (e.forward, e.gradient)})
    if wrong:
        raise Failed(f"results differ from eager: {', '.join(wrong)}")


def _gallery(infos: list[PassInfo]) -> list[Exhibit | None]:
    """Run every pass on an example, with a progress bar on stderr, since it takes a moment."""
    from .testing.gallery import gallery

    console = Console(stderr=True)
    columns = (TextColumn("running {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(infos))
        made: list[Exhibit | None] = []
        exhibits = gallery(infos)
        for info in infos:
            progress.update(task, description=info.name)
            made.append(next(exhibits))
            progress.advance(task)
    return made


def _pass_table(infos: list[PassInfo], exhibits: list[Exhibit | None], run: bool) -> None:
    from .explaining.explanation import PRINTED_WIDTH

    console = Console()
    if not console.is_terminal:
        console.width = GALLERY_WIDTH if run else PRINTED_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    measured = ("nodes", "forward", "gradient") if run else ()
    what_heading = "what it does, and fires on" if run else "purpose"
    for heading in ("stage", "step", "pass", "runs", what_heading, *measured):
        folded = heading == what_heading
        table.add_column(heading, overflow="fold", no_wrap=not folded, ratio=1 if folded else None)
    stage = None
    for info, exhibit in zip(infos, exhibits):
        if stage not in (None, info.stage):
            table.add_row()
        runs = "always" if info.default else "if added"
        shown = info.stage if info.stage != stage else ""
        style = "" if info.default else "dim"
        what = Text(str(info.purpose))
        cells = [""] * len(measured)
        if exhibit is not None and exhibit.example:
            what.append("\n" + shorten(exhibit.example, GALLERY_WIDTH // 2, placeholder=" ..."), style="cyan")
            cells = [f"{exhibit.nodes_before} -> {exhibit.nodes_after}", exhibit.forward, exhibit.gradient]
        table.add_row(shown, str(info.step), info.name, runs, what, *cells, style=style)
        stage = info.stage
    console.print(table)


def _pass_page(infos: list[PassInfo]) -> None:
    from .pipeline import required_names

    info = infos[0]
    # a pass that runs at several places is one pass
    places = ", ".join(dict.fromkeys(f"{i.stage} step {i.step}" for i in infos))
    click.secho(info.name, bold=True)
    if info.name in required_names():
        runs = "always runs"
    else:
        runs = "runs unless removed" if info.default else "runs if added"
    click.echo(f"{places}; {runs}\n\n{info.purpose}")
    if info.example and not info.rules:
        click.echo(f"\n  {info.example}")
    for number, (option, value) in enumerate(info.options.items()):
        click.echo(f"{'' if number else chr(10)}option {info.name}.{option}, by default {value!r}")
    for rule in info.rules:
        click.echo()
        click.secho(rule.name, bold=True, nl=False)
        click.echo("" if rule.exact else "  (equal up to rounding)")
        click.echo(f"  {rule.formula}")
        for example in rule.fires:
            click.echo(_example("fires", example))
        for example in rule.declines:
            click.echo(_example("declines", example))


def _example(outcome: str, example: ExampleInfo) -> str:
    """An example as text, with its inputs: without these, a program that is declined may read like one that is not."""
    first, *others = dedent(example.program).splitlines() or [""]
    conditions = f"  on {example.conditions}" if example.conditions else ""
    reason = f"  # {example.because}" if example.because else ""
    return "\n".join([f"    {outcome:8}  {first}{conditions}{reason}", *(f"              {line}" for line in others)])


def _operations(operations: list[OperationInfo], as_json: bool) -> None:
    if as_json:
        data = [
            {
                "name": one.name, "signature": str(one), "parameters": list(one.parameters),
                "spellings": one.spellings, "traits": one.traits,
            }
            for one in operations
        ]  # fmt: skip
        click.echo(json.dumps(data, indent=2))
        return
    for one in operations:
        click.secho(one.name, bold=True, nl=False)
        click.echo(str(one).removeprefix(one.name))
        if one.spellings:
            click.echo(f"    also spelled {', '.join(one.spellings)}")
        if one.traits and len(operations) == 1:
            click.echo(f"    {', '.join(one.traits)}")
