"""Writes the catalogue, `docs/passes.md` and a page for each stage in `docs/passes/`, from the passes themselves.

The graphs before and after a rewrite are those of `tests/goldens`, which the tests compare with what the rules do.
"""

from __future__ import annotations

import difflib
import os
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from unittest import mock

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from measured_gains import MeasuredGains  # noqa: E402

from tests import golden_text  # noqa: E402
from triptych.options import ON_ERROR_VARIABLE  # noqa: E402
from triptych.passes.catalogue import PassInfo, all_passes, list_passes  # noqa: E402
from triptych.pipeline import Options  # noqa: E402
from triptych.rewrite.examples import Example  # noqa: E402
from triptych.rewrite.passes import Pass  # noqa: E402
from triptych.rewrite.rule import Rule  # noqa: E402

TITLES = {
    "pre_grad": "Stage 1: pre-grad, on the torch-level graph",
    "freeze": "Freezing, in inference before the joint stage, after it and after stage 3",
    "joint": "Stage 2: joint, forward and backward in one ATen graph",
    "before_partition": "Before the partition of the joint graph",
    "after_partition": "After the partition, on forward and backward together",
    "post_grad": "Stage 3: post-grad, forward and backward apart",
    "before_codegen": "Before code generation",
}
INTRODUCTION = """# The passes

The tables list the passes of each stage in the order in which they run; a page for each stage shows every rule with its
formula, programs on which it fires and programs that it leaves alone, and the graph before and after. Types are written
`f32[4, 8]`: dtype and shape; `2 x` means two inputs of that type. Run `triptych passes NAME` to see a pass work on its
examples, and `triptych why-not NAME FILE.py` to ask why one does not fire on a model of yours.

`make catalogue` writes these pages from the passes. The source of a pass has the name of the pass: in `pre_grad/`, in
`joint/` (with freezing and what runs before the partition), in `post_grad/` (with what runs after the partition and
before code generation), or in `rules/` if several stages run it."""
LEGEND = "Lines with `-` are gone after the pass, lines with `+` are new; `<- rule` names the rule that wrote a line."
GAINS = "A measured gain stands with its pass or rule; [the overview](../passes.md) says how and on which machine."
OPTIONS = """# Options

`torch.compile(model, backend="triptych", options={...})` takes these names; `triptych.explain` and the other functions
take the same dictionary. An unknown name is an error that lists similar names."""
OPTIONS_OF_PASSES = """## Options of single passes

Written `options={"pass_name.option": value}`; [the catalogue](passes.md) says what they mean."""
FIRES, DECLINES = 3, 4
"""How many examples of each kind are listed for a rule."""


def pages(gains: MeasuredGains | None = None) -> dict[str, str]:
    """Every page of the catalogue by its path in `docs/`."""
    gains = MeasuredGains.load() if gains is None else gains
    stages = {stage: list_passes(stage) for stage in TITLES}
    written = {f"passes/{stage}.md": _stage_page(stage, steps, gains) for stage, steps in stages.items()}
    parts = [INTRODUCTION, *filter(None, [gains.introduction()])]
    for stage, title in TITLES.items():
        parts += [f"## [{title}](passes/{stage}.md)", _overview(stages[stage], gains)]
    return {"passes.md": "\n\n".join(parts) + "\n", "options.md": _options_page(stages), **written}


def _options_page(stages: dict[str, list[PassInfo]]) -> str:
    rows = ["| option | default | what |", "|---|---|---|"]
    with mock.patch.dict(os.environ):
        os.environ.pop(ON_ERROR_VARIABLE, None)
        defaults = vars(Options())
    for option in fields(Options):
        rows.append(f"| `{option.name}` | `{defaults[option.name]!r}` | {_cell(option.metadata['doc'])} |")
    of_passes = {"| option | default |": None, "|---|---|": None}
    for info in (info for steps in stages.values() for info in steps):
        of_passes.update({f"| `{info.name}.{name}` | `{value!r}` |": None for name, value in info.options.items()})
    return "\n\n".join([OPTIONS, "\n".join(rows), OPTIONS_OF_PASSES, "\n".join(of_passes)]) + "\n"


def _overview(steps: list[PassInfo], gains: MeasuredGains) -> str:
    """The passes of a stage; with a column of gains where any was measured."""
    ratios = [gains.ratio(info.name) if _is_measured(info) else "" for info in steps]
    rows = ["| # | pass | what it does | gain |", "|---|---|---|---|"] if any(ratios) else [
        "| # | pass | what it does |", "|---|---|---|",
    ]  # fmt: skip
    for info, ratio in zip(steps, ratios):
        note = "" if info.default else " (only if added)"
        gain = f" {ratio} |" if any(ratios) else ""
        rows.append(f"| {info.step} | `{info.name}`{note} | {_cell(info.purpose)} |{gain}")
    return "\n".join(rows)


