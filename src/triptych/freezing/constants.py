"""Constants at run time: they are kept between calls, and computed again when one of their weights has changed."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook

log = logging.getLogger("triptych")

_version = attrgetter("_version")
_address = torch.Tensor.data_ptr
_strides: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride


class Constants:
    """The values of one compiled graph that come from weights alone.

    Every call checks that the weights are the same tensors in the same memory, and that nobody has written to them
    since. `_version` counts the writes that PyTorch knows of (`load_state_dict`, in-place operations); optimizer steps
    are noticed by a hook, because fused ones do not change the version. The address reveals a tensor that was given
    other memory, which does not change the version either (`p.data = other`, `swap_tensors`,
    `model.bfloat16().float()`). A write behind PyTorch's back (`p.data.mul_(2)`) is not noticed: whoever sets `freeze`
    promises not to do that.
    """

    def __init__(self, compute: GraphModule, weights: Sequence[int], like: Sequence[torch.Tensor]) -> None:
        self.compute = compute
        self.pick: Callable[[list[Any]], tuple[Any, ...]] = (
            itemgetter(*weights) if len(weights) > 1 else lambda inputs: (inputs[weights[0]],)
        )
        self.strides = [t.stride() for t in like]
        self.values: list[torch.Tensor] = []
        self.changed = True
        """An optimizer has stepped, or nothing was computed yet."""
        self.seen: tuple[torch.Tensor, ...] = ()
        """The weights that the values were computed from. These references keep them alive, so that no new tensor can
        have the identity of one of them."""
        self.versions: list[int] = []
        self.addresses: list[int] = []
        self.memory: tuple[torch.UntypedStorage, ...] = ()
        """The storages at the addresses. These references keep them alive, so that no new memory can have one of the
        addresses."""
        self.turnable: list[torch.Tensor] = []
        """Weights that can be transposed in their memory without a change of shape, as by `p.data = p.data.t()`."""
        self.turned: list[tuple[int, ...]] = []
        """The strides of these weights."""
        self.computed = 0
        """How often the values were computed."""
        self._lock = threading.Lock()
        _watch(self)

    def of(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The values for these inputs of the graph, always in the same memory."""
        weights = self.pick(inputs)
        if self.changed or not all(map(is_, weights, self.seen)) or self._differ(weights):
            with self._lock:
                self._refresh(weights)
        return self.values

    def _differ(self, weights: Sequence[torch.Tensor]) -> bool:
        """Were the weights written, or given other memory?"""
        try:
            return (
                list(map(_version, weights)) != self.versions
                or list(map(_address, weights)) != self.addresses
                or list(map(_strides, self.turnable)) != self.turned
            )
        except RuntimeError:  # an inference tensor has no version: it may have been written
            return True

    def _refresh(self, weights: Sequence[torch.Tensor]) -> None:
        self.changed = False
        self.seen = tuple(weights)
        untold = any(w.is_inference() for w in weights)
        self.versions = [] if untold else list(map(_version, weights))
        self.addresses = list(map(_address, weights))
        self.memory = tuple(w.untyped_storage() for w in weights)
        self.turnable = [w for w in weights if len(set(sizes := [s for s in w.shape if s != 1])) < len(sizes)]
        self.turned = list(map(_strides, self.turnable))
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._compute(weights)
        except Exception:
            self.changed = True
            raise
        self.computed += 1
        if self.computed == 2:
            why = "inference tensors are computed with on every call" if untold else "weights have changed"
            log.warning("freeze: %s; what was computed from them is computed anew", why)

    def _compute(self, weights: Sequence[torch.Tensor]) -> None:
        made = self.compute(*weights)
        if self.values:
            for value, new in zip(self.values, made):
                value.copy_(new)
            return
        taken = set(map(_place, weights))
        for new, stride in zip(made, self.strides):
            own = new.stride() == stride and _place(new) not in taken
            self.values.append(new if own else _copied(new, stride))
            taken.add(_place(new))

    def note_step(self, stepped: set[int]) -> None:
        """An optimizer has stepped over the tensors of these ids."""
        if not stepped.isdisjoint(map(id, self.seen)):
            self.changed = True


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copied(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy of the value with the strides that the graph was compiled for."""
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


_watched: weakref.WeakSet[Constants] = weakref.WeakSet()
_hooked = False


def _watch(constants: Constants) -> None:
    global _hooked
    _watched.add(constants)
    if not _hooked:
        # `disable` is called here and not used as a decorator, because it imports Dynamo
        register_optimizer_step_post_hook(torch.compiler.disable(_note_step))
        _hooked = True


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _watched:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for constants in list(_watched):
            constants.note_step(stepped)
