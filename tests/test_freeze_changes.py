"""freeze, against everything that people do to the weights of a model between two calls."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.test_freeze import X, frozen, only_constants


class Layers(nn.Module):
    """Weights and a buffer that are worked on before they meet the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(16) + 0.5)

    def forward(self, x):
        weight = torch.cat([self.first.weight, self.second.weight])
        bias = torch.cat([self.first.bias, self.second.bias])
        return F.linear(x, weight * 2, bias * 3) * self.scale.exp()


CHANGES: dict[str, Callable[[Layers], None]] = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


# ---- other memory behind the same tensor: neither the object nor its version tells ----


@change
def vector_to_parameters(model):
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach() + 1, model.parameters())


@change
def parts_of_one_vector_exchanged(model):
    """The same storage before and after, and other places in it."""
    flat = torch.randn(2, 64)
    model.first.weight.data, model.second.weight.data = flat[0].view(8, 8), flat[1].view(8, 8)
    frozen_call(model)
    model.first.weight.data, model.second.weight.data = flat[1].view(8, 8), flat[0].view(8, 8)


@change
def there_and_back(model):
    """What was freed may be handed out again: the address alone is not enough."""
    with torch.no_grad():
        model.first.weight.add_(1 / 3)
    frozen_call(model)
    model.bfloat16().float()


@change
def half_and_back(model):
    model.half().float()


@change
def double_and_back(model):
    """Nothing is lost: the values are the same."""
    model.double().float()


@change
def data_replaced(model):
    for p in model.parameters():
        p.data = torch.randn_like(p)


@change
def data_replaced_again_and_again(model):
    for _ in range(20):
        data_replaced(model)


@change
def data_of_a_buffer_replaced(model):
    model.scale.data = torch.rand(16)


@change
def data_transposed(model):
    """The same address and version, other strides."""
    model.first.weight.data = model.first.weight.data.t()


@change
def exchanged_by_data(model):
    first, second = model.first.weight, model.second.weight
    first.data, second.data = second.data, first.data


@change
def set_(model):
    with torch.no_grad():
        model.first.weight.set_(torch.randn(8, 8))


@change
def swap_tensors(model):
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(8, 8)))


@change
def swap_a_buffer(model):
    torch.utils.swap_tensors(model.scale, torch.rand(16))


@change
def moved_to_shared_memory(model):
    model.share_memory()


@change
def storage_written_anew(model):
    storage = model.first.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(2 * size)
    with torch.no_grad():
        model.first.weight.normal_()


@change
def channels_last(model):
    model.to(memory_format=torch.preserve_format)


# ---- other tensors ----


@change
def load_state_dict(model):
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


@change
def load_state_dict_assigned(model):
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


@change
def load_state_dict_swapped(model):
    with swapping():
        load_state_dict(model)


@change
def converted_by_swapping(model):
    with swapping():
        model.bfloat16().float()


@change
def converted_by_overwriting(model):
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.bfloat16().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@change
def module_replaced(model):
    model.second = nn.Linear(8, 8)


@change
def buffer_replaced(model):
    model.scale = torch.rand(16)


@change
def to_empty(model):
    model.to_empty(device="cpu")
    load_state_dict(model)


@change
def tied(model):
    model.second.weight = model.first.weight


@change
def untied(model):
    model.second.weight = nn.Parameter(model.first.weight.detach().clone() + 1)


@change
def copied_deeply(model):
    model.first = copy.deepcopy(model.first)
    with torch.no_grad():
        model.first.weight.mul_(2)


@change
def requires_grad_flipped(model):
    model.first.weight.requires_grad_(not model.first.weight.requires_grad)


@change
def stateless_call(model):
    state = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    with torch.no_grad():
        got = torch.func.functional_call(compiled_of(model), {f"_orig_mod.{k}": v for k, v in state.items()}, (X,))
        torch.testing.assert_close(got, torch.func.functional_call(model, state, (X,)))


# ---- the same tensors, written ----


@change
def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    load_state_dict(model)
    average.update_parameters(model)
    for p, q in zip(model.parameters(), average.module.parameters()):
        p.detach().copy_(q)


@change
def moving_average_put_in_and_taken_out(model):
    own = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)
    frozen_call(model)
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), own)


@change
def low_rank_update_merged(model):
    with torch.no_grad():
        model.first.weight += torch.randn(8, 2) @ torch.randn(2, 8)


@change
def one_element(model):
    with torch.no_grad():
        model.second.weight[3, 4] = 5.0


@change
def through_a_view(model):
    model.second.weight.detach().view(-1)[7].fill_(9.0)