def _is_measured(info: PassInfo) -> bool:
    """Is a gain by that name one of this pass? The name may also be that of another stage's, which runs by default."""
    return info.default or not any(pass_.default for pass_ in all_passes().get(info.name, ()))


def _stage_page(stage: str, steps: list[PassInfo], gains: MeasuredGains) -> str:
    parts = [f"# {TITLES[stage]}", LEGEND]
    if any(gains.sentence(info.name) or any(gains.sentence(rule.name) for rule in info.rules) for info in steps):
        parts.append(GAINS)
    shown: set[str] = set()
    for info in steps:
        if info.name not in shown:
            shown.add(info.name)
            parts.append(_pass(info, gains))
    return "\n\n".join(p for p in parts if p) + "\n"


def _pass(info: PassInfo, gains: MeasuredGains) -> str:
    if not (info.rules or info.options or info.example):
        return ""
    classes = [c for c in all_passes().get(info.name, ()) if c.purpose() == info.purpose]
    lines = [f"## `{info.name}`", info.purpose, *([info.details] if info.details else [])]
    if _is_measured(info) and (gain := gains.sentence(info.name)):
        lines.append(gain)
    if info.options:
        options = ", ".join(f"`{info.name}.{name}` = {value!r}" for name, value in info.options.items())
        lines.append(f"Options: {options}")
    lines += [_example("fires", pass_.part_examples[info.name]) for pass_ in _passes_with_part(info.name)]
    for pass_ in classes:
        rules = pass_().rules()
        lines += [_rule(rule, gains.sentence(rule.name)) for rule in rules]
        if pass_.examples:
            lines.append(_examples(pass_))
    return "\n\n".join(lines)


def _passes_with_part(part: str) -> list[type[Pass]]:
    return [pass_ for passes in all_passes().values() for pass_ in passes if part in pass_.parts]


def _rule(rule: Rule, gain: str) -> str:
    rounding = "" if rule.exact else " (up to rounding)"
    parts = f"**`{rule.name}`**{rounding}: `{rule.formula()}`", gain, _examples(rule)
    return "\n\n".join(part for part in parts if part)


def _examples(subject: Rule | type[Pass]) -> str:
    firing = [e for e in subject.examples if e.fires][:FIRES]
    declining = [e for e in subject.examples if not e.fires][:DECLINES]
    lines = [_example("fires", e) for e in firing] + [_example("declines", e) for e in declining]
    return "\n".join([*lines, *_before_and_after(subject)])


def _example(outcome: str, example: Example) -> str:
    conditions = f" on `{example.conditions}`" if example.conditions else ""
    reason = f", because: {example.because}" if example.because else ""
    source = textwrap.dedent(example.source)
    if source.startswith("def "):
        block = textwrap.indent(f"```python\n{source}\n```", "  ")
        return f"- {outcome}{conditions}{reason}:\n\n{block}\n"
    program = " ".join(source.split()).replace("`", "'")
    return f"- {outcome}: `{program}`{conditions}{reason}"


def _before_and_after(subject: Rule | type[Pass]) -> list[str]:
    """The shortest of the first examples as a diff; nothing where the rewrite cannot be seen in the text."""
    texts = [golden_text.read(subject.name).get(title, "") for _, _, title in golden_text.sections_of(subject)[:FIRES]]
    diffs = [diff for text in texts if (diff := _diff(text))]
    return ["", "```diff", *min(diffs, key=len), "```"] if diffs else []


def _diff(text: str) -> list[str]:
    _, _, graphs = text.partition("--- before\n")
    before, _, after = graphs.partition("\n--- after\n")
    if before == after:
        return []
    return list(difflib.unified_diff(before.split("\n"), after.split("\n"), n=100, lineterm=""))[3:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def stale_pages() -> dict[str, str]:
    """The pages whose files are not what the passes say now, by path."""
    return {path: text for path, text in pages().items() if _file_text(DOCS / path) != text}


def _file_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def main(*arguments: str) -> int:
    """Write the pages that have changed; with `--check` name them, and fail if there are any."""
    stale = stale_pages()
    if "--check" in arguments:
        for path in stale:
            print(f"docs/{path} is stale: run make catalogue, and commit what it writes", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale.items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text)
        print(f"docs/{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
