"""Programs that fail, written as files that anybody can run, and made small."""

from __future__ import annotations

import operator
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import triptych
from triptych.cli import main
from triptych.explaining.source import load
from triptych.repro.python_source import python_source
from triptych.repro.write import repro_of, write_repro


def captured(model, *args, **kwargs):
    """The graph that a backend gets, and its inputs."""
    seen = []

    def backend(gm, example_inputs):
        seen.append((gm, example_inputs))
        return gm

    torch.compile(model, backend=backend, fullgraph=True, **kwargs)(*args)
    return seen[0]


def written(tmp_path, model, *args, options=None, dynamic=None):
    """A program written as a file while a backend is called, which is where fake tensors are made around us."""
    paths = []

    def backend(gm, example_inputs):
        paths.append(write_repro(gm, example_inputs, options, ValueError("it failed"), tmp_path))
        return gm

    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return paths[0]


def run_file(path: Path, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=timeout)


def strided_and_indexed(x, i):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x
    with torch.no_grad():
        z = y * float("inf")
    return y[..., 1:, None] + z.sum(), x[i], torch.tensor([1.0, 2.0]), -x**-2


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: (x + 1,), lambda x: (x - 1,), (x @ x,))


def writes(x):
    x[0] = 3
    x.mul_(2)
    return x.sum()


@pytest.mark.parametrize(
    ("model", "args", "dynamic"),
    [
        (strided_and_indexed, (torch.randn(3, 3).t(), torch.tensor([0, 2])), None),
        (branches, (torch.randn(4, 4),), None),
        (lambda x: x.view(x.shape[0] * x.shape[1]).relu(), (torch.randn(4, 6),), True),
        (writes, (torch.randn(4),), None),
        (torch.nn.Linear(4, 3), (torch.randn(2, 4),), None),
        (lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1), (torch.randn(2, 2), torch.eye(2) > 0), None),
        (lambda x: torch.ops.aten.add.Tensor(x, 1, alpha=2), (torch.ones(3, dtype=torch.int32),), None),
    ],
    ids=["autocast", "cond", "dynamic", "writes", "linear", "mask", "aten"],
)
def test_a_captured_program_computes_the_same_when_it_is_read_back(tmp_path, model, args, dynamic):
    path = written(tmp_path, model, *args, dynamic=dynamic)
    text = path.read_text()
    assert "ValueError: it failed" in text and "cannot be written" not in text
    subject = load(str(path))
    gm, given = captured(model, *args, dynamic=dynamic)
    repro = repro_of(gm, given)
    made = subject.args
    for tensor, one in zip(made, repro.inputs):
        if one.is_tensor:
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (one.shape, one.stride, one.dtype)
            assert tensor.requires_grad == one.requires_grad
    copies = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in made]
    torch.testing.assert_close(subject.model(*made_plain(made)), gm(*made_plain(copies)), equal_nan=True)


def made_plain(args):
    return [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]


def test_the_file_runs_by_itself_and_says_that_nothing_differs(tmp_path):
    path = written(tmp_path, torch.nn.Linear(4, 3), torch.randn(2, 4), options={"codegen": "eager"})
    done = run_file(path)
    assert done.returncode == 0, done.stderr
    assert "compiled and eager agree" in done.stdout


def test_what_cannot_be_written_is_said(tmp_path):
    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    path = write_repro(gm, [torch.randn(2, 4)], None, "it failed", tmp_path)
    assert path is not None and "cannot be written as Python: the module 0 is called whole" in path.read_text()


UNUSUAL = (
    "torch", "inputs", "main", "triptych", "class", "print", "options", "args", "model", "program", "with_weights", "sys",
    "math", "operator", "run_repro", "train", "dynamic", "None", "int", "annotations", "match", "__name__", "self", "_",
)  # fmt: skip


def test_values_may_be_named_as_anything_that_the_file_uses(tmp_path):
    def program(x, y):
        for _ in range(len(UNUSUAL)):
            x = torch.relu(x + y)
        return x

    gm = torch.fx.symbolic_trace(program)
    for node, name in zip(gm.graph.nodes, UNUSUAL):
        node.name = name
    given = [torch.randn(3), torch.randn(3)]
    path = write_repro(gm, given, {"codegen": "eager"}, "it failed", tmp_path)
    subject = load(str(path))
    torch.testing.assert_close(subject.model(*given), program(*given))
    done = run_file(path)
    assert done.returncode == 0 and "compiled and eager agree" in done.stdout, done.stderr


