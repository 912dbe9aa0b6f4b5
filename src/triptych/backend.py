"""The flow: a captured program in, a callable out. `compile_fx` is the `torch.compile` backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from . import _private
from .arguments import require_callable, require_graph, require_inputs
from .calling_convention import compile_flat, has_negated_views, keep_identities, returns_overlap, take_plain_tensors
from .codegen.base import CodeGenerator, Compiled
from .codegen.eager import CallableCodegen, EagerCodegen
from .codegen.inductor import InductorCodegen, reset_cuda_graphs
from .codegen.program_cache import not_saved, program_cache
from .codegen.refused_calls import RefusedCalls
from .fallback import Way, first_that_compiles, refuse_to_start_again, reproduction, require_eager_draws
from .freezing import freeze, warn_of_training
from .ir.dynamo_guards import add_guard
from .ir.facts import fact, is_tangent
from .ir.graph_copies import Backup
from .ir.origins import Origins
from .ir.partitioned import BACKWARD, RESULTS, Backward, mark_gradients
from .ir.rule_notes import note_earlier_rules, rules_by_node
from .ir.values.buffers import KnownBuffers, forget_changes
from .options import Options
from .partition import partition
from .passes.custom_passes import name_of
from .passes.manager import run_stage
from .passes.session import Session, open_session
from .passes.torch_tools import log_compiled, log_graph, log_loaded, provenance, timed_stage
from .spmd_check import require_same_collectives
from .weak_references import dropping_references

_private.check_names()  # before a program is compiled halfway

OptionsLike = Mapping[str, Any] | Options | None
CompileFn = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
ChooseCodegen = Callable[[Session, GraphModule, Sequence[Any]], CodeGenerator]


def compile_fx(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: OptionsLike = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a captured graph: `torch.compile(model, backend=triptych.compile_fx)`. The graph may be modified."""

    def choose(session: Session, gm: GraphModule, example_inputs: Sequence[Any]) -> CodeGenerator:
        if session.options.codegen == "eager":
            return EagerCodegen(session)
        return InductorCodegen(session, gm, example_inputs)

    require_graph(gm, "compile_fx")
    require_inputs(example_inputs, gm, "compile_fx")
    made = Options.make(options, mode)
    if asks_for_tangents():  # compiled kernels do not compute tangents
        return gm.forward
    if has_negated_views(gm, example_inputs):  # Inductor's kernels ignore the negative bit
        made = replace(made, codegen="eager")
    return compile_program(gm, example_inputs, made, choose, LAST_RESORTS[made.codegen])


def asks_for_tangents() -> bool:
    """Does the program run inside `torch.autograd.forward_ad.dual_level`? Dynamo guards the answer."""
    if _private.CompileContext.try_get() is not None and _private.TracingContext.try_get() is not None:
        add_guard(_private.GlobalStateSource(), _private.GuardBuilder.DUAL_LEVEL)
    return _private.forward_ad._current_level >= 0


LAST_RESORTS = {"inductor": ("inductor", "eager"), "eager": ("eager",)}
"""By code generator: what is tried when a compile fails with our passes and without them."""


def reset() -> None:
    """Forget the state that outlives a compile; `torch._dynamo.reset()` calls this."""
    reset_cuda_graphs()
    forget_changes()


compile_fx.reset = reset  # type: ignore[attr-defined]


