"""Measurements kept on disk: whatever is wrong with the disk, a compile goes on, with a warning."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys

import pytest

from triptych.cost import device, store


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path


def test_what_is_added_is_read():
    store.add_to_store("measured.json", "a", 1.5)
    store.add_to_store("measured.json", "b", 2.5)
    assert store.read_store("measured.json") == {"a": 1.5, "b": 2.5}


def test_processes_that_write_at_once_lose_nothing():
    program = "import sys; from triptych.cost.store import *; [add_to_store('m.json', sys.argv[1] + str(i), i) for i in range(30)]"
    processes = [subprocess.Popen([sys.executable, "-c", program, name]) for name in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(store.read_store("m.json")) == 90


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[1]", b"", b"cos\nsystem\n(S'true'\ntR.", b"[" * 200_000])
def test_a_damaged_file_is_replaced(home, caplog, content):
    path = home / "triptych" / "measured.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert store.read_store("measured.json") == {}
    assert content == b"[1]" or "measured again" in caplog.text
    store.add_to_store("measured.json", "a", 1.0)
    assert json.loads(path.read_text()) == {"a": 1.0}


@pytest.mark.parametrize("wrong", [{"bandwidth": "fast"}, {"single": None}, {"cores": 0}, {"half": -1.0}, {"colour": 1}])
def test_what_cannot_be_a_device_is_measured_again(wrong):
    good = {"name": "X", "bandwidth": 1e12, "half": 1e14, "single": 1e13, "launch": 5e-6, "cores": 100}
    store.add_to_store("devices.json", "X", good)
    assert device._remembered("X").bandwidth == 1e12
    store.add_to_store("devices.json", "X", {**good, **wrong})
    assert device._remembered("X") is None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing(home, caplog, monkeypatch, error):
    store.add_to_store("measured.json", "a", 1.0)

    def refuse(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fdopen", refuse)
    with caplog.at_level(logging.WARNING):
        store.add_to_store("measured.json", "b", 1.0)
        store.add_to_store("measured.json", "c", 1.0)
    assert caplog.text.count("cannot be kept") == 1
    assert store.read_store("measured.json") == {"a": 1.0}
    assert sorted(p.name for p in (home / "triptych").iterdir()) == ["measured.json", "measured.lock"]


def test_an_interrupted_write_leaves_the_file_as_it_was(home, monkeypatch):
    store.add_to_store("measured.json", "a", 1.0)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.add_to_store("measured.json", "b", 1.0)
    assert store.read_store("measured.json") == {"a": 1.0}
    assert sorted(p.name for p in (home / "triptych").iterdir()) == ["measured.json", "measured.lock"]


def test_no_home(monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store.Path, "home", nowhere)
    store.add_to_store("measured.json", "a", 1.0)
    assert store.read_store("measured.json") == {}
