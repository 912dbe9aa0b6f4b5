"""Every private name of torch that the package uses, in one place.

A new torch release that moves one of these breaks here and nowhere else.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

# ---- facts about operations and values ----


def is_dispatched(overload: Any) -> bool:
    """A real operator: packets also list TorchScript builtins such as `add.str`, which no graph calls."""
    return torch._C._dispatch_has_kernel(overload.name())


def is_composite(overload: Any) -> bool:
    """An operator that torch itself takes apart before autograd (`linear`, `reshape`)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def storage_id(tensor: torch.Tensor) -> int | None:
    """The storage behind a tensor as a number; sparse and wrapped tensors have none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def fake_mode_of(values: Any) -> Any:
    """The fake-tensor mode that the given values belong to, or None.

    Asked of the values first: around a backend call torch also has a mode of its own that is another one.
    """
    from torch._guards import detect_fake_mode

    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            mode = getattr(item, "fake_mode", None)
            if mode is not None:
                return mode
    return detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])


def new_fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def higher_order_operator() -> type:
    """The class of `cond`, `checkpoint` and their like."""
    from torch._ops import HigherOrderOperator

    return HigherOrderOperator


def region_functions() -> dict[Any, str]:
    """Torch-level calls that open or close a region: what stands on either side must stay there."""
    from torch._C import _set_grad_enabled
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

    return {
        _enter_autocast: "enter_autocast",
        _exit_autocast: "exit_autocast",
        _set_grad_enabled: "set_grad_enabled",
        torch.set_grad_enabled: "set_grad_enabled",
        _enter_inference_mode: "enter_inference_mode",
        _exit_inference_mode: "exit_inference_mode",
    }


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Compute on fake values even while somebody is tracing around us."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def has_hooks(module: torch.nn.Module) -> bool:
    """A module whose call does more than its forward."""
    from torch.nn.modules.module import _has_any_global_hook

    own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return _has_any_global_hook() or any(getattr(module, name) for name in own)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Strided, and no subclass that gives functions a meaning of its own."""
    from torch._subclasses.fake_tensor import FakeTensor

    ordinary = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    return tensor.layout == torch.strided and type(tensor) in ordinary


def prims() -> Any:
    return torch.ops.prims


def generator_prims() -> Any:
    """Inductor's counter-based random generator: operations its code generator knows."""
    from torch._inductor import inductor_prims

    return inductor_prims


def trace_artifact(name: str, payload: Any) -> None:
    """An artifact for TORCH_TRACE and tlparse; `payload` is only called if somebody traces."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


def unlimited_recompiles() -> contextlib.AbstractContextManager[Any]:
    """Many small programs through Dynamo in one process, without its limit on recompiles."""
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=100_000, accumulated_recompile_limit=1_000_000)
