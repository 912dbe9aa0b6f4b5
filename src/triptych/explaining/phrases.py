"""The words that the table and the page share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..passes.effects import Effect, count_effects, sizes_of
from ..passes.record import PassRecord

if TYPE_CHECKING:
    from .explanation import Explanation

CHANGED, FAILED = "●", "✗"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def place(record: PassRecord, program: int) -> str:
    """Where a pass ran: the stage, the graph if that says more, the captured program if not the first."""
    # the graph of a stage bears its name, and a graph inside that one begins with it
    says_it_all = not record.graph or record.graph.startswith(record.stage)
    where = (record.graph or record.stage) if says_it_all else f"{record.stage} {record.graph}"
    return where if program == 1 else f"{where}#{program}"


def title(explanation: Explanation) -> str:
    what = "training step" if explanation.train else "inference"
    if explanation.recorded:
        what = "recorded run"
    return f"{explanation.model or 'model'}, {what}, compiled with {explanation.backend}"


def summary(explanation: Explanation) -> str:
    """One line: how much was captured and what became of it."""
    passes = explanation.passes
    parts = [
        *([compiled] if (compiled := frames_phrase(explanation)) else []),
        count(len(explanation.sessions), "captured program"),
        f"{len(explanation.changed)} of {count(len(passes), 'pass', 'passes')} changed something",
    ]
    if explanation.backend != "inductor":
        parts.append(what_mattered(explanation) or "nothing to improve")
        parts += [rest] if (rest := the_rest(explanation)) else []
        parts.append(f"{count(explanation.declined, 'site')} left alone")
    if explanation.kernel_launches:
        parts.append(kernel_phrase(explanation))
    return "; ".join([*parts, f"{duration(explanation.seconds)} in passes"])


def nothing(explanation: Explanation) -> str:
    """The message where there is nothing to show."""
    if explanation.recorded:
        return "Nothing has been compiled yet."
    return "Nothing was captured: Dynamo found no tensor operation to compile in this call."


def frames_phrase(explanation: Explanation) -> str:
    """What Dynamo compiled, such as "3 compiles (1 recompile), 2 graph breaks"; empty where nothing is remarkable."""
    frames = explanation.frames
    again, breaks = sum(frame.is_recompile for frame in frames), sum(len(frame.breaks) for frame in frames)
    failed = sum(bool(frame.failure) for frame in frames)
    if not (explanation.recorded or again or breaks or failed):
        return ""
    parts = [
        count(len(frames), "compile") + (f" ({count(again, 'recompile')})" if again else ""),
        *([count(breaks, "graph break")] if breaks else []),
        *([f"{count(failed, 'function')} left to Python"] if failed else []),
    ]
    return ", ".join(parts)


def kernel_phrase(explanation: Explanation) -> str:
    """How many kernels are launched, compared with stock Inductor if that was requested."""
    phrase = count(explanation.kernel_launches, "kernel launch", "kernel launches")
    if explanation.stock is None:
        return phrase
    stock = explanation.stock
    phrase += f" instead of {stock.kernel_launches} by stock Inductor"
    saved = stock.kernel_bytes - explanation.kernel_bytes
    if saved and not (explanation.kernels_unknown or stock.kernels_unknown):
        phrase += f", {data_size(abs(saved))} {'less' if saved > 0 else 'more'} read and written (estimated)"
    ratio = measured_ratio(explanation)
    return phrase if ratio is None else f"{phrase}, a step {ratio:.2f} times as fast (measured)"


def measured_ratio(explanation: Explanation) -> float | None:
    """How many times as fast a step is as that of stock Inductor; None if not both were measured."""
    stock = explanation.stock
    if stock is None or explanation.profile is None or stock.profile is None:
        return None
    return stock.profile.wall_seconds / explanation.profile.wall_seconds


def data_size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def what_mattered(explanation: Explanation) -> str:
    """The rewrites that changed what is computed or moved: "2 attentions fused, 26 no-ops gone"."""
    return ", ".join(
        effect.phrase(times, sizes_of(effect, explanation.passes))
        for effect, times in _effects(explanation, matters=True)
    )


def the_rest(explanation: Explanation) -> str:
    """The rewrites that only changed how the program is written: "beside 100 changes of spelling, 12 moves"."""
    phrases = [effect.phrase(times) for effect, times in _effects(explanation, matters=False)]
    return f"beside {', '.join(phrases)}" if phrases else ""


def _effects(explanation: Explanation, matters: bool) -> list[tuple[Effect, int]]:
    """Effects with their counts: first the user's own rewrites and fusions, then the rest, the most frequent first."""
    counts = count_effects(explanation.passes)
    chosen = [(effect, times) for effect, times in counts.items() if effect.matters == matters]
    return sorted(chosen, key=lambda item: (item[0].name not in ("yours", "fusion"), -item[1]))
