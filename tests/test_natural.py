"""What the catalogue says of each pass, as somebody would write it: it fires by its name among all the others, through
`torch.compile` and through the plain function, and the results and gradients are eager's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from tests.compare import assert_close
from triptych.passes.session import watching


@dataclass(frozen=True)
class Natural:
    name: str
    program: Any
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    train: bool = True
    plain: bool = True
    """Fires in `pre_grad_passes` too, which takes no options."""

    def __str__(self) -> str:
        return self.name

    def inputs(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(shape) for shape in self.shapes]


def case(name: str, program: Any, *shapes: tuple[int, ...], **more: Any) -> Natural:
    return Natural(name, program, shapes, **more)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = lambda: (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4), nn.Sigmoid())  # noqa: E731
        self.towers = nn.ModuleList([nn.Sequential(*parts()) for _ in range(16)])

    def forward(self, x):
        return torch.cat([tower(x) for tower in self.towers], 1)


class SumOfLinears(nn.Module):
    """As many as would also make a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8) for _ in range(6)])

    def forward(self, x):
        return sum(layer(piece) for layer, piece in zip(self.layers, x.chunk(6, -1)))


class QueryKeyValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.query(x).relu(), self.key(x).relu(), self.value(x) * 2  # returned as they are, each would be copied


