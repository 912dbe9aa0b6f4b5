"""The harness must fail on each kind of wrong result: a check that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.compare import Call, check_inference, check_training, differences, observe
from triptych.verify.tolerances import PROGRAM

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def spoiled(spoil: Callable[..., Any]) -> Backend:
    """A backend that runs the graph as it is and then spoils its result: `spoil(outputs, inputs)`."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return lambda *inputs: spoil(gm(*inputs), inputs)

    return backend


def first(change: Callable[[Tensor], Tensor]) -> Backend:
    return spoiled(lambda outputs, inputs: (change(outputs[0]), *outputs[1:]))


class Mixed(nn.Module):
    """Writes a buffer and an input; returns a new tensor, an alias of an input and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, written: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.add_(1)
        written.mul_(2)
        y = self.linear(x)
        return torch.relu(y), x[1:], y.t().contiguous().t()


def mixed() -> tuple[Mixed, tuple[Tensor, Tensor]]:
    return Mixed(), (torch.randn(3, 4), torch.randn(5))


def edited(edit: Callable[[torch.fx.Graph], None]) -> Backend:
    """A backend that edits the graph before running it."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        edit(gm.graph)
        gm.recompile()
        return gm.forward

    return backend


def test_honest_backends_pass() -> None:
    model, args = mixed()
    more = [Call((torch.randn(7, 4), torch.randn(6)))]
    for backend in ("eager", "aot_eager"):
        check_inference(model, args, backend=backend, dynamic=True, more=more)
        torch._dynamo.reset()
        check_training(model, args, backend=backend, input_gradients=False)
        torch._dynamo.reset()


def test_the_model_and_its_arguments_are_left_alone() -> None:
    model, (x, written) = mixed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}, written.clone()
    check_training(model, (x, written), backend="eager", input_gradients=False)
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in model.state_dict().items())
    assert torch.equal(written, before[1])
    assert not x.requires_grad and all(weight.grad is None for weight in model.parameters())


WRONG_OUTPUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "value": (lambda y: y * 1.001, "value"),
    "one element": (lambda y: y.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(3.0)), "value"),
    "nan": (lambda y: torch.where(y > 0, y, float("nan")), "value nan"),
    "infinity": (lambda y: y + float("inf"), "value inf"),
    "stride": (lambda y: y.t().contiguous().t(), "stride"),
    "dtype": (lambda y: y.double(), "dtype"),
    "shape": (lambda y: y[None], "shape"),
}


@pytest.mark.parametrize("kind", WRONG_OUTPUTS)
def test_wrong_output(kind: str) -> None:
    change, message = WRONG_OUTPUTS[kind]
    model, args = mixed()
    with pytest.raises(AssertionError, match=f"output 0: {message}"):
        check_inference(model, args, backend=first(change))


def test_lost_aliasing_with_an_input() -> None:
    model, args = mixed()
    backend = spoiled(lambda outputs, inputs: (outputs[0], outputs[1].clone(), *outputs[2:]))
    with pytest.raises(AssertionError, match="output 1 and input 0: separate, expected shared storage"):
        check_inference(model, args, backend=backend)


