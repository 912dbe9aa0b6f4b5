"""The cost model of communication, and what bucketing and overlap decide by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from triptych.communication.costs import compute_seconds
from triptych.communication.example_group import NAME, all_gather, all_reduce, register, wait
from triptych.cost.communication import LINKS, communication_cost, large_enough, link_of
from triptych.errors import TriptychError
from triptych.ir.collectives import collectives
from triptych.options import LINKS as names_of_links
from triptych.options import Options
from triptych.post_grad.bucket_all_gather import BucketAllGather
from triptych.post_grad.fuse_ddp_communication import FuseDdpCommunication
from triptych.post_grad.overlap_scheduling import OverlapScheduling
from triptych.testing.capture import capture_aten
from triptych.testing.check import run_pass

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def captured(program, *inputs):
    return capture_aten(program, inputs)[0]


def test_figures_by_hand():
    """8 ranks on a link of 40e9 bytes/s, 4 us a step, 12 us to start: 7 steps there, 7/8 of the bytes."""
    cost = communication_cost("all_gather", 80_000_000, 8, LINKS["infiniband"])
    assert cost.algorithm == "ring"
    assert cost.seconds == pytest.approx(12e-6 + 7 * 4e-6 + 70e6 / 40e9)
    twice = communication_cost("all_reduce", 80_000_000, 8, LINKS["infiniband"])
    assert twice.seconds == pytest.approx(12e-6 + 14 * 4e-6 + 140e6 / 40e9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", LINKS.values(), ids=lambda link: link.name)
def test_small_tensors_go_by_tree_and_large_ones_by_ring(kind, link):
    assert communication_cost(kind, 8, 64, link).algorithm == "tree"
    assert communication_cost(kind, 1 << 33, 64, link).algorithm == "ring"


@pytest.mark.parametrize("kind", KINDS)
def test_more_costs_more(kind):
    for link in LINKS.values():
        by_size = [communication_cost(kind, 1 << i, 8, link).seconds for i in range(10, 31)]
        by_ranks = [communication_cost(kind, 1 << 20, 1 << i, link).seconds for i in range(1, 11)]
        assert by_size == sorted(by_size) and by_ranks == sorted(by_ranks)


@pytest.mark.parametrize("link", LINKS.values(), ids=lambda link: link.name)
@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_a_bucket_is_large_enough_when_starting_it_hardly_counts(link, ranks):
    size = large_enough("all_gather", ranks, link, 0.05)
    fixed = communication_cost("all_gather", 0, ranks, link).seconds
    assert 0.02 < fixed / communication_cost("all_gather", size, ranks, link).seconds <= 0.0501
    assert math.isfinite(size) and size > 0


def test_every_link_is_an_option():
    assert Options.make({"link": "pcie"}).link == "pcie"
    assert list(LINKS) == list(names_of_links[1:])
    with pytest.raises(TriptychError, match="infiniband"):
        Options.make({"link": "infinband"})


def test_links_by_what_they_connect():
    assert link_of("auto", "cpu", 4).name == "memory"
    assert link_of("auto", "cuda", 8).name == "nvlink"
    assert link_of("auto", "cuda", 16).name == "infiniband"
    assert link_of("ethernet", "cuda", 2).name == "ethernet"
    with pytest.raises(TriptychError, match="infiniband"):
        link_of("infinband", "cuda", 2)


def test_figures_do_not_depend_on_this_process():
    """Ranks may have other numbers of threads, and must decide alike."""
    gm = captured(lambda x: x @ x, torch.ones(64, 64))
    (product,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    threads = torch.get_num_threads()
    try:
        figures = set()
        for count in (1, 2):
            torch.set_num_threads(count)
            figures.add(compute_seconds(product))
    finally:
        torch.set_num_threads(threads)
    assert len(figures) == 1


def gathers(count, size):
    def program(*weights):
        return tuple(wait(all_gather(weight)) + 1 for weight in weights)

    return captured(program, *[torch.ones(size) for _ in range(count)])


@pytest.mark.parametrize(("link", "buckets"), [("nvlink", 1), ("memory", 4)])
def test_a_bucket_closes_when_it_is_large_enough(link, buckets):
    """Eight gathers of 3 MB: on a link that starts slowly for its bandwidth, 24 MB still gain; on a slow one 6 do not."""
    gm = gathers(8, 3 * 2**17)
    options = {"link": link, "bucket_all_gather.by": "coalesced"}
    tally = run_pass(BucketAllGather, gm, options=options)
    assert len(list(collectives(gm.graph))) == buckets
    assert len(tally.decisions) == buckets
    for decision in tally.decisions:
        assert 0 < decision.after < 0.95 * decision.before


def test_what_would_not_pay_is_declined_with_both_figures():
    """Two gradients of 4 MB: copying them costs more than the second start."""
    gm = captured(lambda x, y: (wait(all_reduce(x)), wait(all_reduce(y))), torch.ones(2**20), torch.ones(2**20))
    tally = run_pass(FuseDdpCommunication, gm)
    (declined,) = [d for d in tally.declines.values() if d.rule == "fuse_gradient_all_reduces"]
    assert "would cost" in declined.reason and "modelled" in declined.reason
    coalesced = run_pass(FuseDdpCommunication, gm, options={"fuse_ddp_communication.by": "coalesced"})
    assert coalesced.fired["fuse_gradient_all_reduces"] == 0  # nothing is copied, but a start is hardly anything of 3 ms
    assert len(list(collectives(gm.graph))) == 2


def chain(x, shard):
    """Four products, then a gathered weight; the shard is there from the beginning."""
    for _ in range(4):
        x = x @ x
    return x @ wait(all_gather(shard)).t()


def names(gm):
    return [n.name.partition("_")[0] for n in gm.graph.nodes if n.name.startswith(("all", "wait", "mm"))]


def test_a_collective_starts_just_early_enough():
    """A product of this size hides the gather by far: it starts before the last one, and needs its memory no earlier."""
    gm = captured(chain, torch.ones(512, 512), torch.ones(8, 512))
    tally = run_pass(OverlapScheduling, gm)
    assert names(gm) == ["mm", "mm", "mm", "all", "mm", "wait", "mm"]
    (decision,) = tally.decisions
    assert decision.before > 0 == decision.after


def test_a_collective_that_nothing_hides_starts_as_early_as_it_can():
    gm = captured(chain, torch.ones(8, 8), torch.ones(512, 8))
    tally = run_pass(OverlapScheduling, gm)
    assert names(gm) == ["all", "mm", "mm", "mm", "mm", "wait", "mm"]
    (decision,) = tally.decisions
    assert 0 < decision.after < decision.before


def test_collectives_that_follow_each_other_leave_time_for_each_other():
    """Links carry one after the other: the first must be done before the second has to start."""

    def program(x, first, second):
        for _ in range(4):
            x = x @ x
        return x @ wait(all_gather(first)).t() @ wait(all_gather(second))

    gm = captured(program, torch.ones(128, 128), *[torch.ones(64, 128) for _ in range(2)])
    run_pass(OverlapScheduling, gm)
    assert names(gm) == ["all", "mm", "all", "mm", "mm", "mm", "wait", "mm", "wait", "mm"]


class Shard(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(4, 8)) for _ in range(2))

    def forward(self, x):
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        return torch.tanh(x @ wait(gather(self.first, 2, NAME)).t()) @ wait(gather(self.second, 2, NAME))


def test_buckets_of_modules_that_dynamo_notes():
    """What `nn_module_stack` says after Dynamo and AOTAutograd: one bucket for each layer of a list."""
    from triptych import make_backend

    seen = []

    def compiler(gm, inputs):
        seen.append(len(list(collectives(gm.graph))))
        return gm.forward

    register()
    model = nn.Sequential(*[Shard() for _ in range(3)])
    options = {"codegen": "eager", "add_passes": ["bucket_all_gather"], "on_error": "raise"}

    def backend(**more):
        return lambda gm, inputs: make_backend(compiler)(gm, inputs, options={**options, **more})

    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        for more in ({}, {"bucket_all_gather.group_by": "module"}):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(model, backend=backend(**more))(x), expected)
    assert seen == [1, 3]
