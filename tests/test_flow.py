"""The flow end to end: what a compiled program gives back is what eager gives back."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import triptych
from triptych import _private
from triptych.backend import compile_fx, make_backend
from triptych.passes.session import watching

pytestmark = pytest.mark.fast

CODEGENS = ("eager", "inductor")
aten = torch.ops.aten


def compiled(f: Callable[..., Any], codegen: str = "eager", **kwargs: Any) -> Callable[..., Any]:
    options = {"codegen": codegen, **kwargs.pop("options", {})}
    return torch.compile(f, backend=compile_fx, options=options, **kwargs)


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def relations(given: list[torch.Tensor]) -> list[Any]:
    """Who is whom, who shares whose storage, who is a view of whom."""
    pairs = itertools.combinations(given, 2)
    storage = [t.untyped_storage().data_ptr() for t in given]
    bases = [[t._base is other for other in given] for t in given]
    return [
        [a is b for a, b in pairs],
        [a == b for a, b in itertools.combinations(storage, 2)],
        bases,
        [t.requires_grad for t in given],
    ]


def check(
    f: Callable[..., Any],
    make_args: Callable[[], list[Any]],
    codegen: str,
    *,
    train: bool = False,
    **kwargs: Any,
) -> None:
    """Outputs, gradients, mutated inputs, strides and aliasing of the compiled function against eager's."""
    wanted_args, args = make_args(), make_args()
    wanted = f(*wanted_args)
    got = compiled(f, codegen, **kwargs)(*args)
    assert type(got) is type(wanted)
    assert relations(tensors(wanted) + tensors(wanted_args)) == relations(tensors(got) + tensors(args))
    for a, b in zip(tensors(wanted) + tensors(wanted_args), tensors(got) + tensors(args), strict=True):
        torch.testing.assert_close(b, a)
        assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
    if train:
        for result in (wanted, got):
            sum(t.float().square().sum() for t in tensors(result) if t.requires_grad).backward()
        for a, b in zip(tensors(wanted_args), tensors(args), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad)


def rand(*shapes: tuple[int, ...], grad: bool = False) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(*s, generator=generator).requires_grad_(grad) for s in shapes]

    return make


def mutate(x, y):
    x.add_(y)
    row = x[0]
    row.mul_(2)
    return x.t(), row


def alias_intermediate(x):
    y = x.sin()
    return y, y.view(-1), y.t(), y.detach()


def alias_input(x):
    return x, x.t(), x[1:], x.cos()


def same_twice(x):
    y = x.exp()
    return y, y, x, x


def computed_twice(x):
    return [f(x) for f in (torch.sort, torch.linalg.qr, torch.exp, torch.aminmax) for _ in range(2)]


def constants_out(x):
    return x.relu(), 3, None, (x.shape[0], "s")


def strides_out(x, w):
    return (x @ w).t(), (x + 1).permute(1, 0).contiguous().t(), x.expand(2, *x.shape) * 1


def pool_and_softmax(x, w):
    y = F.max_pool2d(F.conv2d(x, w, padding=1), 2)
    return F.softmax(y, -1), y.mean((2, 3))


def branch(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


def checkpointed(x, w):
    return checkpoint(lambda x, w: torch.relu(x @ w).sin(), x, w, use_reentrant=False) + x


@torch.compiler.nested_compile_region
def region(x, w):
    return torch.relu(x @ w).sin()


def regions(x, w):
    return region(region(x, w), w)


def mutate_out_of_graph(x, y):
    # under autograd, the data of an input that needs no gradient is written after it was read
    z = (x * 2).relu()
    y.copy_(z.detach())
    return z + 1


def overlapping_inputs(x, y):
    # AOTAutograd makes one input of the two
    x.mul_(2)
    y.add_(1)
    return x[0], y[0], y.view(2, 3).t(), x.view_as(y)[1:], y


def overlap(size: int, start: int) -> list[Any]:
    base = torch.arange(12.0)
    return [base[:size], base[start : start + 6]]


PROGRAMS = {
    "mutate": (mutate, rand((4, 4), (4, 4)), False),
    "alias_intermediate": (alias_intermediate, rand((4, 4), grad=True), True),
    "alias_input": (alias_input, rand((4, 4), grad=True), True),
    "same_twice": (same_twice, rand((4, 4)), False),
    "computed_twice": (computed_twice, rand((4, 4)), False),
    "constants_out": (constants_out, rand((4, 4)), False),
    "strides_out": (strides_out, rand((4, 4), (4, 4), grad=True), True),
    "pool_and_softmax": (pool_and_softmax, rand((2, 3, 8, 8), (4, 3, 3, 3), grad=True), True),
    "branch": (branch, rand((4, 4), grad=True), True),
    "checkpointed": (checkpointed, rand((4, 4), (4, 4), grad=True), True),
    "regions": (regions, rand((4, 4), (4, 4), grad=True), True),
    "mutate_out_of_graph": (
        mutate_out_of_graph,
        lambda: [rand((4, 4), grad=True)()[0], rand((4, 4))()[0]],
        True,
    ),
    "overlapping_inputs": (overlapping_inputs, lambda: overlap(6, 4), False),
    "neighbouring_inputs": (overlapping_inputs, lambda: overlap(6, 6), False),
}


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_like_eager(name, codegen):
    f, make_args, train = PROGRAMS[name]
    check(f, make_args, codegen, train=train)


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.norm = torch.nn.BatchNorm1d(16)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(F.gelu(self.norm(self.first(x)))))


