"""What torch offers around a compiled function: each program runs once with `compile` doing nothing, once with it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import triptych

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def compiled_autograd(compile: Compile) -> Any:
    model, x = network(), torch.randn(3, 6, requires_grad=True)
    compiled = compile(model)
    with dynamo_config.patch(compiled_autograd=True):
        y = compiled(x)
        y.square().sum().backward()
    return y, x.grad, gradients(model)


def modules_that_dynamo_calls_whole(compile: Compile) -> Any:
    with dynamo_config.patch(inline_inbuilt_nn_modules=False):
        model, x = network(), torch.randn(3, 6)
        compiled = compile(model)
        first = compiled(x)
        with torch.no_grad():
            model[0].weight.mul_(2)
        model[2] = nn.Linear(8, 4)
        return first, compiled(x)


def a_budget_of_memory(compile: Compile) -> Any:
    with functorch_config.patch(activation_memory_budget=0.3):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
        y = compile(model)(torch.randn(3, 8))
        y.sum().backward()
    return y, gradients(model)


def selective_checkpointing(compile: Compile) -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = network(), torch.randn(3, 6, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y = compile(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))(x)
    y.sin().sum().backward()
    return y, x.grad, gradients(model)


def saved_tensors_elsewhere(compile: Compile) -> Any:
    model, x = network(), torch.randn(3, 6, requires_grad=True)
    compiled = compile(model)
    with autograd_graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = compiled(x)
    y.sum().backward()
    return y, x.grad, gradients(model)


def hooks_on_tensors_and_modules(compile: Compile) -> Any:
    model, x = network(), torch.randn(3, 6, requires_grad=True)
    model[0].register_forward_hook(lambda module, given, result: result * 2)
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 3,))
    x.register_hook(lambda gradient: gradient + 1)
    y = compile(model)(x)
    y.register_hook(lambda gradient: gradient * 5)
    y.sum().backward()
    return y, x.grad, gradients(model)


def an_ensemble_by_vmap(compile: Compile) -> Any:
    models = [network() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def run(parameters: Any, buffers: Any, x: Any) -> Any:
        def one(p: Any, b: Any, x: Any) -> Any:
            return torch.func.functional_call(base, (p, b), (x,))

        return torch.vmap(one, in_dims=(0, 0, None))(parameters, buffers, x)

    return compile(run)(parameters, buffers, torch.randn(2, 6))


def gradients_of_each_sample(compile: Compile) -> Any:
    model = nn.Linear(4, 2)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return compile(each)(parameters, torch.randn(5, 4), torch.randn(5, 2))


def a_learned_codebook(compile: Compile) -> Any:
    """A straight-through estimator, and buffers that training writes without gradients."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(6, 4))
            self.register_buffer("counts", torch.ones(6))

        def forward(self, x: Any) -> Any:
            chosen = torch.cdist(x, self.codes).argmin(-1)
            quantized = self.codes[chosen]
            with torch.no_grad():
                taken = F.one_hot(chosen, 6).float()
                self.counts.mul_(0.9).add_(taken.sum(0), alpha=0.1)
                self.codes.lerp_((taken.t() @ x) / self.counts[:, None], 0.1)
            return x + (quantized - x).detach(), F.mse_loss(x, quantized.detach())

    model, x = Codebook(), torch.randn(5, 4, requires_grad=True)
    y, loss = compile(model)(x)
    (y.sum() + loss).backward()
    return y, loss, x.grad, model.codes, model.counts


def a_cache_that_is_written(compile: Compile) -> Any:
    """Keys of earlier calls, in a buffer that each call extends."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 16)
            self.register_buffer("keys", torch.zeros(1, 6, 8))

        def forward(self, x: Any, position: Any) -> Any:
            query, key = self.project(x).chunk(2, -1)
            self.keys[:, position] = key
            seen = torch.arange(6)[None] <= position[:, None]
            return F.scaled_dot_product_attention(query, self.keys, self.keys, attn_mask=seen)

    model = Attention()
    compiled = compile(model)
    with torch.no_grad():
        first = compiled(torch.randn(1, 3, 8), torch.arange(3))
        later = [compiled(torch.randn(1, 1, 8), torch.tensor([place])) for place in (3, 4)]
    return first, later, model.keys


PROGRAMS = [
    compiled_autograd,
    modules_that_dynamo_calls_whole,
    a_budget_of_memory,
    selective_checkpointing,
    saved_tensors_elsewhere,
    hooks_on_tensors_and_modules,
    an_ensemble_by_vmap,
    gradients_of_each_sample,
    a_learned_codebook,
    a_cache_that_is_written,
]


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_without_a_compile(program, codegen):
    def compile(function):
        return torch.compile(function, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise"})

    torch.manual_seed(0)
    expected = program(lambda function: function)
    torch.manual_seed(0)
    torch.testing.assert_close(program(compile), expected, rtol=1e-4, atol=1e-5)
