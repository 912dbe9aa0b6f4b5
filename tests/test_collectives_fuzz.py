"""Random programs with collectives: whatever is joined and moved, the results stay the same."""

from __future__ import annotations

import random

import pytest
import torch

from triptych.communication.example_group import NAME, OTHER, all_gather, all_reduce, reduce_scatter, wait
from triptych.ir.collectives import collectives, is_wait
from triptych.options import LINKS
from triptych.post_grad.bucket_all_gather import BucketAllGather
from triptych.post_grad.bucket_all_reduce import BucketAllReduce
from triptych.post_grad.bucket_reduce_scatter import BucketReduceScatter
from triptych.post_grad.dedup_reduce_scatters import DedupReduceScatters
from triptych.post_grad.deduplicate_wait_tensors import DeduplicateWaitTensors
from triptych.post_grad.fuse_ddp_communication import FuseDdpCommunication
from triptych.post_grad.overlap_scheduling import OverlapScheduling
from triptych.post_grad.reinplace import Reinplace
from triptych.testing.capture import capture_aten
from triptych.testing.check import run_pass
from triptych.verify.structure import verify

BUCKETS = (FuseDdpCommunication, BucketAllGather, BucketReduceScatter, BucketAllReduce)
SIZE = 4


def random_program(seed):
    """A program over matrices of one size; some results are waited for late, and some inputs are written."""
    choose = random.Random(seed)
    steps = [
        (choose.choice(("all_reduce", "all_gather", "reduce_scatter", "mm", "tanh", "add", "twice", "row", "overwritten")),
         choose.random(), choose.random(), choose.choice(("sum", "max")), choose.choice((NAME, OTHER)), choose.random())
        for _ in range(choose.randint(6, 24))
    ]  # fmt: skip
    writes = choose.random() < 0.3

    def program(*inputs):
        pool, pending = list(inputs), []
        for kind, first, second, reduction, group, late in steps:
            x, y = pool[int(first * len(pool))], pool[int(second * len(pool))]
            if kind == "mm":
                pool.append(torch.tanh(x @ y))
            elif kind == "add":
                pool.append(x * 0.5 + y)
            elif kind == "tanh":
                pool.append(torch.tanh(x))
            elif kind == "row":
                pool.append(torch.index_put(x, [torch.tensor([1])], y[:1]))
            else:
                if kind == "overwritten":  # the operand is needed for nothing else than to be written
                    operand = x + 1
                    started, finish = all_gather(operand), lambda w: w[:SIZE] + w[SIZE:]
                    pool.append(torch.index_put(operand, [torch.tensor([2])], y[:1]))
                elif kind == "all_reduce":
                    started, finish = all_reduce(x, reduction, group), lambda w: w / 2
                elif kind == "all_gather":
                    started, finish = all_gather(x), lambda w: w[:SIZE] - w[SIZE:]
                elif kind == "reduce_scatter":
                    started, finish = reduce_scatter(x, reduction), lambda w: torch.cat([w, w * 2])
                else:
                    started, finish = reduce_scatter(x), lambda w: torch.cat([w, w])
                pending.append((started, finish))
                if kind == "twice":
                    pending.append((reduce_scatter(x), lambda w: torch.cat([w * 2, w])))
            while pending and (late < 0.6 or len(pending) > 3):
                started, finish = pending.pop(0)
                pool.append(finish(wait(started)))
        pool += [finish(wait(started)) for started, finish in pending]
        if writes:
            inputs[0].copy_(pool[-1])
        return pool[-1].sum(), *pool[len(inputs) :: 3]

    return program


@pytest.mark.parametrize("seed", range(40))
def test_results_stay_the_same(seed):
    choose = random.Random(1000 + seed)
    inputs = [torch.randn(SIZE, SIZE) for _ in range(3)]
    gm, _ = capture_aten(random_program(seed), inputs)
    given, again = ([i.clone() for i in inputs] for _ in range(2))
    expected = gm(*given)
    before = len(list(collectives(gm.graph)))
    options = {"codegen": "eager", "overlap_scheduling.megabytes": choose.choice((1e-4, 512.0))}
    for bucket in BUCKETS:
        options[f"{bucket.name}.megabytes"] = choose.choice((2e-4, 25.0))
        options[f"{bucket.name}.by"] = choose.choice(("concatenation", "coalesced"))
    options["link"] = choose.choice(LINKS)
    chosen = [b for b in BUCKETS if choose.random() < 0.7]
    for subject in (DeduplicateWaitTensors, DedupReduceScatters, *chosen, OverlapScheduling, Reinplace):
        run_pass(subject, gm, options=options)
        gm.graph.lint()
        verify(gm)
    got = gm(*again)
    assert len(list(collectives(gm.graph))) <= before
    for mine, theirs in zip((*got, *again), (*expected, *given)):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    started = {node for c in collectives(gm.graph) for node in c.results}
    for node in started:  # nobody reads a result before it has arrived
        assert all(is_wait(user) for user in node.users)