def make_backend(compile_fn: CompileFn) -> Callable[..., Any]:
    """A `torch.compile` backend with the user's own code generator.

    `compile_fn(gm, example_inputs)` gets each optimised ATen graph (forward, backward or inference) and returns
    a callable of positional arguments that gives back what the graph returns.
    """
    require_callable(compile_fn, "make_backend", "a function of a graph and its example inputs")

    def backend(
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: OptionsLike = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        require_graph(gm, "the backend")
        require_inputs(example_inputs, gm, "the backend")
        made = Options.make(options, mode)
        # graphs stay functional, unless in-place writes are added by name
        removed = made.remove_passes if "reinplace" in made.add_passes else (*made.remove_passes, "reinplace")
        # not "inductor": no pass may emit what only Inductor can lower
        made = replace(made, codegen="eager", remove_passes=removed)
        return compile_program(gm, example_inputs, made, lambda *_: CallableCodegen(compile_fn))

    backend.__name__ = backend.__qualname__ = name_of(compile_fn)  # which Dynamo puts into its messages
    backend.compile_fn = compile_fn  # type: ignore[attr-defined]
    return backend


def compile_program(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    choose_codegen: ChooseCodegen,
    last_resorts: Sequence[str] = (),
) -> Callable[..., Any]:
    """Compile a captured graph by the flow; if that fails, without passes, then by the last resorts in order."""

    def compile(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if returns_overlap(gm):  # AOTAutograd would make views of these from other memory
            return gm.forward
        return take_plain_tensors(compile_some_way(gm, example_inputs), example_inputs)

    def compile_some_way(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        session = open_session(options)
        if options.on_error == "raise":
            return compile_flow(gm, example_inputs, session, choose_codegen)
        backup = Backup(gm)

        def without_passes() -> Callable[..., Any]:
            backup.restore()
            plain = open_session(replace(options, freeze=False))
            plain.passes_off = True
            return compile_flow(gm, example_inputs, plain, choose_codegen)

        def by_inductor() -> Callable[..., Any]:
            backup.restore()
            settings = dict(options.inductor_options)
            patches = {"config_patches": settings} if settings else {}
            return _private.stock_compile_fx(gm, example_inputs, **patches)

        def by_eager() -> Callable[..., Any]:
            backup.restore()
            return gm.forward

        def reproduce(error: Exception) -> str:
            backup.restore()
            return reproduction(gm, example_inputs, options, error)

        resorts = {
            "inductor": Way("was compiled by Inductor itself", by_inductor, without_us="in PyTorch's own compiler"),
            "eager": Way("runs eagerly", by_eager),
        }
        ways = [
            Way("was compiled as usual", lambda: compile_flow(gm, example_inputs, session, choose_codegen)),
            Way(
                "was compiled without Triptych's passes", without_passes, breaks_graph=True,
                without_us="without Triptych's passes",
            ),  # fmt: skip
            *(resorts[name] for name in last_resorts),
        ]
        return first_that_compiles(ways, session, reproduce)

    refuse_to_start_again()
    with dropping_references(gm, example_inputs):
        return compile_flat(gm, example_inputs, compile)


def compile_flow(
    gm: GraphModule, example_inputs: Sequence[Any], session: Session, choose_codegen: ChooseCodegen
) -> Callable[..., Any]:
    """Dynamo graph -> pre-grad -> AOTAutograd -> joint -> partition -> post-grad -> code generation -> callable."""
    options = session.options
    session.origins = Origins(gm)
    if options.known_buffers and not session.passes_off:
        session.buffers = KnownBuffers(options)
    session.keep("dynamo", gm)
    log_graph("pre_grad_graphs", "BEFORE PRE GRAD", gm)
    gm = run_stage("pre_grad", gm, session, graph="pre_grad", example_inputs=example_inputs)
    if session.buffers is not None:
        session.buffers.attach_guards()
    session.keep("pre_grad", gm)
    log_graph("pre_grad_graphs", "AFTER PRE GRAD", gm)
    earlier_rules = rules_by_node(gm, session.rules_before_autograd)
    with_identities = keep_identities(gm)
    codegen = choose_codegen(session, gm, example_inputs)
    refused = RefusedCalls(session)

    def joint_stage(joint: GraphModule, inputs: Any, is_inference: bool = False) -> GraphModule:
        leaves = _private.pytree.tree_leaves(inputs)
        joint = run_stage("joint", joint, session, graph="joint", example_inputs=leaves, is_inference=is_inference)
        session.keep("joint", joint)
        return joint

    def partition_joint(joint: GraphModule, inputs: Any, **facts: Any) -> tuple[GraphModule, GraphModule]:
        note_earlier_rules(joint, earlier_rules)
        # AOTAutograd partitions the sub-graphs of regions first, each without inputs: those stay as they are
        if inputs:
            joint = joint_stage(joint, inputs)
        joint = run_stage("before_partition", joint, session, graph="joint", example_inputs=inputs)
        given = [fact(n) for n in joint.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        session.activity = "partitioning the joint graph"
        with timed_stage("partition"):
            forward, backward = partition(joint, inputs, **facts)
        forward.meta[BACKWARD] = Backward(backward, facts["num_fwd_outputs"])
        run_stage("after_partition", forward, session, graph="forward")
        del forward.meta[BACKWARD]
        forward.graph.output_node().meta[RESULTS] = facts["num_fwd_outputs"]
        if inputs and not any(hasattr(type(x), "__tensor_flatten__") for x in (*example_inputs, *gm.parameters())):
            # a wrapper subclass decides on its strides itself
            mark_gradients(backward.graph, given, session.rewritten_before_autograd)
        return forward, backward

    def post_grad_stage(gm: GraphModule, inputs: Sequence[Any], graph: str) -> Compiled:
        is_inference = graph == "inference"
        gm = run_stage("post_grad", gm, session, graph=graph, example_inputs=inputs, is_inference=is_inference)
        # what the stage computes from weights alone
        frozen = freeze(gm, inputs, session, again=True) if options.freeze and is_inference else None
        session.keep("backward" if graph == "backward" else "forward", gm)
        compiled = emit(gm, inputs if frozen is None else frozen.inputs, graph)
        log_compiled(session, graph)
        return compiled if frozen is None else frozen.call(compiled)

    def emit(gm: GraphModule, inputs: Sequence[Any], graph: str) -> Compiled:
        before_codegen(gm, graph, session)
        if options.spmd_check:
            session.activity = f"comparing the collectives of the {graph} graph with those of other ranks"
            require_same_collectives(gm.graph, options.spmd_check)
        session.activity = f"generating code for the {graph} graph"
        if not isinstance(codegen, InductorCodegen):  # which logs it itself
            log_graph("post_grad_graphs", "AFTER POST GRAD", gm)
        return (EagerCodegen(session) if refused.found else codegen).emit(gm, inputs, graph)

    def forward(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if options.freeze:
            warn_of_training(session)
        return post_grad_stage(gm, inputs, "forward")

    def backward(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        compiled = compile_backward(gm, inputs)
        allow_retained_graphs()
        session.graph_compiled()
        return compiled

    def compile_backward(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if options.on_error == "raise":
            return post_grad_stage(gm, inputs, "backward")
        # compiled at its first call, when the forward has run: only this graph can be compiled in another way
        backup = Backup(gm)

        def without_passes() -> Compiled:
            backup.restore()
            return not_saved(emit(gm, inputs, "backward"))

        def by_eager() -> Compiled:
            backup.restore()
            require_eager_draws(gm)
            before_codegen(gm, "backward", replace(session, options=replace(options, codegen="eager")))
            return EagerCodegen(session).emit(gm, inputs, "backward")

        ways = [
            Way("was compiled as usual", lambda: post_grad_stage(gm, inputs, "backward")),
            Way("was compiled without the post-grad passes", without_passes),
            Way("runs eagerly", by_eager),
        ]
        return first_that_compiles(ways, session, lambda error: "It is a backward graph, compiled when it first ran")

    def inference(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        note_earlier_rules(gm, earlier_rules)
        # before the joint stage, so that its passes see the graph without the computations on weights
        frozen = freeze(gm, inputs, session) if options.freeze else None
        if frozen is not None:
            inputs = frozen.inputs
        # nothing to partition, so the joint stage runs here
        gm = joint_stage(gm, inputs, is_inference=True)
        again = freeze(gm, inputs, session, again=True) if options.freeze else None
        if again is not None:
            inputs = again.inputs
        compiled = post_grad_stage(gm, inputs, "inference")
        for step in (again, frozen):  # the later one takes what the earlier one computes
            compiled = compiled if step is None else step.call(compiled)
        return compiled

    with tracing(example_inputs, codegen), program_cache(session, codegen) as cache:
        session.activity = "tracing the program with AOTAutograd"
        autograd = _private.aot_autograd(
            fw_compiler=cache.compiler(forward),
            bw_compiler=cache.compiler(backward),
            inference_compiler=cache.compiler(inference),
            decompositions=refused.left_whole(codegen.decompositions(), codegen.operators_with_kernels()),
            partition_fn=partition_joint,
            keep_inference_input_mutations=True,
            **cache.arguments,
        )
        with provenance() as note_provenance:
            note_provenance(gm)
            compiled = with_identities(autograd(gm, example_inputs))
    if cache.used and all(record.stage == "pre_grad" for record in session.records):
        log_loaded(session)
    session.graph_compiled()
    return compiled


def allow_retained_graphs() -> None:
    """The backward that was compiled last leaves what was saved as it is, where the graph is retained.

    AOTAutograd raises an error otherwise, once such a backward has been compiled for a graph that is not retained.
    """
    context = _private.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def before_codegen(gm: GraphModule, graph: str, session: Session) -> None:
    """Run the last stage on the graph, and on the graphs inside it, which no other stage has seen."""
    for name, inner in list(gm.named_modules()):
        if isinstance(inner, GraphModule):
            run_stage("before_codegen", inner, session, graph=f"{graph}.{name}" if name else graph)


@contextlib.contextmanager
def tracing(example_inputs: Sequence[Any], codegen: CodeGenerator) -> Iterator[None]:
    """The contexts and settings that AOTAutograd, the partitioner and Inductor need."""
    inputs = _private.pytree.tree_leaves(example_inputs)
    detected = _private.detect_fake_mode(inputs)
    fake_mode = detected or _private.FakeTensorMode(allow_non_fake_inputs=True)
    context = _private.TracingContext.try_get() or _private.TracingContext(fake_mode)
    with (
        _private.use_lazy_graph_module(True),
        _private.virtualized.set_fake_mode(fake_mode),
        _private.tracing(context),
        _private.inductor_config.patch(codegen.settings),
        _private.functorch_config.patch(
            unlift_effect_tokens=True,
            donated_buffer=codegen.reuses_saved_tensors and _private.functorch_config.donated_buffer,
            # it would apply to any compiler; ours is marked where its results can be saved
            force_autograd_cache=False,
        ),
    ):
        yield
    if detected is None:  # our fake mode lives on with AOTAutograd's results
        _private.forget_tensors(fake_mode)
