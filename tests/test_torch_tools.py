"""What torch's own tools see of the stages: logs by artifact, the profiler, the trace, provenance."""

from __future__ import annotations

import contextlib
import json
import logging

import pytest
import torch

import triptych
from triptych import _private

EAGER = {"codegen": "eager"}


def program(x):
    return (x * 1.0).relu().sum()


@contextlib.contextmanager
def records_of(logger):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record, record.getMessage()))  # text of the graph as it is now
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def compiled(options):
    return torch.compile(program, backend=triptych.compile_fx, options=options)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_graphs_are_logged_where_inductor_logs_them(codegen):
    torch._logging.set_logs(pre_grad_graphs=True, post_grad_graphs=True)
    try:
        with records_of(logging.getLogger("torch._inductor.compile_fx")) as records:
            compiled({"codegen": codegen})(torch.randn(4))
        texts = [text for _, text in records]
    finally:
        torch._logging.set_logs()
    titles = [next(t for t in ("BEFORE PRE GRAD", "AFTER PRE GRAD", "AFTER POST GRAD") if t in text) for text in texts]
    assert titles == ["BEFORE PRE GRAD", "AFTER PRE GRAD", "AFTER POST GRAD"]
    assert ["mul" in text for text in texts] == [True, False, False]


def test_passes_are_in_the_profiler():
    with torch.profiler.profile() as profile:
        compiled(EAGER)(torch.randn(4))
    names = {event.key for event in profile.key_averages()}
    assert {"triptych.pre_grad", "triptych.pre_grad.remove_noop_pass", "triptych.joint.pass_patterns"} <= names


def test_passes_are_timed_only_where_somebody_looks(monkeypatch):
    timed = []
    monkeypatch.setattr(_private, "trace_log", logging.Logger("nobody listens"))
    monkeypatch.setattr(_private, "dynamo_timed", lambda name: timed.append(name) or contextlib.nullcontext())
    compiled(EAGER)(torch.randn(4))
    assert "triptych.pre_grad" in timed and all(name.count(".") == 1 for name in timed)


def test_inductor_knows_where_its_nodes_come_from():
    def model(x, w):
        return torch.relu((x * 1.0) @ w)

    with (
        records_of(_private.trace_log) as records,
        torch._inductor.config.patch({"trace.provenance_tracking_level": 1, "fx_graph_cache": False}),
    ):
        torch.compile(model, backend=triptych.compile_fx)(torch.randn(64, 64), torch.randn(64, 64))
    name = "inductor_provenance_tracking_node_mappings"
    (notes,) = [r.payload for r, _ in records if getattr(r, "metadata", {}).get("artifact", {}).get("name") == name]
    assert json.loads(notes)["preToPost"] == {"matmul": ["mm"], "relu": ["relu"]}
