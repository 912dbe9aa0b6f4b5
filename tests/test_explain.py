"""What an explanation says, and that asking for one leaves no trace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import triptych
from triptych.errors import TriptychError, UnknownName
from triptych.explaining.explanation import Explanation
from triptych.options import Options
from triptych.passes.diff import aligned, folded, unified
from triptych.passes.record import Listing, PassRecord
from triptych.passes.session import Session
from triptych.rewrite.record import Decline

EAGER = {"codegen": "eager"}


# ---- the value: from hand-made records ----


def make_session(**how) -> Session:
    listing = Listing(["x: f32[4] = input", "a: f32[4] = add(x, 0)", "b: f32[4] = relu(a)", "return (b,)"])
    listing.add(["x: f32[4] = input", "b: f32[4] = relu(x)", "return (b,)"])
    changed = PassRecord(
        "pre_grad", "drop_zero", "pre_grad", nodes_before=4, nodes_after=3, rewrites=1, seconds=0.002,
        changed=True, listing=listing, versions=(0, 1),
    )  # fmt: skip
    changed.fired["add_zero"] = 1
    decline = Decline("merge", "b", "different dtypes <a> & b", "model.py:7")
    quiet = PassRecord("pre_grad", "merge_pass", "pre_grad", 3, 3, declines=[decline, decline])
    other = PassRecord("post_grad", "sort", "backward", 9, 9, seconds=1.5)
    records = [changed, quiet, other]
    return Session(Options(), records=records, kernels={"forward": "if 1 < 2: pass"}, **how)


def test_table_shows_what_changed_and_counts_the_rest():
    text = str(Explanation([make_session()], model="Net"))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("Net, inference, compiled with triptych")
    assert ["pre_grad", "●", "drop_zero", "add_zero", "1", "1", "4", "->", "3", "2.0", "ms"] in lines
    assert ["1", "more", "pass", "changed", "nothing", "2", "0.0", "ms"] in lines
    assert ["post_grad", "backward", "1", "pass", "changed", "nothing", "9", "1.50", "s"] in lines
    assert ["total", "1", "2", "1.50", "s"] in lines
    assert ["2x", "merge", "different", "dtypes", "<a>", "&", "b", "b", "model.py:7"] in lines
    assert "\x1b" not in text


def test_the_passes_that_changed_something():
    explanation = Explanation([make_session(), make_session()])
    assert [record.name for record in explanation.changed] == ["drop_zero", "drop_zero"]
    assert "- a: f32[4] = add(x, 0)" in explanation.changed[0].diff
    assert Explanation([]).changed == []


def test_a_failed_pass_is_marked_and_its_warning_printed():
    session = make_session(warnings=["merge_pass raised ValueError: no"])
    session.records[1].error = "Traceback ...\nValueError: no"
    text = str(Explanation([session]))
    assert "✗ merge_pass" in text
    assert "! merge_pass raised ValueError: no" in text
    assert "Traceback" not in text


def test_nothing_captured_is_said():
    assert "Nothing was captured" in str(Explanation([]))


def test_json_holds_records_and_the_lines_that_changed():
    data = json.loads(Explanation([make_session()], train=True).to_json())
    assert data["version"] == 1 and data["train"] is True
    assert [record["name"] for record in data["passes"]] == ["drop_zero", "merge_pass", "sort"]
    assert "- a: f32[4] = add(x, 0)" in data["passes"][0]["diff"]
    assert data["passes"][1]["declines"][0]["reason"] == "different dtypes <a> & b"
    assert data["kernels"] == {"forward": "if 1 < 2: pass"}


def test_page_is_escaped_and_needs_nothing_else(tmp_path):
    path = Explanation([make_session()], model="<Net>").to_html(tmp_path / "deep" / "page.html")
    page = path.read_text()
    assert "&lt;Net&gt;" in page and "<Net>" not in page
    assert "different dtypes" not in page  # what passes say is compressed data


def test_notebooks_get_a_table_of_what_changed():
    session = make_session(warnings=["<b>odd</b>"])
    fragment = Explanation([session], model="<Net>")._repr_html_()
    assert "<html" not in fragment and "<script" not in fragment
    assert "&lt;Net&gt;" in fragment and "<Net>" not in fragment and "&lt;b&gt;odd" in fragment
    assert "● drop_zero" in fragment and "merge_pass" not in fragment and "2 passes changed nothing" in fragment
    assert "- a: f32[4] = add(x, 0)" in fragment


def test_a_second_program_gets_numbered_names():
    gm = torch.fx.symbolic_trace(nn.Identity())
    first = Session(Options(), graphs={"dynamo": gm, "inference": gm})
    second = Session(Options(), graphs={"dynamo": gm, "backward": gm})
    assert list(Explanation([first, second]).graphs) == ["dynamo", "forward", "dynamo#2", "backward#2"]


def test_only_the_last_attempt_of_a_frame_counts():
    first, last = make_session(compile_id="0/0"), make_session(compile_id="0/0", attempt=1)
    other = make_session(compile_id="1/0")
    assert Explanation([first, last, other]).sessions == [last, other]


def test_an_unknown_pass_is_an_error_with_the_near_ones():
    explanation = Explanation([make_session()])
    assert explanation.runs_of("sort")[0].nodes_after == 9
    with pytest.raises(UnknownName, match="'drop_zero'"):
        explanation.runs_of("drop_zeros")


def test_listings_are_aligned_by_what_a_line_defines():
    before = "a = one()\nb: f32[2] = old(a)\nc = two(b)\nd = gone(c)\nreturn d"
    after = "a = one()\nb: f32[3] = new(a)\nz = made(b)\nc = two(b)\nreturn c"
    rows = [(row.sign, row.left, row.right) for row in aligned(before, after)]
    assert rows == [
        (" ", "a = one()", "a = one()"),
        ("~", "b: f32[2] = old(a)", "b: f32[3] = new(a)"),
        ("+", "", "z = made(b)"),
        (" ", "c = two(b)", "c = two(b)"),
        ("-", "d = gone(c)", ""),
        ("-", "return d", ""),
        ("+", "", "return c"),
    ]


def test_far_lines_are_folded():
    before = "\n".join(f"n{i} = f()" for i in range(100))
    after = before.replace("n50 = f()", "n50 = g()")
    rows = folded(aligned(before, after), context=1)
    assert [(row.sign, row.left) for row in rows] == [
        ("@", "49 lines"), (" ", "n49 = f()"), ("~", "n50 = f()"), (" ", "n51 = f()"), ("@", "48 lines"),
    ]  # fmt: skip
    assert unified(before, after, context=0)[1:3] == ["- n50 = f()", "+ n50 = g()"]
    assert unified(before, before) == ["  ... 100 lines"]


# ---- the run: compiled for real ----


class Stateful(nn.Module):
    """Writes everything a forward can write: buffers, parameters, attributes, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, max_norm=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.last = torch.zeros(4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(self.words(words))
        self.last = x.detach().mean(0)
        return self.drop(x).relu() + 0


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("train", [False, True])
def test_a_model_is_afterwards_what_it_was(train):
    torch.manual_seed(0)
    model, words = Stateful(), torch.randint(0, 8, (6,))
    model.norm.weight.grad = grad = torch.ones(4)
    before, last, random_state = state_of(model), model.last, torch.get_rng_state()
    explanation = triptych.explain(model, words, train=train, options=EAGER)
    assert explanation.sessions and explanation.train is train
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert model.calls == 0 and model.last is last and model.training
    assert model.norm.weight.grad is grad and torch.equal(grad, torch.ones(4))
    assert model.norm.bias.grad is None


def test_inputs_are_afterwards_what_they_were():
    def program(x):
        return x.add_(1) * 2

    x = torch.zeros(3)
    triptych.explain(program, x, options=EAGER)
    assert torch.equal(x, torch.zeros(3))


def test_a_module_in_a_closure_is_left_alone_too():
    norm = nn.BatchNorm1d(4)
    triptych.explain(lambda x: norm(x), torch.randn(6, 4), options=EAGER)
    assert norm.num_batches_tracked == 0


def test_the_history_of_an_input_stays_usable():
    leaf = torch.ones(3, requires_grad=True)
    triptych.explain(torch.sin, y := leaf * leaf, train=True, options=EAGER)
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))


