"""Random taking apart and putting together: the algebra alone against torch, and whole programs with writes."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests.fuzzing import QUICK, choose_from
from triptych.pieces.blocks import Block, neighbours_joined, progressions_joined
from triptych.pieces.index_map import IndexMap
from triptych.pieces.plan import plan
from triptych.pieces.read import Way
from triptych.testing.check import compare_graphs
from triptych.testing.fuzz import random_program

# ---- the algebra alone ----


def random_step(choose, tensor, index_map):
    """A view of the tensor, and what the algebra makes of it."""
    rank = tensor.dim()
    kind = choose(9) if rank else choose(2)
    if kind == 0:
        dim = choose(rank + 1)
        return tensor.unsqueeze(dim), index_map.unsqueeze(dim)
    if kind == 1:
        return tensor.squeeze(), index_map.squeeze(range(rank))
    dim = choose(rank)
    size = tensor.shape[dim]
    if kind == 2:
        dims = sorted(range(rank), key=lambda d: (choose(5), d))
        return tensor.permute(dims), index_map.permute(dims)
    if kind in (3, 4):
        start = choose(size)
        places = range(start, start + 1 + choose(size - start), 1 + choose(3))
        index = (*(slice(None),) * dim, slice(places.start, places.stop, places.step))
        return tensor[index], index_map.slice(dim, places.start, len(places), places.step)
    if kind == 5:
        start = choose(size)
        return tensor.select(dim, start), index_map.select(dim, start)
    if kind == 6:
        return tensor.flip([dim]), index_map.flip([dim])
    if kind == 7:
        shape = [1 + choose(3) if n == 1 else n for n in tensor.shape]
        return tensor.expand(shape), index_map.expand(shape)
    shape, left = [], tensor.numel()
    while left > 1 and len(shape) < 4:
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        shape.append(divisors[choose(len(divisors))])
        left //= shape[-1]
    shape.append(left)
    return tensor.reshape(shape), index_map.reshape(shape)


def run_plan(source, steps):
    """What `build` does, on a real tensor."""
    value = source
    for name, args in steps:
        if name == "slice":
            dims = (slice(None),) * args["dim"]
            value = value[(*dims, slice(args["start"], args["end"], args["step"]))]
        else:
            value = getattr(torch, name, getattr(torch.Tensor, name))(value, *args.values())
    return value


def random_view(choose, source, steps=5):
    tensor, index_map = source, IndexMap.whole("source", tuple(source.shape))
    for _ in range(choose(steps + 1)):
        seen, found = random_step(choose, tensor, index_map)
        if found is not None:
            tensor, index_map = seen, found
        assert tuple(tensor.shape) == index_map.shape
    return tensor, index_map


def random_source(choose):
    shape = [(1, 2, 3, 4, 6, 8)[choose(6)] for _ in range(choose(4))]
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@QUICK
@given(st.data())
def test_a_plan_makes_what_the_operations_made(data):
    choose = choose_from(data)
    source = random_source(choose)
    tensor, index_map = random_view(choose, source)
    steps = plan(index_map)
    if steps is None:  # a part of a part whose rest was cut off
        reject()
    made = run_plan(source, steps)
    assert made.shape == tensor.shape and torch.equal(made, tensor)


@QUICK
@given(st.data())
def test_blocks_put_together_are_what_cat_makes(data):
    choose = choose_from(data)
    source = random_source(choose)
    tensor, index_map = random_view(choose, source, steps=3)
    if not tensor.dim():
        reject()
    along = choose(tensor.dim())
    width = 1 + choose(2)
    starts = [choose(max(tensor.shape[along] - width + 1, 1)) for _ in range(1 + choose(6))]
    if choose(2):
        starts = list(range(0, tensor.shape[along] - width + 1, 1 + choose(3))) or [0]
    pieces = []
    for start in starts[:: -1 if choose(2) else 1]:
        size = min(width, tensor.shape[along])
        found = index_map.slice(along, start, size)
        if found is None:
            reject()
        pieces.append((tensor.narrow(along, start, size), found))
    axis = choose(tensor.dim())
    blocks = [Block(m, (Way(m, frozenset(), ()),)) for _, m in pieces]
    found = progressions_joined(neighbours_joined(blocks, axis), axis)
    plans = [plan(block.map) for block in found]
    if None in plans:
        reject()
    made = torch.cat([run_plan(source, steps) for steps in plans], axis)
    assert torch.equal(made, torch.cat([t for t, _ in pieces], axis))
    assert sum(block.count for block in found) == len(pieces)


# ---- whole programs ----


FIRST_SERVED = ("remove_split_ops_pass", "stack_to_unsqueeze_pass", "remove_reshape_pass", "split_cat_pass")
"""Passes that leave little to the later ones: with and without them."""


@QUICK
@given(st.data(), st.sets(st.sampled_from(FIRST_SERVED)))
def test_pieces_with_writes_keep_their_meaning(data, removed):
    gm, inputs = random_program(choose_from(data), steps=9, taking_apart=True)
    before = copy.deepcopy(gm)
    after = triptych.pre_grad_passes(gm, inputs, "fuse_split_getitem_squeeze_cat", sorted(removed))
    compare_graphs(before, after, inputs)


@QUICK
@given(st.data(), st.sampled_from(["fake", "symbolic"]))
def test_pieces_in_aten_keep_their_meaning(data, mode):
    gm, inputs = random_program(choose_from(data), steps=7, taking_apart=True)
    try:
        with torch.no_grad():
            traced = make_fx(torch.func.functionalize(gm), tracing_mode=mode)(*[t.clone() for t in inputs])
    except (IndexError, RuntimeError):  # some releases of torch cannot trace every split
        reject()
    before = copy.deepcopy(traced)
    compare_graphs(before, triptych.pre_grad_passes(traced), inputs)
