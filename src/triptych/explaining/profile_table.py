"""The measured times of a step for the terminal: the launches that take longest, beside what was estimated."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .phrases import count
from .profile import NOT_ATTRIBUTED, Profile, TimedPart, estimate_of
from .totals import UNKNOWN

SHOWN = 10
PARTS = 6


def microseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1e6:,.1f} us"


def profile_phrase(profile: Profile) -> str:
    """"a step takes 2.41 ms: 2.05 ms in kernels, 0.36 ms elsewhere"."""
    elsewhere = profile.waiting_seconds
    name = "elsewhere" if elsewhere is None else "in which the GPU waits for the host"
    elsewhere = profile.not_attributed if elsewhere is None else elsewhere
    parts = [f"{milliseconds(profile.kernel_seconds)} in kernels", f"{milliseconds(elsewhere)} {name}"]
    return f"a step takes {milliseconds(profile.wall_seconds)}: {', '.join(parts)}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def render_profile(profile: Profile) -> Iterator[RenderableType]:
    yield Text("\nKernels, measured", style="bold")
    yield Text(profile_phrase(profile))
    yield _launches(profile)
    for name, parts in (("made by", profile.regions), ("module", profile.modules)):
        if len([part for part in parts if part.launches]) > 1:
            yield _parts(name, parts)


def _launches(profile: Profile) -> Table:
    table = _table("kernel", "measured", "estimated")
    table.add_column("made by", overflow="fold")
    table.add_column("module", overflow="fold")
    ordered = sorted(profile.launches, key=lambda one: -one.seconds)
    for one in ordered[:SHOWN]:
        launch = one.launch
        name = launch.name.removeprefix("torch.ops.").removeprefix("extern_kernels.")
        estimate = microseconds(estimate_of([launch]))
        table.add_row(name, microseconds(one.seconds), estimate, launch.region, launch.module)
    if rest := ordered[SHOWN:]:
        estimate = microseconds(estimate_of([one.launch for one in rest]))
        more = count(len(rest), "more launch", "more launches")
        table.add_row(more, microseconds(sum(one.seconds for one in rest)), estimate, style="dim")
    table.add_row(NOT_ATTRIBUTED, microseconds(profile.not_attributed), "", style="dim")
    return table


def _parts(name: str, parts: list[TimedPart]) -> Table:
    table = _table(name, "measured", "estimated")
    with_inner = any(part.total != part.seconds for part in parts)
    if with_inner:
        table.add_column("with inner", justify="right", no_wrap=True)
    table.add_column("launches", justify="right")
    known = [part for part in parts if part.name != NOT_ATTRIBUTED]
    for part in known[:PARTS]:
        inner = [microseconds(part.total)] if with_inner else []
        table.add_row(part.name, microseconds(part.seconds), microseconds(part.estimate), *inner, str(part.launches))
    if rest := known[PARTS:]:
        seconds, launches = sum(part.seconds for part in rest), sum(part.launches for part in rest)
        inner = [""] if with_inner else []
        table.add_row(f"{len(rest)} more", microseconds(seconds), "", *inner, str(launches), style="dim")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table