def test_graphs_of_every_stage():
    inference = triptych.explain(nn.Linear(4, 4), torch.randn(2, 4), options=EAGER)
    assert list(inference.graphs) == ["dynamo", "pre_grad", "joint", "forward"]
    training = triptych.explain(nn.Linear(4, 4), torch.randn(2, 4), train=True, options=EAGER)
    assert set(training.graphs) == {"dynamo", "pre_grad", "joint", "forward", "backward"}
    json.loads(training.to_json())


def test_a_pass_that_changes_a_graph_is_shown_with_both_graphs():
    def sine_to_cosine(graph):
        for node in graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos

    hooks = {**EAGER, "pre_grad_custom_pass": sine_to_cosine}
    explanation = triptych.explain(lambda x: torch.sin(x), torch.randn(3), options=hooks)
    (record,) = explanation.runs_of("pre_grad_custom_pass")
    assert record.changed and record.rewrites == 1 and record.stage == "pre_grad"
    assert "sin(" in record.before and "cos(" in record.after and "sin(" not in record.after
    assert "● pre_grad_custom_pass" in str(explanation)
    assert "+ sin: f32[3] = cos(" in explanation._repr_html_()


def test_a_pass_that_raises_is_shown_and_the_compile_goes_on():
    def clumsy(graph):
        raise ValueError("no such node")

    options = {**EAGER, "on_error": "fallback", "joint_custom_pre_pass": clumsy}
    explanation = triptych.explain(lambda x: torch.sin(x), torch.randn(3), options=options)
    for record in explanation.runs_of("joint_custom_pre_pass"):
        assert "ValueError: no such node" in record.error
    assert "✗ joint_custom_pre_pass" in str(explanation)
    assert any("clumsy" in warning for warning in explanation.warnings)
    assert "forward" in explanation.graphs


