"""Graphs in the form in which FSDP2 was traced: parameters that get memory, are filled, read and freed again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp  # has the operator fsdp.copy_

from triptych.ir.program import Program
from triptych.post_grad.remove_fsdp2_unsharded_param_graph_input_usage import RemoveFsdp2UnshardedParamGraphInputUsage
from triptych.stages import post_grad_passes
from triptych.testing.check import is_freed, run_pass

aten, resize, copy_ = torch.ops.aten, torch.ops.inductor.resize_storage_bytes_.default, torch.ops.fsdp.copy_.default
FULL = 8 * 8 * 4


class ByHand:
    """A graph of x and of parameters p with the tensors g that are copied into them."""

    def __init__(self, count: int = 1) -> None:
        self.graph = torch.fx.Graph()
        self.x = self.graph.placeholder("x")
        self.p = [self.graph.placeholder(f"p{i}") for i in range(count)]
        self.g = [self.graph.placeholder(f"g{i}") for i in range(count)]

    def call(self, target, *args):
        return self.graph.call_function(target, args)

    def fill(self, i: int = 0, source=None):
        self.call(resize, self.p[i], FULL)
        self.call(copy_, self.p[i], self.g[i] if source is None else source)

    def free(self, i: int = 0):
        self.call(resize, self.p[i], 0)

    def done(self, *results):
        self.graph.output(tuple(results))
        gm = torch.fx.GraphModule({}, self.graph)
        Program(gm, self.inputs())  # leaves the facts on the nodes
        return gm

    def inputs(self):
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(8, 8, generator=generator) for _ in range(1 + 2 * len(self.p))]
        for parameter in made[1 : 1 + len(self.p)]:
            parameter.untyped_storage().resize_(0)
        return made


def names(gm):
    return [str(n.target).removesuffix(".default") for n in gm.graph.nodes if n.op == "call_function"]


def declined(gm):
    tally = run_pass(RemoveFsdp2UnshardedParamGraphInputUsage, gm)
    assert not tally.fired
    (decline,) = tally.declines.values()
    return decline.reason


def test_two_layers_read_what_was_gathered_and_leave_no_memory_behind():
    """The second parameter is filled while the first one is in use, as a prefetch does it."""
    made = ByHand(2)
    made.fill(0)
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.fill(1)
    y = made.call(aten.add.Tensor, y, made.p[0])
    made.free(0)
    y = made.call(aten.mm.default, y, made.call(aten.t.default, made.p[1]))
    made.free(1)
    gm = made.done(y)
    inputs, again = made.inputs(), made.inputs()
    (expected,) = gm(*inputs)
    tally = run_pass(RemoveFsdp2UnshardedParamGraphInputUsage, gm)
    gm.graph.lint()
    gm.recompile()
    assert tally.fired.total() == 2
    assert names(gm).count("fsdp.copy_") == 0 and names(gm).count("inductor.resize_storage_bytes_") == 2
    (got,) = gm(*again)
    assert torch.equal(got, expected)
    assert all(is_freed(p) for p in (*inputs[1:3], *again[1:3]))


def test_a_parameter_that_came_with_memory_is_freed_as_before():
    made = ByHand()
    made.fill()
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    gm = made.done(y)
    run_pass(RemoveFsdp2UnshardedParamGraphInputUsage, gm)
    gm.recompile()
    inputs = made.inputs()
    inputs[1] = torch.randn(8, 8)
    gm(*inputs)
    assert is_freed(inputs[1])


def test_what_was_copied_must_stay_as_it_is_while_it_is_read():
    made = ByHand()
    made.fill()
    made.call(aten.add_.Tensor, made.g[0], 1)
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    assert declined(made.done(y)).startswith("add__tensor writes the copied tensor")


def test_a_write_after_the_last_use_is_no_obstacle():
    made = ByHand()
    made.fill()
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    made.call(aten.add_.Tensor, made.g[0], 1)
    assert run_pass(RemoveFsdp2UnshardedParamGraphInputUsage, made.done(y)).fired.total() == 1


def test_a_parameter_that_is_written_is_left_alone():
    """The gathered tensor would be written in its place."""
    made = ByHand()
    made.fill()
    made.call(aten.mul_.Tensor, made.p[0], 2)
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    assert declined(made.done(y)).endswith("writes or returns the parameter")


@pytest.mark.parametrize("returned", ["itself", "a view"])
def test_a_parameter_that_is_returned_is_left_alone(returned):
    made = ByHand()
    made.fill()
    y = made.call(aten.mm.default, made.x, made.p[0])
    view = made.p[0] if returned == "itself" else made.call(aten.t.default, made.p[0])
    made.free()
    assert "uses the parameter while the graph has not given it memory" in declined(made.done(y, view))


def test_a_parameter_that_gets_another_size_is_left_alone():
    made = ByHand()
    made.call(resize, made.p[0], 2 * FULL)
    made.call(copy_, made.p[0], made.g[0])
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    assert "resizes the parameter neither to its full size" in declined(made.done(y))


def test_nothing_moves_over_memory_that_is_freed():
    """The schema of the operator does not say that it writes: a read must not move behind it."""
    made = ByHand()
    made.fill()
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    program = Program(made.done(y))
    sizes = [n for n in program.graph.nodes if n.target is resize]
    assert [program.aliasing.effects(n).writes for n in sizes] == [(made.p[0],)] * 2


def test_the_stage_runs_it():
    made = ByHand()
    made.fill()
    y = made.call(aten.mm.default, made.x, made.p[0])
    made.free()
    gm = made.done(y)
    post_grad_passes(gm, is_inference=True)
    assert names(gm) == ["aten.mm", "inductor.resize_storage_bytes_"]
