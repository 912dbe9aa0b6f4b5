"""Every private name of torch that the package uses: where it lives, and what it is for.

A name resolves on its first use (`_private.compile_fx_inner`), so that importing the package loads neither
Dynamo nor Inductor. `missing()` is what a test asks for each torch release that is supported. A name that this torch
does not have is an `UnsupportedTorch` error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from .releases import is_newer_than_tested, missing_names

NAMES: Mapping[str, str] = MappingProxyType(
    {
        # -- what a graph calls --
        "OpOverload": "torch._ops:OpOverload",
        "OpOverloadPacket": "torch._ops:OpOverloadPacket",
        # the class of `cond`, `checkpoint` and their like
        "HigherOrderOperator": "torch._ops:HigherOrderOperator",
        # the call of a graph that is compiled once and called several times
        "invoke_subgraph": "torch._higher_order_ops.invoke_subgraph:invoke_subgraph",
        # a function kept whole for its quantization scheme: its options, its form as traced, and its form for codegen
        "InvokeQuant": "torch._higher_order_ops:InvokeQuant",
        "invoke_quant_packed": "torch._higher_order_ops:invoke_quant_packed",
        "invoke_quant": "torch._higher_order_ops:invoke_quant",
        # the operators that exported programs quantize with; they are there once their module is
        "quantized_operators": "torch.ao.quantization.fx._decomposed:quantized_decomposed_lib",
        # a condition on sizes, which may be symbols: an operator of ours says so what it takes
        "check": "torch:_check",
        # the memory format that torch's kernels read from a tensor's strides
        "memory_format_of": "torch._prims_common:suggest_memory_format",
        # the group of a name, and the store by which processes find each other
        "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
        "default_store": "torch.distributed.distributed_c10d:_get_default_store",
        # a process group that examples communicate over, known by its name
        "register_process_group": "torch._C._distributed_c10d:_register_process_group",
        # has a group memory that its ranks write and read directly, and where that is noted
        "is_symm_mem_enabled_for_group": "torch.distributed._symmetric_memory:is_symm_mem_enabled_for_group",
        "stores_of_symmetric_groups": "torch.distributed._symmetric_memory:_group_name_to_store",
        # the operators that use such memory, computed by plain collectives
        "plain_all_gather_matmul": "torch.distributed._symmetric_memory:_fused_all_gather_matmul_fallback",
        "plain_all_gather_scaled_matmul": (
            "torch.distributed._symmetric_memory:_fused_all_gather_scaled_matmul_fallback"
        ),
        "plain_matmul_reduce_scatter": "torch.distributed._symmetric_memory:_fused_matmul_reduce_scatter_fallback",
        "plain_scaled_matmul_reduce_scatter": (
            "torch.distributed._symmetric_memory:_fused_scaled_matmul_reduce_scatter_fallback"
        ),
        # lets a GPU wait for a number of its cycles
        "gpu_sleep": "torch.cuda:_sleep",
        # facts are computed on fake values even while somebody is tracing around us
        "without_dispatch_modes": "torch.utils._python_dispatch:_disable_current_modes",
        # neither modes such as a default device, nor what subclasses of tensors do in place of a function
        "without_torch_function": "torch._C:DisableTorchFunction",
        # facts of an ATen graph do not depend on the autocast of whoever runs a pass over it
        "without_autocast": "torch._C:_DisableAutocast",
        # what a subclass of tensors, such as a parameter, has in place of a `__torch_function__`
        "disabled_torch_function": "torch._C:_disabled_torch_function_impl",
        "FakeTensor": "torch._subclasses:FakeTensor",
        # hooks on every module there is
        "has_any_global_hook": "torch.nn.modules.module:_has_any_global_hook",
        # operators are decomposed in Python, where symbolic sizes stay symbols: microseconds that must not be timed
        "enable_python_dispatcher": "torch._dispatch.python:enable_python_dispatcher",
        "without_python_dispatcher": "torch._C:_DisablePythonDispatcher",
        # neither compiled autograd nor hooks on saved tensors see a backward that is timed
        "without_compiled_autograd": "torch._dynamo.compiled_autograd:_disable",
        "ignore_saved_tensor_hooks": "torch._C._autograd:_saved_tensors_hooks_set_tracing",
        # Inductor's counter-based random generator: operations its code generator knows
        "generator_prims": "torch._inductor.inductor_prims",
        # maximum and sum of a softmax in one pass over each row: an operation its code generator knows
        "prepare_softmax_online": "torch._inductor.inductor_prims:prepare_softmax_online",
        # where Inductor keeps kernels between processes
        "inductor_cache_dir": "torch._inductor.runtime.cache_dir_utils:cache_dir",
        # the modules of generated code, a Triton kernel in one, and a compiled one that torch launches without Triton
        "PyCodeCache": "torch._inductor.codecache:PyCodeCache",
        "CachingAutotuner": "torch._inductor.runtime.triton_heuristics:CachingAutotuner",
        "StaticTritonCompileResult": "torch._inductor.runtime.triton_heuristics:StaticTritonCompileResult",
        # compares the layouts of many tensors with those of earlier ones in one call
        "TensorGuards": "torch._C._dynamo.guards:TensorGuards",
        # where Inductor notes which nodes a kernel computes
        "inductor_debug": "torch._inductor.debug",
        # logs that TORCH_LOGS turns on by what they show, and a graph as they print it
        "getArtifactLogger": "torch._logging:getArtifactLogger",
        "lazy_format_graph_code": "torch._dynamo.utils:lazy_format_graph_code",
        # times a step for torch's table of compile times, its profiler and its trace
        "dynamo_timed": "torch._dynamo.utils:dynamo_timed",
        # the log that TORCH_TRACE writes
        "trace_log": "torch._logging._internal:trace_log",
        # does somebody profile, or watch every operator and kernel?
        "profiler_enabled": "torch.autograd:_profiler_enabled",
        "get_active_debug_mode": "torch.utils._debug_mode:get_active_debug_mode",
        # artifacts for TORCH_TRACE and tlparse
        "trace_structured": "torch._logging:trace_structured",
        # how the operands that a functionalised custom operator writes are views of the values given beside them
        "read_view_information_from_args": (
            "torch._higher_order_ops.auto_functionalize:read_view_information_from_args"
        ),
        # the names and types of the operands that an operator writes
        "get_mutable_args": "torch._higher_order_ops.auto_functionalize:get_mutable_args",
        # the call of a custom operator that writes its operands, on copies of them
        "auto_functionalized_v2": "torch._higher_order_ops.auto_functionalize:auto_functionalized_v2",
        # the same for a user's Triton kernel, and the table that has the kernels by number
        "triton_kernel_wrapper_functional": (
            "torch._higher_order_ops.triton_kernel_wrap:triton_kernel_wrapper_functional"
        ),
        "kernel_side_table": "torch._higher_order_ops.triton_kernel_wrap:kernel_side_table",
        # the call of a user's Triton kernel on the tensors that it writes
        "triton_kernel_wrapper_mutation": "torch._higher_order_ops.triton_kernel_wrap:triton_kernel_wrapper_mutation",
        # -- the flow --
        # says whether somebody asks for tangents, by forward-mode differentiation, and how Dynamo guards that
        "forward_ad": "torch.autograd.forward_ad",
        "GlobalStateSource": "torch._dynamo.source:GlobalStateSource",
        "GuardBuilder": "torch._dynamo.guards:GuardBuilder",
        # the backends that `torch.compile` knows by name
        "backend_registry": "torch._dynamo.backends.registry",
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
        # tells when Dynamo has done with a frame, its guards included
        "compile_callbacks": "torch._dynamo.callback:callback_handler",
        # a storage that is known by its place in memory as long as it lives, and is not kept alive
        "StorageWeakRef": "torch.multiprocessing.reductions:StorageWeakRef",
        # an attribute of a value that Dynamo guards
        "AttrSource": "torch._dynamo.source:AttrSource",
        # the fake mode of given inputs, and one where nobody brought one
        "detect_fake_mode": "torch._guards:detect_fake_mode",
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
        # where a buffer of a captured graph comes from: a constant that nobody else has
        "ConstantSource": "torch._dynamo.source:ConstantSource",
        # what an input of AOTAutograd's graph was: an input by place, a parameter, a buffer; an output written into one
        "PlainAOTInput": "torch._functorch._aot_autograd.descriptors:PlainAOTInput",
        "ParamAOTInput": "torch._functorch._aot_autograd.descriptors:ParamAOTInput",
        "BufferAOTInput": "torch._functorch._aot_autograd.descriptors:BufferAOTInput",
        "InputMutationAOTOutput": "torch._functorch._aot_autograd.descriptors:InputMutationAOTOutput",
        # a function of positional arguments as one of a list
        "make_boxed_func": "torch._functorch._aot_autograd.utils:make_boxed_func",
        # Inductor's settings, and torch.compile's mode names as such settings
        "inductor_config": "torch._inductor.config",
        "list_mode_options": "torch._inductor:list_mode_options",
        # one ATen graph -> kernels
        "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
        # what a forward or inference graph needs said before compile_fx_inner: fixed inputs, CUDA graphs
        "compile_fx_forward": "torch._inductor.compile_fx:compile_fx_forward",
        "compile_fx_backward": "torch._inductor.compile_fx:compile_fx_backward",
        # what forward and backward share: the CUDA-graphs box, the graph number, the device
        "create_compiler_config_extra": "torch._inductor.compile_fx:create_compiler_config_extra",
        # what Inductor's C++ wrapper needs to be told
        "get_cpp_wrapper_config": "torch._inductor.compile_fx:get_cpp_wrapper_config",
        # an object whose uuid() is part of the FX graph cache's key
        "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
        # a compiler whose results AOTAutograd can save, what it returns, and AOTAutograd's own function
        "SerializableAOTDispatchCompiler": "torch._functorch._aot_autograd.schemas:SerializableAOTDispatchCompiler",
        "OutputCode": "torch._inductor.output_code:OutputCode",
        "aot_module_simplified": "torch._functorch.aot_autograd:aot_module_simplified",
        # kernel compilation in worker processes, woken up early
        "AsyncCompile": "torch._inductor.async_compile:AsyncCompile",
        "reset_cudagraph_trees": "torch._inductor.cudagraph_trees:reset_cudagraph_trees",
        # computes with integers that depend on sizes and indices alone, and the bounds of such an expression
        "IndexPropagation": "torch._inductor.index_propagation:IndexPropagation",
        "bound_sympy": "torch.utils._sympy.value_ranges:bound_sympy",
        # in Inductor: a call of an operator, a value, a node of the scheduler, and other nodes that must run before it
        "FallbackKernel": "torch._inductor.ir:FallbackKernel",
        "TensorBox": "torch._inductor.ir:TensorBox",
        "SchedulerNode": "torch._inductor.scheduler:SchedulerNode",
        "WeakDep": "torch._inductor.dependencies:WeakDep",
        "StarDep": "torch._inductor.dependencies:StarDep",
        # what Inductor makes of each operator; adds a call of torch's own, or returns it; keeps the strides of eager
        "lowerings": "torch._inductor.lowering:lowerings",
        "make_fallback": "torch._inductor.lowering:make_fallback",
        "fallback_handler": "torch._inductor.lowering:fallback_handler",
        "constrain_to_fx_strides": "torch._inductor.lowering:constrain_to_fx_strides",
        # stock Inductor, passes and all: what is left to try when a compile of ours fails
        "stock_compile_fx": "torch._inductor.compile_fx:compile_fx",
        # errors by which a backend tells Dynamo to trace again, to leave a function alone, to break the graph
        "RestartAnalysis": "torch._dynamo.exc:RestartAnalysis",
        "SkipFrame": "torch._dynamo.exc:SkipFrame",
        "Unsupported": "torch._dynamo.exc:Unsupported",
        # errors of a backend, such as a size that depends on data, after which Dynamo tries smaller graphs
        "answered_by_graph_break": "torch._dynamo.exc:exceptions_allowed_to_be_fallback",
        # -- watching a compile: explain, the command line, the demo --
        # Dynamo's settings: how often a function may be compiled, and when sizes become symbols
        "dynamo_config": "torch._dynamo.config",
        # tells which functions Dynamo compiles; those that it has compiled; the lock that it holds while it does
        "register_bytecode_hook": "torch._dynamo.convert_frame:register_bytecode_hook",
        "input_codes": "torch._dynamo.convert_frame:input_codes",
        "compile_lock": "torch._dynamo.convert_frame:compile_lock",
        # why graphs were broken, in order; Dynamo appends to it
        "graph_break_reasons": "torch._dynamo.utils:graph_break_reasons",
        # figures of the last compiles: which function, why again, why it failed, how long; where their steps are logged
        "get_compilation_metrics": "torch._dynamo.utils:get_compilation_metrics",
        "dynamo_utils": "torch._dynamo.utils",
        # what torch.compile makes of a model: settings, and the backend inside its wrappers
        "DynamoContext": "torch._dynamo.eval_frame:_TorchDynamoContext",
        "innermost_backend": "torch._dynamo.eval_frame:innermost_backend",
        # the compiled code that Dynamo keeps with a function, what drops all of it, and what says whether to compile it
        "cache_entries": "torch._dynamo.eval_frame:_debug_get_cache_entry_list",
        "reset_code": "torch._dynamo.eval_frame:reset_code",
        "eval_frame": "torch._C._dynamo.eval_frame",
        # what takes the place of the guards of a dropped one
        "DeletedGuardManagerWrapper": "torch._dynamo.guards:DeletedGuardManagerWrapper",
        # the module that drives Inductor, where its stages are looked up when they run
        "inductor_driver": "torch._inductor.compile_fx",
        # Inductor's three stages as its driver calls them, on a graph and on each graph inside it
        "inductor_pre_grad": "torch._inductor.compile_fx:_recursive_pre_grad_passes",
        "inductor_joint": "torch._inductor.compile_fx:_recursive_joint_graph_passes",
        "inductor_post_grad": "torch._inductor.compile_fx:_recursive_post_grad_passes",
        # the dotted name of a function that a graph calls, to write the graph as Python
        "qualified_name": "torch.fx.node:_get_qualified_name",
        # torch's own search for the part of a compiler that is at fault
        "CompilerBisector": "torch._inductor.compiler_bisector:CompilerBisector",
        # the class that writes kernels; its save_output_code, where set, is given every source
        "GraphLowering": "torch._inductor.graph:GraphLowering",
    }
)


def __getattr__(name: str) -> Any:
    try:
        path = NAMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    try:
        value = globals()[name] = _find(path)
    except (ImportError, AttributeError) as error:
        raise missing_names([path]) from error
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


def check_names() -> None:
    """An error that lists every missing name, on a torch newer than those that the tests have looked at."""
    if is_newer_than_tested() and (gone := missing()):
        raise missing_names([NAMES[name] for name in gone])


def _find(path: str) -> Any:
    module, _, attribute = path.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def compiler_config_extra(gm: Any) -> Any:
    """What forward and backward share. Torch 2.11 wants Inductor's settings here, later releases the graph."""
    create = __getattr__("create_compiler_config_extra")
    wants_config = "config" in inspect.signature(create).parameters
    return create(__getattr__("inductor_config") if wants_config else gm)


