"""A gradient of zeros is not None: an optimizer with weight decay tells them apart, and so do we."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from triptych.errors import VerificationError
from triptych.ir.gradient_paths import WALKS
from triptych.ir.program import Program
from triptych.passes.session import watching
from triptych.pre_grad.remove_split_ops_pass import RemoveSplitOpsPass
from triptych.testing.capture import capture_torch
from triptych.testing.check import compare_gradients
from triptych.verify.numerics import compare
from triptych.verify.running import Result


def overwritten(x, y):
    z = x.clone()
    z[:] = y
    return z * 2


def overwritten_by_a_number(x, y):
    z = x.clone()
    z[:] = 0.0
    return z + y


def filled(x, y):
    return x.clone().zero_() + y


def all_true(x, y):
    return torch.where(torch.ones(4, 3, dtype=torch.bool), y, x) * 2


def masked_by_a_known_mask(x, y):
    return x.masked_fill(torch.arange(3) < 5, 0.0) + y


def without_gradient_inside(x, y):
    with torch.no_grad():
        z = torch.cat([x, y])[4:]
    return z * y


def one_of_two_layers_is_detached(x, y):
    return F.linear(y, x).detach() + F.linear(y, y)


def layers_beside_one_another(x, y):
    """Merged into one product, the weight of the first would get zeros."""
    first, second = F.linear(y, x[:3]), F.linear(y, y[:3] * 2)
    return first.detach(), second


def detached_in_a_cat(x, y):
    return torch.cat([x.detach(), y])[4:] * 2


def another_path(x, y):
    """x still reaches the result: the cat may go."""
    return torch.cat([x, y])[4:] * x.sum()


PROGRAMS = {
    "slice of a cat": lambda x, y: torch.cat([x, y])[4:] * 2,
    "row of a stack": lambda x, y: torch.stack([x, y])[1] * 2,
    "chunk of a cat": lambda x, y: torch.cat([x, y]).chunk(2)[1] * 2,
    "pieces of a cat, joined": lambda x, y: torch.cat(torch.cat([x, y]).split(2)[2:]) * 2,
    "row of an unbound stack": lambda x, y: torch.stack([x, y]).unbind(0)[1] * 2,
    "narrow": lambda x, y: torch.cat([x, y], 1).narrow(1, 3, 3) * 2,
    "slice_scatter over all": lambda x, y: torch.slice_scatter(x, y) * 2,
    "copy_": lambda x, y: x.clone().copy_(y) * 2,
    "index_put over all": lambda x, y: x.index_put((torch.arange(4),), y) * 2,
    "times zero": lambda x, y: x * 0 + y,
    "alpha of zero": lambda x, y: torch.add(y, x, alpha=0),
    "beta of zero": lambda x, y: torch.addmm(x[0], y, y[:3], beta=0),
    "lerp by zero": lambda x, y: torch.lerp(y, x, 0.0),
    "difference with itself": lambda x, y: (x - x) + y,
    "power of zero": lambda x, y: x**0 + y,
    "clamped to one value": lambda x, y: torch.clamp(x, 1, 1) + y,
    "dropout of everything": lambda x, y: F.dropout(x, 1.0, True) + y,
    "nothing of it in a cat": lambda x, y: torch.cat([x[:0], y]) * 2,
    "no diagonal left": lambda x, y: x.tril(-10) + y,
    "mask that asks for a gradient": lambda x, y: F.scaled_dot_product_attention(y, y, y, attn_mask=x @ x.t() * 0),
    "shape alone": lambda x, y: y.sum().expand_as(x) + torch.zeros_like(x),
    "unused": lambda x, y: y * 2,
    "detached": lambda x, y: (x * 2).detach() + y,
    "integers": lambda x, y: x.argmax() + y,
    "comparison": lambda x, y: torch.where(x > 0, y, y * 2),
    **{
        f.__name__: f
        for f in (
            overwritten, overwritten_by_a_number, filled, all_true, masked_by_a_known_mask, without_gradient_inside,
            one_of_two_layers_is_detached, layers_beside_one_another, detached_in_a_cat, another_path,
        )
    },
}  # fmt: skip


def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator).requires_grad_() for _ in range(2)]


def gradients_of(function):
    given = leaves()
    result = function(*given)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
    sum(r.square().sum() for r in results).backward()
    return [t.grad for t in given]


def require_same(got, want):
    assert [g is None for g in got] == [w is None for w in want]
    for g, w in zip(got, want):
        if w is not None:
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("name", PROGRAMS)
def test_none_stays_none_and_zeros_stay_zeros(name):
    torch._dynamo.reset()
    program = PROGRAMS[name]
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager", "verify": "each"})
    with watching() as sessions:
        require_same(gradients_of(compiled), gradients_of(program))
    assert not [w for s in sessions for w in s.warnings if "undone" in w]  # refused, not mended afterwards


@pytest.mark.parametrize("name", ["slice of a cat", "overwritten", "layers_beside_one_another"])
def test_through_kernels(name):
    torch._dynamo.reset()
    compiled = torch.compile(PROGRAMS[name], backend=triptych.compile_fx)
    require_same(gradients_of(compiled), gradients_of(PROGRAMS[name]))


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.unread, self.read = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * torch.cat([self.unread, self.read])[4:]


def test_an_optimizer_decays_what_it_decays_in_eager():
    torch._dynamo.reset()
    models = [Joined(), Joined()]
    calls = [models[0], torch.compile(models[1], backend=triptych.compile_fx, options={"codegen": "eager"})]
    for model, call in zip(models, calls):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        call(torch.ones(4)).sum().backward()
        optimizer.step()
    for eager, compiled in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(compiled, eager)
    assert float(models[1].unread[0]) < 1


def rewritten(program, inputs):
    torch._dynamo.reset()
    fired = []
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})
    with watching() as sessions:
        compiled(*inputs)
    for session in sessions:
        fired += [r for r in session.records if r.stage == "pre_grad" and r.rewrites]
    graph = sessions[0].graphs["pre_grad"].graph
    return {getattr(n.target, "__name__", n.target) for n in graph.nodes}


@pytest.mark.parametrize("name", ["slice of a cat", "row of a stack", "overwritten"])
def test_inference_keeps_the_rewrite(name):
    left_out = {"cat", "stack", "setitem"}
    with torch.no_grad():
        assert not rewritten(PROGRAMS[name], leaves()) & left_out
    assert not rewritten(PROGRAMS[name], [t.detach() for t in leaves()]) & left_out
    assert rewritten(PROGRAMS[name], leaves()) & left_out


def test_another_path_is_enough():
    assert "cat" not in rewritten(another_path, leaves())


def test_the_work_is_linear():
    """Every cat is cut off from one operand that has another path; the program is not walked for all of them."""

    def many(x, y):
        for _ in range(3 * WALKS):
            y = torch.cat([x, y])[4:] + x
        return y

    torch._dynamo.reset()
    seen = []

    def backend(gm, inputs):
        program = Program(gm, inputs)
        from triptych.rewrite.driver import run_rules
        from triptych.rewrite.rewriter import Rewriter

        tally = run_rules(Rewriter(program, "test"), RemoveSplitOpsPass().rules(), strict=True)
        seen.append((program.gradient_paths.walks, tally))
        return gm.forward

    require_same(gradients_of(torch.compile(many, backend=backend)), gradients_of(many))
    assert len(seen) == 1


def test_the_verifier_tells_them_apart():
    zeros = Result({}, gradients={"gradient of x": torch.zeros(3)})
    none = Result({}, gradients={"gradient of x": None})
    compare(zeros, copy.deepcopy(zeros))
    compare(none, copy.deepcopy(none))
    with pytest.raises(VerificationError, match="gradient of x is gone"):
        compare(zeros, none)
    with pytest.raises(VerificationError, match="gradient of x is there"):
        compare(none, zeros)


def test_the_comparator_of_examples_tells_them_apart():
    x, y = (t.detach() for t in leaves())
    with pytest.raises(AssertionError, match="input 0 has None, expected zeros"):
        compare_gradients(lambda x, y: x * 0 + y, lambda x, y: y + 0, [x, y])
    with pytest.raises(AssertionError, match="input 0 has zeros, expected None"):
        compare_gradients(lambda x, y: y + 0, lambda x, y: x * 0 + y, [x, y])
    assert compare_gradients(lambda x, y: x * 0 + y, lambda x, y: y + 0, [x, y], none_is_zero=True)


def test_facts_computed_anew_still_ask_for_a_gradient():
    gm, args = capture_torch(lambda x, y: torch.cat([x, y])[4:].contiguous().view(-1), leaves())
    program = Program(gm, args)
    returned = gm.graph.output_node().all_input_nodes
    assert all(bin(program.gradient_paths.of(n)).count("1") == 2 for n in returned)
