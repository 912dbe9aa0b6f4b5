"""Reading collectives, what may be written while one is under way, and the order that buckets leave."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.counting import counting_passes, grows
from triptych.communication.example_group import NAME, OTHER, all_gather, all_reduce, reduce_scatter, wait
from triptych.errors import TriptychError
from triptych.ir.collectives import awaited, collectives, is_wait
from triptych.ir.program import Program
from triptych.options import Options
from triptych.post_grad.bucket_all_gather import BucketAllGather
from triptych.post_grad.bucket_all_reduce import BucketAllReduce
from triptych.post_grad.fuse_ddp_communication import FuseDdpCommunication
from triptych.post_grad.overlap_scheduling import OverlapScheduling
from triptych.post_grad.reinplace import Reinplace
from triptych.spmd_check import sequences
from triptych.stages import post_grad_passes
from triptych.testing.capture import capture_aten
from triptych.testing.check import run_pass

functional = torch.ops._c10d_functional


def captured(program, *inputs):
    return capture_aten(program, inputs)[0]


def kinds(graph):
    return [c.kind for c in collectives(graph)]


def test_examples_communicate_again_after_all_groups_were_destroyed():
    for _ in range(2):
        assert wait(all_reduce(torch.ones(2))).tolist() == [3, 3]
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        torch.distributed.destroy_process_group()


def test_every_form_is_read():
    def program(x):
        first, second = functional.all_reduce_coalesced([x, x + 1], "avg", NAME)
        return wait(all_reduce(x, "max")), wait(all_gather(x)), wait(reduce_scatter(x)), wait(first) + wait(second)

    found = list(collectives(captured(program, torch.ones(4, 2)).graph))
    assert [(c.kind, c.reduction, c.ranks, c.group, len(c.operands), len(c.waits)) for c in found] == [
        ("all_reduce", "avg", None, NAME, 2, 2),
        ("all_reduce", "max", None, NAME, 1, 1),
        ("all_gather", "", 2, NAME, 1, 1),
        ("reduce_scatter", "sum", 2, NAME, 1, 1),
    ]
    assert all(awaited(w) == c for c in found for w in c.waits)
    assert found[0].wait is None and is_wait(found[1].wait)


def test_what_is_not_read_is_left_alone():
    def program(x):
        return wait(functional.broadcast(x, 0, NAME)) + wait(functional.all_to_all_single(x, [2, 2], [2, 2], NAME))

    gm = captured(program, torch.ones(4))
    assert kinds(gm.graph) == []
    assert not run_pass(OverlapScheduling, gm).fired


def test_sequences_are_text_by_group():
    gm = captured(lambda x: (wait(all_reduce(x)), wait(all_reduce(x[:2], "max", OTHER))), torch.ones(4))
    assert sequences(gm.graph) == {
        NAME: [f"all_reduce(float32[4]) sum over {NAME}"],
        OTHER: [f"all_reduce(float32[2]) max over {OTHER}"],
    }


def test_a_wait_returns_its_operand():
    gm = captured(lambda x: wait(all_reduce(x)) + 1, torch.ones(4))
    program = Program(gm)
    (found,) = collectives(gm.graph)
    assert program.aliasing.same(found.node, found.wait)
    assert not program.aliasing.same(found.node, found.operands[0])


@pytest.mark.parametrize("waits_first", [True, False])
def test_nothing_writes_what_a_collective_under_way_reads(waits_first):
    """An all-gather reads its operand until it is waited for: a write in between would change what others receive."""

    def program(x, i, v):
        y = x.relu()
        started = all_gather(y)
        if waits_first:
            whole = wait(started)
            return torch.index_put(y, [i], v), whole.sum()
        changed = torch.index_put(y, [i], v)
        return changed, wait(started).sum()

    gm = captured(program, torch.ones(5, 2), torch.tensor([0, 3]), torch.zeros(2, 2))
    tally = run_pass(Reinplace, gm, options={"codegen": "eager"})
    assert tally.fired.total() == (1 if waits_first else 0)


def test_buckets_of_two_kinds_do_not_wait_for_each_other():
    """a1 -> b2 and b1 -> a2: joining a1 with a2 and b1 with b2 would let each bucket wait for the other."""

    def program(x, y):
        a1 = wait(all_reduce(x))
        b1 = wait(all_reduce(y, "max"))
        b2 = wait(all_reduce(a1 * 2, "max"))
        a2 = wait(all_reduce(b1 * 2))
        return a1.sum() + b1.sum() + a2.sum() + b2.sum()

    gm = captured(program, torch.ones(4), torch.ones(4))
    before = gm(torch.arange(4.0), torch.arange(4.0))
    tally = run_pass(BucketAllReduce, gm)
    assert tally.fired.total() == 1
    assert kinds(gm.graph) == ["all_reduce"] * 3
    gm.graph.lint()
    assert torch.equal(gm(torch.arange(4.0), torch.arange(4.0)), before)


def test_an_operand_that_is_written_before_the_wait_is_left_alone():
    """In a graph that is not functional: the joined collective would start behind the write, or before it."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    started = [graph.call_function(functional.all_reduce.default, (x, "sum", NAME))]
    graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    started.append(graph.call_function(functional.all_reduce.default, (y, "sum", NAME)))
    graph.output(tuple(graph.call_function(functional.wait_tensor.default, (s,)) for s in started))
    gm = torch.fx.GraphModule({}, graph)
    Program(gm, [torch.ones(4), torch.ones(4)])  # leaves the facts on the nodes
    tally = run_pass(FuseDdpCommunication, gm)
    assert "fuse_gradient_all_reduces" not in tally.fired
    (declined,) = tally.declines.values()
    assert declined.reason.startswith("the operand is written before the wait, by add_")


