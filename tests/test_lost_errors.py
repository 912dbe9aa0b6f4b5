"""What raises in eager raises when compiled: kernels would compute something."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import triptych
from triptych.codegen import refused_calls
from triptych.options import Options
from triptych.passes.session import Session
from triptych.releases import release_of

X, HALF, BOOL, INT = torch.randn(4, 6), torch.randn(4, 6).half(), torch.randn(4, 6) > 0, torch.arange(1, 7)
BYTE, COMPLEX = INT.to(torch.uint8), torch.randn(6, dtype=torch.complex64)

REFUSED = {
    "ceil of bool": (torch.ceil, BOOL),
    "round of bool": (torch.round, BOOL),
    "round of int to decimals": (lambda x: torch.round(x, decimals=1), INT),
    "fmod of bool": (lambda x: torch.fmod(x, x), BOOL),
    "pow of bool": (lambda x: x**x, BOOL),
    "glu of int8": (F.glu, INT.to(torch.int8)),
    "logcumsumexp of uint8": (lambda x: torch.logcumsumexp(x, 0), BYTE),
    "hardswish of int": (F.hardswish, INT),
    "hypot of int": (lambda x: torch.hypot(x, x), INT),
    "bitwise and of float": (lambda x: x & x, X),
    "add of uint16": (lambda x: x + x, INT.to(torch.uint16)),
    "maximum of uint16": (lambda x: x.max(), INT.to(torch.uint16)),
    "floor of complex": (torch.floor, COMPLEX),
    "clamp beyond float": (lambda x: x.clamp(max=3.4e39), X),
    "clamp beyond half": (lambda x: x.clamp(-1e6), HALF),
    "clamp below uint8": (lambda x: x.clamp(-5, 300), BYTE),
    "fill beyond uint8": (lambda x: x.clone().fill_(300), BYTE),
    "masked_fill beyond half": (lambda x: x.masked_fill(x > 0, -1e9), HALF),
    "full beyond half": (lambda x: torch.full((4, 6), 1e6, dtype=torch.float16) + x, HALF),
    "fill beyond half": (lambda x: x.clone().fill_(1e9), HALF),
    "full_like beyond half": (lambda x: torch.full_like(x, 1e9), HALF),
    "new_full beyond half": (lambda x: x + x.new_full((4, 6), 1e9), HALF),
    "where beyond int8": (lambda x: torch.where(x > 0, x, 1000), INT.to(torch.int8)),
    "pad beyond float": (lambda x: F.pad(x, (1, 1), value=1e39), X),
    "threshold beyond float": (lambda x: F.threshold(x, 0.0, 1e39), X),
    "linear of int": (lambda x: F.linear(x, torch.ones(2, 6), torch.ones(2)), INT),
    "matrix by vector of int": (lambda x: torch.ones(2, 6) @ x, INT),
    "celu of alpha 0": (lambda x: F.celu(x, 0.0), X),
    "smooth_l1_loss of negative beta": (lambda x: F.smooth_l1_loss(x, x + 1, beta=-1.0), X),
}
"""Whatever the values are."""

REFUSED_VALUES = {
    "targets of binary_cross_entropy": (lambda x: F.binary_cross_entropy(x, x + 1), torch.rand(4)),
    "inputs of binary_cross_entropy": (lambda x: F.binary_cross_entropy(x + 1, x), torch.rand(4)),
    "negative index_select": (lambda x: X.index_select(1, -x), INT),
    "index_select by int16": (lambda x: X.index_select(1, x.short() - 1), INT),
    "index_select beyond the end": (lambda x: X.index_select(1, x), INT),
    "gather beyond the end": (lambda x: x.gather(0, x), INT),
    "quotient rounded down": (lambda x: x // (x - 1), INT),
    "remainder": (lambda x: x % (x - 1), INT),
}

TAKEN = {
    "ceil of int": (torch.ceil, INT),
    "clamp within uint8": (lambda x: x.clamp(2, 5), BYTE),
    "infinite bound": (lambda x: x.clamp(max=float("inf")), HALF),
    "one element filled": (lambda x: torch.full((1,), 1e6, dtype=torch.float16) + x, HALF),
    "scalar beyond the dtype that promotes": (lambda x: x * 1e39, X),
    "sum of uint16": (lambda x: x.sum(), INT.to(torch.uint16)),
    "index_select": (lambda x: X.index_select(-1, x[:5]), INT),
    "index_select by int32": (lambda x: X.index_select(0, x[:3].int()), INT),
    "index_select of a number": (lambda x: x[0].index_select(0, x[:1] - 1), INT),
    "index_add": (lambda x: X.index_add(-1, x[:5], torch.ones(4, 5), alpha=2), INT),
    "index_copy": (lambda x: X.index_copy(-1, x[:5], torch.ones(4, 5)), INT),
    "index_fill from the end": (lambda x: X.index_fill(-1, -x[:5], 2.0), INT),
    "linear of numbers of one dtype": (lambda x: F.linear(x, x, x[:, 0]), X),
    "matrix by vector": (lambda x: x @ x[0], X),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x, 1 - x, reduction="none"), torch.rand(4)),
    "truncated": (lambda x: torch.div(x - 4, x % 3 - 4, rounding_mode="trunc"), torch.arange(12)),
    "truncated numbers": (lambda x: x + torch.div(1024, -300, rounding_mode="trunc"), INT),
    "number truncated by a tensor": (lambda x: torch.div(torch.tensor(-7), x, rounding_mode="trunc"), INT),
    "truncated by a number beyond the dtype": (lambda x: torch.div(x, -3, rounding_mode="trunc"), BYTE * 40),
    "truncated by a wider tensor": (lambda x: torch.div(x, torch.tensor(253), rounding_mode="trunc"), BYTE.to(torch.int8) * 20),
    "truncated by a number": (lambda x: torch.div(x - 4, -3, rounding_mode="trunc"), torch.arange(12).int()),
}


RELEASE = release_of(str(torch.__version__))
DIVIDES = {"quotient rounded down", "remainder"}
"""By 0. Before torch 2.13, Inductor's kernels for CPUs do so, which ends the process."""


