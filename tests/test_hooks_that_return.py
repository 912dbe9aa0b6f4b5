"""A function in a hook may return another graph or module; anything else is an error that names the hook."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Transformer, symbolic_trace
from torch.fx.passes.infra.pass_base import PassResult

from triptych.options import ADD_RULES, HOOKS

WHERE = [hook for hook in HOOKS if hook != ADD_RULES]
TABLE = torch.arange(8.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x):
        return torch.relu(self.layer(x) + self.offset) + TABLE


def a_copy(gm: GraphModule):
    return copy.deepcopy(gm)


def transformed(gm: GraphModule):
    """New nodes without what was noted on the old ones."""
    return Transformer(gm).transform()


def traced_again(gm: GraphModule):
    return symbolic_trace(gm)


def another_graph(graph: Graph):
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def result_of_a_pass(gm: GraphModule):
    return PassResult(copy.deepcopy(gm), True)


def count(graph: Graph):
    """A number of changes, as the passes of torch return."""
    return 0


def whether(graph: Graph):
    return True


def the_same(gm: GraphModule):
    return gm


def doubled(gm: GraphModule):
    """A copy with an attribute that the module of the compile does not have, or has with other contents."""
    new = copy.deepcopy(gm)
    new.register_buffer("factor", torch.full((8,), 2.0))
    relu = next(n for n in new.graph.nodes if n.op.startswith("call") and "relu" in str(n.target))
    multiply = torch.ops.aten.mul.Tensor if "aten" in str(relu.target) else torch.mul
    with new.graph.inserting_after(relu):
        factor = new.graph.get_attr("factor")
    with new.graph.inserting_after(factor):
        product = new.graph.call_function(multiply, (relu, factor))
    product.meta = dict(relu.meta)
    relu.replace_all_uses_with(product)
    product.args = (relu, factor)
    new.recompile()
    return new


def compile_and_run(function, hook, train, model, x, **options):
    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        run = torch.compile(
            model, backend="triptych", options={"codegen": "eager", "on_error": "raise", hook: function, **options}
        )
        out = run(x)
        return out, torch.autograd.grad(out.sum(), model.layer.weight)[0] if train else None


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("hook", WHERE[1::2])
@pytest.mark.parametrize("function", [a_copy, transformed, another_graph, result_of_a_pass, count, whether, the_same])
def test_what_computes_the_same(function, hook, train, caplog):
    model, x = Net(), torch.randn(4, 8)
    got, gradient = compile_and_run(function, hook, train, model, x)
    torch.testing.assert_close(got, model(x))
    if train:
        torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), model.layer.weight)[0])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("hook", [*WHERE[:2], "joint_custom_post_pass", "post_grad_custom_post_pass"])
def test_attributes_come_with_the_graph(hook):
    model, x = Net(), torch.randn(4, 8)
    want = torch.relu(model.layer(x) + model.offset) * 2 + TABLE
    torch.testing.assert_close(compile_and_run(doubled, hook, False, model, x)[0], want)


def test_attributes_of_one_name_that_differ_are_two():
    model, x = Net(), torch.randn(4, 8)

    def tripled(gm: GraphModule):
        new = doubled(gm)
        new.factor.mul_(1.5)  # both products of the copy read it
        return new

    want = torch.relu(model.layer(x) + model.offset) * 9 + TABLE
    got, _ = compile_and_run([doubled, tripled], "pre_grad_custom_pass", False, model, x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("hook", WHERE[:2])
def test_a_module_that_is_traced_again(hook):
    model, x = Net(), torch.randn(4, 8)
    torch.testing.assert_close(compile_and_run(traced_again, hook, False, model, x)[0], model(x))


@pytest.mark.parametrize("hook", WHERE)
@pytest.mark.parametrize(
    ("value", "what"), [("done", "a str"), (Net, "the class Net"), (Net(), "the module Net"), ((1, 2), "a tuple"), (42, "42, and the graph is as it was")]
)
def test_another_result_is_an_error(hook, value, what):
    def wrong(graph):
        return value

    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"RuleError: {hook}: wrong returned {what}: a function in a hook changes"):
        torch.compile(Net(), backend="triptych", options={"codegen": "eager", hook: wrong})(torch.randn(4, 8))
