"""The catalogue of passes as a page, written from the passes themselves: `python -m triptych.passes.document FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from .catalogue import PassInfo, RuleInfo, list_passes

TITLES = {
    "pre_grad": "Stage 1: pre-grad, on the torch-level graph",
    "freeze": "Freezing, in inference before the joint stage, after it and after stage 3",
    "joint": "Stage 2: joint, forward and backward in one ATen graph",
    "before_partition": "Before the partition of the joint graph",
    "after_partition": "After the partition, on forward and backward together",
    "post_grad": "Stage 3: post-grad, forward and backward apart",
    "before_codegen": "Before code generation",
}


def document() -> str:
    parts = [
        "# The passes",
        "Written by `make docs` from the passes themselves. Each has its file, named as the pass: in `pre_grad/`, in "
        "`joint/` (with freezing and what runs before the partition), in `post_grad/` (with what runs after the "
        "partition and before code generation), or in `rules/` if several stages run it.",
    ]
    for stage, title in TITLES.items():
        steps = list_passes(stage)
        parts.append(f"## {title}")
        parts.append(_overview(steps))
        seen: set[str] = set()
        for info in steps:
            if info.name not in seen:
                seen.add(info.name)
                parts.append(_detail(info))
    return "\n\n".join(p for p in parts if p) + "\n"


def _overview(steps: list[PassInfo]) -> str:
    rows = ["| # | pass | what it does |", "|---|---|---|"]
    for info in steps:
        note = "" if info.default else " (only if added)"
        rows.append(f"| {info.step} | `{info.name}`{note} | {_cell(info.purpose)} |")
    return "\n".join(rows)


def _detail(info: PassInfo) -> str:
    if not (info.rules or info.options or info.example):
        return ""
    lines = [f"### `{info.name}`", info.purpose, *([info.details] if info.details else [])]
    if info.options:
        shown = ", ".join(f"`{info.name}.{name}` = {value!r}" for name, value in info.options.items())
        lines.append(f"Options: {shown}")
    if info.rules:
        lines.extend(_rule(r) for r in info.rules)
    elif info.example:
        lines.append(f"Fires on\n\n```python\n{info.example}\n```")
    return "\n\n".join(lines)


def _rule(rule: RuleInfo) -> str:
    rounding = "" if rule.exact else " (up to rounding)"
    text = f"**`{rule.name}`**{rounding}: `{rule.formula}`"
    shown = [f"- fires: `{_one_line(source)}`" for source in rule.fires[:2]]
    shown += [
        f"- declines: `{_one_line(source)}`" + (f", because: {reason}" if reason else "")
        for source, reason in rule.declines[:3]
    ]
    return "\n".join([text, "", *shown]) if shown else text


def _one_line(source: str) -> str:
    return " ".join(source.split()).replace("`", "'")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
