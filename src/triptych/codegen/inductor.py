"""Inductor's code generator (Triton or C++) with its own optional graph passes off: ours have run already."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..cache import cache_key
from ..ir.facts import tensor_fact
from ..ir.partitioned import RESULTS
from ..ir.weights import FIXED
from ..passes.session import Session
from ..replay.attach import FACTS, Facts, reason_not_to, replaying, verdicts_noted
from ..replay.program import forget_recordings
from .base import Compiled
from .decompositions import Decompositions, corrected
from .fallbacks import call_what_has_no_kernel, own_lowerings
from .kernel_corrections import without_faulty_kernels
from .launches import direct_launches
from .lowered import lowering_noted
from .realized import keep_copied, keep_gaps, keep_masks
from .write_order import keeping_write_order

OWN_PASSES_OFF: Mapping[str, Any] = {
    # rewrites by pattern; what lowering needs (functionalised custom ops become calls on copies) still runs
    "pattern_matcher": False,
    # the joint stage is ours, in inference too
    "use_joint_graph_passes": False,
    # done by our post-grad stage
    "reorder_for_locality": False,
    # done by our `reinplace`, with a proof. Inductor's would go over what that left alone, and is wrong where a write
    # reads its destination through a copy that Inductor does not make (`foreach` with `flip`)
    "disabled_passes": "REINPLACE_INPLACEABLE_OPS",
    # done by our pass of this name. DistributedDataParallel turns it on for the whole process, and it fails on a graph
    # whose nodes do not have the metadata of a traced one
    "_fuse_ddp_communication": False,
}

ON_A_GPU: Mapping[str, Any] = {
    # batched operations concatenate many small weights: one kernel should read them all, not one kernel each. In C++
    # such a cat is inlined into the loop that reads it, which determines for each element the operand that it is from
    "max_pointwise_cat_inputs": 64,
}

WITH_SPARSE_TENSORS: Mapping[str, Any] = {
    # a sparse tensor keeps the memory of the indices and values that it is made of. Inductor does not know that, and
    # would compute other values into that memory
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}


class InductorCodegen:
    """Inductor's lowering, scheduling and kernels for the graphs of one program."""

    def __init__(self, session: Session, gm: Any, example_inputs: Sequence[Any]) -> None:
        self.session = session
        # Inductor counts the inputs of a graph inside the backward as those of the backward itself
        self.reuses_saved_tensors = sum(isinstance(module, GraphModule) for module in gm.modules()) == 1
        self.key = cache_key(session.options)
        self.known_buffers = session.buffers.digest if session.buffers is not None else ""
        on_gpu = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs)
        self.settings = inductor_settings(session, cacheable=self.key is not None)
        self.on_gpu = on_gpu
        if on_gpu:
            self.settings.update(ON_A_GPU)
            _private.AsyncCompile.wakeup()
        self.settings["triton.cudagraphs"] = on_gpu and session.options.replays != "off"
        with _private.inductor_config.patch(self.settings):
            self.shared = _private.compiler_config_extra(gm)

    def decompositions(self) -> Decompositions:
        return without_faulty_kernels(corrected(_private.select_decomp_table()))

    def operators_with_kernels(self) -> Iterable[Any]:
        return _private.lowerings

    def emit(self, gm: GraphModule, example_inputs: Sequence[Any], graph: str) -> Compiled:
        # The settings are set here, not around the whole compile: a backward is compiled at its first call.
        settings = {**self.settings, **(WITH_SPARSE_TENSORS if has_sparse_tensors(gm) else {})}
        with _private.inductor_config.patch(settings), direct_launches(), replaying(self.session.options):
            # Inductor's cache key reads the generated Python, so a stale one would serve a stale kernel.
            gm.recompile()
            call_what_has_no_kernel(gm)
            if graph == "backward":
                compiled = _private.compile_fx_backward(
                    gm, example_inputs, compiler_config_extra=self.shared, inner_compile=self._compile
                )
            else:
                compiled = _private.compile_fx_forward(
                    gm,
                    example_inputs,
                    num_orig_model_outputs=0,
                    num_example_inputs=len(example_inputs),
                    compiler_config_extra=self.shared,
                    inner_compile=self._compile_with_visible_outputs,
                    is_inference=graph == "inference",
                )
        if self.session.observed:
            side = "backward" if graph == "backward" else "forward"
            self.session.kernels[side] = getattr(compiled, "source_code", "")
        return compiled

    def _compile_with_visible_outputs(
        self, gm: GraphModule, example_inputs: Sequence[Any], **facts: Any
    ) -> Compiled:
        if fixed := fixed_inputs(gm):
            facts["static_input_idxs"] = fixed
        output = gm.graph.output_node()
        returned: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [
            i
            for i in visible_outputs(len(returned), facts.get("is_inference", False))
            if isinstance(returned[i], Node)
        ]
        keep_gaps([returned[i] for i in output.meta["user_visible_output_idxs"]])
        keep_masks(gm.graph)
        return self._compile(gm, example_inputs, **facts)

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any], **facts: Any) -> Compiled:
        config = _private.inductor_config
        is_backward = facts.get("is_backward", False)
        facts[FACTS] = known = Facts(
            results_that_leave(gm, is_backward, facts.get("is_inference", False)),
            reason_not_to(gm, self.session.options) if self.settings["triton.cudagraphs"] else "",
            donated_inputs() if is_backward else (),
        )
        keep_copied(gm.graph)
        with contextlib.ExitStack() as stack:
            stack.enter_context(keeping_write_order())
            stack.enter_context(own_lowerings())
            if self.session.observed:
                graph = "backward" if facts.get("is_backward") else "forward"
                stack.enter_context(lowering_noted(self.session, graph, gm))
            if config.cpp_wrapper:
                facts["cpp_wrapper"] = True
                stack.enter_context(config.patch(_private.get_cpp_wrapper_config()))
            if self.key is not None:
                # Which outputs a user sees decides their strides, yet Inductor's own key leaves it out.
                visible = gm.graph.output_node().meta.get("user_visible_output_idxs")
                marker = cache_marker(f"{self.key}/{visible}/{self.known_buffers}")
                stack.enter_context(config.patch(joint_custom_post_pass=marker))
            if not (self.session.observed and self.on_gpu):
                return _private.compile_fx_inner(gm, example_inputs, **facts)
            say = functools.partial(self.session.replays.__setitem__, "backward" if is_backward else "forward")
            note = stack.enter_context(verdicts_noted(say, known, self.session.options))
            compiled = _private.compile_fx_inner(gm, example_inputs, **facts)
            note(compiled)
            return compiled


