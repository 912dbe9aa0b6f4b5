"""Takes compiled graphs over from Inductor where it would hand them to its CUDA graphs.

For this, functions of `torch._inductor.output_code` are replaced while a program is compiled or loaded. All releases
from 2.11 on have them; torch 2.13 has a setting for it (`cudagraph_policy`), which says nothing of parts of a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .. import _private


@contextlib.contextmanager
def compiled_graphs(
    finish: Callable[[Any], None], attach: Callable[[Any], Any] | None, is_quiet: bool
) -> Iterator[None]:
    """Inside, each graph that Inductor compiles, or loads from a cache, is given to `finish`.

    Those that are to be CUDA graphs are given to `attach`, if there is one, instead of torch's CUDA graph trees.
    Inductor may be silent about why others are not.
    """
    module = _private.output_code
    realign = module.maybe_realign_inputs

    def realign_and_finish(is_replayed: Any, compiled: Any, *rest: Any) -> None:
        realign(is_replayed, compiled, *rest)
        finish(compiled)

    def hand_over(inputs: Any, compiled: Any, *rest: Any) -> None:
        assert attach is not None
        attach(compiled)
        # as Inductor does for a graph that is called: kernels want aligned inputs
        realign(_private.BoxedBool(False), compiled, compiled.inputs_to_check, compiled.mutated_input_idxs)

    def say_nothing(message: str) -> None:
        pass

    replaced: dict[str, Any] = {"maybe_realign_inputs": realign_and_finish}
    if attach is not None:
        replaced |= {"cudagraph_post_compile": hand_over, "cudagraph_partition_post_compile": hand_over}
    if is_quiet:
        replaced["log_cudagraph_skip_and_bump_counter"] = say_nothing
    before = {name: getattr(module, name) for name in replaced}
    try:
        vars(module).update(replaced)
        yield
    finally:
        vars(module).update(before)
