"""Eager and compiled, side by side: everything a caller could tell them apart by.

Outputs (value, dtype, device, shape, stride, requires_grad), which tensors share storage, which results are
the very same object, what became of the inputs, parameters and buffers, and all gradients. `differences`
lists every difference; `check_inference` and `check_training` run both sides on deep copies and fail with
that list.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models import Call
from triptych.verify.tolerances import EXACT, PROGRAM, difference, largest


@dataclass
class Outcome:
    """What one call returned and left behind; the names are the same on both sides."""

    structure: Any
    leaves: list[Any]
    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def check_inference(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backend: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = False,
    more: Sequence[Call] = (),
    context: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad,
    fullgraph: bool = False,
) -> None:
    """Call the model eagerly and compiled, with `args` and then each of `more`; compare after every call."""
    if isinstance(model, nn.Module):
        model = copy.deepcopy(model).eval()
    with context():
        _check(model, [Call(args, kwargs or {}), *more], backend, options, dynamic, fullgraph, train=False)


def check_training(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backend: Any,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = False,
    more: Sequence[Call] = (),
    input_gradients: bool = True,
    fullgraph: bool = False,
) -> None:
    """As `check_inference`, in training mode: a backward pass and a step of gradient descent in every call.

    `input_gradients` asks for the gradient of every floating-point input as well; an input that the model
    writes to cannot have one.
    """
    if isinstance(model, nn.Module):
        model = copy.deepcopy(model).train()
    calls = [Call(args, kwargs or {}), *more]
    if input_gradients:
        calls = copy.deepcopy(calls)
        for leaf in _tensors(calls):
            leaf.requires_grad_(leaf.is_floating_point())
    _check(model, calls, backend, options, dynamic, fullgraph, train=True)


def _check(
    model: Callable[..., Any],
    calls: list[Call],
    backend: Any,
    options: dict[str, Any] | None,
    dynamic: bool | None,
    fullgraph: bool,
    train: bool,
) -> None:
    given = {} if options is None else {"options": options}
    # one deepcopy of both keeps tensors that the model and its arguments share shared
    eager, eager_calls = copy.deepcopy((model, calls))
    copied, compiled_calls = copy.deepcopy((model, calls))
    compiled = torch.compile(copied, backend=backend, dynamic=dynamic, fullgraph=fullgraph, **given)
    before = frames = _compiled_frames()
    for number, (eager_call, compiled_call) in enumerate(zip(eager_calls, compiled_calls, strict=True)):
        want = observe(eager, eager_call, train=train)
        got = observe(compiled, compiled_call, train=train)
        found = differences(want, got)
        if found:
            listing = "\n".join(f"  {line}" for line in found)
            raise AssertionError(f"call {number}: compiled differs from eager\n{listing}")
        if number == 0:
            frames = _compiled_frames()
            assert frames > before, "nothing was compiled, so nothing was compared"
        elif dynamic:
            # a recompile for the new size would mean that dynamic shapes were not put to the test
            assert _compiled_frames() == frames, f"call {number} was compiled again despite dynamic=True"


def _compiled_frames() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def observe(function: Callable[..., Any], call: Call, train: bool = False) -> Outcome:
    """Run one call and keep everything by which a caller could tell it from another."""
    torch.manual_seed(1)
    result = function(*call.args, **call.kwargs)
    leaves, structure = pytree.tree_flatten(result)
    outcome = Outcome(
        structure=structure,
        leaves=leaves,
        outputs={f"output {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)},
        inputs={f"input {i}": leaf for i, leaf in enumerate(_tensors(call))},
        state=_state(function),
    )
    if train:
        outcome.gradients = _backward(outcome)
    return outcome


def _state(function: Callable[..., Any]) -> dict[str, Tensor]:
    if not isinstance(function, nn.Module):
        return {}
    function = getattr(function, "_orig_mod", function)
    named = [*function.named_parameters(), *function.named_buffers()]
    return {f"model.{name}": tensor for name, tensor in named}


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Call):
        tree = (tree.args, tree.kwargs)
    elif isinstance(tree, list):
        tree = [(one.args, one.kwargs) for one in tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _backward(outcome: Outcome) -> dict[str, Tensor | None]:
    """Gradients for random weights on the outputs, then one step of gradient descent.

    A plain sum would not do: the sum over a softmax or a layer norm is constant, and its gradient zero
    whatever the graph. The step lets the next call see other weights, so a weight that was folded into the
    graph shows.
    """
    generator = torch.Generator().manual_seed(2)
    roots, weights = [], []
    for tensor in outcome.outputs.values():
        if tensor.requires_grad and tensor.grad_fn is not None:
            roots.append(tensor)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            weights.append(drawn.to(tensor.device, tensor.dtype))
    assert roots, "no output has a gradient, so there is nothing to train"
    torch.autograd.backward(roots, weights)
    gradients: dict[str, Tensor | None] = {}
    for name, tensor in {**outcome.inputs, **outcome.state}.items():
        if tensor.is_leaf and tensor.requires_grad:
            gradients[f"gradient of {name}"] = tensor.grad
            with torch.no_grad():
                if tensor.grad is not None and name in outcome.state:
                    tensor.sub_(tensor.grad, alpha=1e-3)
            tensor.grad = None
    return gradients


def differences(want: Outcome, got: Outcome) -> list[str]:
    """Every difference, one line each; empty when there is none."""
    if want.structure != got.structure:
        return [f"structure of the result: {got.structure}, expected {want.structure}"]
    found: list[str] = []
    for index, (one, other) in enumerate(zip(want.leaves, got.leaves, strict=True)):
        if isinstance(one, Tensor) != isinstance(other, Tensor) or (
            not isinstance(one, Tensor) and one != other
        ):
            found.append(f"output {index}: {other!r}, expected {one!r}")
    if found:
        return found
    for title in ("outputs", "inputs", "state"):
        found += _tensor_differences(getattr(want, title), getattr(got, title))
    found += _gradient_differences(want.gradients, got.gradients)
    found += _sharing_differences(want, got)
    return found


def _gradient_differences(want: dict[str, Tensor | None], got: dict[str, Tensor | None]) -> list[str]:
    if want.keys() != got.keys():
        return [f"gradients exist for {sorted(got)}, expected {sorted(want)}"]
    found = []
    for name in want:
        if (want[name] is None) != (got[name] is None):
            found.append(f"{name}: {_none_or_tensor(got[name])}, expected {_none_or_tensor(want[name])}")
    if found:
        return found
    present = {name: tensor for name, tensor in want.items() if tensor is not None}
    return _tensor_differences(present, {name: tensor for name, tensor in got.items() if tensor is not None})


def _none_or_tensor(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def _tensor_differences(want: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    scale = max((largest(tensor) for tensor in want.values()), default=0.0)
    found = []
    for name, tensor in want.items():
        found += [f"{name}: {what}" for what in _one_tensor(tensor, got[name], scale)]
    return found


def _one_tensor(want: Tensor, got: Tensor, group_scale: float) -> list[str]:
    found = metadata_differences(want, got)
    if want.dtype != got.dtype or want.shape != got.shape or want.device != got.device:
        return found
    wrong = _value_difference(want.detach(), got.detach(), group_scale)
    return found + ([wrong] if wrong else [])


def metadata_differences(want: Tensor, got: Tensor) -> list[str]:
    """What is different about two tensors besides their values."""
    found = [
        f"{what} {getattr(got, what)}, expected {getattr(want, what)}"
        for what in ("dtype", "device", "shape", "layout", "requires_grad")
        if getattr(want, what) != getattr(got, what)
    ]
    if not found and want.layout == torch.strided and _visible_stride(want) != _visible_stride(got):
        found.append(f"stride {got.stride()}, expected {want.stride()}")
    return found


def _visible_stride(tensor: Tensor) -> list[int]:
    """The stride of a dimension of size 1, or of an empty tensor, addresses nothing."""
    if tensor.numel() == 0:
        return []
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _value_difference(want: Tensor, got: Tensor, group_scale: float) -> str:
    problem = difference(want, got, PROGRAM.get(want.dtype, EXACT), group=group_scale)
    return f"value {problem}" if problem else ""


def assert_close(got: Tensor, want: Tensor, name: str = "value") -> None:
    """One tensor, up to what a compiled program may differ from eager by."""
    kinds = [(t.dtype, t.shape, t.device) for t in (got, want)]
    assert kinds[0] == kinds[1], f"{name}: {kinds[0]}, expected {kinds[1]}"
    problem = difference(want, got, PROGRAM.get(want.dtype, EXACT))
    assert not problem, f"{name}: {problem}"


def _sharing_differences(want: Outcome, got: Outcome) -> list[str]:
    """Storage shared, and objects that are the same: for every pair of which one at least is an output."""
    expected, actual = _sharing(want), _sharing(got)
    return [
        f"{first} and {second}: {actual[first, second]}, expected {kind}"
        for (first, second), kind in expected.items()
        if actual[first, second] != kind
    ]


def _sharing(outcome: Outcome) -> dict[tuple[str, str], str]:
    everything = {**outcome.inputs, **outcome.state, **outcome.outputs}
    return {
        (name, other_name): _kinship(tensor, other, other_name not in outcome.outputs)
        for name, tensor in outcome.outputs.items()
        for other_name, other in everything.items()
        if other_name != name
    }


def _kinship(output: Tensor, other: Tensor, other_is_given: bool) -> str:
    if output is other:
        return "the same object"
    if output.layout != torch.strided or other.layout != torch.strided:
        return "separate"
    if output.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return "separate"
    # where in its storage a new result stands is nobody's business; where a view of an argument stands is
    return f"shared storage, offset {output.storage_offset()}" if other_is_given else "shared storage"
