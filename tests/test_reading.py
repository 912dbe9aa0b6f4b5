"""Every spelling of an operation reads as the same call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from triptych.ir.calls import read
from triptych.ir.effects import effects
from triptych.testing.capture import capture_torch

pytestmark = pytest.mark.fast


def last_call(program, *shapes):
    gm, _ = capture_torch(program, [torch.randn(s) for s in shapes])
    *_, last = (n for n in gm.graph.nodes if n.op != "output")
    call = read(last)
    return call.op, {k: v for k, v in call.args.items() if not isinstance(v, torch.fx.Node)}


@pytest.mark.parametrize(
    "program, op, args",
    [
        (lambda x: x[:, 1:3], "slice", {"dim": 1, "start": 1, "end": 3}),
        (lambda x: x[..., -1], "select", {"dim": 2, "index": 5}),
        (lambda x: x[..., None], "unsqueeze", {"dim": 3}),
        (lambda x: x[None], "unsqueeze", {"dim": 0}),
        (lambda x: x[:, None, :], "unsqueeze", {"dim": 1}),
        (lambda x: x[:, 0, 1:], "tensor_getitem", {"index": (slice(None), 0, slice(1, None))}),
        (lambda x: x.view(2, -1), "reshape", {"shape": [2, 24]}),
        (lambda x: x.expand(3, -1, -1, -1), "expand", {"size": [3, 2, 4, 6]}),
        (lambda x: torch.flatten(x, -2), "reshape", {"shape": [2, 24]}),
        (lambda x: x.sum(axis=(-1, 1), keepdims=True), "sum", {"dim": [2, 1], "keepdim": True}),
        (lambda x: torch.sum(x, dim=None), "sum", {}),
        (lambda x: F.glu(x, dim=2), "glu", {}),
        (lambda x: F.glu(x, 1), "glu", {"dim": 1}),
        (lambda x: F.avg_pool2d(x, 2, (2, 2), 0), "avg_pool2d", {"kernel_size": [2, 2], "stride": [2, 2]}),
    ],
)
def test_spelling(program, op, args):
    assert last_call(program, (2, 4, 6)) == (op, args)


def test_where_as_a_method_has_its_operands_in_another_order():
    gm, _ = capture_torch(lambda x, y: x.where(x > 0, y), [torch.randn(3), torch.randn(3)])
    x, y, condition, where, _ = gm.graph.nodes
    assert read(where).args == {"condition": condition, "self": x, "other": y}


def test_cat_counts_dims_in_the_rank_of_what_it_makes():
    """An empty vector among matrices is skipped; its own rank says nothing."""
    op, args = last_call(lambda e, x: torch.cat([e, x], -1), (0,), (2, 3))
    assert (op, args["dim"]) == ("cat", 1)


@pytest.mark.parametrize("join, dim", [(torch.hstack, 1), (torch.vstack, 0), (torch.column_stack, 1)])
def test_stacks_that_are_cats(join, dim):
    op, args = last_call(lambda x, y: join((x, y)), (2, 3), (2, 3))
    assert op == "cat" and args.get("dim", 0) == dim
    vectors = last_call(lambda x, y: join((x, y)), (3,), (3,))[0]
    assert vectors == ("cat" if join is torch.hstack else join.__name__)


def test_einsum_takes_its_operands_as_a_list():
    inputs = [torch.randn(2, 3), torch.randn(3, 4)]
    gm, _ = capture_torch(lambda x, y: torch.einsum("ij,jk->ik", x, y), inputs)
    x, y, einsum, _ = gm.graph.nodes
    assert read(einsum).args == {"equation": "ij,jk->ik", "tensors": [x, y]}


def test_a_device_by_position_is_a_device():
    def program(x, y):
        return x.to(y.device), x.to(torch.device("cpu")), x.to("cpu", torch.float64)

    gm, _ = capture_torch(program, [torch.ones(2), torch.ones(2)])
    calls = [c for node in gm.graph.nodes if (c := read(node)) is not None]
    assert [c.get("dtype") for c in calls if c.op == "to"] == [None, None, torch.float64]


def test_an_operator_of_a_library_is_not_the_one_of_torch_with_its_name():
    with torch.library._scoped_library("reading", "FRAGMENT") as library:
        library.define("relu(Tensor x, float slope) -> Tensor")
        library.define("relu.twice(Tensor x, Tensor slope) -> Tensor")
        library.impl("relu", lambda x, slope: x * slope, "CompositeExplicitAutograd")
        library.impl("relu.twice", lambda x, slope: x * slope, "CompositeExplicitAutograd")
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.ones(3)
        for slope in (2.0, x):
            node = graph.call_function(torch.ops.reading.relu, (x, slope))
            call = read(node)
            assert call.op == "reading.relu" and call.args == {"x": x, "slope": slope} and not call.mutates
            assert effects(node).pure and effects(node).aliases == ()
