"""The order of all passes, as data."""

from __future__ import annotations


def pass_names() -> frozenset[str]:
    return frozenset()


def option_names() -> frozenset[str]:
    return frozenset()
