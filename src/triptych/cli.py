"""The command line: `triptych demo`, `explain`, `why-not`; the other commands are in `cli_*.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from . import cli_debug, cli_doctor, cli_passes, cli_record
from .cli_base import (
    FILE,
    JSON,
    OPTIONS,
    Failed,
    command,
    complete,
    main,
    only_data_on_stdout,
    parse_option,
    parse_options,
    pass_names,
    require_writable,
    rule_and_pass_names,
    working,
)
from .errors import ALL_PASSES, TriptychError, UnknownName
from .options import MODES

if TYPE_CHECKING:
    from .passes.record import PassRecord


@command("demo", "Compile a small transformer and check it.", "triptych demo --out report")
@click.option("--out", default="triptych-report", show_default=True, help="Folder for the report.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@JSON
def demo(out: str, device: str, as_json: bool) -> None:
    """Compile a small transformer, show what each pass did, and check the results against eager."""
    import torch

    from .explaining.demo import run_demo
    from .explaining.page import page

    if device == "cuda" and not torch.cuda.is_available():
        raise TriptychError("there is no CUDA device here; leave --device out to run on the CPU")
    report = Path(out) / "triptych-demo.html"
    require_writable(str(report))
    with working("compiling") as tell:
        result = run_demo(device, tell)
    data = json.dumps(result.to_dict(), indent=2)
    report.write_text(page(result.inference, result.training), encoding="utf-8")
    report.with_suffix(".json").write_text(data, encoding="utf-8")
    if as_json:
        click.echo(data)
    else:
        for explanation in (result.inference, result.training):
            _print(explanation)
            click.echo()
        for check in result.checks:
            click.secho(str(check), fg="green" if check.passed else "red")
        click.echo(f"report: {report} and {report.with_suffix('.json').name}")
    if not result.passed:
        raise Failed("compiled results differ from eager")


@command(
    "explain",
    "What each pass does to a model of yours.",
    "triptych explain model.py:tower --train --html tower.html",
    "triptych explain model.py:tower --dynamic --compare --html both.html",
    "triptych explain model.py:tower --compare --profile --trace step.json",
)
@FILE
@click.option("--train", is_flag=True, help="Explain the training step: forward and backward.")
@click.option("--backend", default="triptych", show_default=True, help="Whose passes: triptych or inductor.")
@OPTIONS
@click.option("--dynamic/--static", default=None, help="torch.compile's dynamic: sizes as symbols, or as they are.")
@click.option("--fullgraph", is_flag=True, default=None, help="A graph break is an error.")
@click.option("--mode", metavar="MODE", help="torch.compile's mode: " + ", ".join(MODES) + ".")
@click.option(
    "--compare", "--stock", "stock", is_flag=True, help="Compare with Inductor and its own passes: compiles twice."
)
@click.option("--profile", is_flag=True, help="Run it some more times, and measure what each kernel launch takes.")
@click.option("--trace", metavar="PATH", help="With --profile: also write the step as a trace for perfetto.")
@click.option("--html", metavar="PATH", help="Also write the report page, which opens from disk.")
@click.option("--json", "as_json", is_flag=True, help="Print data (docs/json.md) instead of a table.")
@click.option("--pass", "pass_name", metavar="NAME", shell_complete=complete(pass_names),
              help="Show what this pass changed, line by line.")  # fmt: skip
def explain(
    file: str,
    train: bool,
    backend: str,
    options: tuple[str, ...],
    dynamic: bool | None,
    fullgraph: bool | None,
    mode: str | None,
    stock: bool,
    profile: bool,
    trace: str | None,
    html: str | None,
    as_json: bool,
    pass_name: str | None,
) -> None:
    """Show what each pass does to a model of yours.

    FILE.py defines NAME (by default `model`), a module, a function, or a function without parameters that makes one;
    and its inputs as a tuple, or a function that returns one: NAME_args, args or example_inputs. The function that
    makes the model may return its inputs with it: `return model, x`. If FILE.py defines `options`, `train` or
    `dynamic`, they hold where the call says nothing else.
    """
    from .explaining.explain import BACKENDS
    from .explaining.explain import explain as explain_model
    from .explaining.source import load

    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    parsed = parse_options(options) if backend == "triptych" else dict(map(parse_option, options))
    if pass_name is not None and backend == "triptych" and pass_name not in (known := pass_names()):
        raise UnknownName("pass", pass_name, known, lister=ALL_PASSES)
    if trace is not None and not profile:
        raise TriptychError("--trace writes a profile: it needs --profile")
    require_writable(html)
    require_writable(trace)
    with only_data_on_stdout(as_json):
        subject = load(file)
        if backend == "triptych":
            parsed = {**subject.settings.get("options", {}), **parsed}
        with working(f"compiling {subject.name}"):
            explanation = explain_model(
                subject.model, *subject.args, train=train or subject.settings.get("train", False),
                options=parsed or None, backend=backend, stock=stock, profile=profile,
                dynamic=subject.settings.get("dynamic") if dynamic is None else dynamic,
                fullgraph=fullgraph, mode=mode, **subject.kwargs,
            )  # fmt: skip
    if html is not None:
        explanation.to_html(html)
    if trace is not None:
        explanation.to_trace(trace)
    if as_json:
        click.echo(explanation.to_json())
        return
    if pass_name is not None:
        _print_changes(explanation.runs_of(pass_name))
    else:
        _print(explanation)
    for what, path in (("report", html), ("trace", trace)):
        if path is not None:
            click.echo(f"{what}: {path}")


@command(
    "why-not",
    "Where a rule or pass fires, where it nearly does, and why not.",
    "triptych why-not fuse_attention model.py",
    "triptych why-not rules.py:MyRule model.py:make --train",
)
@click.argument("rule", metavar="NAME|FILE.py:RULE", shell_complete=complete(rule_and_pass_names))
@FILE
@click.option("--train", is_flag=True, help="Look at the backward graph too.")
@OPTIONS
@JSON
def why_not(rule: str, file: str, train: bool, options: tuple[str, ...], as_json: bool) -> None:
    """Say where a rule, or a pass with all its rules, fires in a model of yours, where it nearly matched, and what was
    missing. The nearest comes first."""
    import triptych

    from .explaining.source import load, load_rule
    from .passes.catalogue import rules_of

    given = parse_options(options)
    with only_data_on_stdout(as_json):
        wanted: Any = load_rule(rule) if ".py" in rule else rule
        rules_of(wanted)  # raises now if the name is unknown
        subject = load(file)
        settings = {**subject.settings.get("options", {}), **given}
        with working(f"looking for {rule}"):
            answer = triptych.why_not(
                wanted, subject.model, *subject.args, train=train or subject.settings.get("train", False),
                options=settings, **subject.kwargs,
            )  # fmt: skip
    if as_json:
        fires = [dataclasses.asdict(one) for one in answer.fires]
        misses = [dataclasses.asdict(miss) for miss in answer]
        stopped = [dataclasses.asdict(one) for one in answer.stopped]
        click.echo(json.dumps({"fires": fires, "misses": misses, "stopped": stopped}, indent=2))
    else:
        click.echo(str(answer))


def _print(what: Any) -> None:
    """Print in colour on a terminal; elsewhere as plain text of a fixed width."""
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


# those register their commands when they are imported
__all__ = ["cli_debug", "cli_doctor", "cli_passes", "cli_record", "main"]
