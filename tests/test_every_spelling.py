"""One program in every spelling: functions, methods, operators, modules, keywords, numpy's names, negative dims, and
graphs from Dynamo, `torch.export`, `make_fx` and `symbolic_trace`. All of them must be optimised alike."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from triptych.ir.fingerprint import fingerprint
from triptych.ir.program import Program
from triptych.ir.text import text
from triptych.options import Options
from triptych.passes.manager import run_stage
from triptych.passes.session import Session
from triptych.rewrite.examples import make_input
from triptych.testing.capture import capture_aten, capture_modules, capture_torch
from triptych.testing.check import compare_graphs

quantized = torch.ops.quantized_decomposed
HOW = (0.1, 3, -128, 127, torch.int8)


class Called(nn.Module):
    """A function of modules and one value."""

    def __init__(self, function, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class CalledWithTwo(Called):
    def forward(self, a, b):
        return self.function(self, a, b)


@dataclass(frozen=True)
class Case:
    """Programs that say the same, and the pass that must see it."""

    name: str
    passes: str
    inputs: tuple[str, ...]
    programs: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    captures: tuple[str, ...] = ("symbolic_trace", "make_fx", "export")
    """Beside Dynamo's, those in whose graphs there is something left to see."""
    written_alike: bool = True
    """False where the words of an operator of a library, or of a draw in place, stay as the user chose them."""


def case(name, passes, inputs, *programs, **how):
    return Case(name, passes, tuple(inputs.split("; ")), programs, **how)