@pytest.mark.parametrize("codegen", CODEGENS)
def test_module_with_buffers_trains_and_infers(codegen):
    eager, x = Net(), torch.randn(6, 8)
    ours = copy.deepcopy(eager)
    call = compiled(ours, codegen)
    for _ in range(2):
        torch.testing.assert_close(call(x), eager(x))
    call(x).square().sum().backward()
    eager(x).square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    for (name, p), q in zip(ours.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
    ours.eval(), eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(call(x), eager(x))
        ours.first.weight.mul_(2), eager.first.weight.mul_(2)
        torch.testing.assert_close(call(x), eager(x))
    with torch.inference_mode():
        y = call(x)
        assert y.is_inference()
        torch.testing.assert_close(y, eager(x))


@pytest.mark.parametrize("codegen", CODEGENS)
def test_autocast(codegen):
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    call = compiled(lambda x: model(x).relu(), codegen)
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = call(x), model(x).relu()
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted)
    y.float().sum().backward()
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("codegen", CODEGENS)
def test_dynamic_shapes(codegen):
    def f(x, w):
        return (x @ w).relu() * x.shape[0], x.reshape(-1)

    with watching() as sessions:
        call = compiled(f, codegen, dynamic=True)
        for rows in (5, 9, 17):
            args = [torch.randn(rows, 6).requires_grad_(), torch.randn(6, 3).requires_grad_()]
            same = [a.detach().clone().requires_grad_() for a in args]
            got, wanted = call(*args), f(*same)
            torch.testing.assert_close(got, wanted)
            (got[0].sum() + got[1].sum()).backward()
            (wanted[0].sum() + wanted[1].sum()).backward()
            torch.testing.assert_close([a.grad for a in args], [a.grad for a in same])
    assert len(sessions) == 1


def test_graph_break():
    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * 2

    with watching() as sessions:
        x = torch.randn(4, requires_grad=True)
        compiled(f)(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2)
    assert len(sessions) == 2
    assert len({s.compile_id for s in sessions}) == 2


def test_dynamos_own_message():
    def f(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compiled(f, fullgraph=True)(torch.ones(2))


def test_unknown_option_names_the_near_one():
    with pytest.raises(Exception, match="did you mean 'codegen'"):
        torch.compile(torch.sin, backend=compile_fx, options={"codegn": "eager"})(torch.ones(2))


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("freeze", "yes", "True or False"),
        ("fallback_random", "yes", "True or False"),
        ("pad_mm.always", "no", "True or False"),
        ("group_batch_fusion_passes.min_group", "four", "a whole number"),
        ("group_batch_fusion_passes.min_group", True, "a whole number"),
        ("fuse_attention.lowest_score", "low", "a number"),
        ("bucket_all_reduce.by", 3, "a string"),
        ("remove_passes", 5, "named by strings"),
    ],
)
def test_options_of_another_kind(name, value, kind):
    with pytest.raises(triptych.TriptychError, match=f"{kind}, not"):
        triptych.Options.make({name: value})


def test_an_option_that_is_a_number_takes_whole_ones():
    assert triptych.Options.make({"fuse_attention.lowest_score": -4000}).pass_options


def test_a_count_is_not_negative():
    with pytest.raises(triptych.TriptychError, match="auto_chunker.chunks cannot be negative: -2"):
        triptych.Options.make({"auto_chunker.chunks": -2})


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_modes(mode):
    x = torch.randn(8, 8)
    call = torch.compile(lambda x: torch.relu(x + 1).sum(0), backend=compile_fx, mode=mode)
    torch.testing.assert_close(call(x), torch.relu(x + 1).sum(0))


