"""Every private name of torch that the package uses: where it lives, and what it is for.

A name resolves on its first use (`_private.compile_fx_inner`), so that importing the package loads neither
Dynamo nor Inductor. `missing()` is what a test asks for each torch release that is supported.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

NAMES: Mapping[str, str] = MappingProxyType(
    {
        # AOTAutograd: decompose, functionalise, differentiate, partition
        "aot_autograd": "torch._dynamo.backends.common:aot_autograd",
        # AOTAutograd's settings: effect tokens, donated buffers, its cache
        "functorch_config": "torch._functorch.config",
        # the min-cut partitioner: joint graph -> forward and backward
        "min_cut_rematerialization_partition": "torch._functorch.partitioners:min_cut_rematerialization_partition",
        # the decompositions that Inductor's lowerings expect
        "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
        # the decompositions anybody can run, where Inductor's emit primitives of its own
        "decomposition_table": "torch._decomp:decomposition_table",
        # the fake mode and the per-compile facts (fw_metadata) of the graph being compiled
        "TracingContext": "torch._guards:TracingContext",
        # makes a TracingContext current
        "tracing": "torch._guards:tracing",
        # which compile of which frame this is
        "CompileContext": "torch._guards:CompileContext",
        # the fake mode of given inputs
        "detect_fake_mode": "torch._guards:detect_fake_mode",
        # a fake mode where nobody brought one
        "FakeTensorMode": "torch._subclasses:FakeTensorMode",
        # Inductor's current-state object: its passes and lowerings ask it for the fake mode
        "virtualized": "torch._inductor.virtualized:V",
        # puts off generating Python for intermediate graphs until somebody runs them
        "use_lazy_graph_module": "torch.fx._lazy_graph_module:_use_lazy_graph_module",
        # makes such a put-off graph runnable now
        "LazyGraphModule": "torch.fx._lazy_graph_module:_LazyGraphModule",
        # nested Python values as flat lists and back
        "pytree": "torch.utils._pytree",
        # the generated-code form of graphs from torch._dynamo.export: nested values in and out
        "PyTreeCodeGen": "torch.fx.graph:_PyTreeCodeGen",
        # the generated-code form whose inputs come in a list that is emptied, so that they can be freed early
        "BoxedCodeGen": "torch.fx.graph:_BoxedCodeGen",
        # a function of positional arguments as one of a list
        "make_boxed_func": "torch._functorch._aot_autograd.utils:make_boxed_func",
        # Inductor's settings
        "inductor_config": "torch._inductor.config",
        # torch.compile's mode names as Inductor's settings
        "list_mode_options": "torch._inductor:list_mode_options",
        # one ATen graph -> kernels
        "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
        # what a forward or inference graph needs said before compile_fx_inner: fixed inputs, CUDA graphs
        "compile_fx_forward": "torch._inductor.compile_fx:compile_fx_forward",
        # the same for a backward graph
        "compile_fx_backward": "torch._inductor.compile_fx:compile_fx_backward",
        # what forward and backward share: the CUDA-graphs box, the graph number, the device
        "create_compiler_config_extra": "torch._inductor.compile_fx:create_compiler_config_extra",
        # what Inductor's C++ wrapper needs to be told
        "get_cpp_wrapper_config": "torch._inductor.compile_fx:get_cpp_wrapper_config",
        # an object whose uuid() is part of the FX graph cache's key
        "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
        # kernel compilation in worker processes, woken up early
        "AsyncCompile": "torch._inductor.async_compile:AsyncCompile",
        # forgets recorded CUDA graphs
        "reset_cudagraph_trees": "torch._inductor.cudagraph_trees:reset_cudagraph_trees",
    }
)


def __getattr__(name: str) -> Any:
    try:
        path = NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = _find(path)
    return value


def missing() -> list[str]:
    """The names that this torch does not have."""
    gone = []
    for name, path in NAMES.items():
        try:
            _find(path)
        except (ImportError, AttributeError):
            gone.append(name)
    return gone


def _find(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def compiler_config_extra(gm: Any) -> Any:
    """What forward and backward share. Torch 2.11 wants Inductor's settings here, later releases the graph."""
    create = __getattr__("create_compiler_config_extra")
    wants_config = "config" in inspect.signature(create).parameters
    return create(__getattr__("inductor_config") if wants_config else gm)
