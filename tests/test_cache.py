"""Caches: a compiled program is reused exactly as long as nothing that made it has changed."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import triptych
from triptych import backend
from triptych.backend import compile_fx
from triptych.cache import cache_key, digest_of_sources, pass_identity, sources_digest
from triptych.kernels.onednn import linear_operator
from triptych.passes.manager import run_stage
from triptych.post_grad.products_by_onednn import _Product

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(options=None):
    """What the compiled function gives, and how the cache of whole programs and the FX graph cache answered."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.arange(6.0)
    y = torch.compile(lambda x: x + 2.0, backend=compile_fx, options=options)(x)
    graphs = {
        k.removeprefix("fxgraph_cache_"): v for k, v in counters["inductor"].items() if "fxgraph_cache" in k
    }
    programs = {
        k.removeprefix("autograd_cache_"): v
        for k, v in counters["aot_autograd"].items()
        if k in ("autograd_cache_hit", "autograd_cache_miss")
    }
    return y, programs, graphs


def adding_to_multiplying(recompile):
    def stage(name, gm, session, **kwargs):
        gm = run_stage(name, gm, session, **kwargs)
        for node in gm.graph.nodes:
            if name == "post_grad" and node.target is aten.add.Tensor:
                node.target = aten.mul.Tensor
        if recompile:
            gm.recompile()
        return gm

    return stage


def test_same_program_is_served_from_the_cache():
    assert run()[1:] == ({"miss": 1}, {"miss": 1})
    y, programs, graphs = run()
    assert (programs, graphs) == ({"hit": 1}, {"hit": 1})
    assert torch.equal(y, torch.arange(6.0) + 2)


@pytest.mark.parametrize("recompile", [True, False])
@pytest.mark.parametrize("force", [True, False], ids=["autograd cache forced", "default"])
def test_an_edited_pass_is_not_served_the_old_kernel(monkeypatch, recompile, force):
    with torch._functorch.config.patch(force_autograd_cache=force, enable_autograd_cache=True):
        assert torch.equal(run()[0], torch.arange(6.0) + 2)
        monkeypatch.setattr(backend, "run_stage", adding_to_multiplying(recompile))
        monkeypatch.setattr("triptych.cache.sources_digest", lambda: "edited")
        y, *answers = run()
    assert torch.equal(y, torch.arange(6.0) * 2)
    assert answers == [{"miss": 1}, {"miss": 1}]


