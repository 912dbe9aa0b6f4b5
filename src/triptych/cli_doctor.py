"""`triptych doctor`: is everything available that a compile needs?"""

from __future__ import annotations

import dataclasses
import json

import click

from .cli_base import Failed, command, working

COLOURS = {"good": "green", "warning": "yellow", "bad": "red"}
SIGNS = {"good": "ok", "warning": "??", "bad": "NO"}


@command(
    "doctor",
    "Check this installation: versions, compilers, caches, a tiny compile.",
    "triptych doctor",
    "triptych doctor --no-compile --json",
    "triptych doctor --forget-measurements",
)
@click.option("--compile/--no-compile", "compile", default=True, help="Compile a tiny program by each code generator.")
@click.option("--forget-measurements", is_flag=True, help="Delete the times measured on this machine, and do no more.")
@click.option("--json", "as_json", is_flag=True, help="Print data.")
def doctor(compile: bool, forget_measurements: bool, as_json: bool) -> None:
    """Check that everything is here that a compile needs, and that a compiled program computes what eager does.

    The exit code is 1 if something is missing or wrong, 0 if not; warnings do not count.
    """
    from .explaining import doctor as checks
    from .explaining.doctor import BAD, examine

    if forget_measurements:
        forgotten = checks.forget_measurements()
        told = "\n".join(f"deleted {path}" for path in forgotten) or "nothing was stored"
        click.echo(json.dumps(forgotten) if as_json else told)
        return
    findings = []
    for name, check in examine(compile):
        with working(name):
            finding = check()
        findings.append(finding)
        if not as_json:
            click.secho(f"{SIGNS[finding.status]}  ", fg=COLOURS[finding.status], nl=False)
            click.echo(f"{finding.name}: {finding.detail}")
            if finding.advice:
                click.echo(f"      {finding.advice}")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    bad = [finding.name for finding in findings if finding.status == BAD]
    if bad:
        raise Failed(f"not in order: {', '.join(bad)}")
