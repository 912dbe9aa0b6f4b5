"""Writes the answers that the package brings for a known device: the times that decide about the models of the suite.

    python bench/answers.py [MODEL[:MODE] ...] [--workers 12] [--folder src/triptych/cost/answers]

Each model goes through the passes in inference, frozen, and in training, in processes of their own. No code is
generated, and nothing runs on the GPU but what the clock is asked about, one question at a time. After each model the
answers are added to the file of the device; those that the package has are not asked again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from models import INFERENCE, MODELS, TRAINING, Unavailable, build
from torch.fx import GraphModule

import triptych
from triptych.codegen.inductor import InductorCodegen
from triptych.cost import answers, clock
from triptych.cost.store import read_store

FROZEN = "frozen"
MODES = (TRAINING, INFERENCE, FROZEN)
LONGEST = 240
"""Seconds that a model may take."""


def without_code(self: Any, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Callable[..., Any]:
    """In the place of code generation: a program whose results are memory of the right sizes."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    values = [getattr(argument, "meta", {}).get("val") for argument in output.args[0]]

    def memory(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return lambda *_, **__: [memory(value) for value in values]


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ask_about(model: str, mode: str, lock: Path) -> None:
    """Take a model through the passes; the clock stores its answers."""
    measure = clock._rounds_on_gpu

    def measured_alone(*given: Any) -> Any:
        with alone(lock):
            return measure(*given)

    clock._rounds_on_gpu = measured_alone
    InductorCodegen.emit = without_code  # type: ignore[method-assign]
    try:
        workload = build(model, small=False).to("cuda", torch.bfloat16)
    except Unavailable as error:
        print(f"{model}: {error}", file=sys.stderr)
        return
    if mode == TRAINING and workload.loss is None:
        return
    program = workload.program(TRAINING if mode == TRAINING else INFERENCE)
    options = {"freeze": True} if mode == FROZEN else {}
    run = torch.compile(program, backend=triptych.compile_fx, dynamic=False, options=options)
    if mode == TRAINING:
        run(**workload.inputs).backward()
    else:
        with torch.no_grad():
            run(**workload.inputs)


def add_answers(folder: Path) -> None:
    """Add what was measured to the file of the device."""
    name = torch.cuda.get_device_name()
    model = answers.model_named(name)
    if model is None:
        raise SystemExit(f"{name} is not in the table of known devices, src/triptych/cost/device.py")
    path = folder / f"{model.name}.json"
    known = json.loads(path.read_text("utf-8"))["answers"] if path.exists() else {}
    before = len(known)
    for key, times in read_store(clock.MEASUREMENTS).items():
        device, _, question = key.split(" | ", 2)
        if device == name and len(times) == 1:
            known[question] = float(f"{times[0][0]:.3g}")
    folder.mkdir(parents=True, exist_ok=True)
    content = {"device": name, "torch": torch.__version__, "answers": dict(sorted(known.items()))}
    path.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
    print(f"{path}: {len(known)} answers, {len(known) - before} of them new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL[:MODE]", help="by default all of the suite in all modes")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no model is begun later than that")
    parser.add_argument("--folder", type=Path, default=answers.FOLDER)
    parser.add_argument("--only", nargs=2, metavar=("MODE", "LOCK"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    wanted = [model.partition(":")[::2] for model in given.models or MODELS]
    for model, mode in wanted:
        if model not in MODELS or mode not in ("", *MODES):
            parser.error(f"no {model}:{mode}; models: {', '.join(MODELS)}; modes: {', '.join(MODES)}")
    if given.only:
        ask_about(given.models[0], given.only[0], Path(given.only[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        cases = [(model, mode) for model, only in wanted for mode in ([only] if only else MODES)]
        end, adding = time.monotonic() + given.seconds, threading.Lock()

        def run(case: tuple[str, str]) -> None:
            if time.monotonic() > end:
                print(f"{' '.join(case)}: left out", file=sys.stderr, flush=True)
                return
            command = [sys.executable, __file__, case[0], "--only", case[1], f"{scratch}/lock"]
            try:
                failed = subprocess.run(command, timeout=LONGEST, check=False).returncode
            except subprocess.TimeoutExpired:
                failed = True
            print(f"{' '.join(case)}{': failed' if failed else ''}", file=sys.stderr, flush=True)
            with adding:
                add_answers(given.folder)

        with ThreadPoolExecutor(given.workers) as pool:
            list(pool.map(run, cases))


if __name__ == "__main__":
    main()
