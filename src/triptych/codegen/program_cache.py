"""AOTAutograd's cache: a program compiled before, in this process or another, is loaded without stages 2 and 3.

Stage 1 always runs, and AOTAutograd's key is the graph that stage 1 leaves, with what is known of its inputs. What else
decides the result is added to the key: our sources and options, what known buffers hold, whether stage 1 rewrote the
program, since `gradient_strides` copies gradients of rewritten programs alone, and whether oneDNN may be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _private
from ..options import HOOKS
from ..passes.session import Session
from ..passes.torch_bisector import bisector_runs
from ..replay.attach import replaying
from .base import CodeGenerator, Compiled
from .eager import boxed
from .inductor import InductorCodegen, cache_marker
from .launches import direct_launches


@dataclass(frozen=True)
class ProgramCache:
    """What AOTAutograd is given so that it looks the program up, and saves what was compiled."""

    used: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def compiler(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        """The compiler, of the type by which AOTAutograd recognises that its results can be saved."""
        return _private.SerializableAOTDispatchCompiler(_private.OutputCode, compile) if self.used else compile


def not_saved(compiled: Compiled) -> Compiled:
    """A graph compiled in a simpler way after a failure: it is not saved, so that the next compile tries again."""
    return boxed(lambda inputs: compiled(inputs))


@contextlib.contextmanager
def program_cache(session: Session, codegen: CodeGenerator) -> Iterator[ProgramCache]:
    """The cache for one program; it is disabled if the program must be compiled in this process."""
    if not isinstance(codegen, InductorCodegen) or codegen.key is None or not _may_be_loaded(session):
        yield ProgramCache()
        return
    settings = f"{session.rewritten_before_autograd}/{torch.backends.mkldnn.enabled}"
    marker = cache_marker(f"{codegen.key}/{codegen.known_buffers}/{settings}")
    with _private.inductor_config.patch(joint_custom_post_pass=marker), direct_launches(), replaying(session.options):
        yield ProgramCache(True, _private.autograd_cache_arguments(codegen.shared))


def _may_be_loaded(session: Session) -> bool:
    """May the program be loaded? Stages 2 and 3 do not run over a program that is loaded.

    So it must be compiled if it is observed or verified, or if rewrites are counted. `freeze` computes from the weights
    of this process, and a user's pass may depend on more than its source says, such as a function in another file.
    Where ranks compare what they compile, each of them must compile.
    """
    options = session.options
    if session.observed or session.passes_off or options.freeze or options.verify != "off":
        return False
    if options.spmd_check or session.rewrites_left is not None or bisector_runs():
        return False
    return not any(options.custom_passes(hook) for hook in HOOKS if not hook.startswith("pre_grad"))