def test_rules_and_declines_reach_the_table(monkeypatch):
    from triptych import pipeline
    from triptych.rewrite.passes import Pass

    class SineOfSine(triptych.Rule):
        """sin(sin(x)) -> cos(x)"""

        def pattern(self, op, x):
            return op.sin(op.sin(x))

        def check(self, m, x):
            m.require(x.shape[0] == 3, "not three rows")

        def rewrite(self, op, x):
            return op.cos(x)

    class MakeCosine(Pass):
        """turns sines into cosines"""

        name = "make_cosine"

        def rules(self):
            return (SineOfSine(),)

    monkeypatch.setattr(pipeline, "STAGES", {**pipeline.STAGES, "pre_grad": (MakeCosine,)})

    def program(x, y):
        return x.sin().sin(), y.sin().sin()

    explanation = triptych.explain(program, torch.randn(3), torch.randn(4), options=EAGER)
    (record,) = explanation.runs_of("make_cosine")
    assert (record.rewrites, record.declined) == (1, 1)
    (refusal,) = explanation.refusals()
    assert (refusal.count, refusal.rule, refusal.reason) == (1, "sine_of_sine", "not three rows")
    assert refusal.source.startswith("test_explain.py:")
    row = next(line.split() for line in str(explanation).splitlines() if "make_cosine" in line)
    assert row[:8] == ["pre_grad", "●", "make_cosine", "sine_of_sine", "1", "1", "1", "7"]


def test_a_graph_break_makes_a_second_program():
    def program(x, *, scale):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() * scale

    explanation = triptych.explain(program, torch.randn(3), scale=2.0, options=EAGER)
    assert {"dynamo", "dynamo#2", "forward#2"} <= set(explanation.graphs)
    assert "2 captured programs" in str(explanation)


def test_what_the_user_compiled_stays_and_no_limit_is_used_up():
    compiles = []

    def counting(gm, example_inputs):
        compiles.append(gm)
        return gm.forward

    def program(x):
        return x.sin() + 1

    x = torch.randn(3)
    mine = torch.compile(program, backend=counting)
    mine(x)
    for _ in range(3):
        assert triptych.explain(program, x, options=EAGER).sessions
    mine(x)
    assert len(compiles) == 1

    def other(x):
        return x.cos() + 1

    for _ in range(10):  # Dynamo gives up on a function after 8 compiles
        assert triptych.explain(other, x, options=EAGER).sessions
    torch.compile(other, backend=counting)(x)
    assert len(compiles) == 2