def test_tensors_reduced_in_place_are_joined():
    """`for g in gradients: dist.all_reduce(g)`: written by the end of the graph, behind the wait."""

    def program(*gradients):
        for gradient in gradients:
            gradient.copy_(wait(all_reduce(gradient / 2)))
        return gradients[0] + 1

    inputs = [torch.ones(3), torch.ones(4, 2), torch.ones(5)]
    gm = captured(program, *inputs)
    expected = [torch.full_like(i, 1.5) for i in inputs]
    assert run_pass(FuseDdpCommunication, gm).fired["fuse_gradient_all_reduces"] == 1
    assert kinds(gm.graph) == ["all_reduce"]
    gm(*inputs)
    assert all(torch.equal(i, e) for i, e in zip(inputs, expected))


def test_results_that_leave_have_memory_of_their_own():
    gm = captured(lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y))), torch.ones(4), torch.ones(3))
    run_pass(FuseDdpCommunication, gm)
    first, second = gm(torch.ones(4), torch.ones(3))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == 16


def test_operands_of_later_gathers_move_before_the_bucket_and_nothing_else_does():
    def program(x, first, second):
        y = x @ wait(all_gather(first)).t()
        z = torch.exp(y)
        return z @ wait(all_gather(second.to(torch.float32) * 2))

    gm = captured(program, torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3, dtype=torch.float64))
    inputs = torch.rand(2, 3), torch.rand(4, 3), torch.rand(4, 3, dtype=torch.float64)
    before = gm(*inputs)
    assert run_pass(BucketAllGather, gm).fired.total() == 1
    names = [n.name for n in gm.graph.nodes]
    bucket = next(i for i, name in enumerate(names) if name.startswith("all_gather"))
    assert [n for n in names[:bucket] if n.startswith(("mm", "exp"))] == []
    assert torch.equal(gm(*inputs), before)


def test_an_unknown_way_to_join_is_an_error():
    gm = captured(lambda x: wait(all_reduce(x)), torch.ones(4))
    with pytest.raises(TriptychError, match="concatenation or by coalesced"):
        run_pass(FuseDdpCommunication, gm, options={"fuse_ddp_communication.by": "magic"})


@pytest.mark.parametrize("seconds", [-1, True, "10"])
def test_seconds_of_the_check_are_a_number(seconds):
    with pytest.raises(TriptychError, match="number of seconds"):
        Options.make({"spmd_check": seconds})


def backward(n):
    """Gradients of n layers, each reduced where it is computed."""

    def program(x, dy):
        gradients = []
        for i in range(n):
            gradients.append(wait(all_reduce(dy.t() @ x / 2)))
            dy = torch.tanh(dy) * i
        return gradients

    return captured(program, torch.ones(4, 8), torch.ones(4, 2))


def test_work_grows_with_the_number_of_collectives():
    def work(n):
        gm = backward(n)
        with counting_passes() as lines:
            post_grad_passes(gm, is_inference=True)
        assert len(kinds(gm.graph)) == 1
        return lines

    work(2)  # tables that are read once
    assert not grows(work(20), work(40))


def test_work_grows_with_the_number_of_buckets():
    def work(n):
        gm = backward(n)
        options = {"fuse_ddp_communication.megabytes": 2 * 64 / 2**20}
        lines = 0

        def count(frame, event, arg):
            nonlocal lines
            lines += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            run_pass(FuseDdpCommunication, gm, options=options)
        finally:
            sys.setprofile(before)
        assert len(kinds(gm.graph)) == n // 2
        return lines

    work(4)
    assert work(80) < 2.5 * work(40)


def test_memory_of_results_received_early_is_limited():
    """With room for two results of 256 bytes, the third gather starts when the first result is used up."""

    def program(x, a, b, c):
        for weight in (a, b, c):
            x = x @ wait(all_gather(weight)).t()
        return x

    gm = captured(program, torch.ones(2, 8), *[torch.ones(4, 8) for _ in range(3)])
    run_pass(OverlapScheduling, gm, options={"overlap_scheduling.megabytes": 2 * 256 / 2**20})
    order = [n.name.partition("_")[0] for n in gm.graph.nodes if n.name.startswith(("all", "wait", "mm"))]
    assert order == ["all", "all", "wait", "mm", "all", "wait", "mm", "wait", "mm"]
