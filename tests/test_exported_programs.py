"""`triptych.optimize`: exported programs in and out, with their signature, state, writes and dynamic sizes."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

import triptych
from triptych.errors import TriptychError
from triptych.rewrite.passes import Pass

RAISE = {"on_error": "raise"}


class Net(nn.Module):
    """Parameters, buffers that are written and read, a constant, a written input, nested inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, more):
        self.calls.add_(1)
        x = self.norm(self.layer(torch.cat([torch.cat([x, x]), x])).relu()) + torch.tensor([1.0, 2, 3, 4])
        q = more["q"]
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        scores = (q @ q.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
        return {"x": x * 1, "written": more["a"].mul_(2), "attention": (torch.softmax(scores, -1) @ q, self.calls + 0)}


def inputs(batch: int = 2):
    return torch.randn(batch, 4), {"a": torch.ones(3), "q": torch.randn(batch, 2, 8, 8)}


def exported(train: bool = False, decomposed: bool = False) -> ExportedProgram:
    batch = Dim("batch", min=2, max=64)
    sizes = {"x": {0: batch}, "more": {"a": None, "q": {0: batch}}}
    program = torch.export.export(Net().train(train), inputs(), dynamic_shapes=sizes)
    return program.run_decompositions() if decomposed else program


def run(program: ExportedProgram, given):
    """What it returns, and what it writes to its inputs and buffers."""
    module, given = copy.deepcopy(program.module()), copy.deepcopy(given)  # programs share their buffers
    return module(*given), given, dict(module.named_buffers())


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed"])
def test_the_result_does_what_the_program_did(train, decomposed):
    program = exported(train, decomposed)
    before = str(program)
    optimised = triptych.optimize(program, options={**RAISE, "verify": "each"})
    assert str(program) == before
    assert isinstance(optimised, ExportedProgram) and optimised.range_constraints == program.range_constraints
    calls = [node.target for node in optimised.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.scaled_dot_product_attention.default in calls
    assert not {torch.ops.aten.matmul.default, torch.ops.aten.bmm.default} & {*calls}
    assert {getattr(call, "namespace", "aten") for call in calls} == {"aten"}
    file = io.BytesIO()
    torch.export.save(optimised, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for batch in (2, 5):
        given = inputs(batch)
        expected = run(program, given)
        for one in (optimised, loaded):
            torch.testing.assert_close(run(one, given), expected)


@pytest.mark.parametrize("name", ["input", "input_1", "max", "self_1"])
def test_inputs_keep_their_names(name):
    """`input`, the name that nn.Linear, nn.Conv2d and nn.Sequential give theirs, is the name of a builtin, too."""
    takes = {}
    exec(f"def forward(self, {name}, x): return torch.cat([torch.cat([{name}, x]), {name}]) * 1", globals(), takes)
    model = type("Model", (nn.Module,), takes)()
    given = {name: torch.randn(2, 3), "x": torch.randn(2, 3)}
    program = torch.export.export(model, (), given)
    optimised = triptych.optimize(program, options={**RAISE, "verify": "each"})
    assert optimised.graph_signature.user_inputs == program.graph_signature.user_inputs == (name, "x")
    assert len(optimised.graph.nodes) < len(program.graph.nodes)
    torch.testing.assert_close(optimised.module()(**given), model(**given))


def test_a_layer_by_itself():
    program = torch.export.export(nn.Linear(4, 4), (x := torch.randn(2, 4),))
    optimised = triptych.optimize(program, options=RAISE)
    torch.testing.assert_close(optimised.module()(x), program.module()(x))


def test_gradients_of_a_program_for_training_are_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def loss(x):
        return (model(torch.cat([torch.cat([x, x]), x])) * x.sum().detach()).square().sum()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return loss(x)

    x = torch.randn(2, 4)
    program = torch.export.export(Loss(), (x,))
    optimised = triptych.optimize(program, train=True, options=RAISE)
    assert len(optimised.graph.nodes) < len(program.graph.nodes)
    gradients = []
    for one in (program, optimised):
        module = one.module()
        gradients.append(torch.autograd.grad(module(x), list(module.parameters())))
    torch.testing.assert_close(*gradients)


def test_constants_that_a_pass_adds_become_inputs():
    def add_constant(gm: torch.fx.GraphModule):
        gm.register_buffer("table", torch.tensor([10.0, 20.0]))
        relu = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[0]
        with gm.graph.inserting_after(relu):
            first = gm.graph.get_attr("table")
            again = gm.graph.get_attr("table")
        first.meta["val"] = again.meta["val"] = relu.meta["val"]
        with gm.graph.inserting_after(again):
            total = gm.graph.call_function(torch.ops.aten.add.Tensor, (first, again))
        total.meta["val"] = relu.meta["val"]
        with gm.graph.inserting_after(total):
            result = gm.graph.call_function(torch.ops.aten.add.Tensor, (relu, total))
        result.meta["val"] = relu.meta["val"]
        relu.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)

    class Relu(nn.Module):
        def forward(self, x):
            return x.relu().exp()

    x = torch.randn(2)
    program = torch.export.export(Relu(), (x,))
    optimised = triptych.optimize(program, options={**RAISE, "post_grad_custom_post_pass": add_constant})
    (spec,) = [s for s in optimised.graph_signature.input_specs if s.kind is InputKind.CONSTANT_TENSOR]
    assert optimised.constants[spec.target].tolist() == [10.0, 20.0]
    torch.testing.assert_close(optimised.module()(x), (x.relu() + torch.tensor([20.0, 40.0])).exp())


def test_graphs_inside_the_graph():
    class Branches(nn.Module):
        def forward(self, x):
            x = torch.cat([torch.cat([x, x]), x])
            return torch.cond(x.sum() > 0, lambda x: x.sin() * 1, lambda x: x.cos() + 0, (x,))

    program = torch.export.export(Branches(), (torch.ones(3),))
    optimised = triptych.optimize(program, options=RAISE)
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(optimised.module()(x), program.module()(x))


def test_a_pass_that_breaks_the_signature_is_an_error_or_leaves_the_program(recwarn):
    @dataclass(frozen=True)
    class DropOutput(Pass):
        """Returns nothing."""

        name = "drop_output"

        def run(self, rewriter, *, strict=False, tally=None):
            rewriter.program.graph.output_node().args = ((),)
            return tally

    program = exported()
    options = {"post_grad_custom_post_pass": DropOutput}
    with pytest.raises(RuntimeError, match="the graph returns 0 values, the signature 4"):
        triptych.optimize(program, options={**options, **RAISE})
    assert triptych.optimize(program, options={**options, "on_error": "fallback"}) is program
    assert "stays as it came" in str(recwarn[-1].message)


def test_wrong_use():
    with pytest.raises(TriptychError, match="not the module Net: torch.export.export"):
        triptych.optimize(Net())
    with pytest.raises(TriptychError, match="not the class Net"):
        triptych.optimize(Net)
    with pytest.raises(TriptychError, match="optimize takes no option 'freeze'"):
        triptych.optimize(exported(), options={"freeze": True})


@pytest.mark.slow
def test_aot_inductor(tmp_path):
    program = exported()
    given = inputs(5)
    expected, _, buffers = run(program, given)
    path = torch._inductor.aoti_compile_and_package(
        triptych.optimize(program, options=RAISE), package_path=str(tmp_path / "net.pt2")
    )
    actual = torch._inductor.aoti_load_package(path)(*given)
    torch.testing.assert_close(actual, expected)
    assert given[1]["a"].tolist() == [2.0] * 3 and buffers["calls"] == 1
