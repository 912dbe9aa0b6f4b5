"""The report page: its data, that it needs nothing but itself, and that it works in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import triptych
from triptych.cost.estimate import FREE, operation_cost
from triptych.explaining.explanation import Explanation
from triptych.explaining.kernels import kernel_calls, kernels
from triptych.explaining.labels import input_labels
from triptych.explaining.line_table import splices
from triptych.explaining.page import ASSETS, page
from triptych.explaining.page_data import report_data
from triptych.options import Options
from triptych.passes.catalogue import all_rules
from triptych.passes.effects import (
    EFFECT_OF_PASS,
    EFFECT_OF_RULE,
    LINEARS,
    MOVE,
    SPELLING,
    count_effects,
    effect_of,
    sizes_of,
)
from triptych.passes.node_lines import NodeLine, node_lines
from triptych.passes.record import PassRecord
from triptych.passes.session import Session
from triptych.pipeline import STAGES, Hook
from triptych.rewrite.record import Firing

ROOT = Path(__file__).parent.parent
FRONT_END = ROOT / "report"
EAGER = {"codegen": "eager"}


class Attention(nn.Module):
    """Small, with something for each stage to do; its text is markup, and must stay text."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        marker = "<script>globalThis.injected = 1</script><img src=x onerror='globalThis.injected = 1'>"
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 8**0.5 + 0 * len(marker)  # <script>injected = 1</script>
        return self.out[0](scores.softmax(-1) @ self.value(x)).relu() + 0.0


@pytest.fixture(scope="module")
def training() -> Explanation:
    return triptych.explain(Attention(), torch.randn(2, 4, 8), train=True, options=EAGER)


@pytest.fixture(scope="module")
def data(training):
    # as the page gets it: through JSON
    return json.loads(json.dumps(report_data(training)))


def line(graphs, number) -> dict:
    names = ("name", "type", "call", "inputs", "stack", "rule", "origin", "sequence", "gemms", "bytes", "nanoseconds")
    parts = dict(zip(names, (column[number] for column in graphs["columns"]), strict=True))
    parts["inputs"] = [graphs["names"][n] for n in parts["inputs"]]
    return {
        **parts,
        "name": graphs["names"][parts["name"]],
        "type": graphs["types"][parts["type"]],
        "rule": graphs["rules"][parts["rule"]],
        "origin": graphs["names"][parts["origin"]],
    }


def version(listing, number) -> list[int]:
    lines = listing["first"]
    for delta in listing["deltas"][:number]:
        for where, gone, come in reversed(delta):
            lines = [*lines[:where], *come, *lines[where + gone :]]
    return lines


# ---- the data ----


def test_every_version_of_every_listing_can_be_put_together(training, data):
    graphs = data["graphs"]
    assert len(data["core"]["passes"]) == len(training.passes)
    changed = 0
    for shown, record in zip(data["core"]["passes"], training.passes):
        before, after = (
            [line(graphs, n)["name"] for n in version(graphs["listings"][shown["listing"]], v)] for v in shown["versions"]
        )
        names = [re.split(r"[: ]", text, maxsplit=1)[0] for text in record.before.splitlines()]
        assert [name if name != "output" else "return" for name in before] == names
        assert shown["changed"] == record.changed and shown["name"] == record.name
        changed += before != after
    assert changed > 3


def test_a_line_says_what_a_node_is_and_where_it_comes_from(data):
    graphs = data["graphs"]
    joint = next(g for g in graphs["listings"] if g["stage"] == "joint")
    nodes = {node["name"]: node for node in (line(graphs, n) for n in joint["first"])}
    product = next(node for node in nodes.values() if node["call"].startswith("aten.addmm(out.0.bias"))
    assert product["type"] == "f32[8, 8]" and product["gemms"] == 1 and product["bytes"] > 0
    assert product["origin"].startswith("linear")
    assert any(operand.startswith("primals_") for operand in product["inputs"])
    file, number, function = graphs["stacks"][product["stack"]][-1]
    shown = graphs["files"][file]
    assert function == "forward" and shown["path"].endswith("test_report_page.py")
    assert "self.out[0]" in shown["lines"][shown["numbers"].index(number)]
    installed = {f["path"]: f["installed"] for f in graphs["files"]}
    assert not installed.pop(shown["path"]) and all(is_it for path, is_it in installed.items() if path.startswith("torch/"))


def test_parameters_have_the_names_of_the_module(training, data):
    labels = input_labels(training.sessions[0].graphs)
    assert {"query.weight", "out.0.bias", "x"} <= set(labels.values())
    assert labels["primals_1"] in labels.values()
    pre_grad = data["graphs"]["listings"][0]
    calls = [line(data["graphs"], n)["call"] for n in pre_grad["first"]]
    assert "input out.0.weight" in calls
    assert any("linear(" in call and "out.0.weight, out.0.bias" in call for call in calls)