CASES = [
    case("a view of the same shape", "remove_noop_pass", "f32[4, 8]",
         lambda x: x.view(4, 8) + 1, lambda x: x.reshape(-1, 8) + 1, lambda x: torch.reshape(x, (4, -1)) + 1,
         lambda x: x.view(size=(4, 8)) + 1, lambda x: x.view_as(x).add(1), lambda x: x.flatten(-1) + 1,
         lambda x: torch.add(x.unflatten(0, (4,)), 1), lambda x: 1 + x.reshape(shape=(4, 8)),
         captures=("symbolic_trace", "make_fx", "export")),
    case("nothing dropped", "remove_identity", "f32[4, 8]",
         lambda x: F.dropout(x, 0.0) * 2, lambda x: F.dropout(x, p=0.5, training=False) * 2,
         lambda x: torch.dropout(x, 0.5, False) * 2, lambda x: (+x) * 2, lambda x: torch.positive(x).mul(2),
         lambda x: F.dropout(input=x, training=False) * 2,
         Called(lambda m, x: m.drop(x) * 2, drop=nn.Dropout(0.5).eval()),
         Called(lambda m, x: torch.mul(m.same(x), 2), same=nn.Identity()), captures=("symbolic_trace",)),
    case("nan_to_num before relu", "relu_nan_to_num", "f32[4, 8]",
         lambda x: torch.relu(torch.nan_to_num(x, nan=1.0)), lambda x: x.nan_to_num(1.0).relu(),
         lambda x: F.relu(torch.nan_to_num(input=x, nan=1)), lambda x: F.relu(input=x.nan_to_num(nan=1.0, posinf=None)),
         Called(lambda m, x: m.relu(x.nan_to_num(1.0)), relu=nn.ReLU())),
    case("cat of relus", "sink_cat_after_pointwise", "f32[4, 3]; f32[4, 2]",
         lambda a, b: torch.cat([a.relu(), b.relu()], 1), lambda a, b: torch.concat((F.relu(a), torch.relu(b)), dim=-1),
         lambda a, b: torch.hstack([a.relu(), F.relu(input=b)]), lambda a, b: torch.cat(tensors=[a.relu(), b.relu()], axis=1),
         lambda a, b: torch.concatenate([torch.relu(a), b.relu()], axis=-1),
         lambda a, b: torch.column_stack([a.relu(), b.relu()]),
         CalledWithTwo(lambda m, a, b: torch.cat([m.relu(a), m.relu(b)], 1), relu=nn.ReLU()),
         options={"codegen": "eager"}),
    case("stack of products", "sink_cat_after_pointwise", "f32[4, 3]; f32[4, 3]",
         lambda a, b: torch.stack([a * 2, b * 2], 1), lambda a, b: torch.stack((2 * a, torch.mul(b, 2)), dim=-2),
         lambda a, b: torch.stack(tensors=[a.mul(2), torch.multiply(b, 2)], dim=1), options={"codegen": "eager"}),
    case("cat of a cat", "merge_concats_pass", "f32[2, 3]; f32[2, 3]",
         lambda a, b: torch.cat([torch.cat([a, b]), a]), lambda a, b: torch.vstack([torch.concat((a, b), dim=-2), a]),
         lambda a, b: torch.cat((torch.concatenate([a, b], axis=0), a), dim=0),
         lambda a, b: torch.cat(tensors=[torch.vstack([a, b]), a], axis=-2)),
    case("two permutes", "remove_reshape_pass", "f32[2, 3, 4]",
         lambda x: x.permute(2, 0, 1).permute(2, 1, 0) + 1, lambda x: x.permute(dims=(2, 0, 1)).transpose(0, -1) + 1,
         lambda x: torch.permute(x, [-1, 0, 1]).transpose(dim0=0, dim1=2) + 1,
         lambda x: torch.movedim(x, 2, 0).swapaxes(-1, 0) + 1, lambda x: x.movedim(-1, 0).permute([2, 1, 0]) + 1),
    case("pieces put together", "remove_split_ops_pass", "f32[4, 6]",
         lambda x: torch.cat(x.split([2, 4], 1), 1) + 1, lambda x: torch.cat(torch.split(x, (2, 4), dim=-1), dim=1) + 1,
         lambda x: torch.hstack(torch.split_with_sizes(x, [2, 4], 1)) + 1,
         lambda x: torch.concat(x.tensor_split((2,), dim=1), axis=-1) + 1,
         lambda x: torch.cat(x.tensor_split([2], -1), 1) + 1,
         lambda x: torch.cat(torch.split(tensor=x, split_size_or_sections=[2, 4], dim=1), 1) + 1),
    case("stack of one", "stack_to_unsqueeze_pass", "f32[4, 8]",
         lambda x: torch.stack([x], 1) * 2, lambda x: torch.stack((x,), dim=-2) * 2,
         lambda x: torch.stack(tensors=[x], dim=1).mul(2), lambda x: 2 * torch.stack([x], dim=1)),
    case("quantize after a transpose", "quant_lift_up", "f32[4, 8]",
         lambda x: quantized.quantize_per_tensor(x.t(), *HOW), lambda x: quantized.quantize_per_tensor(x.T, *HOW),
         lambda x: quantized.quantize_per_tensor.default(torch.transpose(x, 0, -1), *HOW),
         lambda x: quantized.quantize_per_tensor(x.mT, 0.1, 3, quant_min=-128, quant_max=127, dtype=torch.int8),
         lambda x: quantized.quantize_per_tensor(input=x.permute(1, 0), scale=0.1, zero_point=3, quant_min=-128,
                                                 quant_max=127, dtype=torch.int8), written_alike=False),
    case("a sample", "apply_gumbel_max_trick", "f32[4, 8]",
         lambda x: torch.argmax(x.softmax(-1) / torch.empty_like(x).exponential_(), -1),
         lambda x: torch.softmax(x, dim=1).div(torch.empty_like(x).exponential_(lambd=1)).argmax(dim=1),
         lambda x: torch.argmax(torch.divide(F.softmax(x, 1), torch.empty_like(x).exponential_(1.0)), axis=-1),
         Called(lambda m, x: (m.softmax(x) / torch.empty_like(x).exponential_()).argmax(1), softmax=nn.Softmax(-1)),
         options={"add_passes": "apply_gumbel_max_trick"}, written_alike=False),
    case("sums", "normalize_node_kwargs_pass", "f32[4, 8]",
         lambda x: torch.sum(x, axis=-1, keepdims=True), lambda x: x.sum(-1, keepdim=True),
         lambda x: torch.sum(input=x, dim=[1], keepdim=True), lambda x: x.sum(axis=(1,), keepdims=True),
         lambda x: x.sum(dim=-1, keepdim=True), captures=("symbolic_trace",)),
    case("a linear", "normalization_pass_aten", "f32[4, 8]; f32[2, 8]",
         lambda x, w: F.linear(x, w, w[:, 0]).relu(), lambda x, w: torch.addmm(w.select(1, 0), x, w.t()).relu(),
         lambda x, w: F.relu(w[:, 0].addmm(x, w.T)), lambda x, w: F.linear(input=x, weight=w, bias=w[..., 0]).relu(),
         lambda x, w: torch.relu(torch.addmm(input=w[:, 0], mat1=x, mat2=w.transpose(-1, 0), beta=1, alpha=1)),
         captures=("symbolic_trace",)),
    case("matrix products", "normalization_pass_aten", "f32[4, 8]; f32[8, 2]",
         lambda x, w: x @ w, lambda x, w: torch.mm(x, w), lambda x, w: x.mm(mat2=w), lambda x, w: x.matmul(w),
         lambda x, w: torch.matmul(input=x, other=w), lambda x, w: x.__matmul__(w), captures=("symbolic_trace",)),
]  # fmt: skip


