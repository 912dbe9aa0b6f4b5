"""The fast tests on every torch release that is supported, each in an environment of its own.

    python tests/releases.py                  # all of them
    python tests/releases.py 2.11 2.15 --keep # these, and leave the environments where they are

An environment with a CUDA build of torch takes some 7 GB. Each is removed after its tests unless it is to be kept; one
that is there is used as it is. pip takes the wheels from where its own settings say (PIP_INDEX_URL and the like).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "expecttest", "numpy", "transformers")
FAST = (
    "test_private", "test_flow", "test_stages", "test_match", "test_rewrite", "test_ir", "test_passes", "test_reading",
    "test_numbers", "test_partition", "test_lost_errors", "test_replay", "kernels/test_constants",
    "test_gpu_code",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="the fast tests on every torch release that is supported")
    parser.add_argument("releases", nargs="*", default=RELEASES, help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "releases", help="where environments go")
    parser.add_argument("--workers", default="2", help="processes of pytest (default: 2)")
    args = parser.parse_args()
    outcomes = {}
    for release in args.releases:
        environment = args.folder / f"torch-{release}"
        try:
            python = make_environment(environment, release)
            outcomes[release] = run_fast_tests(python, args.workers)
        except subprocess.CalledProcessError as error:
            outcomes[release] = (False, f"no environment: {' '.join(map(str, error.cmd[:4]))} failed")
        finally:
            if not args.keep:
                shutil.rmtree(environment, ignore_errors=True)
    for release, (_, text) in outcomes.items():
        print(f"torch {release}: {text}")
    return 0 if all(passed for passed, _ in outcomes.values()) else 1


def make_environment(folder: Path, release: str) -> Path:
    """The Python of an environment with this torch and this package; the stamp comes last."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "-c", constraints]
    print(f"torch {release}: installing into {folder}", flush=True)
    subprocess.run([*install, f"torch=={release}.*", "-e", ROOT, *TOOLS], check=True)
    stamp.touch()
    return python


def run_fast_tests(python: Path, workers: str) -> tuple[bool, str]:
    """Have they passed? And the version of torch, and what pytest says of them."""
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    print(f"torch {version}: running the fast tests", flush=True)
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", workers, *(f"tests/{name}.py" for name in FAST)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        print(run.stdout[-8000:], run.stderr[-2000:], flush=True)
    said = re.search(r"\d+ (?:passed|failed|error).*", run.stdout.strip().rsplit("\n", 1)[-1])
    return run.returncode == 0, f"{version}: {said[0] if said else f'pytest ended with {run.returncode}'}"


if __name__ == "__main__":
    sys.exit(main())