def test_firings_say_what_took_the_place_of_what(data):
    number = next(n for n, p in enumerate(data["core"]["passes"]) if p["name"] == "fuse_attention" and p["changed"])
    (firing,) = [f for f in data["graphs"]["firings"][str(number)] if f[0] == "fuse_attention"]
    _, _, removed, created = firing
    assert any(name.startswith("softmax") for name in removed)
    assert "scaled_dot_product_attention" in created
    assert data["core"]["passes"][number]["effect"] == "fusion"


def test_the_flow_has_the_size_of_each_graph(data):
    flow = data["core"]["programs"][0]["flow"]
    assert [box["key"] for box in flow] == ["dynamo", "pre_grad", "autograd", "joint", *["partition"] * 2, *["post_grad"] * 2]
    assert [box["side"] for box in flow[4:]] == ["forward", "backward"] * 2
    sizes = {(box["key"], box["side"]): box for box in flow}
    assert sizes["dynamo", ""]["gemms"] == 6 > sizes["pre_grad", ""]["gemms"]  # the two of the attention are one
    assert all(box["nodes"] > 0 and box["bytes"] > 0 and box["seconds"] > 0 for box in flow)
    numbers = [number for box in flow for number in box["passes"]]
    assert sorted(numbers) == list(range(len(data["core"]["passes"]))), "every pass belongs to one point of the flow"


def branch(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 1, (x,))


def two_programs(x):
    x = x.relu() + 1
    torch._dynamo.graph_break()
    return x.sin()


weights = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "model, options",
    [
        (branch, {}),
        (two_programs, {}),
        (lambda x: (x @ (weights.weight.t() * 2 + weights.bias.exp())).relu() + torch.full((4, 4), 2.0) * 3, {"freeze": True}),
    ],
)
def test_graphs_inside_graphs_several_programs_and_repeated_stages(model, options):
    explanation = triptych.explain(model, torch.randn(4, 4), options={**EAGER, **options})
    for record in explanation.passes:
        sizes = (len(record.before.splitlines()), len(record.after.splitlines()))
        assert sizes == (record.nodes_before, record.nodes_after), f"{record.stage} {record.name}"
    core = report_data(explanation)["core"]
    (joint,) = [box for box in core["programs"][0]["flow"] if box["key"] == "joint"]
    assert joint["nodes"] == len(explanation.graphs["joint"].graph.nodes)
    numbers = [number for program in core["programs"] for box in program["flow"] for number in box["passes"]]
    assert sorted(numbers) == list(range(len(core["passes"]))), "every pass belongs to one point of the flow"


def test_a_stage_that_runs_again_goes_on_only_if_the_graph_is_the_same():
    session = Session(Options())
    first = session.open_listing("freeze/joint", ["a", "b"])
    first.add(["a"])
    assert session.open_listing("freeze/joint", ["a"]) is first
    second = session.open_listing("freeze/joint", ["c"])
    assert second is not first and second.version(0) == "c"
    assert session.open_listing("freeze/joint", ["c"]) is second


def test_declines_are_counted_by_reason(training, data):
    for shown, record in zip(data["core"]["passes"], training.passes):
        assert {(d["rule"], d["reason"]): d["count"] for d in shown["declines"]} == Counter((d.rule, d.reason) for d in record.declines)
    assert training.declined > 0


def test_splices_keep_what_stays_in_order():
    rng = random.Random(0)
    for _ in range(300):
        before = rng.sample(range(30), rng.randint(0, 12))
        after = rng.sample(range(30), rng.randint(0, 12))
        if rng.random() < 0.5:
            after = [n for n in before if rng.random() < 0.8]
            after.insert(rng.randint(0, len(after)), 99)
        result = list(before)
        for where, gone, come in reversed(splices(before, after)):
            result[where : where + gone] = come
        assert result == after
    # one value moved: it alone goes and comes
    assert splices([1, 2, 3, 4, 5], [1, 3, 4, 2, 5]) == [(1, 1, []), (4, 0, [2])]


def test_a_line_of_a_listing_is_still_its_text():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
    (first, second, last) = node_lines(graph)
    assert second == "relu = relu(x)" and isinstance(second, NodeLine) and second.inputs == ("x",)
    assert first.cost == FREE and last.startswith("return")


# ---- estimates ----


def cost_of(function, *inputs):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode() as mode:
        gm = make_fx(function)(*(mode.from_tensor(value) for value in inputs))
    return [operation_cost(node) for node in gm.graph.nodes if node.op == "call_function"]