def test_sizes_are_those_of_the_call_whatever_was_seen_before():
    def program(x):
        return x.sin()

    for length in (3, 5, 7):
        explanation = triptych.explain(program, torch.randn(length), options=EAGER)
        (node,) = [n for n in explanation.graphs["dynamo"].graph.nodes if n.op == "placeholder"]
        assert list(node.meta["example_value"].shape) == [length]


def test_a_model_that_is_compiled_already():
    explanation = triptych.explain(torch.compile(nn.Linear(4, 4)), torch.randn(2, 4), options=EAGER)
    assert explanation.model == "Linear" and explanation.sessions


def test_the_settings_of_torch_compile():
    def program(x):
        return x.sin()

    def sizes(explanation):
        (node,) = explanation.graphs["dynamo"].graph.find_nodes(op="placeholder", sort=False)[-1:]
        return [str(size) for size in node.meta["example_value"].shape]

    x = torch.randn(3)
    assert sizes(triptych.explain(program, x, options=EAGER)) == ["3"]
    assert sizes(triptych.explain(program, x, options=EAGER, dynamic=True))[0].startswith("s")
    mode = triptych.explain(program, x, options=EAGER, mode="max-autotune").sessions[0].options.mode
    assert mode == "max-autotune"

    def broken(x):
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        triptych.explain(broken, x, options=EAGER, fullgraph=True)


class Half(nn.Module):
    def forward(self, x):
        return (x * 0.5).relu()


class TwoSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Half()

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        return self.layer(x), self.layer(x[:2])


def test_what_the_program_compiled_before_makes_no_recompile():
    x = torch.randn(4, requires_grad=True)
    torch.compile(half := Half(), backend="triptych", options=EAGER)(x)
    explanation = triptych.explain(half, x, options=EAGER)  # without gradients, so that Dynamo's guards fail
    assert len(explanation.frames) == 1 and not explanation.recompiles
    assert "again" not in str(explanation) and "recompile" not in str(explanation)
    again = triptych.explain(TwoSizes(), x, options=EAGER)
    assert [frame.is_recompile for frame in again.frames] == [False, True] and "size mismatch" in again.frames[1].reason


@pytest.mark.parametrize("how", ["module", "in place", "function", "our function"])
def test_a_compiled_model_is_explained_with_its_own_settings(how):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    settings = {
        "backend": triptych.compile_fx if how == "our function" else "triptych",
        "options": {"codegen": "eager", "remove_passes": "fuse_attention", "verify": "final"},
        "dynamic": True,
    }
    if how == "in place":
        (compiled := model).compile(**settings)
    elif how == "module":
        compiled = torch.compile(model, **settings)
    else:
        compiled = torch.compile(lambda x: model(x), **settings)
    explanation = triptych.explain(compiled, x)
    (session,) = explanation.sessions
    assert session.options.codegen == "eager" and session.options.verify == "final"
    assert "fuse_attention" not in {record.name for record in explanation.passes}
    assert "f32[s" in explanation.passes[0].before

    # what is said here counts
    explanation = triptych.explain(compiled, x, options={"verify": "off"}, dynamic=False)
    assert explanation.sessions[0].options.verify == "off" and explanation.sessions[0].options.codegen == "eager"
    assert "f32[2, 4]" in explanation.passes[0].before


def test_a_compiled_model_with_a_mode():
    compiled = torch.compile(nn.Linear(4, 4), backend="triptych", mode="max-autotune-no-cudagraphs", fullgraph=True)
    explanation = triptych.explain(compiled, torch.randn(2, 4), options=EAGER)
    assert explanation.sessions[0].options.mode == "max-autotune-no-cudagraphs"
    # the options of another backend mean nothing to this one
    compiled = torch.compile(nn.Linear(4, 4), options={"max_autotune": True})
    assert triptych.explain(compiled, torch.randn(2, 4), options=EAGER).sessions