def test_new_aliasing_with_an_input() -> None:
    def function(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(AssertionError, match="output 0 and input 0: .*, expected separate"):
        check_inference(function, (torch.randn(3),), backend=spoiled(lambda outputs, inputs: (inputs[0][:],)))


def test_wrong_place_in_a_shared_storage() -> None:
    def function(x: Tensor) -> Tensor:
        return x[1:3]

    # equal values, so that nothing but the place differs
    with pytest.raises(AssertionError, match="offset 0, expected shared storage, offset 1"):
        check_inference(function, (torch.ones(4),), backend=spoiled(lambda outputs, inputs: (inputs[0][:2],)))


def test_lost_aliasing_between_outputs() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y[1:]

    with pytest.raises(AssertionError, match="output 0 and output 1: separate, expected shared storage"):
        check_inference(function, (torch.randn(4),), backend=first(torch.clone))


def test_lost_identity() -> None:
    x = torch.randn(3)
    want = observe(lambda x: (x, x), Call((x,)))
    got = observe(lambda x: (x[:], x), Call((x,)))
    lost = "output 0 and input 0: shared storage, offset 0, expected the same object"
    assert lost in differences(want, got)
    assert not differences(want, want)


def test_unmutated_input() -> None:
    def drop_write(graph: torch.fx.Graph) -> None:
        (write,) = (node for node in graph.nodes if node.target == "mul_")
        graph.erase_node(write)

    model, args = mixed()
    with pytest.raises(AssertionError, match="input 1: value"):
        check_inference(model, args, backend=edited(drop_write))


def test_unmutated_buffer() -> None:
    def drop_write(graph: torch.fx.Graph) -> None:
        (write,) = (node for node in graph.nodes if node.target == "add_")
        graph.erase_node(write)

    model, args = mixed()
    with pytest.raises(AssertionError, match="model.calls: value"):
        check_inference(model, args, backend=edited(drop_write))


def leak(source: int, amount: float) -> Backend:
    """Right values, but a gradient of `amount` too much for the input number `source`."""

    def spoil(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        extra = amount * (inputs[source] - inputs[source].detach()).sum()
        return (outputs[0] + extra, *outputs[1:])

    return spoiled(spoil)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize("source, name", [(0, "model.weight"), (1, "input 0")])
def test_wrong_gradient(source: int, name: str) -> None:
    args = (torch.randn(3, 4),)
    check_training(Product(), args, backend=leak(source, 0.0))
    torch._dynamo.reset()
    with pytest.raises(AssertionError, match=f"gradient of {name}: value"):
        check_training(Product(), args, backend=leak(source, 1e-3))


def test_wrong_gradient_that_is_small() -> None:
    """All gradients near 1e-7: an absolute tolerance would let anything pass."""

    def function(x: Tensor) -> Tensor:
        return x * 1e-7

    with pytest.raises(AssertionError, match="gradient of input 0: value"):
        check_training(function, (torch.randn(4),), backend=leak(0, 1e-10))


def test_missing_gradient() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    args = (torch.randn(3), torch.randn(3))
    with pytest.raises(AssertionError, match="output 0: requires_grad False, expected True"):
        check_training(function, args, backend=first(Tensor.detach))

    def cut(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return outputs[0].detach() + 0 * inputs[1], outputs[1]

    torch._dynamo.reset()
    with pytest.raises(AssertionError, match="gradient of input 0: None, expected a tensor"):
        check_training(function, args, backend=spoiled(cut))


def test_weight_folded_into_the_graph() -> None:
    """Right on the first call, and on every call until the weight changes."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        frozen: list[Tensor] = []

        def run(weight: Tensor, x: Tensor) -> tuple[Tensor]:
            if not frozen:
                frozen.append(weight.detach().clone())
            return (weight * 0 + frozen[0] * x + (weight - weight.detach()) * x,)

        return run

    x = torch.randn(3, 4)
    with pytest.raises(AssertionError, match="call 1: .*\n.*output 0: value"):
        check_training(Product(), (x,), backend=backend, more=[Call((x,))])


def test_wrong_at_another_size() -> None:
    """A size burnt into the graph is right for the first call and wrong for the second."""

    def burnt(outputs: tuple[Tensor, ...], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        y = outputs[0]
        return (torch.where(torch.arange(len(y)) < 3, y, torch.zeros(())), *outputs[1:])

    def function(x: Tensor) -> Tensor:
        return x + 1

    more = [Call((torch.randn(5),))]
    with pytest.raises(AssertionError, match="call 1: .*\n.*output 0: value"):
        check_inference(function, (torch.randn(3),), backend=spoiled(burnt), dynamic=True, more=more)


def test_recompiling_is_not_dynamic() -> None:
    def function(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] == 3 else x + 2

    with pytest.raises(AssertionError, match="compiled again despite dynamic=True"):
        check_inference(
            function, (torch.randn(3),), backend="eager", dynamic=True, more=[Call((torch.randn(5),))]
        )


def test_nothing_compiled() -> None:
    with pytest.raises(AssertionError, match="nothing was compiled"):
        check_inference(lambda x: x, (torch.randn(3),), backend="eager")


def test_rounding_passes_and_little_more() -> None:
    want = torch.randn(1000)
    outcome = observe(lambda: want, Call())
    rounding = observe(lambda: want * (1 + 1e-6) + 1e-6, Call())
    wrong = observe(lambda: want + 1e-3, Call())
    assert not differences(outcome, rounding)
    assert differences(outcome, wrong)
    assert set(PROGRAM) >= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_the_models_depend_on_their_attention(name: str) -> None:
    """A scale 5 % off must show: in a model whose attention is almost uniform it would not."""

    def rescale(graph: torch.fx.Graph) -> None:
        attentions = [n for n in graph.nodes if n.target is nn.functional.scaled_dot_product_attention]
        assert attentions
        for node in attentions:
            node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * 1.05}

    case = models.build(name)
    with pytest.raises(AssertionError, match="output 0: value"):
        check_inference(case.model, case.call.args, case.call.kwargs, backend=edited(rescale), fullgraph=True)
