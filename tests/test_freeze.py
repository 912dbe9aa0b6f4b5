"""freeze: what comes from weights alone is computed once, and is never old."""

from __future__ import annotations

import copy
import gc
import logging
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests.compare import check_inference
from tests.models import build
from triptych import Options
from triptych.ir.program import Program
from triptych.ir.weights import FIXED
from triptych.joint.freeze import ComputeOnce
from triptych.passes.session import watching
from triptych.rewrite.computed_once import COMPUTED_ONCE
from triptych.rewrite.driver import run_rules
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture_aten
from triptych.testing.fuzz import random_program

CODEGENS = ("eager", "inductor")
aten = torch.ops.aten


def frozen(model, codegen="eager", freeze=True, **kwargs):
    options = {"codegen": codegen, "freeze": freeze, **kwargs.pop("options", {})}
    return torch.compile(model, backend=triptych.compile_fx, options=options, **kwargs)


class Two(nn.Module):
    """Two linears over one input, their weights joined in the forward."""

    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        weight = torch.cat([self.first.weight, self.second.weight])
        return F.linear(x, weight, torch.cat([self.first.bias, self.second.bias])).relu()


class Weighted(nn.Module):
    """A function of a weight and the input."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(*shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.norm.running_mean.uniform_()
        self.norm.running_var.uniform_(1, 2)

    def forward(self, x):
        return self.norm(self.conv(x))


def autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w)


X = torch.randn(5, 8)

# model, input, constants, operations that must be gone from the graph
FOLDS = {
    "cat": (Two(), X, 2, [aten.cat.default]),
    "stack": (Weighted(lambda x, w: x @ torch.stack([w, w], -1).sum(-1), 8, 8), X, 1, [aten.cat.default, aten.sum]),
    "transposed copy": (Weighted(lambda x, w: x @ w.t().contiguous(), 8, 8), X, 1, [aten.clone.default]),
    "cast": (Weighted(lambda x, w: x.bfloat16() @ w.bfloat16().t(), 8, 8), X, 1, []),
    "autocast": (Weighted(autocast, 8, 8), X, 1, []),
    "scale": (Weighted(lambda x, w: x * (w * 2 + 1).exp(), 8), X, 1, [aten.exp.default]),
    "several results": (Weighted(lambda x, w: x * torch.topk(w, 8)[0], 8), X, 1, [aten.topk.default]),
    "lookup": (Weighted(lambda x, w: x + F.embedding(torch.arange(5), w), 9, 8), X, 1, [aten.embedding.default]),
    "number": (Weighted(lambda x, w: x / w.norm(), 8, 8), X, 1, [aten.pow.Tensor_Scalar]),
    "batch norm": (Normed().eval(), torch.randn(2, 3, 6, 6), None, [aten.sqrt.default, aten.reciprocal.default]),
}


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("name", FOLDS)
def test_what_comes_from_weights_is_computed_once(name, codegen):
    model, x, constants, gone = FOLDS[name]
    compiled = frozen(model, codegen)
    with torch.no_grad(), watching() as sessions:
        got = compiled(x)
        torch.testing.assert_close(got, model(x))
    (record,) = [r for r in sessions[0].records if r.name == "freeze"]
    assert record.changed and record.rewrites == record.fired["computed_once"]
    assert constants is None or record.rewrites == constants
    assert record.nodes_after < record.nodes_before and "done once" in record.note
    left = {n.target for n in sessions[0].graphs["forward"].graph.nodes}
    assert not left & set(gone) and not {getattr(t, "overloadpacket", None) for t in left} & set(gone)


NOT_FOLDED = {
    "a view of a weight": Weighted(lambda x, w: F.linear(x, w.t().t()), 8, 8),
    "a weight": nn.Linear(8, 8),
    "random": Weighted(lambda x, w: x * F.dropout(w, 0.0, True), 8),
    "returned": Weighted(lambda x, w: (x, w * 2), 8),
    "a view of it returned": Weighted(lambda x, w: (x, (w * 2).view(2, 4)), 8),
    "no weight": Weighted(lambda x, w: x * torch.arange(8).exp(), 8),
    "much larger": Weighted(lambda x, w: x.sum() * w.repeat(5_000_000, 1), 8),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_what_is_left_in_the_graph(name):
    model = NOT_FOLDED[name]
    with torch.no_grad(), watching() as sessions:
        torch.testing.assert_close(frozen(model)(X), model(X))
    (record,) = [r for r in sessions[0].records if r.name == "freeze"]
    assert not record.changed and record.rewrites == 0


def test_a_result_is_the_callers_own():
    model = Weighted(lambda x, w: ((w * 2).exp(), x * (w * 2).exp(), (w * 2)[:4]), 8)
    compiled = frozen(model)
    with torch.no_grad():
        first = compiled(X)
        kept = [t.clone() for t in first]
        for t in first:
            t.zero_()
        for got, want in zip(compiled(X), kept):
            torch.testing.assert_close(got, want)
        second = compiled(X)
        model.weight.mul_(2)
        compiled(X)
        for got, want in zip(second, kept):
            torch.testing.assert_close(got, want)


def change_nothing(model):
    pass


def load(model):
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


def load_assigned(model):
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


def write_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def write_under_inference_mode(model):
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(2)


def replace_parameter(model):
    model.first.weight = nn.Parameter(torch.randn(8, 8))


def replace_linear(model):
    model.second = nn.Linear(8, 8)


def step(kind, **how):
    def change(model):
        optimizer = kind(model.parameters(), lr=0.1, **how)
        with torch.enable_grad():
            model(X).sum().backward()
        optimizer.step()

    change.__name__ = f"{kind.__name__} {how}"
    return change


SEEN = [
    change_nothing, load, load_assigned, write_in_place, write_under_inference_mode, replace_parameter, replace_linear,
    step(torch.optim.SGD), step(torch.optim.SGD, fused=True), step(torch.optim.Adam, foreach=True),
    step(torch.optim.AdamW, fused=True),
]  # fmt: skip


def write_to_data(model):
    for p in model.parameters():
        p.data.mul_(2)


def replace_data(model):
    for p in model.parameters():
        p.data = torch.randn_like(p)


def our_messages(caplog):
    """Without those of torch, which warns where its build has CUDA and the machine has not."""
    return [r.message for r in caplog.records if r.name.startswith("triptych")]


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_change_shows_in_the_next_call(codegen, mode, caplog):
    model = Two()
    compiled = frozen(model, codegen)
    with mode(), caplog.at_level(logging.WARNING, "triptych"):
        torch.testing.assert_close(compiled(X), model(X))
    assert not our_messages(caplog)
    for change in SEEN * 2:
        change(model)
        with mode(), caplog.at_level(logging.WARNING, "triptych"):
            torch.testing.assert_close(compiled(X), model(X), msg=lambda m, c=change: f"{c.__name__}: {m}")
    assert our_messages(caplog) == [
        "freeze: weights have changed; what was computed from them is computed anew"
    ]


@pytest.mark.parametrize("codegen", CODEGENS)
def test_without_the_promise_every_change_shows(codegen):
    model = Two()
    compiled = frozen(model, codegen, freeze=False)
    for change in (*SEEN, write_to_data, replace_data):
        change(model)
        with torch.no_grad(), watching() as sessions:
            torch.testing.assert_close(compiled(X), model(X), msg=lambda m, c=change: f"{c.__name__}: {m}")
        assert not any(r.name == "freeze" for s in sessions for r in s.records)


def constants_of(sessions):
    (record,) = [r for s in sessions for r in s.records if r.name == "freeze"]
    return record.rewrites


def only_constants():
    from triptych.freezing.constants import _watched

    gc.collect()
    return list(_watched)


def test_constants_stay_where_they_are():
    """CUDA graphs have their addresses."""
    torch._dynamo.reset()
    model = Two()
    compiled = frozen(model)
    before = only_constants()
    with torch.no_grad():
        compiled(X)
        (constants,) = [c for c in only_constants() if c not in before]
        places = [t.data_ptr() for t in constants.values]
        assert constants.computed == 1
        compiled(X)
        assert constants.computed == 1
        load_assigned(model)
        compiled(X)
        assert constants.computed == 2 and [t.data_ptr() for t in constants.values] == places


def test_replaced_weights_are_let_go_with_the_next_call():
    model = Two()
    compiled = frozen(model)
    gone = weakref.ref(model.first.weight)
    with torch.no_grad():
        compiled(X)
        load_assigned(model)
        torch.testing.assert_close(compiled(X), model(X))
        gc.collect()
        assert gone() is None


class Shared(nn.Module):
    """Tied weights, a list of plain tensors, and a view of a parameter as a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.plain = [torch.randn(8), torch.randn(8)]
        self.list = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(2)])
        self.register_buffer("row", self.first.weight.data[0])

    def forward(self, x):
        weight = torch.cat([self.first.weight, self.second.weight])
        return F.linear(x, weight).view(-1, 8) * torch.stack([*self.plain, self.list[0], self.list[1]]).sum(0) + self.row.exp()


