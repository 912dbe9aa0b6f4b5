"""Every private name of torch that the package uses, in one place.

A new torch release that moves one of these breaks here and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    """The fake-tensor mode that the given values belong to, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


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


def prims() -> Any:
    return torch.ops.prims


def generator_prims() -> Any:
    """Inductor's counter-based random generator: operations its code generator knows."""
    from torch._inductor import inductor_prims

    return inductor_prims


# ---- watching a compile: what explain, the command line and the demo need ----


def flatten(tree: Any) -> list[Any]:
    """The leaves of nested containers, of registered ones (a model's output classes) too."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers with other leaves."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


NO_LIMIT = 1 << 20


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Whatever is called inside is compiled from the beginning, for the sizes of that call, however often.

    Only the caches of whole graphs are off: with them on no pass would run. Those of single kernels stay, so
    that the kernels are the ones a user gets.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as aot_autograd
    from torch._inductor import config as inductor

    with (
        dynamo.patch(recompile_limit=NO_LIMIT, accumulated_recompile_limit=NO_LIMIT),
        dynamo.patch(automatic_dynamic_shapes=False),
        aot_autograd.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


@contextlib.contextmanager
def forgotten(backend: Callable[..., Any]) -> Iterator[None]:
    """What `backend` compiles inside is dropped at the end.

    Dynamo keeps compiled code with the user's functions. There it would stay alive, and count against the
    limit of recompilations of the user's own `torch.compile`.
    """
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    codes: list[Any] = []
    handle = register_bytecode_hook(lambda code, compiled: codes.append(code))
    try:
        yield
    finally:
        handle.remove()
        for code in codes:
            entries = _debug_get_cache_entry_list(code)
            ours = [e for e in entries if getattr(e.backend, "compiler_fn", None) is backend]
            if len(ours) == len(entries):
                reset_code(code)
                continue
            for entry in ours:
                holder: Any = entry.guard_manager.extra_state
                holder.invalidate(entry, DeletedGuardManagerWrapper("compiled only to be explained"))


# Inductor's three stages as its driver calls them, on a graph and on each graph inside it.
INDUCTOR_STAGES = {
    "pre_grad": "_recursive_pre_grad_passes",
    "joint": "_recursive_joint_graph_passes",
    "post_grad": "_recursive_post_grad_passes",
}


def inductor_driver() -> Any:
    """The module that drives Inductor: where its stages are looked up when it runs them."""
    import importlib

    return importlib.import_module("torch._inductor.compile_fx")


def inductor_lowering() -> Any:
    """The class that writes kernels; its `save_output_code`, where set, gets every source."""
    from torch._inductor.graph import GraphLowering

    return GraphLowering
