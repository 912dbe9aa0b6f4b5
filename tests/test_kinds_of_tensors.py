"""Tensors of other kinds: subclasses whose `__torch_function__` Dynamo traces, views with the other sign, dual numbers,
sparse tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych.ir.program import Program
from triptych.post_grad.reinplace import Reinplace
from triptych.testing.check import run_pass


class Swapping(torch.Tensor):
    """The sine of such a tensor is its cosine, and the cosine its tangent: what is applied twice shows."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        swapped = {"sin": torch.cos, "cos": torch.tan}
        with torch._C.DisableTorchFunctionSubclass():
            for name, other in swapped.items():
                if func in (getattr(torch, name), getattr(torch.Tensor, name), getattr(torch.ops.aten, name).default):
                    return other(*args).as_subclass(cls)
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """A subclass with torch's own `__torch_function__`, which keeps the type of results."""


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_torch_function_is_called_once(codegen):
    compiled = torch.compile(
        lambda x, y: (x.sin() * 2 + y, y.relu()),
        backend=triptych.compile_fx,
        options={"codegen": codegen, "on_error": "raise"},
    )
    x, y = torch.randn(3), torch.randn(3)
    for kind in (Swapping, Named):
        result, relu = compiled(x.as_subclass(kind), y)
        assert type(result) is kind and type(relu) is torch.Tensor
        torch.testing.assert_close(result.as_subclass(torch.Tensor), (x.cos() if kind is Swapping else x.sin()) * 2 + y)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_gradients_and_writes_reach_the_tensor_of_the_caller(codegen):
    options = {"codegen": codegen, "on_error": "raise"}
    values = torch.randn(3)
    x = values.clone().as_subclass(Swapping).requires_grad_()
    torch.compile(lambda x: (x * x).sin().sum(), backend=triptych.compile_fx, options=options)(x).backward()
    torch.testing.assert_close(x.grad, -2 * values * (values * values).sin())
    y = values.clone().as_subclass(Swapping)
    torch.compile(lambda y: y.add_(1), backend=triptych.compile_fx, options=options)(y)
    torch.testing.assert_close(y.as_subclass(torch.Tensor), values + 1)


def test_an_eager_fallback_does_not_call_it_either(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no compile")

    monkeypatch.setattr("triptych.backend.compile_flow", fail)
    options = {"codegen": "eager", "on_error": "fallback"}
    compiled = torch.compile(lambda x: x.sin() * 2, backend=triptych.compile_fx, options=options)
    x = torch.randn(3)
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        result = compiled(x.as_subclass(Swapping))
    torch.testing.assert_close(result.as_subclass(torch.Tensor), x.cos() * 2)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_view_with_the_other_sign_is_read_and_written_as_such(codegen):
    """`z.conj().imag` is a view of the imaginary part whose values have the other sign."""

    def function(x):
        x.add_(1)
        return x * 2

    compiled = torch.compile(function, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise"})
    real = torch.randn(3)
    assert torch.equal(compiled(real.clone()), (real + 1) * 2)
    z = torch.randn(3, dtype=torch.complex64)
    expected = z.clone()
    assert z.conj().imag.is_neg()
    assert torch.equal(compiled(z.conj().imag), function(expected.conj().imag))
    assert torch.equal(z, expected)


def test_a_constant_with_the_other_sign_is_read_as_such():
    constant = torch.randn(3, dtype=torch.complex64).conj().imag
    x = torch.randn(3)
    compiled = torch.compile(lambda x: x + constant, backend=triptych.compile_fx, options={"on_error": "raise"})
    assert torch.equal(compiled(x), x + constant)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_dual_numbers_keep_their_tangents(codegen):
    """By operators, which know the tangents: kernels do not, and passes drop a `detach` where no gradient is asked for."""

    def function(x):
        return x.sin() * x + x.detach() * 3

    compiled = torch.compile(function, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise"})
    x, direction = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(compiled(x), function(x))
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, direction)))
    torch.testing.assert_close(value, function(x))
    torch.testing.assert_close(tangent, direction * (x.cos() * x + x.sin()))
    assert torch.equal(compiled(x), compiled(x.clone()))


def test_results_with_gaps_keep_their_strides():
    """An operation that reads such a view too, a product here, may have it copied without the gaps."""

    def program(x):
        part = x.double()[:, :2]
        return torch.ones(1, 2, dtype=torch.float64) @ part, part.unsqueeze(1), part.reshape(2, 1, 2)

    x = torch.randint(0, 5, (2, 3))
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"on_error": "raise"})
    assert [t.stride() for t in compiled(x)] == [t.stride() for t in program(x)]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_sparse_gradient_keeps_the_memory_of_its_values(codegen):
    """Inductor computes another gradient into the memory of the values: a sparse tensor shares it, and no schema says so."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8, sparse=True), torch.nn.Linear(8, 8))
    eager, indices = copy.deepcopy(model), torch.arange(8)
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise"})
    for run in (eager, compiled):
        run(indices).sin().sum().backward()
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        assert got.grad.layout == want.grad.layout
        torch.testing.assert_close(got.grad.to_dense(), want.grad.to_dense())


def test_a_product_is_not_added_to_the_values_of_a_sparse_tensor():
    def program(indices, a, b, c):
        values = a @ b
        sparse = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
            1, 1, [10, 8], indices, values, dtype=values.dtype, layout=torch.sparse_coo, device=values.device
        )
        return sparse, torch.addmm(values, a, c)

    inputs = (torch.arange(8)[None], *(torch.randn(8, 8) for _ in range(3)))
    gm = make_fx(program, tracing_mode="fake")(*inputs)
    (values,), (sparse,) = (
        [n for n in gm.graph.nodes if str(n.target).startswith(f"aten.{name}")] for name in ("mm", "_sparse_coo")
    )
    assert Program(gm).aliasing.same(values, sparse)
    want = [tensor.to_dense() for tensor in program(*inputs)]
    run_pass(Reinplace, gm)
    torch.testing.assert_close([tensor.to_dense() for tensor in gm(*inputs)], want)


@pytest.fixture
def mesh():
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.tensor import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("train", [False, True])
def test_local_parts_of_distributed_tensors(codegen, train, mesh):
    """The values of a graph may be distributed tensors, their local parts, and both."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def returned(x, w):
        return (x @ w).to_local()

    def between(x, w):
        return DTensor.from_local(x.to_local() + 1, mesh, [Shard(0)]) @ w

    def gradient(program, *operands):
        x, w = (distribute_tensor(t.clone(), mesh, [Shard(0)]).requires_grad_(train) for t in operands)
        result = program(x, w)
        if train:
            result.sum().backward()
        parts = (result, x.grad, w.grad)
        return [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]

    operands = torch.randn(4, 6), torch.randn(6, 3)
    for program in (returned,) if train else (returned, between):  # torch itself fails to split the other one
        compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": codegen, "on_error": "raise"})
        torch.testing.assert_close(gradient(compiled, *operands), gradient(program, *operands))
