"""Operations that look at more of a tensor than its values see what they see in eager.

A custom operator may read strides and storage offset; `as_strided` addresses memory by them.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych.ir.program import Program
from triptych.testing.check import compare


@torch.library.custom_op("triptych_tests::place", mutates_args=())
def place(x: torch.Tensor) -> torch.Tensor:
    """Storage offset and strides of the operand."""
    return torch.tensor([x.storage_offset(), *x.stride()])


@place.register_fake
def _(x):
    return torch.empty(1 + x.dim(), dtype=torch.long)


see = torch.ops.triptych_tests.place


def condition_on(x):
    return torch.cond(x.sum() > 0, lambda y: see(y), lambda y: see(y) + 1, (x.clone(),))


PROGRAMS = {
    "clone": lambda x: see(x.clone()),
    "called by overload": lambda x: see.default(x.clone()),
    "clone of slice": lambda x: see(x[1:].clone()),
    "view of clone": lambda x: see(x.clone().view(-1)[2:]),
    "views of views of clone": lambda x: see(x.clone().view(8, 4).t()[1:].unsqueeze(0)),
    "pieces put together": lambda x: see(torch.cat([x[0:2], x[2:4]])),
    "some pieces put together": lambda x: see(torch.cat([(x * 2)[1:2], (x * 2)[2:3]])),
    "piece of a cat": lambda x: see(torch.cat([x, x * 2])[4:]),
    "unbound and stacked": lambda x: see(torch.stack(x.unbind(0))),
    "contiguous": lambda x: see((x * 2)[1:].contiguous()),
    "times one": lambda x: see(x * 1),
    "plus zero": lambda x: see(x[1:].long() + 0),
    "casts": lambda x: see(x[1:].to(torch.float64).to(torch.float32)),
    "dims of size one": lambda x: see(x[:, None].permute(1, 0, 2).clone()),
    "strides of dims of size one": lambda x: see(x[:1].as_strided((1, 8), (3, 1)).clone()),
    "expanded": lambda x: see(x[:1].expand(1, 8).clone()),
    "reshaped and back": lambda x: see(x.clone().reshape(8, 4).reshape(4, 8)),
    "several products": lambda x: [see(x @ torch.full((8, 8), float(i))) for i in range(4)],
    "as_strided of clone": lambda x: x[1:].clone().as_strided((2, 2), (1, 1), 0) + 0,
    "as_strided of times one": lambda x: torch.as_strided(x * 1, (2, 2), (1, 1), 1) + 0,
    "as_strided of a view of clone": lambda x: x[1:].clone().view(-1).as_strided((2, 2), (1, 1), 3) + 0,
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x[1:].clone(), torch.ones(2), (2,), (1,), 2) * 2,
    "complex": lambda x: torch.view_as_complex(x.view(-1)[1:-1].clone().view(-1, 2)).abs(),
    "other dtype": lambda x: x.view(-1)[1:-1].clone().view(torch.float64) * 0,
}

INPUTS = {
    "whole": lambda: torch.arange(32.0).view(4, 8),
    "part": lambda: torch.arange(40.0).view(5, 8)[1:],
    "from an odd place": lambda: torch.arange(33.0)[1:].view(4, 8),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_through_the_backend(name):
    """Compiled for one storage offset, called with others: no guard tells them apart."""
    program = PROGRAMS[name]
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager", "on_error": "raise"})
    for given in INPUTS.values():
        compare(_list(program(given())), _list(compiled(given())))


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_stages(name, stage):
    program = PROGRAMS[name]
    gm = make_fx(program)(INPUTS["whole"]())
    if stage == "pre_grad":
        gm = triptych.pre_grad_passes(gm, [INPUTS["whole"]()])
    elif stage == "joint":
        gm = triptych.joint_graph_passes(gm)
    else:
        triptych.post_grad_passes(gm, is_inference=True)
    for given in INPUTS.values():
        compare(_list(program(given())), _list(gm(given())))


def test_higher_order_operator():
    compiled = torch.compile(condition_on, backend=triptych.compile_fx, options={"codegen": "eager", "on_error": "raise"})
    for given in INPUTS.values():
        compare([condition_on(given())], [compiled(given())])


def test_clone_goes_where_nobody_looks():
    gm = make_fx(lambda x: (x.clone().view(-1) + 1, see(x)))(INPUTS["part"]())
    gm = triptych.joint_graph_passes(gm)
    assert not any("clone" in str(n.target) for n in gm.graph.nodes)


def test_reason_is_said():
    from triptych.joint.remove_noop_ops import RemoveNoopOps
    from triptych.rewrite.rewriter import Rewriter

    gm = make_fx(lambda x: see(x.clone()))(INPUTS["whole"]())
    tally = RemoveNoopOps().run(Rewriter(Program(gm), "remove_noop_ops"))
    assert any("may read strides and storage offset" in d.reason for d in tally.declines.values())


def _list(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]
