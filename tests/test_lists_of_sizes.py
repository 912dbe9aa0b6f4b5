"""Sizes, shapes and lists of numbers that a single node computes, as `y.size()` does in a graph with symbolic sizes.

Every operation that takes such a list is called with one: no rule may raise, and results must be those of eager.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.fx.proxy import TraceError

import triptych
from triptych.ir.calls import read

aten = torch.ops.aten


def _parts(y):
    """A vector that can be split into pieces of the sizes of y."""
    return torch.cat([y.flatten()] * 3)[: sum(y.shape)]


SHAPES = {
    "torch.broadcast_to": lambda x, y: torch.broadcast_to(x, y.shape) * 2,
    "broadcast_to": lambda x, y: x.broadcast_to(y.size()) * 2,
    "broadcast_to by keyword": lambda x, y: torch.broadcast_to(x, size=y.size()) * 2,
    "broadcast_to of the class": lambda x, y: torch.Tensor.broadcast_to(x, y.shape) * 2,
    "aten.broadcast_to": lambda x, y: aten.broadcast_to.default(x, y.size()) * 2,
    "expand": lambda x, y: x.expand(y.shape) * 2,
    "expand by keyword": lambda x, y: x.expand(size=y.size()) * 2,
    "expand, summed": lambda x, y: x.expand(y.size()).sum(-1),
    "expand to a part": lambda x, y: x[..., 0].expand(y.size()[:2]) * 2,
    "expand to more dims": lambda x, y: x.expand((1,) + y.size()) * 2,
    "expand_copy": lambda x, y: torch.expand_copy(x, y.size()) * 2,
    "aten.expand": lambda x, y: aten.expand.default(x, y.size()) * 2,
    "view": lambda x, y: (x + y).view(y.shape) * 2,
    "view by keyword": lambda x, y: (y + 1).view(size=y.size()) * 2,
    "view_copy": lambda x, y: torch.view_copy(y, y.size()) * 2,
    "aten.view": lambda x, y: aten.view.default(y, y.size()) * 2,
    "torch.reshape": lambda x, y: torch.reshape(y + 1, y.size()) * 2,
    "reshape by keyword": lambda x, y: torch.reshape(y + 1, shape=y.size()) * 2,
    "unflatten": lambda x, y: (y + 1).flatten().unflatten(0, y.size()) * 2,
    "torch.unflatten": lambda x, y: torch.unflatten((y + 1).flatten(), dim=0, sizes=y.size()) * 2,
    "as_strided": lambda x, y: (y + 1).as_strided(y.size(), y.stride()) * 2,
    "torch.as_strided": lambda x, y: torch.as_strided(y + 1, y.size(), y.stride()) * 2,
    "resize_": lambda x, y: (y + 1).clone().resize_(y.size()) * 2,
    "sum_to_size": lambda x, y: (x + y).sum_to_size(x.size()) * 2,
    "zeros": lambda x, y: torch.zeros(y.size()) + y,
    "zeros by keyword": lambda x, y: torch.zeros(size=y.size(), dtype=torch.float64) + y,
    "ones": lambda x, y: torch.ones(y.size()) + y,
    "empty": lambda x, y: torch.empty(y.size()).fill_(1) + y,
    "empty_strided": lambda x, y: torch.empty_strided(y.size(), y.stride()).fill_(2) + y,
    "full": lambda x, y: torch.full(y.size(), 2.0) + y,
    "full by keyword": lambda x, y: torch.full(size=y.size(), fill_value=2.0) + y,
    "aten.full": lambda x, y: aten.full.default(y.size(), 2.0) * y,
    "new_zeros": lambda x, y: x.new_zeros(y.size()) + y,
    "new_zeros by keyword": lambda x, y: x.new_zeros(size=y.size()) + y,
    "new_ones": lambda x, y: x.new_ones(y.size()) + y,
    "new_full": lambda x, y: x.new_full(y.size(), 3.0) + y,
    "new_empty_strided": lambda x, y: y.new_empty_strided(y.size(), y.stride()).fill_(2) + y,
    "rand": lambda x, y: torch.rand(y.size()) * 0 + y,
    "randint": lambda x, y: torch.randint(0, 1, y.size()) + y,
    "normal": lambda x, y: torch.normal(0.0, 1.0, y.size()) * 0 + y,
}

OTHER_LISTS = {
    "repeat": lambda x, y: x.repeat(y.size()) * 2,
    "repeat by keyword": lambda x, y: x.repeat(repeats=y.size()) * 2,
    "tile": lambda x, y: torch.tile(x, dims=y.size()) * 2,
    "split": lambda x, y: torch.cat([p * 2 for p in _parts(y).split(y.size())]),
    "split by keyword": lambda x, y: torch.cat([p * 2 for p in torch.split(_parts(y), split_size_or_sections=y.size())]),
    "split_with_sizes": lambda x, y: torch.cat([p * 2 for p in _parts(y).split_with_sizes(y.size())]),
    "tensor_split": lambda x, y: [p * 2 for p in torch.tensor_split(y.flatten(), y.size())],
    "roll": lambda x, y: torch.roll(y + 1, y.size(), (0, 1, 2)) * 2,
    "pad": lambda x, y: F.pad(y, y.size()[:2]) * 2,
    "pad of several lists": lambda x, y: F.pad(y, y.size() + (1,)) * 2,
    "constant_pad_nd": lambda x, y: torch.constant_pad_nd(y, y.size()[:2], 0) * 2,
    "layer_norm": lambda x, y: F.layer_norm(y, normalized_shape=y.size()[1:]) * 2,
    "rms_norm": lambda x, y: F.rms_norm(y, y.size()[1:]) * 2,
    "interpolate": lambda x, y: F.interpolate(y[None], y.size()[1:], mode="bilinear") * 2,
    "adaptive_avg_pool2d": lambda x, y: F.adaptive_avg_pool2d(y, y.size()[1:]) * 2,
    "fftn": lambda x, y: torch.fft.fftn(y, s=y.size()).real * 2,
}

PROGRAMS = SHAPES | OTHER_LISTS
STRICT = {"codegen": "eager", "on_error": "raise", "verify": "each"}


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 1, 3, generator=generator), torch.randn(4, 2, 3, generator=generator)


@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name, caplog):
    caplog.set_level(logging.WARNING, logger="triptych")
    compiled = torch.compile(PROGRAMS[name], backend=triptych.compile_fx, options=STRICT, dynamic=True)
    torch.testing.assert_close(compiled(*inputs()), PROGRAMS[name](*inputs()))
    assert not [r.getMessage() for r in caplog.records if r.name.startswith("triptych")]


def test_no_rule_raises_without_shapes():
    """A graph of `torch.fx` may go through stage 1 without any shapes."""
    for name, program in PROGRAMS.items():
        try:
            gm = torch.fx.symbolic_trace(program)
        except (TraceError, TypeError):
            continue
        gm = triptych.pre_grad_passes(gm)
        assert gm(*inputs()) is not None, name


class TestReading:
    def captured(self, function):
        graphs = []

        def keep(gm, example_inputs):
            graphs.append(gm)
            return gm.forward

        torch.compile(function, backend=keep, dynamic=True)(*inputs())
        return graphs[0]

    @pytest.mark.parametrize("name", ["torch.broadcast_to", "broadcast_to", "expand"])
    def test_one_node_for_all_sizes(self, name):
        (node,) = [n for n in self.captured(SHAPES[name]).graph.nodes if name.rpartition(".")[2] in n.name]
        call = read(node)
        assert call.op == "expand" and isinstance(call.args["size"], list) and len(call.args["size"]) == 3

    def test_a_list_of_repeats(self):
        (node,) = self.captured(OTHER_LISTS["repeat"]).graph.find_nodes(op="call_method", target="repeat")
        assert isinstance(node.args[1], torch.fx.Node)
        assert isinstance(read(node).args["repeats"], list)

    def test_an_unknown_node_stays(self):
        gm = torch.fx.symbolic_trace(lambda x, n: x.repeat(n))
        (node,) = gm.graph.find_nodes(op="call_method", target="repeat")
        assert isinstance(read(node).args["repeats"], torch.fx.Node)