def inductor_settings(session: Session, cacheable: bool) -> dict[str, Any]:
    """Inductor's settings for one program: its passes off, torch.compile's mode, the user's own, the caches."""
    options = session.options
    off = {name: value for name, value in OWN_PASSES_OFF.items() if hasattr(_private.inductor_config, name)}
    settings = {**off, "fallback_random": options.fallback_random}
    if options.mode is not None:
        settings.update(_private.list_mode_options(options.mode))
    settings.update(options.inductor_options)
    if session.observed or not cacheable:
        # A cached kernel is not generated, so an observer would see nothing.
        settings.update(fx_graph_cache=False, fx_graph_remote_cache=False)
    if session.observed:
        settings.update(_private.TRACK_NODES_OF_KERNELS)
    return settings


def has_sparse_tensors(gm: GraphModule) -> bool:
    """Is a value of the graph, or of a graph inside it, a sparse tensor of any kind?"""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    tensors = (tensor_fact(node) for graph in graphs for node in graph.nodes)
    return any(tensor is not None and tensor.layout != torch.strided for tensor in tensors)


def fixed_inputs(gm: GraphModule) -> list[int]:
    """Inputs of a frozen graph that CUDA graphs need not copy; AOTAutograd's list still counts removed inputs."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [i for i, n in enumerate(inputs) if FIXED in n.meta]


def visible_outputs(count: int, is_inference: bool) -> range:
    """The outputs whose strides must be as in eager.

    In training a forward returns mutated inputs, the user's outputs, the bases that aliasing outputs are rebuilt
    from, then what the backward needs, whose layout is free.
    """
    context = _private.TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    if is_inference or facts is None:
        return range(count)
    first = facts.num_mutated_inp_runtime_indices
    return range(first, first + facts.num_outputs + facts.num_intermediate_bases)


def results_that_leave(gm: GraphModule, is_backward: bool, is_inference: bool) -> int | None:
    """How many of a graph's results leave the program; the others are for its backward. None for a backward."""
    if is_backward:
        return None
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    return len(returned) if is_inference else output.meta.get(RESULTS, len(returned))


def donated_inputs() -> tuple[int, ...]:
    """The inputs of the backward that is compiled now whose memory it may overwrite."""
    context = _private.TracingContext.try_get()
    facts = context.fw_metadata if context is not None else None
    return tuple(facts.bw_donated_idxs or ()) if facts is not None else ()


def cache_marker(key: str) -> Any:
    """What Inductor's setting `joint_custom_post_pass` is given so that `key` joins the keys of its caches."""
    return _marker_type()(key)


@functools.cache
def _marker_type() -> type:
    class CacheMarker(_private.CustomGraphPass):
        """Stands in one of Inductor's pass slots, which is never called here, so that its id joins the cache key."""

        def __init__(self, key: str) -> None:
            self.key = key

        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return self.key

    return CacheMarker


def reset_cuda_graphs() -> None:
    """Forget recorded CUDA graphs, also those of programs that Inductor compiled itself after a failure of ours."""
    forget_recordings()
    if "torch._inductor.cudagraph_trees" in sys.modules:
        _private.reset_cudagraph_trees()
