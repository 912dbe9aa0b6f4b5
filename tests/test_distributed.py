"""Programs of several ranks, compiled and not: two processes with gloo, each test with a time limit of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.rank_programs import ALL_PASSES
from tests.ranks import ROOT, run_ranks

LAYER_BYTES = 4 * (16 * 16 + 16)
FOUR_LAYERS = 4 * LAYER_BYTES / 2**20


def assert_trained_alike(outcome):
    """Up to rounding: gradients of the same layers are computed by other operations, the sum of two ranks is exact."""
    wanted, got = outcome["wanted"], outcome["got"]
    torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(wanted["losses"]), rtol=1e-6, atol=1e-7)
    assert len(got["gradients"]) == len(wanted["gradients"])
    for mine, theirs in zip(got["gradients"], wanted["gradients"]):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-7)


def test_gradients_of_ddp_are_reduced_in_buckets():
    """12 layers have 24 parameters: one all-reduce each, of which buckets of four layers make three."""
    for outcome in run_ranks("ddp", **{"fuse_ddp_communication.megabytes": FOUR_LAYERS}):
        assert_trained_alike(outcome)
        assert (outcome["before"], outcome["after"]) == ([24], [3])
        order = outcome["order"]
        last_product = max(i for i, word in enumerate(order) if word == "mm")
        assert sum(word == "all_reduce" for word in order[:last_product]) == 2  # while others are computed
        assert order[last_product + 1 :] == ["all_reduce", "wait", "wait", "wait"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["concatenation", "coalesced"])
def test_a_small_model_is_one_bucket(by):
    for outcome in run_ranks("ddp", **{"fuse_ddp_communication.by": by}):
        assert_trained_alike(outcome)
        assert (outcome["before"], outcome["after"]) == ([24], [1])


@pytest.mark.slow
def test_kernels_of_inductor_reduce_the_same_gradients():
    """DistributedDataParallel turns Inductor's own pass of this name on: it must stay off."""
    for outcome in run_ranks("ddp", layers=2, kernels=True, seconds=300):
        assert_trained_alike(outcome)
        assert outcome["before"] == [4]


@pytest.mark.slow
def test_sharded_blocks():
    """Dynamo does not trace the hooks of `fully_shard`: blocks are compiled, and communicate outside of the graphs."""
    for outcome in run_ranks("fsdp"):
        assert_trained_alike(outcome)
        assert outcome["graphs"] > 0
        assert outcome["before"] == []


@pytest.mark.slow
def test_four_ranks():
    for outcome in run_ranks("ddp", ranks=4, layers=4):
        assert_trained_alike(outcome)
        assert (outcome["before"], outcome["after"]) == ([8], [1])


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_layers_of_four_ranks(sequence):
    """Five training steps, by gloo, are those of the uncompiled layers."""
    for outcome in run_ranks("tensor_parallel", ranks=4, sequence=sequence, add_passes=ALL_PASSES):
        assert_trained_alike(outcome)
        assert outcome["before"] == outcome["after"] == ([2, 1] if sequence else [1])


@pytest.mark.slow
def test_products_of_four_ranks_are_computed_while_they_communicate():
    for outcome in run_ranks("symmetric", ranks=4, dim=1):
        assert_trained_alike(outcome)
        assert outcome["after"] == [] and len(outcome["order"]) == 3


@pytest.mark.slow
def test_sharded_blocks_of_four_ranks():
    for outcome in run_ranks("fsdp", ranks=4):
        assert_trained_alike(outcome)


def test_tensor_parallel_layers():
    for outcome in run_ranks("tensor_parallel"):
        assert outcome["got"] == outcome["wanted"]
        assert outcome["before"] == outcome["after"] == [1]


@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_products_are_computed_while_ranks_communicate(dim):
    """Layers gather their input and scatter their result, and the backward gathers its gradient: operators that torch's
    substitutes compute on the CPU."""
    for outcome in run_ranks("symmetric", dim=dim):
        assert_trained_alike(outcome)
        assert outcome["before"] == [2, 1]
        assert outcome["after"] == []
        gather, scatter = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
        assert outcome["order"] == [gather, scatter, gather]


def assert_fused(outcomes):
    """One operator communicates, and computes what plain torch does up to the rounding of bfloat16."""
    assert len(outcomes) >= 10
    for name, outcome in outcomes.items():
        (operator,) = outcome["operators"]
        assert operator.startswith("fused_"), name
        assert outcome["same_layout"] and outcome["off"] < 0.02, (name, outcome)


@pytest.mark.slow
def test_every_form_of_a_fused_operator():
    """On the CPU, by torch's substitutes; `tests/gpu` has the operators themselves."""
    for outcomes in run_ranks("fused_operators"):
        assert_fused(outcomes)


@pytest.mark.slow
def test_sequence_parallel_layers():
    for outcome in run_ranks("tensor_parallel", sequence=True, add_passes=ALL_PASSES):
        assert outcome["got"] == outcome["wanted"]
        assert outcome["before"] == outcome["after"] == [2, 1]


def test_gathers_and_scatters_of_shards_are_joined():
    """Four layers gather their weight and scatter its gradient; an all-reduce stands at the end."""
    for outcome in run_ranks("sharded_by_hand", add_passes=ALL_PASSES):
        assert outcome["got"] == outcome["wanted"]
        assert (outcome["before"], outcome["after"]) == ([9], [3])
        assert outcome["order"][0] == "all_gather"
        assert outcome["order"][-4:] == ["reduce_scatter", "all_reduce", "wait", "wait"]


def test_ranks_with_other_collectives_all_raise():
    for error in run_ranks("mismatch"):
        assert "ranks 0 and 1 have compiled different collectives, 1 and 2 of them" in error


@pytest.mark.slow
def test_a_rank_that_does_not_compile_is_an_error_in_time():
    error, _ = run_ranks("mismatch", absent=True, limit=3)
    assert "rank 1 has not compiled such a graph within 3 s" in error


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_a_rank_that_dies_is_an_error_on_the_others(tensor_parallel):
    error, _ = run_ranks("dying", seconds=90, tensor_parallel=tensor_parallel)
    assert error.startswith("step 2: ")


@pytest.mark.slow
def test_the_work_does_not_depend_on_the_number_of_ranks():
    """On the fake process group: as many lines of Python with 1,024 ranks as with 8, and the same graph."""
    ((few, many),) = run_ranks("fake_group", ranks=1)
    assert few == many
    assert few[0]["post_grad/bucket_all_gather"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["ddp.py"], ["24 collectives in a graph\n1 collectives in a graph", "all ranks have the same weights: True"]),
        (["tensor_parallel.py"], ["loss and gradients are those of the uncompiled model"]),
        (["tensor_parallel.py", "--sequence"], ["reduce_scatter", "those of the uncompiled model"]),
    ],
)
def test_examples_run_by_torchrun(arguments, wanted):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / arguments[0]), *arguments[1:], "--codegen", "eager"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*launcher, *script], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(text in done.stdout for text in wanted), done.stdout