def test_estimates_count_what_is_read_and_written():
    x, y = torch.randn(4, 8), torch.randn(8, 16)
    (product,) = cost_of(torch.mm, x, y)
    assert product.gemms == 1 and product.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    (pointwise,) = cost_of(torch.relu, x)
    assert pointwise.gemms == 0 and pointwise.bytes == 2 * 4 * 32
    (view,) = cost_of(lambda x: x.view(32), x)
    assert view == FREE
    large, small = (cost_of(torch.mm, torch.randn(n, n), torch.randn(n, n))[0].seconds for n in (512, 64))
    assert large > 10 * small


# ---- kernels ----

SOURCE = """
async_compile = AsyncCompile()

cpp_fused_relu_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{
}
''')

triton_poi_fused_add_1 = async_compile.triton('triton_poi_fused_add_1', '''
import triton
@triton.jit
def triton_poi_fused_add_1(in_ptr0):
    pass
''', device_str='cuda')

async_compile.wait(globals())

class Runner:
    def call(self, args):
        arg0_1, = args
        buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
        # [Provenance debug handles] cpp_fused_relu_0:1
        cpp_fused_relu_0(arg0_1, buf0)
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
        # [Provenance debug handles] extern_kernels.mm:2
        extern_kernels.mm(buf0, arg0_1, out=buf1)
        # [Provenance debug handles] triton_poi_fused_add_1:3
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_1.run(buf1, 4, stream=stream0)
        # [Provenance debug handles] torch.ops.aten.sort.default:4
        buf3 = torch.ops.aten.sort.default(buf1)
        return (buf3, )

def benchmark_compiled_module(args):
    cpp_fused_relu_0(1, 2)
"""


def test_generated_source_is_kernels_and_calls_of_them():
    assert [(k.name, k.language) for k in kernels(SOURCE)] == [("cpp_fused_relu_0", "cpp"), ("triton_poi_fused_add_1", "python")]
    assert kernels(SOURCE)[1].source.startswith("import triton") and "pass" in kernels(SOURCE)[1].source
    calls = kernel_calls(SOURCE, {"cpp_fused_relu_0:1": ["relu"], "extern_kernels.mm:2": ["mm"], "triton_poi_fused_add_1:3": ["add"]})
    assert [(c.name, c.nodes) for c in calls] == [
        ("cpp_fused_relu_0", ("relu",)),
        ("extern_kernels.mm", ("mm",)),
        ("triton_poi_fused_add_1", ("add",)),
        ("torch.ops.aten.sort.default", ()),
    ]


def test_inductor_says_which_nodes_a_kernel_computes(tmp_path):
    layer = nn.Linear(8, 8)
    explanation = triptych.explain(lambda x: layer(x).relu().sum(), torch.randn(4, 8), stock=True)
    calls = report_data(explanation)["kernels"]["calls"]
    assert explanation.kernel_launches == len(calls) > 0
    nodes = {node.name for node in explanation.graphs["forward"].graph.nodes}
    computed = {name for call in calls for name in call["nodes"]}
    assert computed <= nodes and {"relu", "sum_1"} & computed
    assert any(call["gemms"] for call in calls)
    (flow,) = [box for box in report_data(explanation)["core"]["programs"][0]["flow"] if box["key"] == "kernels"]
    assert flow["nodes"] == len(calls) and flow["seconds"] > 0
    assert explanation.stock.backend == "inductor" and explanation.stock.kernel_launches > 0
    said = " ".join(str(explanation).split())
    assert f"{len(calls)} kernel launches instead of {explanation.stock.kernel_launches} by stock Inductor" in said
    path = explanation.to_html(tmp_path / "both.html")
    assert decoded(path.read_text("utf-8"), 1)["core"]["backend"] == "inductor"


# ---- what mattered ----


def test_effects_name_passes_and_rules_that_exist():
    names = {e.name for entries in STAGES.values() for e in entries if not isinstance(e, Hook)}
    assert set(EFFECT_OF_PASS) <= names and set(EFFECT_OF_RULE) <= set(all_rules())
    assert effect_of("a_pass_without_a_row").phrase(2) == "2 other rewrites"


def test_spelling_and_order_are_counted_apart():
    record = PassRecord("pre_grad", "normalization_pass_aten", "pre_grad")
    record.fired["one_spelling"] = 7
    fused = PassRecord("pre_grad", "fuse_attention", "pre_grad")
    fused.fired.update({"fuse_attention": 2, "contraction_by_hand": 3})
    moved = PassRecord("post_grad", "reorder_for_locality", "forward")
    moved.fired["move_down"] = 5
    counts = count_effects([record, fused, moved])
    assert counts[SPELLING] == 10 and counts[MOVE] == 5
    assert [e.phrase(n) for e, n in counts.items() if e.matters] == ["2 attentions fused"]
    assert effect_of("pre_grad_custom_pass", "anything").name == "yours"