def optimised(gm, case):
    session = Session(Options.make(case.options))
    run_stage("pre_grad", gm, session, graph="test")
    assert not session.warnings
    return sum((r.fired for r in session.records if r.name == case.passes), Counter()).total()


def calls(gm):
    """What a graph calls, with what, whatever its words."""
    program = Program(gm)
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    read = [program.call(node) for node in gm.graph.nodes]
    return [(c.op, torch.fx.map_arg(c.args, number.__getitem__)) for c in read if c is not None]


def inputs_of(case):
    generator = torch.Generator().manual_seed(0)
    return [make_input(spec, generator) for spec in case.inputs]


def through_dynamo(case, program):
    gm, inputs = capture_torch(program, inputs_of(case))
    before = copy.deepcopy(gm)
    fired = optimised(gm, case)
    compare_graphs(before, gm, inputs)
    return gm, fired


PROGRAMS = [
    pytest.param(case, i, id=f"{case.name.replace(' ', '_')}-{i}") for case in CASES for i in range(len(case.programs))
]


@pytest.mark.parametrize("case, number", PROGRAMS)
def test_every_spelling_becomes_the_same_graph(case, number):
    wanted, fired = through_dynamo(case, case.programs[0])
    gm, _ = through_dynamo(case, case.programs[number])
    assert fired
    assert calls(gm) == calls(wanted), f"\n{text(gm)}\ninstead of\n{text(wanted)}"
    if case.written_alike:
        assert fingerprint(gm.graph) == fingerprint(wanted.graph), f"\n{text(gm)}\ninstead of\n{text(wanted)}"


def captured(how, program, inputs):
    if how == "make_fx":
        return capture_aten(program, inputs)[0]
    if how == "symbolic_trace":
        return capture_modules(program, inputs)[0]
    if not isinstance(program, nn.Module):
        program, function = (Called if len(inputs) == 1 else CalledWithTwo)(None), program
        program.function = lambda m, *given: function(*given)
    return torch.export.export(program, tuple(inputs)).module()


CAPTURED = [pytest.param(*p.values, how, id=f"{p.id}-{how}") for p in PROGRAMS for how in p.values[0].captures]


@pytest.mark.parametrize("case, number, how", CAPTURED)
def test_other_captures_are_rewritten_alike(case, number, how):
    inputs = inputs_of(case)
    gms = [captured(how, case.programs[i], inputs) for i in (0, number)]
    fired = [optimised(gm, case) for gm in gms]
    assert fired[0]
    assert calls(gms[0]) == calls(gms[1]), f"\n{text(gms[1])}\ninstead of\n{text(gms[0])}"
