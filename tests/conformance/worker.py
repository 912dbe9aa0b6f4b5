"""One process of a conformance run: loads PyTorch's test file and runs the tests it is told to, one after another.

It reads names of tests from its standard input, one a line, and writes one JSON object a line to the file descriptor it
is given: first what there is to run and on what, then the outcome of each test. It is a process of its own, so that a
test that crashes or hangs costs one test.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import sys
import time
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MODES: Mapping[str, dict[str, Any] | None] = {
    "stock": None,
    "aot_eager": None,
    "eager": {"codegen": "eager", "on_error": "raise"},
    "kernels": {"codegen": "inductor", "on_error": "raise"},
}
"""Options of Triptych in Inductor's place. A fallback would hide what fails to compile. Without it: Inductor itself, and
torch's own backend that captures as Inductor does and runs operators one by one."""

Backend = Callable[[Any, Sequence[Any]], Callable[..., Any]]

TRACEBACK = 6000
"""How many characters of a traceback are written down: its end."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("answers", type=int, help="the file descriptor to write answers to")
    args = parser.parse_args()
    with open(args.answers, "w", buffering=1) as answers:
        if args.mode != "stock":
            put_in_place(backend_of(args.mode))
        tests = load_tests(args.file)
        say(answers, tests=list(tests), **platform())
        for line in sys.stdin:
            name = line.strip()
            started = time.monotonic()
            outcome = run_test(tests[name])
            say(answers, test=name, seconds=round(time.monotonic() - started, 1), **outcome)


def say(answers: IO[str], **what: Any) -> None:
    answers.write(json.dumps(what) + "\n")


def platform() -> dict[str, str]:
    """The torch and the device that the results hold for."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": str(torch.__version__), "device": device}


def backend_of(mode: str) -> Backend:
    if mode == "aot_eager":
        import torch._dynamo

        return torch._dynamo.lookup_backend(mode)
    import triptych

    return functools.partial(triptych.compile_fx, options=MODES[mode])


def put_in_place(backend: Backend) -> None:
    """A backend compiles whatever is compiled with Inductor from now on, by name or by function."""
    import torch._inductor.compile_fx as driver
    import torch._inductor.config as settings

    def compile_fx(
        gm: Any, example_inputs: Sequence[Any], *, config_patches: Any = None, compile_region_name: str | None = None
    ) -> Callable[..., Any]:
        with settings.patch(config_patches or {}):
            return backend(gm, example_inputs)

    driver.compile_fx = compile_fx


def load_tests(file: Path) -> dict[str, unittest.TestCase]:
    """The tests of a file by `Class.method`. Its neighbours can be imported, as when PyTorch runs it."""
    provide_expecttest()
    sys.path.insert(0, str(file.parent))
    module = import_with_stand_ins(file.stem)
    tests: dict[str, unittest.TestCase] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__:
            for method in unittest.defaultTestLoader.getTestCaseNames(value):
                tests[f"{name}.{method}"] = value(method)
    return tests


def provide_expecttest() -> None:
    """torch.testing cannot be imported without the package `expecttest`; few tests need what it does."""
    try:
        importlib.import_module("expecttest")
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def import_with_stand_ins(name: str) -> types.ModuleType:
    """Import a test module of another torch release: names that this torch lacks get a stand-in.

    A stand-in works as a decorator while the module is imported. A test that calls one is skipped.
    """
    importing = True

    def stand_in(dropped: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not importing:
                raise unittest.SkipTest(f"this torch has no {dropped}")
            bare = len(args) == 1 and callable(args[0]) and not kwargs
            return args[0] if bare else lambda decorated: decorated

        return call

    while True:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if missing is None:
                raise
            attribute, owner = missing.groups()
            setattr(importlib.import_module(owner), attribute, stand_in(f"{owner}.{attribute}"))
        else:
            importing = False
            return module


class Result(unittest.TestResult):
    """Keeps the error itself too: its text would be hard to find in a traceback."""

    error = ""

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.error = self.error or short(err[1])

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.error = self.error or short(err[1])


def short(error: BaseException) -> str:
    """An error on one line, without the advice that PyTorch adds."""
    text = re.split(r"\n\s*(?:Set TORCHDYNAMO|To execute this test)", str(error))[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def run_test(test: unittest.TestCase) -> dict[str, str]:
    """The outcome of one test, and what there is to say of it."""
    result = Result()
    unittest.TestSuite([test]).run(result)
    if result.failures or result.errors:
        text = "\n".join(text for _, text in result.failures + result.errors)
        return {"outcome": "failed", "why": result.error, "traceback": text[-TRACEBACK:]}
    if result.unexpectedSuccesses:
        return {"outcome": "failed", "why": "was expected to fail, and passed"}
    if result.skipped:
        return {"outcome": "skipped", "why": result.skipped[0][1]}
    return {"outcome": "passed", "why": ""}


if __name__ == "__main__":
    main()
