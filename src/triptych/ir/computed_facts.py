"""Facts for graphs that come without any, or with facts of many fake modes: the graph is run on fake values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from .. import _private
from .facts import difference, fact


def fake(mode: Any, value: Any) -> Any:
    """The fake value of a real tensor in `mode`; a number stays as it is."""
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The fake-tensor mode that the given values belong to, or None.

    Asked of the values first: around a backend call torch also has a mode of its own that is another one.
    """
    work = list(values)[::-1]
    while work:
        value = work.pop()
        if (mode := getattr(value, "fake_mode", None)) is not None:
            return mode
        if isinstance(value, (list, tuple)):
            work += value[::-1]
        elif hasattr(value, "__tensor_flatten__"):  # a tensor made of others, such as a DTensor
            work += (getattr(value, name) for name in value.__tensor_flatten__()[0])
    return _private.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])


def no_pending_symbols(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Context in which facts are computed. A size that depends on data gets a new unbacked symbol, and the next tracer
    would look for that symbol in the results of its own operation and fail. Here the symbols are not left pending: a
    fact is compared and thrown away, or stored on its node."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def compute_facts(
    gm: GraphModule, example_inputs: Sequence[Any], key: str, mode: Any, with_gradients: bool = False
) -> Any:
    """Run the graph on fake inputs and store each value on its node; returns the fake mode, or None if the run fails.

    After a failure, the nodes that were not reached keep the facts they had. Before autograd, `with_gradients` makes
    the facts say which values require a gradient. For a traced ATen graph it stays off: such a graph may write inputs
    that require a gradient, which autograd would refuse.
    """
    mode = mode or fake_mode_of(list(example_inputs))
    mode = mode or _private.FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, no_pending_symbols(mode), torch.set_grad_enabled(with_gradients):
            _FactRunner(gm, key, mode).run(*(fake(mode, v) for v in example_inputs))
    except Exception:  # any failure of the user's own code: facts are optional
        return None
    return mode


def unify_fake_modes(gm: GraphModule, key: str, mode: Any) -> None:
    """Move all facts of a graph into one fake mode.

    `make_fx` on real tensors gives every node a different fake mode: an operation cannot be computed on two such
    facts, and none shares memory with another, not even a view with its base. The graph is therefore run once more, on
    fake values of `mode`. Where that gives a value that differs from the recorded one (a kernel that chooses the
    strides of its result), or none at all (a size that depends on data), the recorded one is copied into `mode`.
    """
    facts = [fact(n) for n in gm.graph.nodes]
    tensors = [t for f in facts for t in (f if isinstance(f, (list, tuple)) else (f,)) if _is_fake(t)]
    if all(t.fake_mode is mode for t in tensors) or not all(_is_static(t) for t in tensors):
        return
    inputs = [fact(n) for n in gm.graph.nodes if n.op == "placeholder"]
    with _private.without_dispatch_modes(), mode, no_pending_symbols(mode), torch.no_grad():
        _ModeRunner(gm, key, mode).run(*(_moved(mode, v) for v in inputs))


def _is_fake(value: Any) -> bool:
    return isinstance(value, _private.FakeTensor)


def _is_static(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))


def _moved(mode: Any, value: Any) -> Any:
    """A fake value with the same metadata, in new memory, in `mode`."""
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(mode, v) for v in value)
    if not _is_fake(value) or value.fake_mode is mode:
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return moved.requires_grad_(value.requires_grad)


class _FactRunner(Interpreter):
    """Runs a graph on fake values and leaves each value on its node."""

    def __init__(self, gm: GraphModule, key: str, mode: Any) -> None:
        super().__init__(gm)
        self.key, self.mode = key, mode
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "get_attr" and isinstance(value, torch.Tensor):
            value = fake(self.mode, value)
        if n.op != "output":
            n.meta[self.key] = value
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        state = {k: fake(self.mode, v) for k, v in (*module.named_parameters(), *module.named_buffers())}
        return torch.func.functional_call(module, state, args, kwargs)


class _ModeRunner(_FactRunner):
    """Like `_FactRunner`, for a graph with facts: where the computed value differs, the recorded one is used."""

    def __init__(self, gm: GraphModule, key: str, mode: Any) -> None:
        super().__init__(gm, key, mode)
        self.snapshots: dict[torch.Tensor, torch.Tensor] = {}
        """The latest snapshot of each tensor."""

    def run_node(self, n: Node) -> Any:
        recorded = fact(n)
        try:
            value = super().run_node(n)
        except Exception:
            if n.op == "output":
                return None
            value = _moved(self.mode, recorded)
        if recorded is not None and difference(recorded, value) is not None:
            value = _moved(self.mode, recorded)
        if n.op != "output":
            n.meta[self.key] = self._snapshot(value)
        return value

    def _snapshot(self, value: Any) -> Any:
        """The value as it is now, in the same memory: `unsqueeze_` later changes the shape of the value itself.

        Two nodes whose value is one tensor share a snapshot.
        """
        if isinstance(value, (list, tuple)):
            return type(value)(self._snapshot(v) for v in value)
        if not _is_fake(value):
            return value
        latest = self.snapshots.get(value)
        if latest is None or difference(latest, value) or latest.requires_grad != value.requires_grad:
            latest = self.snapshots[value] = value.detach().requires_grad_(value.requires_grad)
        return latest