@change
def through_numpy(model):
    """NumPy has the memory: only the version that is counted by hand tells."""
    model.first.weight.detach().numpy()[0] = 3.0
    with torch.no_grad():
        model.first.weight.add_(0)


@change
def initialised_anew(model):
    nn.init.xavier_uniform_(model.first.weight)
    model.second.reset_parameters()


@change
def clipped(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


@change
def buffer_written(model):
    model.scale.mul_(2)


def steps(name, make):
    def changed(model):
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        with torch.enable_grad():
            model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    CHANGES[name] = changed


steps("SGD", lambda p: torch.optim.SGD(p, lr=0.1))
steps("SGD foreach", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True))
steps("SGD fused", lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
steps("Adam", lambda p: torch.optim.Adam(p, lr=0.1, foreach=False))
steps("Adam foreach", lambda p: torch.optim.Adam(p, lr=0.1, foreach=True))
steps("AdamW fused", lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
steps("Adagrad fused", lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True))
steps("RMSprop differentiable off", lambda p: torch.optim.RMSprop(p, lr=0.1))


# ---- other modules ----


@change
def weight_norm(model):
    parametrizations.weight_norm(model.first)


@change
def weight_norm_written(model):
    parametrizations.weight_norm(model.first)
    frozen_call(model)
    with torch.no_grad():
        model.first.parametrizations.weight.original0.mul_(2)


@change
def spectral_norm(model):
    parametrizations.spectral_norm(model.first)
    model.eval()


@change
def parametrized_and_back(model):
    parametrize.register_parametrization(model.first, "weight", Doubled())
    frozen_call(model)
    parametrize.remove_parametrizations(model.first, "weight")


@change
def parametrized_and_cached(model):
    parametrize.register_parametrization(model.first, "weight", Doubled())
    with torch.no_grad(), parametrize.cached():
        frozen_call(model)
    with torch.no_grad():
        model.first.parametrizations.weight.original.add_(1)


@change
def pruned(model):
    prune.l1_unstructured(model.first, "weight", 0.5)


@change
def pruned_for_good(model):
    prune.random_unstructured(model.first, "weight", 0.5)
    frozen_call(model)
    prune.remove(model.first, "weight")


@change
def quantised_by_another_module(model):
    model.first = Rounded(model.first)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Rounded(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.register_buffer("whole", (linear.weight.detach() * 16).round().to(torch.int8))
        self.bias = linear.bias

    @property
    def weight(self):
        return self.whole.float() / 16


@contextlib.contextmanager
def swapping():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


_compiled: dict[int, Callable[..., torch.Tensor]] = {}


def compiled_of(model):
    return _compiled[id(model)]


def frozen_call(model):
    """Eager and frozen give the same now, and what comes after is seen by the frozen one that has called already."""
    with torch.no_grad():
        torch.testing.assert_close(compiled_of(model)(X), model(X))


THROUGH_KERNELS = ("vector_to_parameters", "there_and_back", "swap_tensors", "load_state_dict_swapped", "AdamW fused")


@pytest.mark.parametrize(
    ("name", "codegen"), [*((name, "eager") for name in CHANGES), *((name, "inductor") for name in THROUGH_KERNELS)]
)
def test_a_change_shows_in_the_next_call(name, codegen):
    torch._dynamo.reset()
    model = Layers()
    _compiled[id(model)] = frozen(model, codegen)
    try:
        frozen_call(model)
        CHANGES[name](model)
        frozen_call(model)
        frozen_call(model)
    finally:
        del _compiled[id(model)]


def test_nothing_is_computed_anew_without_a_change():
    torch._dynamo.reset()
    before = only_constants()
    model = Layers()
    compiled = frozen(model)
    with torch.no_grad():
        for _ in range(5):
            compiled(X)
    constants = [c for c in only_constants() if c not in before]  # one for each stage that made something of weights
    assert constants and all(c.computed == 1 for c in constants)


def test_memory_that_weights_no_longer_use_is_let_go_with_the_next_call():
    torch._dynamo.reset()
    before = only_constants()
    model = Layers()
    compiled = frozen(model)
    with torch.no_grad():
        compiled(X)
        constants = [c for c in only_constants() if c not in before]
        data_replaced(model)
        compiled(X)
    held = {s.data_ptr() for c in constants for s in c.memory}
    # a later stage computes with what an earlier one keeps
    used = [*model.parameters(), *model.buffers(), *(v for c in constants for v in c.values)]
    assert constants and held <= {t.untyped_storage().data_ptr() for t in used}
