"""Two compiles of one model side by side, and the page of a recorded run, in a browser too."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch
from torch import nn

import triptych
from triptych.explaining.comparison import comparison_data, figures, same_operations
from triptych.explaining.page import page
from triptych.explaining.page_data import report_data
from triptych.passes.node_lines import node_lines

from .test_report_page import FRONT_END, decoded


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        marker = "<img src=x onerror='globalThis.injected = 1'>"
        return self.linear(x).view(-1, 8).clone().relu() * 1 + len(marker)  # <script>globalThis.injected = 1</script>


class Broken(Layer):
    def forward(self, x):
        y = self.linear(x)
        print("<script>globalThis.injected = 1</script>")
        return y.relu()


@pytest.fixture(scope="module")
def both():
    return triptych.explain(Layer(), torch.randn(4, 8), train=True, stock=True)


@pytest.fixture(scope="module")
def recorded():
    with triptych.record() as exp:
        step = torch.compile(Broken(), backend="triptych", options={"codegen": "eager"})
        for rows in (3, 5):
            step(torch.randn(rows, 8)).sum().backward()
        triptych.joint_graph_passes(torch.fx.symbolic_trace(lambda x: (x.relu(),)))
    return exp


def test_figures_of_both(both):
    said = {one.what: (one.ours, one.theirs) for one in figures(both, both.stock)}
    assert said["kernel launches"] == (both.kernel_launches, both.stock.kernel_launches)
    for place in (0, 1):
        parts = said["of generated kernels"][place] + said["of libraries and operators"][place]
        assert said["kernel launches"][place] == parts > 0
    assert said["GEMMs in the final graphs"] == (2, 2)
    nodes = [sum(len(exp.graphs[name].graph.nodes) for name in ("forward", "backward")) for exp in (both, both.stock)]
    assert said["nodes of the final graphs"] == tuple(nodes)
    assert min(said["time to compile"]) > 0 < min(said["time in passes"])
    assert "compared" in str(both) and "different generated kernels" in str(both)
    data = json.loads(both.to_json())["comparison"]
    assert data[0] == {
        "what": "kernel launches", "unit": "", "ours": both.kernel_launches, "stock": both.stock.kernel_launches,
        "ours_unknown": 0, "stock_unknown": 0,
    }  # fmt: skip
    assert both.stock.to_dict()["comparison"] is None


def test_data_of_the_page(both):
    text = page(both, both.stock)
    data = decoded(text)["comparison"]
    assert data == json.loads(json.dumps(comparison_data(both, both.stock, [report_data(e)["core"] for e in (both, both.stock)])))
    assert data["backends"] == ["triptych", "inductor"]
    (program,) = data["programs"]
    places = [(label, side) for label, side, *_ in program["stages"]]
    assert places == [
        ("Dynamo", ""), ("pre-grad", ""), ("AOTAutograd", ""), ("joint", ""),
        ("partition", "forward"), ("partition", "backward"), ("post-grad", "forward"), ("post-grad", "backward"),
        ("code generation", "forward"), ("code generation", "backward"),
    ]  # fmt: skip
    assert all(ours and theirs for _, _, ours, theirs in program["stages"])
    assert [graph["graph"] for graph in program["graphs"]] == ["forward", "backward"]
    assert "comparison" not in decoded(page(both))


def graph_of(function, *inputs):
    return torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs).graph


def pairs(ours, theirs):
    return same_operations(node_lines(ours), node_lines(theirs))


def test_lines_pair_by_operation_and_type_not_by_name():
    x, y = torch.randn(2, 3), torch.randn(3)
    ours = graph_of(lambda x, y: (x.relu() * y).view(6).sin(), x, y)
    theirs = graph_of(lambda x, y: torch.reshape(y * x.clone().relu(), (6,)).cos(), x, y)
    for node in list(theirs.nodes):
        if node.op == "call_function":
            node._rename(f"other_{node.name}")
    rows = [(row.sign, row.left.partition(" = ")[2].partition("(")[0], row.right.partition(" = ")[2].partition("(")[0])
            for row in pairs(ours, theirs)]  # fmt: skip
    assert rows[2:] == [
        ("+", "", "aten.clone"),
        (" ", "aten.relu", "aten.relu"),
        (" ", "aten.mul.Tensor", "aten.mul.Tensor"),
        (" ", "aten.view", "aten.view"),
        ("-", "aten.sin", ""),
        ("+", "", "aten.cos"),
        (" ", "", ""),
    ]


@pytest.mark.slow
def test_large_graphs_are_paired_in_reasonable_work():
    def long(count):
        def function(x):
            for _ in range(count):
                x = x.sin() + 1
            return x

        return function

    x = torch.randn(3)
    rows = pairs(graph_of(long(1500), x), graph_of(long(1501), x))
    assert sum(row.sign == " " for row in rows) >= 3000


def test_frames_of_a_recorded_run_are_data_of_its_page(recorded):
    core = report_data(recorded)["core"]
    assert core["recorded"] and [frame["programs"] for frame in core["frames"]] == [[1], [2], [3], [4], [5]]
    assert core["frames"][0]["breaks"][0][1].startswith("test_comparison.py:")
    assert "size mismatch" in core["frames"][2]["reason"]
    assert core["frames"][4]["what"].startswith("joint_graph_passes called at test_comparison.py:")
    assert core["programs"][1]["label"].startswith("forward, resumed, ")


def test_a_reader_can_use_them(recorded, both, tmp_path):
    """From a compile to its passes; from a figure to the passes of both compilers; `test/run.mjs` has the steps."""
    chromium, node = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("node")
    if chromium is None or node is None:
        pytest.skip("needs chromium and node")
    if not (FRONT_END / "node_modules" / "playwright-core").is_dir():
        pytest.skip("needs playwright-core: make report")
    pages = [exp.to_html(tmp_path / name) for exp, name in ((recorded, "run.html"), (both, "both.html"))]
    command = [node, "test/run.mjs", *map(str, pages), chromium]
    done = subprocess.run(command, cwd=FRONT_END, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