@pytest.mark.parametrize("codegen", CODEGENS)
def test_shared_weights(codegen):
    model = Shared()
    compiled = frozen(model, codegen)
    with torch.no_grad(), watching() as sessions:
        torch.testing.assert_close(compiled(X), model(X))
        assert constants_of(sessions) == 3
        for change in (
            lambda: model.first.weight.add_(1), lambda: model.plain[0].add_(1), lambda: model.list[1].zero_(),
            lambda: model.row.mul_(3), lambda: model.plain.__setitem__(1, torch.ones(8)),
            lambda: setattr(model.second, "weight", nn.Parameter(torch.randn(8, 8))),
        ):  # fmt: skip
            change()
            torch.testing.assert_close(compiled(X), model(X))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("count", torch.zeros(8))
        self.register_buffer("view", torch.zeros(4, 8))

    def forward(self, x):
        self.count.add_(1)
        self.view[0].add_(1)
        return x * (self.weight * 2) + self.count.exp() + (self.view * 2).sum(0)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_what_the_graph_writes_is_never_folded(codegen):
    model = Counting()
    eager = copy.deepcopy(model)
    compiled = frozen(model, codegen)
    with torch.no_grad(), watching() as sessions:
        for _ in range(3):
            torch.testing.assert_close(compiled(X), eager(X))
    assert constants_of(sessions) == 1
    (first,) = [r for s in sessions for r in s.records if r.name == "freeze"]
    reasons = [d.reason for d in first.declines]
    assert reasons == ["the graph itself writes it"] * 2