def compiled(function, codegen):
    return torch.compile(function, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise"})


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize("name", REFUSED | REFUSED_VALUES)
def test_raises_as_in_eager(name, codegen):
    if RELEASE < (2, 13) and codegen == "inductor" and name in {*DIVIDES, "negative index_select"}:
        pytest.skip("not checked by the kernels of this release")
    function, x = (REFUSED | REFUSED_VALUES)[name]
    try:
        function(x)
    except Exception as error:
        in_eager = error
    else:
        assert name == "clamp below uint8" and RELEASE >= (2, 15)
        return
    with pytest.raises(Exception) as raised:
        compiled(function, codegen)(x)
    if name in REFUSED:
        assert str(in_eager) in str(raised.value)  # or of torch's fake tensors, which name the error


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_computed(name, codegen):
    function, x = TAKEN[name]
    torch.testing.assert_close(compiled(function, codegen)(x), function(x), rtol=1e-6, atol=1e-6)


def test_gradient_of_index_select_by_a_number():
    x, place = torch.randn(4, 5, requires_grad=True), torch.tensor(2)
    function = lambda x: x.index_select(1, place).square().sum()  # noqa: E731
    want, got = (torch.autograd.grad(run(x), x)[0] for run in (function, compiled(function, "inductor")))
    torch.testing.assert_close(got, want)


def test_what_decompositions_call_is_not_asked_about():
    """They may compute with dtypes that eager has no kernel for."""
    session = Session(Options())
    calls = refused_calls.RefusedCalls(session)
    ceil, sigmoid = torch.ops.aten.ceil.default, torch.ops.aten.sigmoid.default
    table = calls.left_whole({sigmoid: lambda x: table[ceil](x)}, [ceil])
    assert table[sigmoid](BOOL) is NotImplemented and not calls.found and not session.passes_off
    assert table[ceil](BOOL) is NotImplemented and calls.found and session.passes_off


def test_each_call_is_asked_about_once(monkeypatch):
    asked = []
    monkeypatch.setattr(refused_calls, "_answers", {})
    monkeypatch.setattr(refused_calls, "_raises", lambda *call: asked.append(call) or False)
    ceil = torch.ops.aten.ceil.default
    for x in (X, X[:3], X.half(), X):
        refused_calls.refused_by_eager(ceil, (x,), {})
    assert len(asked) == 2


@pytest.mark.skipif(RELEASE < (2, 13), reason="the kernels of this release divide by 0")
def test_division_by_zero_does_not_end_the_process():
    program = (
        "import torch, triptych\n"
        "def f(x, y):\n"
        "    return torch.div(x, y, rounding_mode='trunc')\n"
        "try:\n"
        "    torch.compile(f, backend='triptych')(torch.arange(8), torch.zeros(8, dtype=torch.int64))\n"
        "except RuntimeError:\n"
        "    print('raised')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "raised\n", done.stderr[-2000:]


def test_nothing_is_made_up_where_values_matter(monkeypatch):
    """On a GPU an operator that asserts other values would end all work of the process with that GPU."""
    asked = []
    monkeypatch.setattr(refused_calls, "_answers", {})
    monkeypatch.setattr(refused_calls, "_raises", lambda overload, *call: asked.append(overload) or False)
    aten = torch.ops.aten
    with FakeTensorMode():
        there, here = torch.ones(3, dtype=torch.int64, device="cuda"), torch.ones(3, dtype=torch.int64)
        # not earlier: a build of torch for GPUs would look for one to make a tensor there
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        refused_calls.refused_by_eager(aten.repeat_interleave.Tensor, (here,), {"output_size": 12})
        for integers in (there, there > 0):
            refused_calls.refused_by_eager(aten.cumsum.default, (integers, 0), {})
        assert asked == []
        refused_calls.refused_by_eager(aten.cumsum.default, (here, 0), {})
        refused_calls.refused_by_eager(aten.cumsum.default, (there.float(), 0), {})
        refused_calls.refused_by_eager(aten.ceil.default, (there,), {})
    assert asked == [aten.cumsum.default, aten.cumsum.default, aten.ceil.default]


@pytest.mark.parametrize("operands", [(), (X,)], ids=["full", "new_full"])
def test_made_up_tensors_are_small(monkeypatch, operands):
    made = []
    monkeypatch.setattr(refused_calls, "_answers", {})
    monkeypatch.setattr(refused_calls, "_raises", lambda overload, spec, leaves: made.extend(leaves) or False)
    overload = torch.ops.aten.new_full.default if operands else torch.ops.aten.full.default
    refused_calls.refused_by_eager(overload, (*operands, [10**6, 10**6], 1.0), {})
    assert max(leaf for leaf in made if isinstance(leaf, int)) <= refused_calls.FEW
