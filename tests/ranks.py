"""Runs a program of `tests/rank_programs.py` in several processes that form a process group, with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_ranks(program: str, ranks: int = 2, seconds: float = 120, **settings: Any) -> list[Any]:
    """What the program returns on each rank. A rank that fails, or all of them after the time limit, are an error."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.rank_programs", program, f"{directory}/store", json.dumps(settings)]
        outputs = [Path(directory, f"output{rank}") for rank in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                arguments = [*command, str(rank), str(ranks)]
                processes.append(subprocess.Popen(arguments, stdout=file, stderr=file, env=environment, cwd=ROOT))
        deadline = time.monotonic() + seconds
        try:
            codes = [p.wait(max(0.1, deadline - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired:
            codes = [p.poll() for p in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [output.read_text() for output in outputs]
    problems = [f"rank {r} ended with {code}:\n{text[-4000:]}" for r, (code, text) in enumerate(zip(codes, texts)) if code]
    problems += [f"rank {r} did not end:\n{t[-4000:]}" for r, (c, t) in enumerate(zip(codes, texts)) if c is None]
    assert not problems, "\n".join(problems)
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]