@pytest.mark.parametrize("codegen", CODEGENS)
def test_tensor_subclass(codegen):
    def f(x, y):
        return (x * y).sin().t(), x + 1

    def make():
        ones = torch.ones(2, 3)
        return [TwoTensor(ones * i, ones + i).requires_grad_() for i in (1, 2)]

    wanted_args, args = make(), make()
    wanted, got = f(*wanted_args), compiled(f, codegen)(*args)
    for out in (wanted, got):
        (out[0].sum() + out[1].sum()).backward()
    for a, b in zip((*wanted, wanted_args[0].grad), (*got, args[0].grad), strict=True):
        assert isinstance(b, TwoTensor) and a.stride() == b.stride()
        torch.testing.assert_close((b.a, b.b), (a.a, a.b))
        assert (a.a.stride(), a.b.stride()) == (b.a.stride(), b.b.stride())


def test_second_backward_through_eager_codegen():
    x = torch.randn(4, requires_grad=True)
    y = compiled(lambda x: (x.sin() * x.cos()).exp())(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, first * 2)


# Randomness


@pytest.mark.parametrize("codegen", CODEGENS)
def test_dropout_in_training(codegen):
    x = torch.rand(64, 64).add(1).requires_grad_()
    call = compiled(lambda x: F.dropout(x, 0.5) * 3, codegen)
    y = call(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y / x).detach())  # forward and backward drew the same mask
    assert 0.4 < (y == 0).float().mean() < 0.6
    torch.manual_seed(3)
    again = call(x)
    torch.manual_seed(3)
    assert torch.equal(call(x), again)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_fallback_random_keeps_eagers_stream(codegen):
    def f(x):
        return F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4, 4)

    x = torch.ones(4, 4)
    torch.manual_seed(3)
    wanted = f(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(f, codegen, options={"fallback_random": True})(x), wanted)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False),
        torch.compiler.nested_compile_region(lambda x: F.dropout(x, 0.5)),
    ],
    ids=["checkpoint", "region"],
)
def test_dropout_inside_higher_order_operations(program):
    x = torch.rand(32, 32).add(1).requires_grad_()
    y = compiled(lambda x: program(x) * 1, "inductor")(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y / x).detach())


def test_dropout_inside_cond():
    # inference only: in training, eager's own backward of cond draws another mask
    x = torch.rand(32, 32).add(1)
    y = compiled(
        lambda x: torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.3), (x,)),
        "inductor",
    )(x)
    kept = y != 0
    assert 0.4 < kept.float().mean() < 0.6
    torch.testing.assert_close(y[kept], x[kept] * 2)


# Calling it directly


def test_graphs_of_other_forms():
    x = torch.randn(4, 4)

    def nested(d):
        return {"a": d["x"] + 1, "b": [d["y"] * 2, d["x"]]}

    exported, _ = torch._dynamo.export(nested)({"x": x, "y": x.clone()})
    out = compile_fx(exported, [{"x": x, "y": x}], options={"codegen": "eager"})({"x": x, "y": x})
    torch.testing.assert_close(out, nested({"x": x, "y": x}))
    assert out["b"][1] is x

    single = torch.fx.symbolic_trace(lambda x: x.sin())
    torch.testing.assert_close(compile_fx(single, [x], options={"codegen": "eager"})(x), x.sin())

    bumpy = torch.fx.symbolic_trace(lambda x, y: (x + 1, [y * 2, {"z": x - y}]))
    out = compile_fx(bumpy, [x, x], options={"codegen": "eager"})(x, x)
    assert (type(out), type(out[1]), type(out[1][1])) == (tuple, list, dict)
    torch.testing.assert_close(out[1][1]["z"], x - x)

    inputs = torch.fx.symbolic_trace(lambda x: (x[0] + x[1][0],))
    out = compile_fx(inputs, [[x, [x]]], options={"codegen": "eager"})([x, [x]])
    torch.testing.assert_close(out[0], x * 2)


def test_exported_program():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return {"y": self.linear(x), "calls": self.calls.clone()}

    model, x = Counts(), torch.randn(2, 4)
    program = torch.export.export(model, (x,)).module()
    out = compile_fx(program, [x], options={"codegen": "eager"})(x)
    torch.testing.assert_close(out["y"], model.linear(x))
    assert out["calls"] == 1


# Somebody else's code generator


