"""The command line: `triptych demo`, `passes`, `explain`, `why-not`; `bisect` and `repro` stand in `cli_debug`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from . import cli_debug
from .cli_base import Failed, command, main, parse_option, working
from .errors import TriptychError, UnknownName
from .explaining.explanation import PRINTED_WIDTH
from .passes.catalogue import PassInfo
from .passes.record import PassRecord
from .pipeline import STAGES
from .testing.gallery import DIFFERS, Exhibit, gallery

GALLERY_WIDTH = 160
"""Of the table with examples, where it is not printed on a terminal."""


@command("demo", "Compile a small transformer and check it.", "triptych demo --out report")
@click.option("--out", default="triptych-report", show_default=True, help="Folder for the report.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def demo(out: str, device: str) -> None:
    """Compile a small transformer, show what each pass did, and check the results against eager."""
    import torch

    from .explaining.demo import run_demo
    from .explaining.page import page

    if device == "cuda" and not torch.cuda.is_available():
        raise TriptychError("there is no CUDA device here; leave --device out to run on the CPU")
    with working("compiling") as tell:
        result = run_demo(device, tell)
    for explanation in (result.inference, result.training):
        _print(explanation)
        click.echo()
    for check in result.checks:
        click.secho(str(check), fg="green" if check.passed else "red")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "triptych-demo.html"
    report.write_text(page(result.inference, result.training), encoding="utf-8")
    (folder / "triptych-demo.json").write_text(json.dumps(result.to_dict(), indent=2), encoding="utf-8")
    click.echo(f"report: {report} and {report.with_suffix('.json').name}")
    if not result.passed:
        raise Failed("compiled results differ from eager")


@command("passes", "The passes, or one of them.", "triptych passes --stage pre_grad")
@click.argument("name", required=False)
@click.option("--stage", help="Only this stage: " + ", ".join(STAGES) + ".")
@click.option("--run/--no-run", "run", default=True, help="Run an example of each pass, or only list them.")
@click.option("--json", "as_json", is_flag=True, help="Print data.")
def passes(name: str | None, stage: str | None, run: bool, as_json: bool) -> None:
    """List the passes in the order in which they run, each alone on an example of its own.

    Shown are the size of the graph before and after, and whether results and gradients are eager's. With a NAME, one
    pass: purpose, rules, examples, options.
    """
    import triptych

    infos = triptych.list_passes(stage)
    if name is not None:
        chosen = [info for info in infos if info.name == name]
        if not chosen:
            raise UnknownName("pass", name, {info.name for info in infos})
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


@command(
    "explain",
    "What each pass does to a model of yours.",
    "triptych explain model.py:tower --train --html tower.html",
)
@click.argument("file", metavar="FILE.py[:NAME]")
@click.option("--train", is_flag=True, help="Explain the training step: forward and backward.")
@click.option("--backend", default="triptych", show_default=True, help="Whose passes: triptych or inductor.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="One of its options; repeatable.")
@click.option("--stock", is_flag=True, help="Compare with the kernels of Inductor's own passes: compiles twice.")
@click.option("--html", metavar="PATH", help="Also write the report page, which opens from disk.")
@click.option("--json", "as_json", is_flag=True, help="Print data instead of a table.")
@click.option("--pass", "pass_name", metavar="NAME", help="Show what this pass changed, line by line.")
def explain(
    file: str,
    train: bool,
    backend: str,
    options: tuple[str, ...],
    stock: bool,
    html: str | None,
    as_json: bool,
    pass_name: str | None,
) -> None:
    """Show what each pass does to a model of yours.

    FILE.py defines NAME (by default `model`), a module or a function, and its inputs as a tuple, or a
    function that returns one: NAME_args, args or example_inputs.
    """
    from .explaining.explain import explain as explain_model
    from .explaining.source import load

    parsed = dict(parse_option(text) for text in options)
    subject = load(file)
    with working(f"compiling {subject.name}"):
        explanation = explain_model(
            subject.model, *subject.args, train=train, options=parsed, backend=backend, stock=stock, **subject.kwargs
        )
    if html is not None:
        explanation.to_html(html)
    if as_json:
        click.echo(explanation.to_json())
        return
    if pass_name is not None:
        _print_changes(explanation.runs_of(pass_name))
    else:
        _print(explanation)
    if html is not None:
        click.echo(f"report: {html}")


@command(
    "why-not",
    "Where a rule or pass fires, where it nearly does, and why not.",
    "triptych why-not fuse_attention model.py",
    "triptych why-not rules.py:MyRule model.py:make --train",
)
@click.argument("rule", metavar="NAME|FILE.py:RULE")
@click.argument("file", metavar="FILE.py[:NAME]")
@click.option("--train", is_flag=True, help="Look at the backward graph too.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="An option of the compiler; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print data.")
def why_not(rule: str, file: str, train: bool, options: tuple[str, ...], as_json: bool) -> None:
    """Say where a rule, or a pass with all its rules, fires in a model of yours, where it nearly matched, and what was
    missing. The nearest comes first."""
    import triptych

    from .explaining.source import load, load_rule

    wanted: Any = load_rule(rule) if ".py" in rule else rule
    subject = load(file)
    settings = {**subject.settings.get("options", {}), **dict(map(parse_option, options))}
    with working(f"looking for {rule}"):
        answer = triptych.why_not(
            wanted, subject.model, *subject.args, train=train, options=settings, **subject.kwargs
        )
    if as_json:
        fires = [dataclasses.asdict(one) for one in answer.fires]
        click.echo(json.dumps({"fires": fires, "misses": [dataclasses.asdict(miss) for miss in answer]}, indent=2))
    else:
        click.echo(str(answer))


def _print(what: Any) -> None:
    """In colour on a terminal; elsewhere as plain text of a fixed width."""
    console = Console()
    if console.is_terminal:
        console.print(what)
    else:
        click.echo(str(what))


def _print_changes(records: list[PassRecord]) -> None:
    colours = {"+": "green", "-": "red"}
    for record in records:
        nodes = f"{record.nodes_before} -> {record.nodes_after} nodes"
        what = f"{record.rewrites} rewritten, {nodes}" if record.changed else "nothing changed"
        click.secho(f"{record.stage} {record.name} ({record.graph}): {what}", bold=True)
        if record.error:
            click.secho(record.error, fg="red")
        if record.changed:
            for line in record.diff.splitlines():
                click.secho(line, fg=colours.get(line[0]), dim=line.startswith("  ..."))
        for decline in record.declines:
            click.echo(f"  left alone: {decline}")
        click.echo()


def _gallery(infos: list[PassInfo]) -> list[Exhibit | None]:
    """Every pass on an example; with a bar beside what is printed, since it takes a moment."""
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
    info = infos[0]
    # a pass that runs at several places is one pass
    places = ", ".join(f"{i.stage} step {i.step}" for i in infos)
    click.secho(info.name, bold=True)
    click.echo(f"{places}; {'runs unless removed' if info.default else 'runs if added'}\n\n{info.purpose}")
    if info.example and not info.rules:
        click.echo(f"\n  {info.example}")
    for option, value in info.options.items():
        click.echo(f"\noption {info.name}.{option}, by default {value!r}")
    for rule in info.rules:
        click.echo()
        click.secho(rule.name, bold=True, nl=False)
        click.echo("" if rule.exact else "  (equal up to rounding)")
        click.echo(f"  {rule.formula}")
        for program in rule.fires:
            click.echo(f"    fires     {program}")
        for program, because in rule.declines:
            click.echo(f"    declines  {program}" + (f"  # {because}" if because else ""))


__all__ = ["cli_debug", "main"]  # the one registers its commands when it is imported
