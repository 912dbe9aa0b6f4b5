"""Sizes that depend on data, captured whole: what passes compute on fake values leaves no symbol behind."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import triptych
from triptych.ir.program import Program

PROGRAMS = {
    "repeat_interleave": lambda x, r: torch.repeat_interleave(x, r, 0) * 2,
    "repeat_interleave_method": lambda x, r: x.repeat_interleave(r, dim=0).relu().view(-1),
    "repeat_interleave_twice": lambda x, r: torch.cat([x.repeat_interleave(r, 0), torch.repeat_interleave(x, r + 1, 0)]),
    "nonzero": lambda x, r: x.nonzero() + 1,
    "nonzero_as_tuple": lambda x, r: x[x.nonzero(as_tuple=True)] * 2,
    "argwhere": lambda x, r: torch.argwhere(x > 0).t(),
    "where_alone": lambda x, r: torch.where(x > 0)[0].float().mean(),
    "masked_select": lambda x, r: torch.masked_select(x, x > 0).unsqueeze(0).squeeze(0).clone() + 0,
    "index_by_mask": lambda x, r: torch.cat([x[x > 0], x[x < 0]]).view(-1).view(-1, 1) * 1.0,
    "cat_of_masked_rows": lambda x, r: (lambda y: torch.cat([y * 2, y, y + 1]))(x[r > 0]),
    "cat_of_masked_rows_with_themselves": lambda x, r: (lambda y: torch.cat([y, y], 1))(x.t()[:, r > 0].sin()),
    "unique": lambda x, r: torch.unique(r) * 2,
    "bincount": lambda x, r: torch.bincount(r) + 1,
    "item": lambda x, r: x * r.sum().item(),
    "item_as_size": lambda x, r: torch.zeros(r[0].item(), 4) + x[0],
    "item_as_bound": lambda x, r: x[: r[0].item()] * 2,
    "tolist_as_sizes": lambda x, r: [piece * 2 for piece in x.split(r.tolist())],
}


EQUAL_OPERANDS = {
    "nonzero_of_equal_masks": lambda x, r: (torch.nonzero(x > 0) + 1, torch.nonzero(x > 0) * 2),
    "index_by_equal_masks": lambda x, r: (x[x > 0] * 2, x[x > 0].sum(), torch.nonzero(x > 0)),
    "items_of_equal_sums": lambda x, r: torch.full((3,), r.sum().item()) + r.sum().item(),
    "unique_of_equal_casts": lambda x, r: (torch.unique(x.long()) + 1, torch.unique(x.long()) * 2),
    "nonzero_of_a_copy": lambda x, r: (torch.nonzero(r) + 1, torch.nonzero(r.clone()) * 2),
    "nonzero_of_a_view": lambda x, r: (torch.nonzero(r) + 1, torch.nonzero(r.view(r.shape)) * 2),
    "nonzero_of_a_product_with_one": lambda x, r: (torch.nonzero(r) + 1, torch.nonzero(r * 1) * 2),
    "item_of_a_copy": lambda x, r: (lambda s: torch.full((3,), s.item()) + s.clone().item())(r.sum()),
}
"""Two operations that give a size a symbol each, on operands that passes could make one. A fake tensor remembers the
symbols that were computed from it: of one operand both would get the same symbol."""
PROGRAMS |= EQUAL_OPERANDS


@pytest.fixture(autouse=True)
def capture_sizes():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def check(name: str, grad: bool, **options: str) -> None:
    results = []
    options["on_error"] = "raise"
    for compiled in (False, True):
        x = (torch.arange(12.0).reshape(3, 4) - 5).requires_grad_(grad)
        program = PROGRAMS[name]
        if compiled:
            program = torch.compile(program, backend=triptych.compile_fx, options=options, fullgraph=True)
        outputs = program(x, torch.tensor([1, 0, 2]))
        leaves = [o for o in pytree.tree_leaves(outputs) if o.requires_grad]
        if leaves:
            sum(o.sum() for o in leaves).backward()
        results.append((outputs, x.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes_from_data(name, grad):
    check(name, grad, codegen="eager")


@pytest.mark.parametrize(
    "name",
    ["repeat_interleave", "index_by_mask", "nonzero", "cat_of_masked_rows_with_themselves", "cat_of_masked_rows"],
)
def test_sizes_from_data_through_kernels(name):
    check(name, True, codegen="inductor")


def test_towers_over_masked_rows_through_kernels():
    """Their gradients are put together along a number of rows that depends on data."""
    tower = lambda: torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))  # noqa: E731
    towers = torch.nn.ModuleList(tower() for _ in range(8))

    def program(x, keep):
        rows = x[keep]
        return sum(tower(rows).sum() for tower in towers)

    gradients = []
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"on_error": "raise"}, fullgraph=True)
    for call in (program, compiled):
        towers.zero_grad()
        call(torch.linspace(-1, 1, 1024).reshape(64, 16), torch.arange(64) % 3 > 0).backward()
        gradients.append([p.grad.clone() for p in towers.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", EQUAL_OPERANDS)
def test_symbols_of_equal_operands_through_kernels(name, grad):
    check(name, grad, codegen="inductor")


@pytest.mark.parametrize("name", ["repeat_interleave", "masked_select"])
def test_sizes_from_data_are_no_difference_to_the_verifier(name):
    check(name, False, codegen="eager", verify="each")


def test_facts_leave_no_symbol_pending():
    """What is computed for a fact is nobody's result: the next operation that is traced must not be asked for it."""
    seen = []

    def backend(gm, inputs):
        program = Program(gm)
        for node in list(gm.graph.nodes):
            if node.op in ("call_function", "call_method"):
                seen.append(node.name)
                program.compute(node)
        assert not program.fake_mode.shape_env.pending_fresh_unbacked_symbols
        return gm

    torch.compile(PROGRAMS["repeat_interleave"], backend=backend, fullgraph=True)(torch.ones(3, 4), torch.ones(3).long())
    assert seen
