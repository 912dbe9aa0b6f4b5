"""The models on a GPU, in bfloat16: as near to float32 as eager is, with Triton kernels and with CUDA graphs.

    PYTHONPATH=src python -m pytest tests/gpu -q
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import triptych
from tests import models
from tests.compare import Call, Outcome, metadata_differences, observe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 128
ROUNDING = 2.0**-8
"""Relative spacing of bfloat16, halved: two right answers may always differ by that."""


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """The reference must be float32 all the way: convolutions use TF32 unless told otherwise."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def moved(call: Call, dtype: torch.dtype, train: bool) -> Call:
    """A copy of the arguments on the GPU, floating-point ones in the given type."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf.cuda() if isinstance(leaf, Tensor) else leaf
        return leaf.detach().to("cuda", dtype).clone().requires_grad_(train)

    return Call(*pytree.tree_map(move, (call.args, call.kwargs)))


def on_gpu(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model; the frequencies of rotary embeddings stay in float32, where models keep them."""
    model = copy.deepcopy(model).cuda()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in kept.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    return model


def norm(tensor: Tensor) -> float:
    return float(tensor.detach().norm())


def assert_no_worse(reference: Outcome, eager: Outcome, compiled: Outcome) -> None:
    """The error of compiled bfloat16 against float32: at most twice that of eager, and a rounding."""
    assert compiled.structure == eager.structure
    found = []
    for title in ("outputs", "gradients"):
        group: dict[str, Tensor | None] = getattr(reference, title)
        largest = max((norm(t) for t in group.values() if t is not None), default=0.0)
        for name, exact in group.items():
            one, other = getattr(eager, title)[name], getattr(compiled, title)[name]
            if exact is None or one is None or other is None:
                assert one is None and other is None, f"{name}: a gradient on one side only"
                continue
            found += [f"{name}: {what}" for what in metadata_differences(one, other)]
            if one.shape != other.shape:
                continue
            eager_error, compiled_error = (norm(t.float() - exact) for t in (one, other))
            # a gradient that is zero but for rounding is measured by the others of the model
            allowed = 2 * eager_error + ROUNDING * max(norm(exact), 1e-2 * largest)
            if not compiled_error <= allowed:
                found.append(
                    f"{name}: error {compiled_error:.3g}, of eager {eager_error:.3g}, allowed {allowed:.3g}, "
                    f"norm {norm(exact):.3g}"
                )
    assert not found, "\n".join(found)


def prepare(name: str, train: bool) -> tuple[nn.Module, nn.Module, nn.Module, models.Case]:
    """The model three times: in float32, and twice in bfloat16."""
    case = models.build(name, WIDTH, layers=2)
    case.model.train(train)
    return (
        on_gpu(case.model, torch.float32),
        on_gpu(case.model, torch.bfloat16),
        on_gpu(case.model, torch.bfloat16),
        case,
    )


def run_beside(
    reference: nn.Module, eager: nn.Module, compiled: Callable[..., Any], call: Call, train: bool
) -> None:
    with torch.set_grad_enabled(train):
        assert_no_worse(
            observe(reference, moved(call, torch.float32, train), train=train),
            observe(eager, moved(call, torch.bfloat16, train), train=train),
            observe(compiled, moved(call, torch.bfloat16, train), train=train),
        )


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", models.MODELS)
def test_bfloat16(name: str, train: bool) -> None:
    reference, eager, copied, case = prepare(name, train)
    compiled = torch.compile(copied, backend=triptych.compile_fx, fullgraph=True, dynamic=False)
    run_beside(reference, eager, compiled, case.call, train)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["mlp", "encoder", "gpt2"])
def test_cuda_graphs(name: str, train: bool) -> None:
    """Later calls replay what the second recorded: each brings other values, which a replay must take in."""
    from torch._inductor.cudagraph_trees import get_manager

    reference, eager, copied, case = prepare(name, train)
    compiled = torch.compile(
        copied, backend=triptych.compile_fx, mode="reduce-overhead", fullgraph=True, dynamic=False
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        run_beside(reference, eager, compiled, reshuffled(case.call), train)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values()), "no CUDA graph was recorded"


def reshuffled(call: Call) -> Call:
    """The same call with its values in another order."""

    def shuffle(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.flatten()[torch.randperm(leaf.numel())].view(leaf.shape)

    return Call(*pytree.tree_map(shuffle, (call.args, call.kwargs)))


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_kernels_are_triton(name: str) -> None:
    case = models.build(name, WIDTH, layers=2)
    model = on_gpu(case.model.eval(), torch.bfloat16)
    call = moved(case.call, torch.bfloat16, train=False)
    with torch.no_grad():
        explanation = triptych.explain(model, *call.args, **call.kwargs)
    assert any("triton" in source for source in explanation.kernels.values())
