"""Threads and processes that compile at once, interruptions, and what may be read from disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.backends import registry
from torch._dynamo.backends.registry import lookup_backend

import triptych

SOURCES = Path(triptych.__file__).parent


def compile_and_compare(number: int, codegen: str) -> None:
    def function(x):
        return torch.cat([(x * number).sin(), x + torch.tensor(float(number))]).softmax(0)

    x, y = (torch.linspace(-1, 1, 5 + number).requires_grad_() for _ in range(2))
    compiled = torch.compile(function, backend=triptych.compile_fx, options={"codegen": codegen})
    for call, leaf in ((compiled, x), (function, y)):
        call(leaf).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_threads_that_compile_at_once(codegen):
    settings = inductor_config.get_config_copy()
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            compile_and_compare(number, codegen)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert inductor_config.get_config_copy() == settings


@pytest.mark.parametrize("moment", ["before either registers", "while one registers"])
def test_threads_that_ask_for_the_backend_by_name_at_once(monkeypatch, moment):
    """Torch registers a backend by name when it is first asked for, and asks nobody else to wait."""
    project = (SOURCES.parents[1] / "pyproject.toml").read_text()
    (value,) = re.findall(r'\[project.entry-points.torch_dynamo_backends\]\ntriptych = "(.*)"', project)
    declared = EntryPoint("triptych", value, "torch_dynamo_backends")
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    monkeypatch.delitem(sys.modules, "triptych.entry_point", raising=False)
    together, backends = threading.Barrier(2, timeout=60), []

    class Slow:
        """Torch's `lookup_backend` has seen that there is nothing yet, in both threads."""

        def load(self):
            loaded = declared.load()
            together.wait()
            return loaded

    monkeypatch.setitem(registry._BACKENDS, "triptych", Slow())
    if moment == "while one registers":
        declared.load()
        monkeypatch.setitem(registry._BACKENDS, "triptych", None)  # torch does this first
    threads = [threading.Thread(target=lambda: backends.append(lookup_backend("triptych"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*backends, lookup_backend("triptych")] == [triptych.compile_fx] * 3
    assert "triptych" in torch.compiler.list_backends()
    with pytest.raises(KeyError, match="nobody"):
        registry._COMPILER_FNS["nobody"]


def test_processes_that_compile_at_once(tmp_path):
    program = "from tests.test_robustness import compile_and_compare; compile_and_compare(3, 'inductor')"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES.parent), str(Path(__file__).parent.parent)]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors


def test_an_interrupted_compile_leaves_nothing_behind(monkeypatch):
    def model(x):
        return torch.cat([x, x]).relu()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    x = torch.randn(4)
    with monkeypatch.context() as patched:
        patched.setattr("triptych.rewrite.passes.run_rules", interrupt)
        with pytest.raises(KeyboardInterrupt):
            torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager", "on_error": "fallback"})(x)
    settings = inductor_config.get_config_copy()
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager"})
    assert torch.equal(compiled(x), model(x))
    assert inductor_config.get_config_copy() == settings


def test_a_home_that_cannot_be_written(tmp_path):
    home = tmp_path / "home"
    home.write_text("a file, where a folder is wanted")
    program = (
        "import torch; from triptych.cost.store import add_to_store, read_store;"
        "add_to_store('measured.json', 'a', 1.0); assert read_store('measured.json') == {};"
        "import triptych; f = lambda x: x.relu() + 1;"
        "c = torch.compile(f, backend=triptych.compile_fx, options={'codegen': 'eager'});"
        "assert torch.equal(c(torch.ones(3)), f(torch.ones(3)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "HOME": str(home), "XDG_CACHE_HOME": str(home)}
    outcome = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert "cannot be kept" in outcome.stderr


def test_nothing_is_unpickled():
    """Caches and reports are data: nothing in a file that the package reads may run code."""
    banned = re.compile(r"\b(import|from) (pickle|marshal|shelve|dill|cloudpickle)\b|torch\.load\(")
    guilty = [
        f"{path.relative_to(SOURCES)}:{number}"
        for path in sorted(SOURCES.rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if banned.search(line) and not line.lstrip().startswith("#")
    ]
    assert guilty == []
