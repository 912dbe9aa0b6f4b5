"""Facts that are remembered are those that would be computed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from triptych.ir.fact_memo import FactMemo
from triptych.ir.facts import difference, fact, same_strides, storage
from triptych.ir.program import Program
from triptych.options import Options
from triptych.passes.manager import run_stage
from triptych.passes.session import open_session
from triptych.rewrite.emit import Emitter
from triptych.testing.capture import capture_aten, capture_torch

from .attention_idioms import IDIOMS
from .test_attention import make_inputs


@pytest.fixture
def recalled(monkeypatch):
    """Computes every fact that was recalled once more, and compares the two; the calls whose facts were recalled."""
    calls, latest = [], []
    recall, compute = FactMemo.recall, Program.compute

    def recall_and_tell(memo, key):
        latest.append(recall(memo, key))
        return latest[-1]

    def compute_twice(program, node, known=fact, at=None):
        latest.clear()
        value = compute(program, node, known, at)
        if latest and latest[-1] is not None:
            calls.append(str(node.target))
            memo, program.__dict__["fact_memo"] = program.fact_memo, FactMemo(None)
            computed = compute(program, node, known, at)
            program.__dict__["fact_memo"] = memo
            assert difference(computed, value) is None and same_strides(computed, value), node.format_node()
            assert (computed.requires_grad, computed.layout) == (value.requires_grad, value.layout)
            assert computed.untyped_storage().nbytes() == value.untyped_storage().nbytes()
            operands = [known(n) for n in node.all_input_nodes]
            assert storage(computed) not in map(storage, operands), "a view was remembered"
        return value

    monkeypatch.setattr(FactMemo, "recall", recall_and_tell)
    monkeypatch.setattr(Program, "compute", compute_twice)
    return calls


def optimised(gm, inputs):
    return run_stage("pre_grad", gm, open_session(Options(on_error="raise")), graph="pre_grad", example_inputs=inputs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention(recalled, dynamic):
    """Over a part of the idioms: each is written twice, and the second one finds the facts of the first."""
    for name in sorted(IDIOMS)[::8]:
        torch._dynamo.reset()
        idiom = IDIOMS[name]
        inputs = make_inputs(idiom, torch.float32)
        program = copy.deepcopy(idiom.program)
        gm, args = capture_torch(lambda *x: (program(*x), program(*x)), inputs, dynamic)  # noqa: B023
        optimised(gm, args)
    assert recalled


def test_facts_of_plans_are_those_of_nodes(recalled):
    gm, args = capture_torch(
        lambda q, k, v, m, b: ((q @ k.mT) * 0.3 + b).masked_fill(m, -1e9).softmax(-1) @ v,
        [torch.randn(2, 4, 6, 8)] * 3 + [torch.rand(2, 1, 6, 6) > 0.5, torch.randn(2, 1, 6, 6)], False,
    )  # fmt: skip
    optimised(gm, args)
    assert any("where" in call for call in recalled), recalled


def emitted(function, *inputs, capture=capture_torch):
    gm, args = capture(function, inputs)
    program = Program(gm, args)
    return program, Emitter(program, gm.graph.output_node(), "test")


def nodes(program):
    return [program.value(n) for n in program.graph.nodes if n.op == "placeholder"]


def test_layers_share_facts_but_not_memory(recalled):
    program, op = emitted(lambda x, w: F.linear(x, w), torch.randn(4, 8), torch.randn(8, 8))
    x, w = nodes(program)
    first = op.linear(x, w)
    second = op.linear(first, w)
    assert recalled and storage(first.fact) != storage(second.fact)


def test_views_and_writes_are_computed(recalled):
    program, op = emitted(lambda x: x + 1, torch.randn(4, 8))
    (x,) = nodes(program)
    views = [op.permute(x, [1, 0]) for _ in range(2)] + [op.reshape(x, [8, 4]) for _ in range(2)]
    views += [op.call(torch.Tensor.contiguous, x) for _ in range(2)]
    assert not recalled and len({storage(v.fact) for v in (x, *views)}) == 1


def test_views_are_recalled_in_the_memory_of_what_they_view(monkeypatch):
    recalled = []
    recall = FactMemo.recall_views
    monkeypatch.setattr(FactMemo, "recall_views", lambda *a: recalled.append(recall(*a)) or recalled[-1])
    program, op = emitted(lambda x, y: (x + y, x - y), torch.randn(4, 8), torch.randn(4, 8))
    x, y = nodes(program)
    makers = [
        lambda v: op.permute(v, [1, 0]), lambda v: op.reshape(v, [2, 16]), lambda v: op.select(v, 0, 2),
        lambda v: op.getitem(op.split(v, [4, 4], dim=1), 1),
    ]  # fmt: skip
    for make in makers:
        recalled.clear()
        first, second = make(x), make(y)
        assert any(fact is not None for fact in recalled)
        assert storage(second.fact) == storage(y.fact) != storage(first.fact)
        assert same_strides(first.fact, second.fact) and difference(first.fact, second.fact) is None
        assert first.fact.storage_offset() == second.fact.storage_offset()


def test_a_view_of_what_requires_a_gradient_does_too():
    program, op = emitted(lambda x: x + 1, torch.randn(4, 8, requires_grad=True))
    y = program.value(next(n for n in program.graph.nodes if n.op == "call_function"))
    facts = [op.permute(y, [1, 0]).fact for _ in range(2)]
    assert facts[0].requires_grad == facts[1].requires_grad


def test_a_view_where_there_was_a_copy(recalled):
    """`reshape` copies here and is a view there, by the strides of the operand."""
    program, op = emitted(lambda x: x + 1, torch.randn(4, 8))
    (x,) = nodes(program)
    turned = op.permute(x, [1, 0])
    copied = [op.reshape(turned, [32]) for _ in range(2)]
    assert recalled == [str(copied[0].node.target)]
    assert storage(op.reshape(x, [32]).fact) == storage(x.fact)
    assert storage(copied[0].fact) != storage(copied[1].fact)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda op, x: op.add(x, 1), lambda op, x: op.add(x, 1.0)),
        (lambda op, x: op.sum(x, [0]), lambda op, x: op.sum(x, [0], keepdim=True)),
        (lambda op, x: op.full([2], 1), lambda op, x: op.full([2], True)),
    ],
)
def test_other_arguments_have_other_facts(recalled, first, second):
    program, op = emitted(lambda x: x + 1, torch.arange(4))
    (x,) = nodes(program)
    first(op, x), second(op, x)
    assert not recalled


def test_sizes_that_depend_on_data_are_computed(recalled):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        program, op = emitted(lambda x, y: (x.nonzero(), y.nonzero()), torch.arange(4), torch.arange(4))
    first, second = (op.call(torch.nonzero, x) for x in nodes(program))
    assert first.shape[0].node.expr != second.shape[0].node.expr and not recalled


def test_autocast_regions_tell_calls_apart(recalled):
    def function(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x @ w
        return inside, x @ w

    gm, args = capture_torch(function, [torch.randn(4, 4), torch.randn(4, 4)])
    program = Program(gm, args)
    products = [n for n in gm.graph.nodes if "matmul" in str(n.target)]
    assert [program.compute(n).dtype for n in products] == [torch.bfloat16, torch.float32] and not recalled


def test_a_shape_that_changes_in_place(recalled):
    """What is remembered is not the tensor, whose shape an operation in place may change."""
    program, op = emitted(lambda x: x + 1, torch.randn(4, 8))
    (x,) = nodes(program)
    first = op.add(x, 1)
    op.call(torch.Tensor.unsqueeze_, first, 0)
    assert op.add(x, 1).shape == (4, 8) and recalled


def test_aten_graphs(recalled):
    program, op = emitted(lambda x: x + 1, torch.randn(4, 8), capture=capture_aten)
    x = nodes(program)[0]
    op.relu(x), op.relu(x)
    assert recalled