def test_inductors_own_settings_reach_inductor(monkeypatch):
    from triptych import _private

    given = []
    compile_fx = _private.inductor_driver.compile_fx

    def noted(*args, config_patches=None, **how):
        if config_patches:
            given.append(config_patches)
        return compile_fx(*args, config_patches=config_patches, **how)

    monkeypatch.setattr(_private.inductor_driver, "compile_fx", noted)
    x = torch.randn(3)
    triptych.explain(torch.compile(torch.sin, options={"max_fusion_size": 3}), x, backend="inductor")
    triptych.explain(torch.sin, x, backend="inductor", mode="max-autotune-no-cudagraphs")
    assert given[0]["max_fusion_size"] == 3 and given[1]["max_autotune"] is True
    with pytest.raises(UnknownName, match="'max-autotune'"):
        triptych.explain(torch.sin, x, backend="inductor", mode="max-autotun")


def test_wrong_use_is_named():
    x = torch.randn(3)
    with pytest.raises(TriptychError, match="not an int"):
        triptych.explain(3, x)
    with pytest.raises(UnknownName, match="'inductor'"):
        triptych.explain(torch.sin, x, backend="inducter")
    with pytest.raises(UnknownName, match="'codegen'"):
        triptych.explain(torch.sin, x, options={"codegn": "eager"})
    with pytest.raises(UnknownName, match="'max_autotune'"):
        triptych.explain(torch.sin, x, backend="inductor", options={"max_autotun": True})
    with pytest.raises(TriptychError, match="requires a gradient"):
        triptych.explain(torch.sin, x, train=True, options=EAGER)


def test_the_function_and_the_package_of_one_name():
    from triptych.explaining import table  # noqa: F401

    assert callable(triptych.explain) and triptych.why_not


# ---- Inductor's own passes, through the same window ----


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).view(-1, 8)).clone().relu() * 1


@pytest.fixture(scope="module")
def inductor_training():
    model = Tower()
    before = state_of(model)
    explanation = triptych.explain(model, torch.randn(4, 8), train=True, backend="inductor")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return explanation


def test_inductor_every_stage_has_records(inductor_training):
    seen = {(record.stage, record.graph) for record in inductor_training.passes}
    assert seen == {
        ("pre_grad", "pre_grad"), ("joint", "joint"), ("post_grad", "forward"), ("post_grad", "backward"),
    }  # fmt: skip
    assert list(inductor_training.graphs) == ["dynamo", "pre_grad", "joint", "forward", "backward"]
    assert set(inductor_training.kernels) == {"forward", "backward"}
    assert all("def call" in source for source in inductor_training.kernels.values())


def test_inductor_changes_are_seen(inductor_training):
    (joint, *_) = inductor_training.runs_of("remove_noop_ops")
    assert joint.stage == "joint" and joint.changed and joint.rewrites == 1
    assert joint.nodes_after < joint.nodes_before
    assert "clone" in joint.before and "clone" not in joint.after
    unchanged = next(record for record in inductor_training.passes if not record.changed)
    assert unchanged.rewrites == 0 and unchanged.before == unchanged.after != ""


def test_inductor_table_says_changed(inductor_training):
    text = str(inductor_training)
    assert "compiled with inductor" in text and "rewrites" not in text
    assert any(line.split()[:4] == ["joint", "●", "remove_noop_ops", "changed"] for line in text.splitlines())


def test_inductor_records_join_up(inductor_training):
    """What one pass leaves is what the next one finds: nothing happens between records."""
    for stage in ("joint", "post_grad"):
        for graph in ("joint", "forward", "backward"):
            run = [r for r in inductor_training.passes if (r.stage, r.graph) == (stage, graph)]
            for one, following in zip(run, run[1:], strict=False):
                assert one.after == following.before
                assert one.nodes_after == following.nodes_before


def test_inductor_is_left_as_it_was(inductor_training):
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    from triptych import _private

    assert GraphTransformObserver.__enter__.__module__ == GraphTransformObserver.__module__
    assert _private.inductor_driver._recursive_joint_graph_passes is _private.inductor_joint
    assert _private.GraphLowering.save_output_code is None


def test_a_rule_is_not_looked_for_where_it_never_runs():
    """Weights are joined in the first stage, so the products of the joint graph are no sites that were missed."""

    class Parallel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            return self.q(x) + self.k(x) * self.v(x)

    told = triptych.why_not("fuse_parallel_linear_pass", Parallel(), torch.randn(512, 64), train=True)
    assert {one.graph for one in [*told, *told.fires]} == {"pre_grad"}
