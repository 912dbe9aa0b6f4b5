"""Numbers among the arguments that become inputs of the graph: dims, sizes, factors (automatic dynamic shapes).

A node may stand wherever a number is expected. No rule may raise, and results must be those of eager.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch.fx.proxy import TraceError

import triptych
from tests.compare import differences, observe
from tests.models import Call
from tests.symbolic_programs import PROGRAMS, Program
from triptych.ir.calls import read
from triptych.ir.facts import fact
from triptych.ir.graph_copies import snapshot
from triptych.ir.partitioned import backward_of
from triptych.ir.program import Program as Graph
from triptych.options import Options
from triptych.pipeline import STAGES, Hook
from triptych.rewrite.driver import Tally
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture
from triptych.testing.check import compare

EAGER = {"codegen": "eager", "on_error": "raise"}
STRICT = {**EAGER, "verify": "each"}
"""A rule that raises is an error, and so is a pass that changes results."""

THROUGH_KERNELS = [
    "dim: split, joined",
    "dim: transpose, product",
    "dim: movedim",
    "dim: unbind, tanh, stacked",
    "dim: softmax by hand",
    "dim: index_select",
    "size: view, then back",
    "size: slice both, joined",
    "size: index by numbers",
    "size: attention, heads",
    "size: add alpha",
    "float: softmax of scaled",
    "float: attention, scale",
]


@pytest.fixture(autouse=True)
def no_complaint(caplog):
    """A rule that raised, a call that could not be read, a pass that was undone: each is logged as a warning."""
    caplog.set_level(logging.WARNING, logger="triptych")
    yield
    complaints = [r.getMessage() for r in caplog.get_records("call") if r.name.startswith("triptych")]
    assert not complaints, "\n".join(complaints)


def check(program: Program, options: dict, numbers=None, **how) -> None:
    """One compiled function, called with each number in turn; the gradient too, where there is one."""
    compiled = torch.compile(program.function, backend=triptych.compile_fx, options=options, **how)
    for number in numbers or program.numbers:
        calls = [Call((program.tensor().requires_grad_(), number)) for _ in range(2)]
        trains = any(t.grad_fn is not None for t in _tensors(program.function(*copy.deepcopy(calls[0]).args)))
        want = observe(program.function, calls[0], train=trains)
        got = observe(compiled, calls[1], train=trains)
        assert not differences(want, got), f"called with {number}"


def _tensors(result) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_number_as_input(name):
    check(PROGRAMS[name], STRICT)


@pytest.mark.parametrize("name", list(PROGRAMS)[::4])
def test_without_verification(name):
    check(PROGRAMS[name], EAGER)


@pytest.mark.parametrize("name", list(PROGRAMS)[1::4])
def test_symbolic_from_the_first_call(name):
    check(PROGRAMS[name], STRICT, PROGRAMS[name].numbers[:2], dynamic=True)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("float")])
@pytest.mark.parametrize("specialize", [True, False])
def test_floats(name, specialize):
    with torch._dynamo.config.patch(specialize_float=specialize):
        check(PROGRAMS[name], STRICT, PROGRAMS[name].numbers[1:], dynamic=True)


@pytest.mark.parametrize("name", THROUGH_KERNELS)
def test_through_kernels(name):
    check(PROGRAMS[name], {"on_error": "raise"})


@pytest.mark.parametrize("name", PROGRAMS)
def test_traced_without_facts(name):
    """`symbolic_trace` knows nothing of the number: what its dim is must not be guessed, from an example either."""
    program = PROGRAMS[name]
    try:
        traced = torch.fx.symbolic_trace(program.function)
    except (TraceError, TypeError, ValueError, RuntimeError) as error:
        pytest.skip(f"cannot be traced: {error}")
    for stage in (
        lambda gm: triptych.pre_grad_passes(gm),
        lambda gm: triptych.joint_graph_passes(gm),
        lambda gm: triptych.post_grad_passes(gm, is_inference=False) or gm,
    ):
        gm = stage(copy.deepcopy(traced))
        for number in program.numbers:
            x = program.tensor()
            want, got = traced(x.clone(), number), gm(x.clone(), number)
            compare(_tensors(want), _tensors(got))


class TestReading:
    """What a call is read as, when a dim is a node."""

    @staticmethod
    def captured(function, *numbers):
        graphs = []

        def keep(gm, example_inputs):
            graphs.append(gm)
            return gm.forward

        compiled = torch.compile(function, backend=keep, dynamic=None)
        for number in numbers:
            compiled(torch.randn(4, 6, 8), number)
        return graphs[-1]

    def test_fixed_symbol_is_its_number(self):
        gm = self.captured(lambda x, d: x.transpose(d, 2), 0, 1)
        (node,) = gm.graph.find_nodes(op="call_method", target="transpose")
        assert isinstance(node.args[1], torch.fx.Node)
        assert read(node).args["dims"] == [0, 2, 1]

    def test_guarded_expression_is_its_number(self):
        gm = self.captured(lambda x, d: x.sum(d % 3), 0, 1)
        (node,) = gm.graph.find_nodes(op="call_method", target="sum")
        assert read(node).args["dim"] == [1]

    def test_guarded_condition_is_its_value(self):
        gm = self.captured(lambda x, d: x.narrow(1, 0, d).sum(1), 2, 3)
        (node,) = gm.graph.find_nodes(op="call_method", target="sum")
        symbol = next(v for n in gm.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.SymInt))
        condition = symbol == 5
        assert not condition  # adds the guard
        with gm.graph.inserting_before(node):
            keepdim = gm.graph.placeholder("keepdim")
        keepdim.meta["example_value"] = condition
        node.kwargs = {"keepdim": keepdim}
        assert read(node).args == {"self": node.args[0], "dim": [1]}

    def test_symbol_that_stays_one_is_a_node(self):
        gm = self.captured(lambda x, d: x.narrow(1, 0, d) * 2, 2, 3)
        (node,) = gm.graph.find_nodes(op="call_method", target="narrow")
        assert isinstance(read(node).args["length"], torch.fx.Node)

    def test_unknown_dim_is_not_read(self):
        traced = torch.fx.symbolic_trace(lambda x, d: x.transpose(d, 2))
        (node,) = traced.graph.find_nodes(op="call_method", target="transpose")
        assert read(node) is None
        assert Graph(traced).aliasing.effects(node).writes  # so it may do anything

    def test_rules_fire_on_a_fixed_dim(self):
        def program(x, d):
            return torch.cat(x.split(2, d), d) * 2

        gm = triptych.pre_grad_passes(self.captured(program, 0, 1))
        assert not any("cat" in str(n.target) or "split" in str(n.target) for n in gm.graph.nodes)

    def test_raising_reader_is_survived(self, monkeypatch, caplog):
        def broken(node, args):
            raise TypeError("broken")

        monkeypatch.setitem(triptych.ir.calls.CANONICAL, "relu", broken)
        compiled = torch.compile(lambda x: x.relu() + 1, backend=triptych.compile_fx, options=EAGER)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        assert "could not be read" in caplog.text
        caplog.clear()

def arithmetic_of_sizes(x, y):
    """Numbers computed from sizes by operators that tensors have too."""
    n, d = x.shape
    numbers = (n * d, n + d, d - 1, n // 2, n % 3, -n, max(n, d), min(n, 7), n * 2 + d, n**2, n / 2, n * 0.5, n << 1)
    scaled = x.reshape(n * d) * (n * d) + n // 2
    wide = torch.cat([scaled, x.new_full((n + d,), 1.0), y.expand(n, d).reshape(-1)])
    halves = torch.stack([x[: n // 2].sum(0), x[n - n // 2 :].sum(0)])
    normal = F.layer_norm(x @ y[:, None].expand(d, d), (d,), y) * (n * 0.5) + (n - 1)
    return wide.sum() * sum(numbers), halves * (-n), normal.softmax(-1) / (d + 1)


STAGES_SEEN = {"pre_grad": ["torch"], "joint": ["aten", "joint"], "post_grad": ["aten", "partitioned"]}


@pytest.mark.parametrize("stage", STAGES_SEEN)
def test_no_rule_takes_a_number_computed_from_sizes_for_a_tensor(stage):
    given = [torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)]
    for dialect in STAGES_SEEN[stage]:
        gm, inputs = capture(arithmetic_of_sizes, given, dialect, dynamic=True)
        graphs = [gm, backward.gm] if (backward := backward_of(gm)) is not None else [gm]
        nodes = [n for g in graphs for n in g.graph.nodes if n.op == "call_function"]
        assert any(isinstance(fact(n), torch.SymInt) and "mul" in n.name for n in nodes)
        for pass_ in (entry() for entry in STAGES[stage] if not isinstance(entry, Hook)):
            for graph in graphs:
                copied = snapshot(graph)
                program = Graph(copied, inputs if graph is gm else (), Options(), is_inference=False)
                pass_.run(Rewriter(program, pass_.name), strict=True, tally=Tally())
