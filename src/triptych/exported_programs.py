"""Exported programs: `torch.export`'s graph with its signature, optimised by the three stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node

from .arguments import require_exported_program
from .errors import TriptychError
from .fallback import Way, first_that_compiles
from .ir.graph_copies import snapshot
from .ir.modules import attribute
from .ir.program import WILL_BE_DECOMPOSED
from .options import Options
from .passes.manager import run_stage
from .passes.session import Session, open_session

GRADIENT_SAFE = ("pre_grad",)
"""Stages that preserve gradients; the others assume that autograd has run."""
INFERENCE = ("pre_grad", "joint", "post_grad")

UNSUPPORTED = {
    "freeze": "it is a promise about a compiled model; an exported program keeps its weights as inputs",
}


def optimize(
    exported_program: ExportedProgram, *, train: bool = False, options: Mapping[str, Any] | Options | None = None
) -> ExportedProgram:
    """The same program, optimised: for AOTInductor, for another backend, or to run as it is.

    Inputs, outputs, parameters, buffers and what is written to them stay as the signature says, and dynamic sizes stay
    dynamic. The given program is not changed; the result has the same weights and buffers, not copies of them. Its
    graph calls ATen operators only, so that whatever takes an exported program takes this one.

    The result is for inference. With `train`, only the passes before autograd run, which leave gradients as they were.
    """
    require_exported_program(exported_program, "optimize")
    given = Options.make(options)
    for name, reason in UNSUPPORTED.items():
        if getattr(given, name) != getattr(Options(), name):
            raise TriptychError(f"optimize takes no option {name!r}: {reason}")
    # not "inductor": no pass may emit what only Inductor's kernels know; buffers are the caller's, and may change
    session = open_session(replace(given, codegen="eager", known_buffers=False))

    def optimised() -> ExportedProgram:
        gm = snapshot(exported_program.graph_module)
        gm.meta[WILL_BE_DECOMPOSED] = True
        run_stages(gm, session, INFERENCE if not train else GRADIENT_SAFE, is_inference=not train)
        del gm.meta[WILL_BE_DECOMPOSED]
        return with_graph(exported_program, gm)

    if given.on_error == "raise":
        return optimised()
    ways = [Way("was optimised", optimised), Way("stays as it came", lambda: exported_program)]
    return first_that_compiles(ways, session, lambda error: "The caller has the program")


def run_stages(gm: GraphModule, session: Session, stages: tuple[str, ...], is_inference: bool) -> None:
    inputs = [node.meta.get("val") for node in _inputs(gm)]
    graphs = {"pre_grad": "pre_grad", "joint": "joint", "post_grad": "inference"}
    for stage in stages:
        run_stage(stage, gm, session, graph=graphs[stage], example_inputs=inputs, is_inference=is_inference)


def with_graph(program: ExportedProgram, gm: GraphModule) -> ExportedProgram:
    """The program with another graph of the same inputs and outputs; constants that the graph holds become inputs."""
    constants = lift_constants(gm, program.graph_signature)
    added = [
        InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=name), target=name) for name in constants
    ]
    specs = list(program.graph_signature.input_specs)
    place = _first_user_input(program.graph_signature)
    input_specs = [*specs[:place], *added, *specs[place:]]
    names = [node.name for node in _inputs(gm)]
    if names != [spec.arg.name for spec in input_specs]:
        raise RuntimeError(f"the graph takes {names}, which is not what the signature says")
    return ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(input_specs, _output_specs(program.graph_signature, gm)),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants={**program.constants, **constants},
        verifiers=program.verifiers,
    )


def _output_specs(signature: ExportGraphSignature, gm: GraphModule) -> list[OutputSpec]:
    """The specs with the names that the returned values have now."""
    returned: Any = gm.graph.output_node().args[0]
    if len(returned) != len(signature.output_specs):
        raise RuntimeError(f"the graph returns {len(returned)} values, the signature {len(signature.output_specs)}")
    specs = []
    for spec, value in zip(signature.output_specs, returned):
        if isinstance(value, Node):
            spec = replace(spec, arg=replace(spec.arg, name=value.name))
        specs.append(spec)
    return specs


def lift_constants(gm: GraphModule, signature: ExportGraphSignature) -> dict[str, torch.Tensor]:
    """Turn every tensor that the graph reads from its module into an input, before the user's; returns them by name."""
    constants: dict[str, torch.Tensor] = {}
    taken = {spec.arg.name for spec in signature.input_specs} | {spec.target for spec in signature.input_specs}
    inputs = _inputs(gm)
    place = _first_user_input(signature)
    after = inputs[place] if place < len(inputs) else _first_call(gm)
    lifted: dict[str, Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute(gm, node.target)
        if not isinstance(value, torch.Tensor):
            continue  # a graph inside this one
        if node.target not in lifted:
            name = next(n for i in range(len(taken) + 1) if (n := f"c_triptych_constant_{i}") not in taken)
            taken.add(name)
            with gm.graph.inserting_before(after):
                lifted[str(node.target)] = gm.graph.placeholder(name)
            lifted[str(node.target)].meta = {**node.meta}
            constants[name] = value.detach()
        node.replace_all_uses_with(lifted[str(node.target)])
        gm.graph.erase_node(node)
    for path in lifted:
        owner, _, name = path.rpartition(".")
        delattr(gm.get_submodule(owner), name)
    gm.recompile()
    return constants


def _first_user_input(signature: ExportGraphSignature) -> int:
    kinds = [spec.kind for spec in signature.input_specs]
    return kinds.index(InputKind.USER_INPUT) if InputKind.USER_INPUT in kinds else len(kinds)


def _inputs(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="placeholder")


def _first_call(gm: GraphModule) -> Node:
    return next(node for node in gm.graph.nodes if node.op != "placeholder")