class Compressed(nn.Module):
    """A linear layer over the feature axis, returned as it is."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3, bias=bias)

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class SeveralCompressed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 8), nn.Linear(64, 4)

    def forward(self, x):
        turned = x.transpose(1, 2)
        return self.one(turned).transpose(1, 2), self.two(turned).transpose(1, 2)


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Linear(16, 3)

    def forward(self, x):
        return self.compress(x @ x.transpose(1, 2))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


class TurnedAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 64)

    def forward(self, x):
        return self.layer(x).permute(0, 2, 1).contiguous()


class TurnedBefore(TurnedAfter):
    def forward(self, x):
        return self.layer(x.permute(0, 2, 1))


def adds(name: str) -> dict[str, Any]:
    return {"add_passes": name}


FROZEN: dict[str, Any] = {"options": {"freeze": True}, "train": False, "plain": False}
STEPS = [
    case("normalization_pass_aten", lambda x: x.chunk(3, -1)[0] + 1, (4, 6)),
    case("normalize_node_kwargs_pass", lambda x: torch.sum(x, axis=-1), (4, 6)),
    case("remove_noop_pass", lambda x: x.view(x.shape) * 2, (4, 6)),
    case("relu_nan_to_num", lambda x: torch.nan_to_num(F.relu(x)), (4, 6), train=False),
    case("relu_nan_to_num", lambda x: torch.nan_to_num(x).relu(), (4, 6)),
    case("fuse_chunk_reshape_concat_pass", lambda x: torch.cat([p.reshape(-1) for p in x.chunk(3, 1)]) * 2, (4, 6)),
    case("group_batch_fusion_passes", Towers(), (16, 8)),
    case("fuse_chunk_squeeze_cat_pass", lambda x: torch.cat([p.squeeze(1) for p in x.chunk(3, 1)], 1), (4, 3, 5)),
    case("merge_concats_pass", lambda a, b: torch.cat([torch.cat([a, b], 1), a], 1), (4, 2), (4, 3)),
    case("fuse_split_linear_add_pass", SumOfLinears(), (64, 24)),
    case("remove_reshape_pass", lambda x: x.transpose(0, 1).relu().transpose(0, 1) + 1, (4, 6)),
    case("fuse_parallel_linear_pass", QueryKeyValue(), (2, 16), **FROZEN),
    case("remove_split_ops_pass", lambda x: torch.cat(x.split(2, 1), 1) + 1, (4, 6)),
    case("remove_split_ops_pass", lambda x: [p * 2 for h in x.split(3, 1) for p in h.split(1, 1)], (4, 6)),
    case("remove_split_ops_pass", lambda x, y: torch.cat([y, *x.split(2, 1)], 1), (4, 6), (4, 1)),
    case("stack_to_unsqueeze_pass", lambda x: torch.stack([x]) * 2, (4, 6)),
    case("stack_to_unsqueeze_pass", lambda x: torch.stack(x.unbind(0), 1), (4, 6)),
    case("fuse_chunk_reshape_unsqueeze_concat_pass",
         lambda x: torch.cat([p.reshape(2, 4).unsqueeze(1) for p in x.chunk(3, 1)], 1) * 2, (4, 6)),
]  # fmt: skip
OPTIONAL = [
    case("fuse_split_getitem_squeeze_cat",
         lambda x: torch.cat([x.split(1, 1)[i].squeeze(1) for i in (3, 0, 5, 1)], -1) + 1, (4, 6, 3)),
    case("use_triton_dot_compress", lambda x, w: x @ x.transpose(1, 2) @ w, (2, 16, 4), (16, 3)),
    case("use_triton_dot_compress", Interaction(), (2, 16, 4)),
    case("use_triton_lce_replace_simple_LCE", Compressed(bias=False), (2, 8, 5)),
    case("use_triton_lce_replace_simple_LCE", lambda x, w: (x.mT @ w.t()).mT, (2, 8, 5), (3, 8)),
    case("use_triton_lce_replace_normal_LCE", Compressed(), (2, 8, 5)),
    case("use_matmul_fuse_lce_replace_first_LCE", SeveralCompressed(), (64, 64, 64), train=False),
    case("use_matmul_lce_replace_normal_LCE", Compressed(), (2, 8, 5)),
]  # fmt: skip
ALSO = [
    case("sink_cat_after_pointwise", lambda x: torch.cat([p.relu() for p in x.split(2, 1)], 1), (4, 6)),
    case("linear_permute_fusion", TurnedAfter(), (8, 32, 16), train=False),
    case("permute_linear_fusion", TurnedBefore(), (16, 16, 32), train=False),
    case("permute_matmul_fusion", lambda x, y: x.transpose(1, 2).contiguous() @ y, (16, 64, 32), (16, 64, 8)),
    case("remove_identity", lambda x: F.dropout(x, 0.5, training=False) * 2, (4, 6)),
    case("fuse_conv_bn", Normed().eval(), (2, 3, 8, 8), **FROZEN),
    case("efficient_conv_bn_eval", Normed().eval(), (32, 3, 32, 32), options=adds("efficient_conv_bn_eval")),
    case("einsum_to_pointwise_pass", lambda x, y: torch.einsum("ij,ij->ij", x, y), (4, 6), (4, 6)),
    case("merge_getitem_cat_pass", lambda x: (lambda a, b, c: (torch.cat([a, b], 1), c * 2))(*x.split(2, 1)), (4, 6)),
    case("merge_stack_tanh_unbind_pass",
         lambda x: [r * 2 for r in torch.stack([p.squeeze(1) for p in x.split(1, 1)]).tanh().unbind()], (4, 6)),
    case("unbind_cat_to_view_pass", lambda x: torch.cat(x.unbind(1), 1) + 1, (3, 4, 5)),
    case("split_stack_to_cats_pass", lambda x: torch.stack(x.split(2, 1)) + 1, (4, 6)),
    case("unbind_stack_to_slices_pass", lambda x, y: torch.stack([y, *x.unbind()]), (4, 6), (6,)),
    case("unbind_stack_pass", lambda x: torch.stack(x.unbind(1)[1:3], 1) + 1, (4, 6)),
    case("move_reshape_out_of_split_stack_pass",
         lambda x: torch.stack([p.reshape(2, 4) for p in x.split(2, 1)]) + 1, (4, 6)),
    case("split_cat_pass", lambda x: torch.cat([p.t() for p in x.split(2, 1)]) + 1, (4, 6)),
]  # fmt: skip


def results(program: Any, given: list[torch.Tensor], train: bool) -> list[torch.Tensor]:
    inputs = [t.clone().requires_grad_(train) for t in given]
    with torch.set_grad_enabled(train):
        made = program(*inputs)
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    if not train:
        return outputs
    weights = list(program.parameters()) if isinstance(program, nn.Module) else []
    gradients = torch.autograd.grad([o.sin().sum() for o in outputs], [*inputs, *weights])
    return [*(o.detach() for o in outputs), *gradients]


def check(natural: Natural, compiled: Any, train: bool) -> None:
    given = natural.inputs()
    for want, got in zip(results(natural.program, given, train), results(compiled, given, train), strict=True):
        assert_close(got, want)
        assert got.stride() == want.stride() or train


def fired(sessions: list[Any], name: str) -> int:
    return sum(r.rewrites for s in sessions for r in s.records if r.name == name)


def with_options(natural: Natural) -> dict[str, Any]:
    optional = adds(natural.name) if natural in OPTIONAL else {}
    return {"codegen": "eager", **optional, **natural.options}


CASES = [*STEPS, *OPTIONAL, *ALSO]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("natural", CASES, ids=str)
def test_fires_in_the_whole_flow(natural, train):
    if train and not natural.train:
        pytest.skip("does not pay in training, or would change the gradient")
    torch._dynamo.reset()
    with watching() as sessions:
        compiled = torch.compile(natural.program, backend=triptych.compile_fx, options=with_options(natural))
        check(natural, compiled, train)
    assert fired(sessions, natural.name)


@pytest.mark.parametrize("natural", [c for c in CASES if c.plain], ids=str)
def test_fires_in_the_plain_function(natural):
    torch._dynamo.reset()
    sessions = []

    def backend(gm, inputs):
        added = natural.name if natural in OPTIONAL else natural.options.get("add_passes")
        with watching() as seen:
            optimized = triptych.pre_grad_passes(gm, inputs, add_passes=added)
        sessions.extend(seen)
        return optimized.forward

    check(natural, torch.compile(copy.deepcopy(natural.program), backend=backend), train=False)
    assert fired(sessions, natural.name)


@pytest.mark.parametrize("name", ["use_triton_lce_replace_normal_LCE", "use_matmul_lce_replace_normal_LCE"])
def test_modules_as_symbolic_trace_calls_them(name):
    module, x = Compressed(), torch.randn(2, 8, 5)
    with watching() as sessions:
        gm = triptych.pre_grad_passes(torch.fx.symbolic_trace(module), [x], add_passes=name)
    assert fired(sessions, name)
    torch.testing.assert_close(gm(x), module(x))