def autograd_cache_arguments(shared: Any) -> dict[str, Any]:
    """What AOTAutograd's cache needs to set up a program that it loads. Later releases than 2.11 take it as one."""
    taken = inspect.signature(__getattr__("aot_module_simplified")).parameters
    if "compiler_config_extra" in taken:
        return {"compiler_config_extra": shared}
    return {"cudagraphs": shared.cudagraphs, "boxed_forward_device_index": shared.forward_device}


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, tensors are real and on the CPU unless a device is named, whatever modes the caller has on."""
    with __getattr__("without_torch_function")(), __getattr__("without_dispatch_modes")(), torch.inference_mode(False):
        yield


# ---- facts about operations and values ----


def is_dispatched(overload: Any) -> bool:
    """A real operator: packets also list TorchScript builtins such as `add.str`, which no graph calls."""
    return torch._C._dispatch_has_kernel(overload.name())


def has_kernel(overload: Any, device: torch.device) -> bool:
    """Can an operator run on a device?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), device.type.upper())


def aten_names() -> set[str]:
    """The names of all ATen operators, without their overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::")}


@functools.cache
def is_composite(overload: Any) -> bool:
    """An operator that torch itself takes apart before autograd (`linear`, `reshape`).

    `sym_size` and its like are computed by one kernel for all devices, as these are, but stand in symbolic graphs.
    """
    if not any("Tensor" in str(result.type) for result in overload._schema.returns):
        return False
    name = overload.name()  # the dispatcher does not know all that stand in graphs
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


def views_of_bases(overload: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of each operand that an operator writes, how it is a view of a base: an index, and sizes or a slice.

    Takes the arguments that say so out of `kwargs`, which then are those of the operator.
    """
    names, types = __getattr__("get_mutable_args")(overload)
    return __getattr__("read_view_information_from_args")(names, types, kwargs, [])