@pytest.mark.parametrize("codegen", CODEGENS)
def test_batch_norm_in_training_mode(codegen):
    model = Normed().train()
    eager = copy.deepcopy(model)
    compiled = frozen(model, codegen)
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(model.norm.running_mean, eager.norm.running_mean)
    model.eval(), eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))
        model.train(), eager.train()
        compiled(x), eager(x)
        model.eval(), eager.eval()
        torch.testing.assert_close(compiled(x), eager(x))


@pytest.mark.parametrize("codegen", CODEGENS)
def test_written_by_another_compiled_graph(codegen):
    model = Counting()
    compiled = frozen(lambda x: x * model.count.exp(), codegen)
    count = torch.compile(lambda: model.count.add_(1), backend=triptych.compile_fx, options={"codegen": codegen})
    with torch.no_grad():
        for _ in range(3):
            count()
            torch.testing.assert_close(compiled(X), X * model.count.exp())


@pytest.mark.parametrize("codegen", CODEGENS)
def test_written_through_an_input_that_shares_its_memory(codegen):
    def function(model, view, x):
        view.add_(1)
        return x * (model.weight * 2)

    model = Weighted(None, 8)
    eager = copy.deepcopy(model)
    compiled = frozen(function, codegen)
    with torch.no_grad():
        for _ in range(3):
            got, want = (f(m, m.weight[2:], X) for f, m in ((compiled, model), (function, eager)))
            torch.testing.assert_close(got, want)


def test_two_models_have_constants_of_their_own():
    models = [Two(), Two()]
    compiled = [frozen(m) for m in models]
    with torch.no_grad():
        for _ in range(2):
            for f, m in zip(compiled, models):
                torch.testing.assert_close(f(X), m(X))
        write_in_place(models[0])
        for f, m in zip(compiled, models):
            torch.testing.assert_close(f(X), m(X))


def test_one_function_of_two_models():
    """Dynamo may hand both to one graph: the constants follow."""
    models = [Two(), Two()]
    compiled = frozen(lambda m, x: m(x))
    with torch.no_grad():
        for _ in range(2):
            for m in models:
                torch.testing.assert_close(compiled(m, X), m(X))


@pytest.mark.parametrize("codegen", CODEGENS)
def test_dynamic_shapes(codegen):
    model = Two()
    compiled = frozen(model, codegen, dynamic=True)
    with torch.no_grad(), watching() as sessions:
        for size in (3, 5, 9):
            torch.testing.assert_close(compiled(x := torch.randn(size, 8)), model(x))
        write_in_place(model)
        torch.testing.assert_close(compiled(X), model(X))
    assert len(sessions) == 1 and constants_of(sessions) == 2


def test_training_is_left_alone_and_says_so(caplog):
    model = Two()
    compiled = frozen(model)
    with caplog.at_level(logging.WARNING, "triptych"), watching() as sessions:
        got = compiled(X)
    got.sum().backward()
    assert model.first.weight.grad is not None
    assert "no_grad" in sessions[0].warnings[0] and "no_grad" in caplog.text
    assert not any(r.name == "freeze" for r in sessions[0].records)
    torch.testing.assert_close(got, model(X))


def test_inference_tensors_are_not_folded():
    with torch.inference_mode():
        model = Two()
        compiled = frozen(model)
        with watching() as sessions:
            torch.testing.assert_close(compiled(X), model(X))
        write_in_place(model)
        torch.testing.assert_close(compiled(X), model(X))
    (record,) = [r for r in sessions[0].records if r.name == "freeze"]
    assert not record.changed and "inference tensor" in record.declines[0].reason