def test_a_value_does_not_hide_the_module_that_is_called_after_it():
    graph = torch.fx.Graph()
    x = graph.placeholder("statistics")
    mean = graph.call_function(statistics.fmean, ([1.0, 3.0],))
    graph.output(graph.call_function(operator.mul, (x, mean)))
    source = python_source(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert source.parameters == ["statistics_1"]
    assert torch.equal(source.function()(torch.ones(3)), torch.full((3,), 2.0))


def options(graph):
    """A user's pass with a name that the file uses itself."""


RELU_OF_SUM = "relu"


def uses_other_names(graph):
    args = RELU_OF_SUM  # its own
    return None if args else options(graph)


def test_a_pass_does_not_replace_what_the_file_uses(tmp_path):
    for given in (options, uses_other_names):
        path = written(tmp_path, torch.relu, torch.randn(3), options={"pre_grad_custom_pass": given, "codegen": "eager"})
        text = path.read_text()
        assert "option left out, pre_grad_custom_pass: options is a name that the file uses itself" in text
        assert run_file(path).returncode == 0


def test_it_never_raises(tmp_path):
    gm, inputs = captured(lambda x: x + 1, torch.randn(3))
    assert write_repro(gm, inputs, {"no such option": 1}, None, tmp_path) is not None
    assert write_repro(gm, [object()], None, None, tmp_path) is not None
    assert write_repro(gm, inputs, None, None, tmp_path / "a" / "b") is not None
    (tmp_path / "file").write_text("")
    assert write_repro(gm, inputs, None, None, tmp_path / "file") is None


@pytest.mark.slow
def test_options_travel_with_the_users_own_passes(tmp_path):
    path = written(tmp_path, torch.relu, torch.randn(3), options={"pre_grad_custom_pass": drop_relu, "codegen": "eager"})
    done = run_file(path)
    assert done.returncode == 1, done.stderr
    assert "output 0 differs" in done.stdout
    assert triptych.__name__ in path.read_text()


RELU = "relu"


def is_relu(node):
    return RELU in str(node.target)


def drop_relu(graph):
    for node in list(graph.nodes):
        if is_relu(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class Sine(torch.nn.Module):
    """Computes from a weight alone, which freeze does once."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.inner(x.clone()) * self.scale.sin() + 1


def spoil_frozen(graph):
    """Wrong only where freeze has taken the sine out of the graph, which then comes in as an input."""
    if any("sin" in n.name for n in graph.find_nodes(op="placeholder")):
        negate_outputs(graph)


def negate_outputs(graph):
    output = graph.output_node()
    with graph.inserting_before(output):
        made = [graph.call_function(torch.ops.aten.neg.default, (value,)) for value in output.args[0]]
    for node, value in zip(made, output.args[0]):
        node.meta = dict(value.meta)
    output.args = (tuple(made),)


@pytest.mark.slow
def test_weights_are_weights_where_freeze_counts_on_them(tmp_path):
    options = {"codegen": "eager", "freeze": True, "post_grad_custom_post_pass": spoil_frozen}
    model = Sine().requires_grad_(False)
    found = triptych.bisect(model, torch.randn(2, 4), options=options, repro=tmp_path / "repro.py")
    assert found.repro is not None and not found.notes, found
    assert "with_weights(program, args" in found.repro.read_text()
    assert run_file(found.repro).returncode == 1


SHRUNK = """
import torch
import triptych

def spoil(graph):
    for node in graph.nodes:
        if "tanh" in str(node.target):
            node.target = torch.ops.aten.sin.default

def model(x, y):
    z = (x @ y).relu().t()
    return torch.tanh(z.contiguous() + 1).exp().sum(), z * 2

args = (torch.randn(8, 16), torch.randn(16, 4))
options = {"codegen": "eager", "joint_custom_post_pass": spoil}
"""


@pytest.mark.slow
def test_the_command_writes_a_small_program(tmp_path):
    file, out = tmp_path / "subject.py", tmp_path / "small.py"
    file.write_text(SHRUNK)
    result = CliRunner().invoke(main, ["repro", str(file), "--out", str(out)])
    assert result.exit_code == 1 and "reproduction" in result.output, result.output
    small = load(str(out))
    assert small.settings["options"]["codegen"] == "eager"
    assert all(a.numel() <= 4 for a in small.args)
    body = [line for line in out.read_text().splitlines() if " = " in line and "  # f32" in line]
    assert len(body) == 1 and "tanh" in body[0]
    assert run_file(out).returncode == 1
    whole = CliRunner().invoke(main, ["repro", str(file), "--whole", "--out", str(out)])
    assert whole.exit_code == 1 and "exp()" in out.read_text()


def test_the_command_says_when_there_is_nothing_to_show(tmp_path):
    file, out = tmp_path / "subject.py", tmp_path / "small.py"
    file.write_text("import torch\n\n\ndef model(x):\n    return x + 1\n\n\nargs = (torch.randn(3),)\n")
    result = CliRunner().invoke(main, ["repro", str(file), "--option", "codegen=eager", "--out", str(out)])
    assert result.exit_code == 0 and "no difference" in result.output and not out.exists()


def sum_over_a_dim_that_is_not_there(graph):
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        node.args = (node.args[0], [7])


def test_a_crash_in_code_generation_is_reproduced(tmp_path):
    """Inductor refuses the graph: the file shows that, and nothing else of the program is left."""
    options = {"post_grad_custom_post_pass": sum_over_a_dim_that_is_not_there}
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Softmax(-1)).requires_grad_(False)
    path = tmp_path / "repro.py"
    found = triptych.bisect(model, torch.randn(2, 16), options=options, repro=path)
    assert found.rewrite is not None and found.rewrite.rule == "sum_over_a_dim_that_is_not_there"
    assert found.failure is not None and found.failure.kind.startswith("raises")
    assert found.repro_size == 1 and "softmax" in path.read_text()
    assert run_file(path).returncode == 1