def storage_id(tensor: torch.Tensor) -> int | None:
    """The storage behind a tensor as a number; sparse and wrapped tensors have none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


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


def forget_tensors(fake_mode: Any) -> None:
    """Drop the weak references of a fake mode to the tensors it has fake values for: they forbid `swap_tensors`."""
    describer = fake_mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()


TRACK_NODES_OF_KERNELS: Mapping[str, Any] = MappingProxyType({"trace.provenance_tracking_level": 2})
"""Settings with which Inductor notes for each call of a kernel which nodes of the graph it computes."""


@contextlib.contextmanager
def nodes_of_kernels(notes: dict[str, dict[str, list[str]]], graph: str) -> Iterator[None]:
    """Keep what Inductor notes inside, for one graph: node names by `kernel:number of the call`.

    A torch that takes no such notes leaves the entry empty: reports then have kernels without nodes. The notes are of
    the process, so one thread at a time.
    """
    debug = __getattr__("inductor_debug")
    with __getattr__("compile_lock"), debug.reset_provenance_globals():
        yield
        noted = getattr(debug, "_inductor_triton_kernel_to_post_grad_node_info", {})
        notes[graph] = {kernel: list(nodes) for kernel, nodes in noted.items()}


def source_name(source: Any) -> str:
    """The expression by which Dynamo finds a value: `L['self']._buffers['mask']`. A method until torch 2.11."""
    return source.name() if callable(source.name) else source.name


def add_guard(source: Any, create: Callable[[Any, Any], None]) -> None:
    """One more guard of the program that Dynamo is compiling; `create(builder, guard)` runs when guards are built."""
    __getattr__("TracingContext").get().guards_context.dynamo_guards.add(source.make_guard(create))


def add_lambda_guard(builder: Any, guard: Any, check: Callable[[Any], bool], what: str) -> None:
    """Let a guard call `check` with the tensor of its source; `what` is said where recompilations are explained.

    Dynamo takes tensors for immutable: while the dict of a module's buffers is the same, it may skip the guards
    on them (`skip_tensor_guards_with_matching_dict_tags`, `use_recursive_dict_tags_for_guards`). It always evaluates
    those of a tensor that has guards on a property, as symbolic sizes are, and so this one asks for a property, too.
    """
    manager = builder.get_guard_manager(guard)
    builder.get_guard_manager_from_source(__getattr__("AttrSource")(guard.originating_source, "_version"))
    text = [f"{source_name(guard.originating_source)} {what}"]
    try:
        manager.add_lambda_guard(check, text, guard.user_stack)
    except TypeError:  # an older torch takes no stack
        manager.add_lambda_guard(check, text)


def saves_guards() -> bool:
    """Are guards written to disk, where one that holds a function of ours cannot go?"""
    return bool(getattr(__getattr__("dynamo_config"), "caching_precompile", False))


def has_hooks(module: torch.nn.Module) -> bool:
    """A module whose call does more than its forward."""
    own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return __getattr__("has_any_global_hook")() or any(getattr(module, name) for name in own)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Strided, and no subclass that gives functions a meaning of its own."""
    ordinary = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, __getattr__("FakeTensor"))
    return tensor.layout == torch.strided and type(tensor) in ordinary


def trace_artifact(name: str, payload: Any) -> None:
    """An artifact for TORCH_TRACE and tlparse; `payload` is only called if somebody traces."""
    how = {"metadata_fn": lambda: {"name": name, "encoding": "string"}, "payload_fn": payload}
    __getattr__("trace_structured")("artifact", **how)


def unlimited_recompiles() -> contextlib.AbstractContextManager[Any]:
    """Many small programs through Dynamo in one process, without its limit on recompiles."""
    return __getattr__("dynamo_config").patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)