def test_make_backend_gets_the_optimised_aten_graphs():
    graphs = []

    def compile_fn(gm, example_inputs):
        assert isinstance(gm, torch.fx.GraphModule) and type(gm).__name__ != "_LazyGraphModule"
        graphs.append([n.target for n in gm.graph.nodes if n.op == "call_function"])
        return gm.forward

    call = torch.compile(pool_and_softmax, backend=make_backend(compile_fn))
    args = rand((2, 3, 8, 8), (4, 3, 3, 3), grad=True)()
    got, wanted = call(*args), pool_and_softmax(*args)
    torch.testing.assert_close(got, wanted)
    (got[0].square().sum() + got[1].sum()).backward()
    with torch.no_grad():
        torch.testing.assert_close(call(*args), wanted)
    assert len(graphs) == 3  # forward, backward, inference
    targets = {t for g in graphs for t in g if isinstance(t, torch._ops.OpOverload)}
    assert aten.convolution.default in targets and aten.convolution_backward.default in targets
    only_inductor = ("prims::_low_memory", "prims::fma", "prims::inductor")
    assert not [t for t in targets if t.name().startswith(only_inductor)]


def test_a_made_backend_is_explained_with_its_own_compiler():
    graphs = []

    @make_backend
    def mine(gm, inputs):
        graphs.append(gm)
        return gm.forward

    assert mine.__name__ == "mine"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    explanation = triptych.explain(torch.compile(model, backend=mine), torch.randn(2, 4), train=True)
    assert len(graphs) == 2 and explanation.backend == "mine" and not explanation.kernels
    assert "inductor" not in graphs[0].code


def test_a_backend_that_returns_nothing_is_named():
    def forgetful(gm, inputs):
        pass

    call = torch.compile(torch.sin, backend=make_backend(forgetful), options={"on_error": "raise"})
    with pytest.raises(Exception, match="forgetful returned None"):
        call(torch.ones(2))


def test_make_backend_takes_options_and_mode():
    call = torch.compile(torch.sin, backend=make_backend(lambda gm, _: gm), options={"fallback_random": True})
    torch.testing.assert_close(call(torch.ones(2)), torch.ones(2).sin())
    call = torch.compile(torch.cos, backend=make_backend(lambda gm, _: gm), mode="reduce-overhead")
    torch.testing.assert_close(call(torch.ones(2)), torch.ones(2).cos())


# What a watcher sees


def test_sessions_keep_graphs_and_kernels():
    x = torch.randn(4, 4, requires_grad=True)
    with watching() as sessions:
        compiled(lambda x: torch.relu(x @ x).sum(), "inductor")(x).backward()
        with torch.no_grad():
            compiled(lambda x: torch.relu(x @ x) + 1, "inductor")(x)
    training, inference = sessions
    assert list(training.graphs) == ["dynamo", "pre_grad", "joint", "forward", "backward"]
    assert list(inference.graphs) == ["dynamo", "pre_grad", "joint", "forward"]
    assert set(training.kernels) == {"forward", "backward"} and set(inference.kernels) == {"forward"}
    assert all("async_compile" in source or "kernel" in source for source in training.kernels.values())
    assert any(n.meta.get("stack_trace") for n in training.graphs["joint"].graph.nodes)
    assert (training.compile_id, training.attempt) == ("0/0", 0)
    for gm in training.graphs.values():
        gm.graph.lint()


def test_a_watcher_is_never_served_from_the_cache():
    x = torch.randn(4, 4)
    for _ in range(2):
        torch._dynamo.reset()
        with watching() as sessions:
            compiled(lambda x: x.sin() + x, "inductor")(x)
        assert "sin" in sessions[0].kernels["forward"]


def test_sessions_carry_compile_id_and_attempt():
    gm = torch.fx.symbolic_trace(lambda x: (x + 1,))
    context = torch._guards.CompileContext(torch._guards.CompileId(frame_id=7, frame_compile_id=0))
    with torch._guards.compile_context(context), watching() as sessions:
        for attempt in range(2):
            context.attempt = attempt
            compile_fx(copy.deepcopy(gm), [torch.ones(2)], options={"codegen": "eager"})
    assert [(s.compile_id, s.attempt) for s in sessions] == [("7/0", 0), ("7/0", 1)]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        lambda x: F.channel_shuffle(x, 2),
        F.logsigmoid,
        lambda x: x.index_select(1, torch.tensor([0, 2])),
    ],
    ids=["max_pool2d", "channel_shuffle", "logsigmoid", "index_select"],
)
def test_operators_whose_decomposition_has_other_strides_are_left_whole(operator, needs_gradient):
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_(needs_gradient)
    got = torch.compile(operator, backend=compile_fx, options={"codegen": "eager"})(x)
    for a, b in zip(_private.pytree.tree_leaves(got), _private.pytree.tree_leaves(operator(x)), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


# The private names and the import


def test_private_names_are_there():
    assert _private.missing() == []


def test_import_loads_neither_dynamo_nor_inductor():
    heavy = ["torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd"]
    program = f"import sys, triptych.backend; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