def test_a_new_weight_that_is_an_inference_tensor():
    model = Two()
    compiled = frozen(model)
    with torch.inference_mode():
        compiled(X)
        model.first.weight = nn.Parameter(torch.randn(8, 8))
        for _ in range(2):
            torch.testing.assert_close(compiled(X), model(X))
            model.first.weight.mul_(2)


def test_a_backend_of_ones_own():
    seen = []

    @triptych.make_backend
    def backend(gm, example_inputs):
        seen.append([len(example_inputs), len(gm.graph.find_nodes(op="placeholder"))])
        return gm.forward

    model = Two()
    compiled = torch.compile(model, backend=backend, options={"freeze": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))
        write_in_place(model)
        torch.testing.assert_close(compiled(X), model(X))
    assert seen == [[3, 3]]  # the input and two constants


@pytest.mark.parametrize("capture", ["make_fx", "export", "symbolic_trace"])
def test_graphs_that_bring_their_weights(capture):
    model = Two()
    with torch.no_grad(), watching() as sessions:
        if capture == "make_fx":
            gm = make_fx(model)(X)
        elif capture == "export":
            gm = torch.export.export(model, (X,)).module()
        else:
            gm = torch.fx.symbolic_trace(model)
        compiled = triptych.compile_fx(gm, [X], options={"codegen": "eager", "freeze": True})
        torch.testing.assert_close(compiled(X), model(X))
        assert constants_of(sessions) == 2
        write_in_place(model)
        torch.testing.assert_close(compiled(X), model(X))


def test_the_kernel_cache_keeps_no_weights():
    for _ in range(2):
        torch._dynamo.reset()
        model = Two()
        with torch.no_grad():
            torch.testing.assert_close(frozen(model, "inductor")(X), model(X))


def test_a_bisection_can_stop_it():
    from triptych.options import Options
    from triptych.passes.session import Session

    for limit, constants in ((0, 0), (1, 1), (9, 2)):
        torch._dynamo.reset()
        session = Session(Options.make({"freeze": True, "codegen": "eager"}), rewrite_limit=limit)
        model = Two()
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("triptych.backend.open_session", lambda options, s=session: s)
            patch.setattr("triptych.backend.run_stage", lambda stage, gm, *args, **kwargs: gm)
            torch.testing.assert_close(frozen(model)(X), model(X))
        assert constants_of([session]) == constants


def test_explain_shows_it():
    exp = triptych.explain(Two(), X, options={"freeze": True, "codegen": "eager"})
    (record,) = [r for r in exp.passes if r.name == "freeze"]
    assert "2 operations are done once" in record.note and "aten.cat" in record.before and "aten.cat" not in record.after
    assert "computed_once" in str(exp) and "done once" in exp.to_json()


@pytest.mark.parametrize(
    "name, codegen",
    [
        ("mlp", "eager"), ("conv_batchnorm", "eager"), ("encoder", "eager"), ("llama", "eager"),
        ("conv_batchnorm", "inductor"), ("encoder", "inductor"),
        *[pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("mlp", "llama")],
    ],
)  # fmt: skip
def test_models(name, codegen):
    case = build(name)
    for dynamic, more in ((False, ()), (True, (case.other,))):
        torch._dynamo.reset()
        check_inference(
            case.model, case.call.args, case.call.kwargs, backend=triptych.compile_fx, dynamic=dynamic, more=more,
            options={"freeze": True, "codegen": codegen},
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed):
    """What is split off and what is left compute together what the whole did, and return memory of their own."""
    split = 0
    for number in range(25):
        choose = random.Random(1000 * seed + number).randrange
        program, inputs = random_program(choose, steps=12)
        try:
            gm, _ = capture_aten(program, inputs)
        except (RuntimeError, ValueError, IndexError):
            continue  # a write that cannot be made functional; some releases of torch cannot trace every split
        want = gm(*[t.clone() for t in inputs])
        for node in gm.graph.find_nodes(op="placeholder")[::2]:
            node.meta[FIXED] = True
        rewriter = Rewriter(Program(gm, options=Options.make({"freeze": True}), is_inference=True))
        run_rules(rewriter, [ComputeOnce()], strict=True)
        taken = gm.meta.get(COMPUTED_ONCE)
        if taken is None:
            continue
        split += 1
        gm.graph.lint()
        gm.recompile()
        constants = taken.module()(*[inputs[i].clone() for i in taken.weights])
        got = gm(*[inputs[i].clone() for i in taken.kept], *constants)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
        theirs = {t.untyped_storage().data_ptr() for t in constants if t.numel()}
        assert theirs.isdisjoint(t.untyped_storage().data_ptr() for t in got)
    assert split > 3
