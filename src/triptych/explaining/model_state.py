"""Saving and restoring the state of a model around a run: parameters, buffers, inputs and random state."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .. import _private


@contextlib.contextmanager
def preserved(model: Any, inputs: Any) -> Iterator[None]:
    """Restore on exit whatever the run inside writes: parameters, buffers, attributes, inputs, random state."""
    modules = [m for root in roots(model) for m in root.modules()]
    attributes = [(m, _attributes(m)) for m in modules]
    contents = [(t, _copy(t)) for t in _tensors(modules, inputs)]
    generators = random.getstate()
    with torch.random.fork_rng(devices=_cuda_devices(t for t, _ in contents)):
        try:
            yield
        finally:
            random.setstate(generators)
            for module, tables in attributes:
                _restore_attributes(module, tables)
            for tensor, content in contents:
                _restore(tensor, content)


def roots(model: Any) -> Iterator[nn.Module]:
    """The modules a callable runs: itself, the owner of a method, what a function closes over."""
    if isinstance(model, nn.Module):
        yield model
    elif isinstance(model, functools.partial):
        for part in (model.func, *model.args, *model.keywords.values()):
            yield from roots(part)
    elif inspect.ismethod(model):
        yield from roots(model.__self__)
    elif inspect.isfunction(model):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            seen = inspect.getclosurevars(model)
            values = (*seen.nonlocals.values(), *seen.globals.values())
            yield from (value for value in values if isinstance(value, nn.Module))


_TABLES = ("_parameters", "_buffers", "_modules")


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {"": dict(vars(module)), **{table: dict(vars(module)[table]) for table in _TABLES}}


def _restore_attributes(module: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    # only what differs is written: to write at all makes Dynamo check the guards of compiled code again
    for table, saved in before.items():
        current = vars(module)[table] if table else vars(module)
        for name in [n for n in current if n not in saved]:
            del current[name]
        for name, value in saved.items():
            if name not in current or current[name] is not value:
                current[name] = value


def _tensors(modules: list[nn.Module], inputs: Any) -> list[torch.Tensor]:
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        own = [*vars(module).values(), *(v for table in _TABLES for v in vars(module)[table].values())]
        tensors.update((id(v), v) for v in own if isinstance(v, torch.Tensor))
    tensors.update((id(v), v) for v in _private.pytree.tree_leaves(inputs) if isinstance(v, torch.Tensor))
    return [t for t in tensors.values() if t.device.type != "meta" and t.layout == torch.strided]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # on the host, so that a model that fills its GPU can be explained
    return tensor.detach().to("cpu", copy=True)


def _restore(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(tensor.detach().cpu(), before):
            # through .data: autograd is not told of a write that changes nothing in the end
            tensor.data.copy_(before)


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> list[int]:
    used = {t.device.index for t in tensors if t.device.type == "cuda"}
    if torch.cuda.is_initialized():
        used.add(torch.cuda.current_device())
    return sorted(used)
