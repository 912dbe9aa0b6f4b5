"""The torch releases this package is tested on, and the errors for other releases.

Importing the package must not load Dynamo and Inductor, so that only torch's version is looked at then. On the tested
releases every private name exists, and a test says so. On a newer one all of them are looked up when a program is first
compiled, before anything is done to it.
"""

from __future__ import annotations

import re

import torch

from .errors import UnsupportedTorch

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = "torch 2.11 to 2.15"


def release_of(version: str) -> tuple[int, int]:
    """(2, 13) for 2.13.0+cpu or 2.13.0a0+git1234567."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else NEWEST


def check_release(version: str = str(torch.__version__)) -> None:
    """Raise an error if torch is too old: most of what the package needs would be missing."""
    if release_of(version) < OLDEST:
        raise UnsupportedTorch(f"this is torch {version}; Triptych needs {SUPPORTED}")


def is_newer_than_tested(version: str = str(torch.__version__)) -> bool:
    return release_of(version) > NEWEST


def missing_names(paths: list[str], version: str = str(torch.__version__)) -> UnsupportedTorch:
    """The error for private names that this torch has moved or dropped."""
    names = ", ".join(path.replace(":", ".") for path in paths)
    return UnsupportedTorch(f"torch {version} has no {names}, which Triptych needs; it is tested with {SUPPORTED}")
