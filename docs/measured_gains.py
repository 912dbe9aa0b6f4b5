"""The measured gains of passes and rules for the catalogue, from the file that `bench/gains.py` has written on a GPU.

A run on a CPU is not published: its times are those of whoever shares the machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "bench" / "results" / "gains-cuda.json"


@dataclass(frozen=True)
class MeasuredGains:
    header: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of what was measured, by the name of the pass or rule."""

    @staticmethod
    def load(path: Path = RESULTS) -> MeasuredGains:
        """What the file has; nothing where there is none."""
        if not path.exists():
            return MeasuredGains()
        header = json.loads(path.read_text())
        gains = header.pop("gains")
        return MeasuredGains(header, {name: figures for name, figures in gains.items() if _is_gain(figures)})

    def introduction(self) -> str:
        """How the figures came about."""
        if not self.figures:
            return ""
        return (
            "Gains are measured: the time of a program without the pass over its time with it, the rest of the "
            "pipeline and the code generator as by default. A pass that stands in several places is left out in "
            "all of them. Programs are workloads of a real size, or examples of the pass made larger; the page of "
            "the stage names each. `1x` means that the times cannot be told apart: another pass or the code "
            "generator does the same, or the program is too small for it to matter. No figure means that the pass "
            "was not measured, or does not fire on that machine.\n\n"
            f"Measured on {self.header['machine']}, with {self.header['versions']}, by `{self.header['command']}`; "
            f"medians of {self.header['rounds']} rounds in turns."
        )

    def ratio(self, name: str) -> str:
        """The gain in a table: `2.1x`; empty where there is none."""
        figures = self.figures.get(name)
        return "" if figures is None else "1x" if _alike(figures) else f"{figures['ratio']:.3g}x"

    def sentence(self, name: str) -> str:
        """The gain with all that belongs to it; empty where there is none."""
        figures = self.figures.get(name)
        if figures is None:
            return ""
        on, off, ms = figures["on"], figures["off"], figures["ms"]
        gain = "no difference in time" if _alike(figures) else f"{figures['ratio']:.3g}x"
        parts = [f"{ms['on']:.3g} ms instead of {ms['off']:.3g} ms"]
        if on["kernels"] and off["kernels"]:
            kernels = "1 kernel" if on["kernels"] == 1 else f"{on['kernels']} kernels"
            parts.append(kernels if on["kernels"] == off["kernels"] else f"{kernels} instead of {off['kernels']}")
        if on["bytes"] != off["bytes"]:
            read_and_written = f"an estimated {_megabytes(on['bytes'])} read and written"
            parts.append(f"{read_and_written} instead of {_megabytes(off['bytes'])}")
        return f"Measured gain: {gain} ({', '.join(parts)}), on: {figures['workload']}."


LARGEST_DIFFERENCE = 0.05
"""Relative, of the results with the pass and without."""


def _is_gain(figures: dict[str, Any]) -> bool:
    """Was it timed, and were the results the same?"""
    return "ratio" in figures and figures.get("difference", 0.0) <= LARGEST_DIFFERENCE


def _alike(figures: dict[str, Any]) -> bool:
    """Do the middle halves of the rounds overlap? Then a difference of the medians says nothing."""
    quartiles = figures.get("quartiles_ms") or {}
    if len(quartiles) < 2:
        return False
    (low, high), (other_low, other_high) = quartiles["on"], quartiles["off"]
    return low <= other_high and other_low <= high


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.3g} MB" if number < 1e9 else f"{number / 1e9:.3g} GB"