@pytest.mark.parametrize("recompile", [True, False])
def test_another_graph_is_not_served_the_old_kernel(monkeypatch, recompile):
    """Whatever the reason, which the key of whole programs need not know: here, that they are not cached."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        run()
        monkeypatch.setattr(backend, "run_stage", adding_to_multiplying(recompile))
        y, programs, graphs = run()
    assert torch.equal(y, torch.arange(6.0) * 2) and (programs, graphs) == ({}, {"miss": 1})


def module_pass(gm):
    return None


def other_module_pass(gm):
    pass


class Identified:
    def __init__(self, uuid):
        self.id = uuid

    def uuid(self):
        return self.id

    def __call__(self, gm):
        return None


def with_pass(custom_pass):
    return {"post_grad_custom_post_pass": custom_pass}


def add_becomes_multiply(graph):
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.target = aten.mul.Tensor


class Liar(Identified):
    def __call__(self, graph):
        add_becomes_multiply(graph)


def test_a_users_pass_takes_effect_at_once():
    assert torch.equal(run(with_pass(module_pass))[0], torch.arange(6.0) + 2)
    assert torch.equal(run(with_pass(add_becomes_multiply))[0], torch.arange(6.0) * 2)
    # even one that claims to be what was compiled before
    assert torch.equal(run(with_pass(Identified("same")))[0], torch.arange(6.0) + 2)
    assert torch.equal(run(with_pass(Liar("same")))[0], torch.arange(6.0) * 2)


def test_other_options_and_passes_are_other_programs():
    assert run()[1:] == ({"miss": 1}, {"miss": 1})
    assert run({"remove_passes": ["addmm"]})[1:] == ({"miss": 1}, {"miss": 1})
    assert run({"verify": "final"})[1:] == ({}, {"miss": 1})
    assert run(with_pass(module_pass))[1:] == ({}, {"miss": 1})
    assert run(with_pass(other_module_pass))[1:] == ({}, {"miss": 1})
    assert run(with_pass(module_pass))[1:] == ({}, {"hit": 1})


def test_a_pass_without_identity_is_not_cached():
    for _ in range(2):
        assert run(with_pass(functools.partial(module_pass)))[1:] == ({}, {})


# ---- whole programs ----


@pytest.fixture
def without_onednn():
    enabled = torch.backends.mkldnn.enabled
    yield lambda: torch.backends.mkldnn.set_flags(False)
    torch.backends.mkldnn.set_flags(enabled)


@pytest.mark.skipif(linear_operator() is None, reason="torch without oneDNN")
def test_a_program_that_calls_onednn_is_not_loaded_where_it_is_disabled(monkeypatch, without_onednn):
    monkeypatch.setattr(_Product, "on_this_machine", lambda product: (2e-4, 1e-4))

    def calls_onednn():
        x = torch.randn(160, 160)
        seen, _ = answers(torch.mm, x, x)
        with torch.profiler.profile() as profile:
            torch.compile(torch.mm, backend=compile_fx, options={})(x, x)
        return seen, "mkldnn::_linear_pointwise" in {event.key for event in profile.key_averages()}

    assert calls_onednn() == ({"miss": 1}, True)
    assert calls_onednn() == ({"hit": 1}, True)
    without_onednn()
    assert calls_onednn() == ({"miss": 1}, False)


def answers(program, *inputs, **options):
    """Whether the cache of whole programs had the program, and what it computes."""
    torch._dynamo.reset()
    counters.clear()
    result = torch.compile(program, backend=compile_fx, options=options)(*inputs)
    seen = counters["aot_autograd"]
    return {k.removeprefix("autograd_cache_"): v for k, v in seen.items() if k.endswith(("cache_hit", "cache_miss"))}, result


def test_a_training_step_is_loaded_whole(monkeypatch):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)), torch.randn(2, 8)

    def step():
        model.zero_grad()
        seen, result = answers(model, x)
        result.sum().backward()
        return seen, [p.grad.clone() for p in model.parameters()]

    first, expected = step()
    stages = []
    monkeypatch.setattr(backend, "run_stage", lambda name, *a, **k: stages.append(name) or run_stage(name, *a, **k))
    second, gradients = step()
    assert (first, second) == ({"miss": 1}, {"hit": 1}) and stages == ["pre_grad"]
    for got, want in zip(gradients, expected):
        assert torch.equal(got, want)


def test_a_weight_and_an_input_are_not_the_same_program():
    """Passes may do with the one what they may not with the other."""

    class Scaled(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x):
            return x * self.scale

    x, scale = torch.randn(4), torch.ones(4)
    assert answers(lambda x, w: x * w, x, scale)[0] == {"miss": 1}
    assert answers(Scaled(scale.clone()), x)[0] == {"miss": 1}
    assert answers(lambda x, w: x * w, x, torch.nn.Parameter(scale, requires_grad=False))[0] == {"miss": 1}
    assert answers(lambda x, w: x * w, x, scale.clone())[0] == {"hit": 1}


def test_a_known_buffer_is_part_of_the_program():
    class Masked(torch.nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, x):
            return x.masked_fill(self.mask == 0, 0.0)

    x = torch.randn(4, 4)
    for mask in (torch.ones(4, 4), torch.zeros(4, 4), torch.eye(4)):
        seen, result = answers(Masked(mask), x)
        assert torch.equal(result, x.masked_fill(mask == 0, 0.0))


def test_who_watches_sees_every_pass():
    def program(x):
        return (x * 1.0).relu()

    x = torch.randn(4)
    answers(program, x)
    explanation = triptych.explain(program, x)
    assert {record.stage for record in explanation.passes} >= {"pre_grad", "joint", "post_grad"}
    assert answers(program, x, verify="each")[0] == {}
    assert answers(program, x, freeze=True)[0] == {}


def test_key_follows_what_it_must():
    keys = [
        cache_key(),
        cache_key({"fallback_random": True}),
        cache_key({"codegen": "eager"}),
        cache_key(with_pass(module_pass)),
        cache_key(with_pass([module_pass, other_module_pass])),
        cache_key(with_pass([other_module_pass, module_pass])),
        cache_key({"post_grad_custom_pre_pass": module_pass}),
        cache_key(with_pass(Identified("one"))),
        cache_key(with_pass(Identified("two"))),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert cache_key() == keys[0] and cache_key(with_pass(Identified("one"))) == keys[7]


def test_identity_of_a_pass():
    pair = [lambda gm: gm.graph.lint(), lambda gm: gm.recompile()]
    assert pass_identity(pair[0]) != pass_identity(pair[1])
    constant = object()
    assert pass_identity(lambda gm: constant) is None  # a closure carries state
    assert pass_identity(Identified(None)) is None
    assert pass_identity(Identified("mine").__call__) is None
    assert pass_identity(functools.partial(module_pass)) is None

    def with_default(gm, limit=3):
        return None

    first = pass_identity(with_default)
    with_default.__defaults__ = (4,)
    assert None is not first != pass_identity(with_default)


def test_sources_are_part_of_the_key(monkeypatch):
    before = cache_key()
    monkeypatch.setattr("triptych.cache.sources_digest", lambda: "edited")
    assert cache_key() != before


def test_the_digest_of_sources_is_that_of_names_and_contents(tmp_path):
    (tmp_path / "inner").mkdir()
    one, other = tmp_path / "one.py", tmp_path / "inner" / "other.py"
    one.write_text("a = 1\n")
    other.write_text("b = 2\n")
    digests = [digest_of_sources(str(tmp_path))]
    status = one.stat()
    one.write_text("a = 3\n")  # as long as before
    os.utime(one, ns=(status.st_atime_ns, status.st_mtime_ns))
    digests.append(digest_of_sources(str(tmp_path)))
    other.rename(tmp_path / "inner" / "another.py")
    digests.append(digest_of_sources(str(tmp_path)))
    (tmp_path / "empty.py").touch()
    digests.append(digest_of_sources(str(tmp_path)))
    assert len(set(digests)) == len(digests)
    (tmp_path / "notes.txt").write_text("no source")
    assert digest_of_sources(str(tmp_path)) == digests[-1]
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))  # the same sources in another folder
    assert digest_of_sources(str(copy)) == digests[-1]


def test_the_key_is_that_of_all_our_sources():
    package = Path(triptych.__file__).parent
    assert sources_digest() == digest_of_sources(str(package))
    assert len(list(package.rglob("*.py"))) > 400


class TimesProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        product = x @ w
        ctx.save_for_backward(product)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (product,) = ctx.saved_tensors
        return grad * product, None


def test_visible_outputs_are_part_of_the_key():
    """One forward graph, whose second output is the user's in one program and saved for backward in another.

    Their strides are fixed in the first only, so the programs must not share kernels.
    """

    def returns_both(x, w):
        with torch.no_grad():
            product = x @ w
        return x * 2, product

    def returns_one(x, w):
        return TimesProduct.apply(x, w)

    counters.clear()
    for f in (returns_both, returns_one):
        torch.compile(f, backend=compile_fx)(torch.randn(3, 3, requires_grad=True), torch.randn(3, 3))
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    assert counters["inductor"]["fxgraph_cache_miss"] == 2
