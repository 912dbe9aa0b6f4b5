"""The list of tests that need not pass, each under a reason."""

from __future__ import annotations

import re
from pathlib import Path

LISTED = Path(__file__).parent / "listed.txt"


def read_listing(path: Path, mode: str) -> dict[str, str]:
    """Test -> reason, for one mode.

    A heading `[kernels, eager] reason` says why the tests below it need not pass in these modes. `CommonTemplate.test_x`
    is what PyTorch copies into `CpuTests.test_x_cpu` and `GPUTests.test_x_cuda`.
    """
    reasons: dict[str, str] = {}
    modes: list[str] = []
    reason = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if heading := re.fullmatch(r"\[([\w, ]+)\] (.+)", text):
            modes, reason = re.split(r",\s*", heading[1]), heading[2]
            unknown = set(modes) - {"kernels", "eager"}
            if unknown:
                raise ValueError(f"{path.name}:{number}: no such mode: {', '.join(sorted(unknown))}")
        elif not re.fullmatch(r"\w+\.\w+", text) or not reason:
            raise ValueError(f"{path.name}:{number}: neither a heading nor a test below one: {line}")
        elif mode in modes:
            reasons.update(dict.fromkeys(copies(text), reason))
    return reasons


def copies(test: str) -> list[str]:
    """The tests that PyTorch makes of one of a template."""
    template, method = test.split(".")
    if template != "CommonTemplate":
        return [test]
    return [f"CpuTests.{method}_cpu", f"GPUTests.{method}_cuda"]
