"""Reading calls, facts, effects, aliasing, the text form, fingerprints and verification."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from triptych.errors import VerificationError
from triptych.ir.calls import read
from triptych.ir.effects import effects
from triptych.ir.facts import known, known_equal
from triptych.ir.fingerprint import fingerprint
from triptych.ir.program import ATEN, TORCH, Program
from triptych.ir.text import line, text
from triptych.ir.traits import traits
from triptych.testing.capture import capture_aten, capture_torch
from triptych.verify.structure import contract, verify

pytestmark = pytest.mark.fast


def calls(program, *inputs, dialect="torch"):
    gm, _ = (capture_torch if dialect == "torch" else capture_aten)(program, inputs)
    return [c for n in gm.graph.nodes if (c := read(n)) is not None]


def one(program, *inputs, dialect="torch"):
    (call,) = calls(program, *inputs, dialect=dialect)
    return call


X = torch.randn(4, 6)

SAME = [
    ("sum", {"dim": [1], "keepdim": True}, [
        lambda x: torch.sum(x, axis=-1, keepdims=True), lambda x: x.sum(-1, True), lambda x: torch.sum(x, [1], keepdim=True),
        lambda x: torch.ops.aten.sum.dim_IntList(x, [1], True)]),
    ("permute", {"dims": [1, 0]}, [
        lambda x: x.T, lambda x: x.t(), lambda x: x.transpose(0, -1), lambda x: torch.permute(x, (1, 0)), lambda x: x.mT,
        lambda x: x.movedim(0, 1), lambda x: x.permute(-1, 0), lambda x: torch.swapaxes(x, 0, 1)]),
    ("reshape", {"shape": [24]}, [
        lambda x: x.view(24), lambda x: x.reshape((24,)), lambda x: torch.flatten(x), lambda x: x.ravel()]),
    ("to", {"dtype": torch.float64}, [
        lambda x: x.double(), lambda x: x.to(torch.float64), lambda x: x.to(dtype=torch.float64)]),
    ("split", {"sizes": [4, 2], "dim": 1}, [
        lambda x: x.split(4, dim=-1), lambda x: torch.split(x, [4, 2], 1), lambda x: x.tensor_split((4,), dim=1)]),
    ("softmax", {"dim": 1}, [
        lambda x: F.softmax(x, -1), lambda x: x.softmax(dim=1), lambda x: torch.softmax(x, 1)]),
    ("mul", {"other": 2}, [lambda x: x * 2, lambda x: torch.mul(x, 2), lambda x: x.mul(other=2), lambda x: torch.multiply(x, 2)]),
    ("clamp", {"min": 0}, [lambda x: x.clamp(min=0), lambda x: torch.clip(x, 0), lambda x: x.clamp_min(0)]),
    ("cat", {"dim": 1}, [lambda x: torch.cat([x, x], -1), lambda x: torch.concat((x, x), dim=1), lambda x: torch.concatenate([x, x], axis=1)]),
    ("relu", {}, [lambda x: F.relu(x), lambda x: x.relu(), lambda x: torch.relu(x), lambda x: F.relu(x, inplace=False)]),
    ("slice", {"dim": 1, "start": 1, "end": 3}, [
        lambda x: x.narrow(1, 1, 2), lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3), lambda x: torch.ops.aten.slice.Tensor(x, -1, -5, 3)]),
]  # fmt: skip


@pytest.mark.parametrize("op, args, spellings", SAME, ids=[s[0] for s in SAME])
def test_every_spelling_reads_the_same(op, args, spellings):
    for spelling in spellings:
        call = calls(spelling, X)[0]
        rest = {k: list(v) if isinstance(v, tuple) else v for k, v in call.args.items() if k not in ("self", "tensors")}
        assert (call.op, rest) == (op, args)


def test_arguments_that_say_the_default_are_left_out():
    assert one(lambda x: torch.add(x, 3, alpha=1), X).args.keys() == {"self", "other"}
    assert one(lambda x: torch.add(x, 3, alpha=2), X).args["alpha"] == 2
    assert one(lambda x: x.sum(dtype=None), X).args.keys() == {"self"}


def test_in_place_is_another_operation():
    call = one(lambda x: x.relu_(), X)
    assert call.op == "relu_" and call.mutates
    gm = symbolic_trace(lambda x: F.relu(x, inplace=True))
    assert read(list(gm.graph.nodes)[1]).mutates


def test_reflected_operand_order():
    call = one(lambda x: 1 - x, X)
    assert call.op == "sub" and call.args["self"] == 1
    assert one(lambda x: 1 - x, X, dialect="aten").args["self"] == 1


def test_dialect():
    assert Program(capture_torch(lambda x: x.relu(), [X])[0]).dialect == TORCH
    assert Program(capture_aten(lambda x: x.split(2)[0].relu(), [X])[0]).dialect == ATEN
    assert Program(symbolic_trace(lambda x: x + 1)).dialect == TORCH


def test_facts_are_learned_from_example_inputs():
    gm = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.ReLU()))
    program = Program(gm, (X,))
    last = list(gm.graph.nodes)[-2]
    assert program.value(last).shape == (4, 3) and program.value(last).dtype == torch.float32
    assert gm.get_submodule("0").weight.shape == (3, 6)  # real, not fake


def test_symbolic_facts():
    gm, _ = capture_torch(lambda x: x.reshape(-1), [X], dynamic=True)
    value = Program(gm).value([n for n in gm.graph.nodes if n.op == "call_method"][0])
    rows, columns = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"][-1].shape
    assert known_equal(value.shape, [rows * columns])
    assert not known(rows == columns) and not known(rows == 4)


def by_name(program, *inputs):
    gm, _ = capture_torch(program, inputs)
    program = Program(gm)
    return program, {n.name: n for n in gm.graph.nodes}


def test_aliasing_of_views_and_copies():
    def f(x):
        a, b, c, d = x.view(-1), x.clone(), x.t().reshape(-1), x.to(torch.float32)
        return a + 1, b + 1, c + 1, d + 1

    program, n = by_name(f, X)
    x = n["l_x_"]
    aliasing = program.aliasing
    assert aliasing.same(x, n["a"]) and aliasing.same(x, n["d"])
    assert not aliasing.same(x, n["b"])
    assert not aliasing.same(x, n["c"]), "this reshape copies, as the facts tell"
    assert aliasing.is_input(n["a"]) and not aliasing.is_input(n["b"]) and not aliasing.is_output(n["a"])


def test_writes_are_seen_through_views():
    def f(x):
        y = x.relu()
        z = y[0]
        z.add_(1)
        return y * 2

    program, n = by_name(f, X)
    aliasing = program.aliasing
    assert aliasing.written(n["y"]) and not aliasing.written(n["l_x_"])
    assert aliasing.written_between([n["y"]], n["y"], n["mul"]) is n["add_"]
    assert aliasing.written_between([n["l_x_"]], n["y"], n["mul"]) is None


def test_inputs_that_share_memory_are_one_class():
    base = torch.randn(8)
    gm, _ = capture_torch(lambda x, y: (x.add_(1), y * 2)[1], [base[:4], base[4:]])
    # captured from copies: apart
    first, second = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert not Program(gm).aliasing.same(first, second)


def test_effects_of_what_no_schema_tells():
    graph = symbolic_trace(lambda x, m, v: F.batch_norm(x, m, v, training=True)).graph
    x, m, v, norm, _ = graph.nodes
    assert set(effects(norm).writes) == {m, v}
    assert effects(symbolic_trace(lambda x: F.dropout(x, 0.5, True)).graph.find_nodes(op="call_function", target=F.dropout)[0]).random

    def mystery(x):
        return x

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    unknown = graph.call_function(mystery, (x,))
    assert effects(unknown).writes == (x,) and effects(unknown).kept
    store = graph.call_function(operator.setitem, (x, 0, 1))
    assert effects(store).writes == (x,) and effects(store).kept


def test_autocast_and_grad_mode_are_barriers():
    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
        with torch.no_grad():
            z = x @ w
        return y, z

    gm, _ = capture_torch(f, [X, torch.randn(6, 2)])
    kinds = [n for n in gm.graph.nodes if effects(n).barrier]
    assert len(kinds) == 4


def test_traits():
    assert {"pointwise", "commutative"} <= traits("add")
    assert "gemm" in traits("matmul") and "reduction" in traits("sum") and "view" in traits("permute")
    assert "random" in traits("rand_like") and "mutating" in traits("add_")
    assert "commutative" not in traits("sub")


def test_text_has_types_and_source():
    gm, _ = capture_torch(lambda x: torch.relu(x) * 2, [X])
    shown = text(gm)
    assert "relu: f32[4, 6] = relu(l_x_)  # test_ir.py:" in shown
    gm, _ = capture_aten(lambda x: x.sum(1, keepdim=True), [X])
    assert line(list(gm.graph.nodes)[1]) == "sum_1: f32[4, 1] = aten.sum.dim_IntList(x_1, [1], True)"


def test_fingerprint_follows_structure_not_names():
    def graph(other):
        return capture_aten(lambda x: torch.relu(x) + other, [X])[0].graph

    first, same, different = graph(1), graph(1), graph(2)
    for node in same.nodes:
        node.name = node.name + "_renamed" if node.op != "output" else node.name
    assert fingerprint(first) == fingerprint(same) != fingerprint(different)


def test_verify_finds_what_is_wrong():
    gm, _ = capture_aten(lambda x: torch.relu(x).sum(1), [X])
    promise = contract(gm)
    verify(gm, promise)
    relu = list(gm.graph.nodes)[1]
    relu.meta["val"] = relu.meta["val"].to(torch.float64)
    with pytest.raises(VerificationError, match="dtype"):
        verify(gm)

    gm, _ = capture_aten(lambda x: torch.relu(x), [X])
    promise = contract(gm)
    x, relu, output = gm.graph.nodes
    relu.replace_all_uses_with(x)
    with pytest.raises(VerificationError, match="sharing"):
        verify(gm, promise)
    output.args = ((x, x),)
    with pytest.raises(VerificationError, match="outputs"):
        verify(gm, promise)
