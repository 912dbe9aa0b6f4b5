"""Which operations before and after a value generated code can fuse with it, looking through views; and whether it
computes products itself."""

from __future__ import annotations

from torch.fx import Node

from .. import _private
from ..ir.program import Program
from ..ir.readers import readers
from ..ir.traits import is_pointwise, is_reduction, is_view
from ..options import Options


def read_by_pointwise(program: Program, node: Node, reductions: bool = False) -> bool:
    """If the node were a pointwise operation, would it be fused into the kernels that read it?

    That is so if all its readers are pointwise operations or, with `reductions`, reductions. Only generated code has
    such kernels.
    """
    if program.options.codegen != "inductor":
        return False
    calls = [program.call(reader) for reader in readers(program, node)]
    return bool(calls) and all(
        call is not None and not call.mutates and (is_pointwise(call.op) or (reductions and is_reduction(call.op)))
        for call in calls
    )


def made_by_pointwise(program: Program, node: Node) -> bool:
    """Is the value, looking through views, computed by a pointwise operation that has no other reader? Then a pointwise
    kernel that reads the value can compute it inline, and it is never written to memory."""
    if program.options.codegen != "inductor":
        return False
    while len(node.users) == 1:
        call = program.call(node)
        if call is None or call.mutates:
            return False
        if not is_view(call.op):
            return is_pointwise(call.op)
        node = call.args["self"]
    return False


def generates_products(options: Options) -> bool:
    """Does Inductor generate its own kernels for products? It makes what follows a part of them."""
    if options.codegen != "inductor":
        return False
    config = _private.inductor_config
    switches = ("max_autotune", "max_autotune_gemm")
    by_mode = options.mode in ("max-autotune", "max-autotune-no-cudagraphs")
    return by_mode or any(options.inductor_options.get(name, getattr(config, name)) for name in switches)
