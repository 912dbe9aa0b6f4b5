"""What TORCH_LOGS=triptych prints: one line for each graph that is compiled or loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys

PROGRAM = """
import torch

codegen = {codegen!r}
train = torch.compile(lambda x: torch.relu(x * 1.0) + 1, backend="triptych", options={{"codegen": codegen}})
train(torch.ones(3, requires_grad=True)).sum().backward()
with torch.no_grad():
    torch.compile(lambda x: torch.tanh(x * 1.0) + 1, backend="triptych", options={{"codegen": codegen}})(torch.ones(3))
"""
COUNTS = r"\d+ of \d+ passes changed something, (1 rewrite|(?!1 )\d+ rewrites), \d+ declined, \d+\.\d\d s in passes$"


def logged(logs, cache, codegen="eager"):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    environment.pop("TORCH_LOGS", None)
    if logs:
        environment["TORCH_LOGS"] = logs
    command = [sys.executable, "-c", PROGRAM.format(codegen=codegen)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in result.stderr.splitlines() if "triptych" in line]
    return [(line[0], line.partition("] ")[2].partition("] ")[2]) for line in lines]


def test_each_graph_has_a_line_and_each_pass_if_asked_for(tmp_path):
    assert logged("", tmp_path) == []
    lines = logged("+triptych", tmp_path)
    graphs = [line for level, line in lines if level == "I"]
    for graph, line in zip(["forward", "backward", "inference"], graphs, strict=True):
        assert re.match(f"the {graph} graph was compiled: {COUNTS}", line)
    changed = [int(re.search(r": (\d+) of", line)[1]) for line in graphs]
    assert changed[0] >= 1 and changed[1] == 0 and changed[2] >= 1  # `x * 1.0` goes; the backward has nothing to change
    passes = [line for level, line in lines if level == "V"]
    assert any(re.match(r"pre_grad \w+: \d+ rewrites? in pre_grad", line) for line in passes)


def test_what_is_loaded_from_a_cache_says_so(tmp_path):
    compiled = logged("triptych", tmp_path, "inductor")
    assert len(compiled) == 3 and not any("cache" in line for _, line in compiled)
    loaded = logged("triptych", tmp_path, "inductor")
    assert len(loaded) == 2
    for _, line in loaded:
        says = "the program was loaded from AOTAutograd's cache, so stages 2 and 3 did not run"
        assert re.match(f"{says}: {COUNTS}", line)
