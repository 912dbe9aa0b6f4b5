"""The flow on a GPU: Triton kernels, bfloat16, CUDA graphs."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from triptych import _private
from triptych.backend import compile_fx
from triptych.passes.session import watching

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def encoder_layer(dropout: float = 0.0) -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True).cuda()


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (value.float() - exact).norm().item() / exact.norm().item()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_bfloat16_training_is_as_exact_as_eager(codegen, mode):
    exact = encoder_layer()
    eager = copy.deepcopy(exact).bfloat16()
    ours = copy.deepcopy(eager)
    call = torch.compile(ours, backend=compile_fx, options={"codegen": codegen, "mode": mode})
    for _ in range(3):  # a CUDA graph is warmed up, recorded, replayed
        x = torch.randn(4, 16, 64, device="cuda")
        outputs = []
        for model, f in ((exact, exact), (eager, eager), (ours, call)):
            model.zero_grad()
            y = f(x.to(next(model.parameters()).dtype))
            y.float().square().mean().backward()
            outputs.append(y.detach().float().clone())
        wanted, theirs, got = outputs
        assert error(got, wanted) < 1.5 * error(theirs, wanted) + 1e-3
        for p, q, r in zip(exact.parameters(), eager.parameters(), ours.parameters(), strict=True):
            assert error(r.grad, p.grad) < 2 * error(q.grad, p.grad) + 1e-2


def test_kernels_are_triton():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    with watching() as sessions:
        torch.compile(lambda x: F.gelu(x @ x).sum(), backend=compile_fx)(x).backward()
    assert all("triton" in source and "tl.load" in source for source in sessions[0].kernels.values())


def test_later_launches_go_straight_to_cpp():
    """Torch prepares the first launch of a kernel. Newer releases do not prepare the others."""
    x = torch.randn(64, 64, device="cuda")
    call = torch.compile(lambda x: (x.softmax(1), x.sin().sum()), backend=compile_fx)
    call(x), call(x)
    prepared = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.endswith(("static_triton_launcher.py", "triton_heuristics.py")):
            prepared.append(code.co_name)

    sys.setprofile(note)
    try:
        y = call(x)
    finally:
        sys.setprofile(None)
    assert "run" not in prepared
    torch.testing.assert_close(y, (x.softmax(1), x.sin().sum()), atol=1e-3, rtol=1e-4)


def test_cuda_graphs_are_recorded_in_inference():
    model = encoder_layer().eval()
    call = torch.compile(model, backend=compile_fx, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 8, 64, device="cuda")
            torch.testing.assert_close(call(x), model(x), rtol=1e-2, atol=1e-2)
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None and manager.new_graph_id().id > 0


def test_dropout_masks_agree():
    for program in (
        lambda x: F.dropout(x, 0.5) * 3,
        lambda x: torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False) * 3,
    ):
        torch._dynamo.reset()
        x = torch.rand(256, 64, device="cuda").add(1).requires_grad_()
        y = torch.compile(program, backend=compile_fx)(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, (y / x).detach())
        assert 0.45 < (y == 0).float().mean() < 0.55


def test_channels_last_strides_are_kept():
    conv = torch.nn.Conv2d(8, 16, 3, padding=1).cuda()
    x = torch.randn(2, 8, 16, 16, device="cuda")
    for given in (x, x.to(memory_format=torch.channels_last)):
        wanted = conv(given).relu()
        got = torch.compile(lambda x: conv(x).relu(), backend=compile_fx)(given)
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def generated_kernels(first: int) -> list:
    """The Triton kernels of the modules of generated code that were loaded since there were `first` of them."""
    modules = _private.PyCodeCache.modules[first:]
    return [k for module in modules for k in vars(module).values() if type(k) is _private.CachingAutotuner]


@pytest.mark.skipif(hasattr(_private.CachingAutotuner, "_build_fast_launcher"), reason="this torch does so itself")
def test_kernels_are_launched_directly_from_the_second_call_on():
    first = len(_private.PyCodeCache.modules)
    call = torch.compile(lambda x: (x.sin() + 1).softmax(-1).sum(), backend=compile_fx)
    gradients, launches = [], []
    for _ in range(3):
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        call(x).backward()
        gradients.append(x.grad)
        launches.append({kernel.run.__name__ for kernel in generated_kernels(first)})
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert launches[1:] == [{"launch_directly"}] * 2
    with torch.profiler.profile() as profiler:
        call(x)
    assert any(event.key.startswith("triton_") for event in profiler.key_averages())
