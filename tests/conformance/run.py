"""PyTorch's own Inductor tests with Triptych in Inductor's place.

    python tests/conformance/run.py PATH [--mode kernels] [--match abs] [--workers 2]

PATH is PyTorch's `test_torchinductor.py`, or a folder that contains it, such as a checkout of PyTorch's sources. Every
test that stock Inductor passes on the same torch must pass; those that need not stand in `listed.txt`, each with the
reason. Stock Inductor runs only the tests that fail here. With `--mode eager` there are no kernels, which some tests
count or read, and float16 is rounded after every operation: there torch's own `aot_eager` is what must not be better.

Outcomes are written as they come, one JSON object a line, to a file named for the mode, torch and the device. A run that
was interrupted goes on where it stopped, as long as neither the tests nor the package have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import queue
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
if not __package__:  # started as a file
    sys.path.insert(0, str(ROOT))

from tests.conformance.journal import BAD, Journal, Outcome  # noqa: E402
from tests.conformance.listing import LISTED, read_listing  # noqa: E402
from tests.conformance.process import SOURCES, WORKER, WorkerProcess  # noqa: E402

WHAT = "test_torchinductor.py"
JUDGES = {"kernels": "stock", "eager": "aot_eager"}
"""Who else must fail a test that fails here."""
HOW_TO_GET = f"""\
PyTorch's tests are not part of this project. Get those of a release, and say where they are:

    git clone --depth 1 --filter=blob:none --sparse --branch v2.6.0 https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set test/inductor
    make conformance PYTORCH_TESTS=pytorch

The path may be {WHAT} itself, or a folder that contains it or test/inductor/{WHAT}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own Inductor tests with Triptych in Inductor's place")
    parser.add_argument("path", nargs="?", help=f"{WHAT}, or a folder that contains it")
    parser.add_argument("--mode", choices=("kernels", "eager", *JUDGES.values()), default="kernels")
    parser.add_argument("--match", default="", help="only tests in whose name this regular expression is found")
    parser.add_argument("--workers", type=int, default=2, help="how many processes (default: 2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a test may take (default: 300)")
    parser.add_argument("--results", type=Path, default=Path("build/conformance"), help="where outcomes are written")
    parser.add_argument("--anew", action="store_true", help="do not take up outcomes of an earlier run")
    parser.add_argument("--listed", type=Path, default=LISTED, help="tests that need not pass")
    args = parser.parse_args(arguments)
    file = find_tests(args.path)
    if file is None:
        print(HOW_TO_GET if not args.path else f"no {WHAT} in {args.path}\n\n{HOW_TO_GET}", file=sys.stderr)
        return 2

    run = Run(file, args.mode, args.results, args.workers, args.timeout, args.anew)
    names = [n for n in run.tests if re.search(args.match, n)]
    outcomes = run.all(names)
    if args.mode not in JUDGES:
        print(summary(outcomes.values()))
        return 0
    listed = read_listing(args.listed, args.mode)
    failing = [n for n in names if outcomes[n]["outcome"] in BAD and n not in listed]
    judge, judged = JUDGES[args.mode], {}
    if failing:
        print(f"{len(failing)} fail and are not listed: does {judge} pass them?")
        judged = Run(file, judge, args.results, args.workers, args.timeout).all(failing)
    return report(outcomes, judge, judged, listed)


def find_tests(path: str | None) -> Path | None:
    """PyTorch's test file at a path: the file itself, in the folder, or in a checkout of PyTorch."""
    if not path:
        return None
    for candidate in (Path(path), Path(path, WHAT), Path(path, "test/inductor", WHAT)):
        if candidate.is_file():
            return candidate.resolve()
    return None


def summary(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(o["outcome"] for o in outcomes)
    return ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()) or "no tests"


def report(outcomes: dict[str, Outcome], judge: str, judged: dict[str, Outcome], listed: dict[str, str]) -> int:
    """Print what the outcomes mean; 1 if a test fails that the judge passes and that is not listed."""
    bad = [n for n, o in outcomes.items() if o["outcome"] in BAD]
    ours = [n for n in bad if n in judged and judged[n]["outcome"] == "passed"]
    counts = Counter(o["outcome"] for o in outcomes.values())
    stale = [n for n, o in outcomes.items() if n in listed and o["outcome"] == "passed"]
    print(
        f"{len(outcomes)} tests: {counts['passed']} passed, {len(ours)} failed, "
        f"{sum(n in listed for n in bad)} listed, {len(judged) - len(ours)} fail with {judge} too, "
        f"{counts['skipped']} skipped"
    )
    for name in stale:
        print(f"warning: {name} is listed and passes: take it off the list")
    for name in ours:
        print(f"{outcomes[name]['outcome']}: {name}: {outcomes[name]['why']}")
    return 1 if ours else 0


class Run:
    """The tests of one file in one mode, over several processes."""

    def __init__(self, file: Path, mode: str, folder: Path, workers: int, timeout: float, anew: bool = False) -> None:
        self.file, self.mode, self.folder, self.workers, self.timeout = file, mode, folder, workers, timeout
        folder.mkdir(parents=True, exist_ok=True)
        self.first = self._start(0)
        hello = self.first.hello
        self.tests: list[str] = hello["tests"]
        platform = re.sub(r"[^\w.+]+", "_", f"torch{hello['torch']}-{hello['device']}")
        self.journal = Journal(folder / f"{file.stem}-{mode}-{platform}.jsonl", fingerprint(file, mode), anew)

    def all(self, names: Sequence[str]) -> dict[str, Outcome]:
        """The outcomes of these tests, those known from before among them."""
        known = self.journal.outcomes
        left = [n for n in names if n not in known]
        print(f"{self.mode}: {len(names)} tests, {len(left)} to run; outcomes in {self.journal.path}", flush=True)
        todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in left:
            todo.put(name)
        count = max(1, min(self.workers, len(left)))
        threads = [threading.Thread(target=self._work, args=(todo, i), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        missing = [n for n in names if n not in known]
        if missing:
            raise SystemExit(f"{len(missing)} tests did not run, {missing[0]} among them; see {self.folder}/worker-*.log")
        return {n: known[n] for n in names}

    def _start(self, index: int) -> WorkerProcess:
        return WorkerProcess(self.file, self.mode, self.folder / f"worker-{index}.log")

    def _work(self, todo: queue.SimpleQueue[str], index: int) -> None:
        """Run one test after another; a worker that is gone is replaced."""
        worker = self.first if index == 0 else None
        try:
            while True:
                name = todo.get_nowait()
                if worker is None or not worker.alive():
                    worker = self._start(index)
                outcome = worker.run(name, self.timeout)
                self.journal.add(outcome)
                if outcome["outcome"] in BAD:
                    print(f"{outcome['outcome']}: {name}: {outcome['why']}", flush=True)
                if len(self.journal.outcomes) % 50 == 0:
                    print(f"{todo.qsize()} tests left", flush=True)
        except queue.Empty:
            pass
        finally:
            if worker is not None:
                worker.end()


def fingerprint(file: Path, mode: str) -> str:
    """What outcomes depend on besides torch and the device: the tests, and the package where it takes part."""
    sources = [file, WORKER]
    if mode in JUDGES:
        sources += sorted(SOURCES.rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