def test_linears_that_are_joined_are_counted():
    assert [LINEARS.phrase(len(sizes), sizes) for sizes in ([3], [3, 3], [3, 2])] == [
        "3 linears joined", "2x3 linears joined", "5 linears joined into 2",
    ]  # fmt: skip
    assert LINEARS.phrase(2) == "2 groups of linears joined"
    record = PassRecord("pre_grad", "fuse_parallel_linear_pass", "pre_grad")
    record.sites.append(Firing("joined_weights", "linear", removed=("linear", "linear_1", "linear_2"), created=("cat",)))
    assert sizes_of(LINEARS, [record]) == [3]


def test_the_summary_says_what_mattered(training):
    head = str(training).splitlines()[1]
    assert "1 attention fused" in head and "changes of spelling" in str(training)
    assert f"{training.rewrites} rewrites" not in head


# ---- the page ----


def decoded(text: str, number: int = 0) -> dict:
    found = re.findall(rf'id="data-{number}-(\w+)" data-report="[^"]*">([A-Za-z0-9+/=]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in found}


def test_the_page_has_all_it_needs_and_the_same_data_give_the_same_page(training, data, tmp_path):
    path = training.to_html(tmp_path / "deep" / "page.html")
    text = path.read_text("utf-8")
    assert decoded(text) == data
    assert not re.search(r'(?:src|href)\s*=\s*["\']?(?:https?:)?//', text)
    assert text == page(training)


def test_names_and_sources_cannot_end_an_element(training):
    training = Explanation(training.sessions, model="</script><script>globalThis.injected = 1</script>", train=True)
    text = page(training)
    assert "globalThis.injected" not in text.partition("<style>")[0].replace("&lt;script&gt;globalThis.injected", "")
    assert text.count("<script") == text.count("</script") == 4  # three parts of the data and the program
    assert any("<script>" in entry for entry in decoded(text)["graphs"]["files"][0]["lines"])


def test_a_page_of_several_explanations_has_the_data_of_each(training):
    inference = triptych.explain(Attention(), torch.randn(2, 4, 8), options=EAGER)
    text = page(inference, training)
    assert [decoded(text, number)["core"]["train"] for number in (0, 1)] == [False, True]
    assert "backward" not in {box["side"] for box in decoded(text)["core"]["programs"][0]["flow"]}


def test_an_explanation_of_nothing_is_a_page():
    assert decoded(page(Explanation([])))["core"]["programs"] == []


def test_the_lock_file_names_no_host():
    if not FRONT_END.is_dir():
        pytest.skip("no front end beside the package")
    assert "://" not in (FRONT_END / "package-lock.json").read_text()


# ---- in a browser ----


def with_kernels(explanation: Explanation) -> Explanation:
    """As if code had been generated: a kernel for every two nodes, without a compiler."""
    (session,) = explanation.sessions
    for graph in ("forward", "backward"):
        nodes = [n.name for n in explanation.graphs[graph].graph.nodes if n.op == "call_function"]
        pairs = [nodes[i : i + 2] for i in range(0, len(nodes), 2)]
        names = [f"cpp_fused_{number}" for number, _ in enumerate(pairs)]
        bodies = "".join(f"{n} = async_compile.cpp_pybinding([], r'''\nvoid kernel() {{ /* <b>{n}</b> */ }}\n''')\n\n" for n in names)
        calls = "".join(f"        # [Provenance debug handles] {n}:{i}\n        {n}(buf{i})\n" for i, n in enumerate(names))
        session.kernels[graph] = f"{bodies}\nclass Runner:\n    def call(self, args):\n{calls}"
        session.kernel_nodes[graph] = {f"{n}:{i}": pairs[i] for i, n in enumerate(names)}
    return explanation


def test_a_reader_can_use_it(tmp_path):
    """Passes, search, folds, history, picture, from a source line to its kernel and back; `test/browser.mjs` has the steps."""
    chromium, node = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("node")
    if chromium is None or node is None:
        pytest.skip("needs chromium and node")
    if not (FRONT_END / "node_modules" / "playwright-core").is_dir():
        pytest.skip("needs playwright-core: make report")
    explanation = triptych.explain(Attention(), torch.randn(2, 4, 8), train=True, options=EAGER)
    explanation.model = "<script>globalThis.injected = 1</script>"
    path = with_kernels(explanation).to_html(tmp_path / "page.html")
    command = [node, "test/browser.mjs", str(path), chromium]
    done = subprocess.run(command, cwd=FRONT_END, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_built_script_is_that_of_the_sources(tmp_path):
    """`make report` builds it; an edit of the front end that was not built fails here."""
    if shutil.which("node") is None or not (FRONT_END / "node_modules" / "esbuild").is_dir():
        pytest.skip("needs node and the packages of the front end: make report")
    built = [ASSETS / "report.js", ASSETS / "report.css"]
    before = [asset.read_bytes() for asset in built]
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=FRONT_END, check=True, capture_output=True)
    assert [(tmp_path / asset.name).read_bytes() for asset in built] == before
