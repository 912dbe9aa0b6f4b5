"""What is said of arguments of the wrong kind, and of names that nobody knows."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import triptych
from triptych.cache import cache_key
from triptych.errors import TriptychError, UnknownName
from triptych.ir.canonical import CANONICAL, SPELLING_OF
from triptych.ir.operation_names import is_operation
from triptych.options import Options
from triptych.passes.custom_passes import wants_module

EAGER = {"codegen": "eager"}
X = torch.ones(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).relu()


# ---- another kind of thing than what a function takes ----

WANT_GRAPHS = {
    "compile_fx": lambda it: triptych.compile_fx(it, [X]),
    "pre_grad_passes": triptych.pre_grad_passes,
    "joint_graph_passes": triptych.joint_graph_passes,
    "post_grad_passes": lambda it: triptych.post_grad_passes(it, True),
    "find": lambda it: triptych.find("fuse_attention", it),
    "the backend": lambda it: triptych.make_backend(lambda gm, inputs: gm.forward)(it, [X]),
}
WANT_MODELS = {
    "explain": lambda it: triptych.explain(it, X),
    "why_not": lambda it: triptych.why_not("fuse_attention", it, X),
    "bisect": lambda it: triptych.bisect(it, X),
}


@pytest.fixture(scope="module")
def exported():
    return torch.export.export(Net(), (X,))


@pytest.mark.parametrize("function", WANT_GRAPHS)
def test_a_graph_is_wanted(function, exported):
    cases = {
        "not the module Net: (torch.compile|why_not takes a model)": Net(),
        "not an ExportedProgram: triptych.optimize takes one": exported,
        "not the class Net: give an instance": Net,
        "not a Graph: torch.fx.GraphModule": torch.fx.symbolic_trace(Net()).graph,
        "not a Tensor": X,
        "not None": None,
    }
    for message, value in cases.items():
        with pytest.raises(TriptychError, match=f"^{function} takes a captured graph .*{message}"):
            WANT_GRAPHS[function](value)


@pytest.mark.parametrize("function", WANT_MODELS)
def test_a_model_is_wanted(function, exported):
    cases = {
        "not an ExportedProgram: exported_program.module()": exported,
        "not the class Net: give an instance": Net,
        "not a Graph": torch.fx.symbolic_trace(Net()).graph,
        "not a Tensor": X,
    }
    for message, value in cases.items():
        with pytest.raises(TriptychError, match=f"^{function} takes a module or a function to call, {message}"):
            WANT_MODELS[function](value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda gm: triptych.compile_fx(gm, X), "inputs as a list or tuple, not as a Tensor"),
        (lambda gm: triptych.compile_fx(gm, []), "got 0 inputs for a graph of 1"),
        (lambda gm: triptych.compile_fx(gm, [X, X]), "got 2 inputs for a graph of 1"),
        (lambda gm: triptych.compile_fx(gm, [X], options=["freeze"]), "options is a dict or a triptych.Options, not list"),
        (lambda gm: triptych.compile_fx(gm, [X], options={3: 4}), "options are named by strings, not by int: 3"),
        (lambda gm: triptych.pre_grad_passes(gm, X), "inputs as a list or tuple, not as a Tensor"),
        (lambda gm: triptych.rule(lambda x: x, 3), "rule takes two functions, a pattern and a replacement, not an int"),
        (lambda gm: triptych.bisect(gm, X, check=3), "bisect takes as check a function of the compiled model, not an int"),
        (lambda gm: triptych.list_operations(3), "unknown operation '3'"),
        (lambda gm: triptych.make_backend(lambda gm, inputs: None)(gm, [X]), "<lambda> returned None, not a callable"),
        (lambda gm: triptych.make_backend(None), "make_backend takes a function .* not None"),
        (lambda gm: triptych.find(3, gm), "a rule, a pass or the name of one is wanted, not int"),
        (lambda gm: triptych.find(Net, gm), "a rule, a pass or the name of one is wanted, not Net"),
    ],
)  # fmt: skip
def test_wrong_use_is_named(call, message):
    with pytest.raises(TriptychError, match=message):
        call(torch.fx.symbolic_trace(Net()))


def scaled(x, scale=1.0):
    return x.relu() * scale


CALLS = {
    "explain": lambda *args, **kwargs: triptych.explain(scaled, *args, options=EAGER, **kwargs),
    "why_not": lambda *args, **kwargs: triptych.why_not("noop_clone", scaled, *args, options=EAGER, **kwargs),
    "bisect": lambda *args, **kwargs: triptych.bisect(scaled, *args, options=EAGER, **kwargs),
}


@pytest.mark.parametrize("function", CALLS)
def test_a_misspelt_keyword_is_named(function):
    for name, near in {"trian": "train", "sclae": "scale"}.items():
        message = f"'{name}' is no parameter of {function}, nor of the model; did you mean '{near}'"
        with pytest.raises(TriptychError, match=message):
            CALLS[function](X, **{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'"):
        CALLS[function](X, zzz=True)


def test_a_keyword_of_the_model_is_no_mistake():
    assert triptych.explain(lambda x, **given: x * len(given), X, trian=1, options=EAGER).passes
    assert triptych.explain(lambda x, trains: x * trains, X, trains=2, options=EAGER).passes
    assert triptych.why_not("noop_clone", scaled, X, dynamic=True, options=EAGER) == []


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("kind", [tuple, list])
def test_inputs_in_one_tuple_are_to_be_unpacked(function, kind):
    with pytest.raises(TriptychError, match=f"the model got one {kind.__name__}; .* unpack it .* The call failed: "):
        CALLS[function](kind([X]))


def test_a_model_may_take_a_tuple():
    assert triptych.explain(lambda pair: pair[0] + pair[1], (X, X), options=EAGER).passes
    with pytest.raises(Exception, match="two of them"):  # what else fails is told as it is

        def fails(pair):
            raise ValueError("two of them")

        triptych.explain(fails, (X, 3, "text"), options=EAGER)


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("explain", {"train": "yes"}, "explain takes train as True or False, not 'yes'"),
        ("explain", {"dynamic": "yes"}, "explain takes dynamic as True or False, not 'yes'"),
        ("explain", {"fullgraph": 1}, "explain takes fullgraph as True or False, not 1"),
        ("explain", {"stock": "no"}, "explain takes stock as True or False, not 'no'"),
        ("why_not", {"train": "no"}, "why_not takes train as True or False, not 'no'"),
        ("bisect", {"train": "no"}, "bisect takes train as True or False, not 'no'"),
        ("bisect", {"tolerance": "a"}, "bisect takes tolerance as a number that is not negative, not 'a'"),
        ("bisect", {"tolerance": -1}, "bisect takes tolerance as a number that is not negative, not -1"),
        ("bisect", {"tell": "x"}, "bisect takes as tell a function of a message, not a str"),
        ("bisect", {"repro": 3}, "the path of a file is wanted, not 3"),
        ("bisect", {"repro": "/"}, "the path of a file is wanted, and '/' is a folder"),
    ],
)
def test_a_parameter_of_the_wrong_type(function, given, message):
    with pytest.raises(TriptychError, match=message):
        CALLS[function](X, **given)


def test_a_file_that_cannot_be_written(tmp_path):
    explanation = triptych.explain(scaled, X, options=EAGER)
    (tmp_path / "file").write_text("")
    for path, message in {tmp_path: "is a folder", "": "is a folder", tmp_path / "file" / "page.html": "cannot be written"}.items():
        with pytest.raises(TriptychError, match=message):
            explanation.to_html(path)
    assert explanation.to_html(tmp_path / "new" / "folder" / "page.html").is_file()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: triptych.Options(pass_options=["a"]), "pass_options is a dict of options and their values, not list"),
        (lambda: Options.make({"pass_options": 3}), "pass_options is a dict of options and their values, not int"),
        (lambda: Options.make({"inductor_options": 3}), "inductor_options is a dict of options and their values, not int"),
        (lambda: Options.make({"known_buffers_bytes": True}), "known_buffers_bytes is a number of bytes, not True"),
        (lambda: triptych.rule(torch.relu, torch.relu, exact="no"), "rule takes exact as True or False, not 'no'"),
        (lambda: triptych.rule(torch.relu, torch.relu, example_inputs=3), "as a list or tuple, not as an int"),
        (lambda: triptych.FirstOf(3), r"FirstOf takes functions, as in FirstOf\(lambda: x\), not an int"),
    ],
)
def test_other_wrong_types(call, message):
    with pytest.raises(TriptychError, match=message):
        call()


def test_an_input_with_a_default_may_be_left_out():
    gm = torch.fx.symbolic_trace(lambda x, scale=2: x * scale)
    assert torch.equal(triptych.compile_fx(gm, [X], options={**EAGER, "on_error": "raise"})(X), X * 2)


# ---- names ----


def test_a_name_is_never_its_own_suggestion():
    error = UnknownName("operation", "t", ["t", "to"])
    assert error.near == ["to"]
    assert len(str(UnknownName("option", "zzz", map(str, range(1000))))) < 300


@pytest.mark.parametrize(("name", "op"), [("t", "permute"), ("view", "reshape"), ("mm", "matmul"), ("float", "to")])
def test_a_spelling_in_a_pattern_names_the_operation(name, op):
    with pytest.raises(UnknownName, match=f"it is read as '{op}', .* write op.{op}\\(self"):
        triptych.rule(lambda op, x: getattr(op, name)(x), lambda op, x: x)


def test_operations_are_listed():
    known = {info.name: info for info in triptych.list_operations()}
    assert str(known["permute"]) == "permute(self, dims)"
    assert {"t", "transpose", "mT"} <= set(known["permute"].spellings) and "view" in known["permute"].traits
    assert "commutative" in known["add"].traits and str(known["sum"]).startswith("sum(self, dim=None")
    assert not {"t", "view", "mm", "relu_", "_softmax"} & set(known)
    assert [info.name for info in triptych.list_operations("mm")] == ["matmul"]
    with pytest.raises(UnknownName, match="did you mean 'linear'"):
        triptych.list_operations("linaer")


def test_every_listed_name_can_stand_in_a_pattern_and_every_spelling_leads_to_one():
    from triptych.match.pattern import PatternBuilder

    op = PatternBuilder()
    for info in triptych.list_operations():
        getattr(op, info.name)
    assert {name: op for name, op in SPELLING_OF.items() if not is_operation(op)} == {}
    assert SPELLING_OF.keys() == CANONICAL.keys()


def test_a_spelling_is_read_as_the_operation_that_the_table_says():
    from triptych.ir.calls import read
    from triptych.testing.capture import capture_torch

    def program(x):
        y = x.t() + x.view(4, 2).float() - torch.transpose(x, 0, 1)
        return torch.mm(x, y).clamp_min(0), x.flatten(), x.narrow(0, 0, 1), x.chunk(2), torch.hstack([x, x])

    gm, _ = capture_torch(program, [X])
    names = {n.target if isinstance(n.target, str) else n.target.__name__: n for n in gm.graph.nodes if n.op != "output"}
    spellings = [(name, node) for name, node in names.items() if name in SPELLING_OF]
    assert len(spellings) >= 9
    for name, node in spellings:
        assert read(node).op == SPELLING_OF[name]


# ---- Inductor's own options ----


def test_options_of_inductor_have_a_prefix():
    options = Options.make({"inductor.max_autotune": True, "inductor.triton.cudagraphs": True})
    assert options.inductor_options == {"max_autotune": True, "triton.cudagraphs": True}
    assert options.replays == "on"
    assert Options.make({"inductor.triton.cudagraphs": False}, "max-autotune").replays == "off"
    assert Options.make(options) == options == Options.make({"inductor_options": options.inductor_options})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inductor.max_autotun", "unknown option of Inductor 'max_autotun'; did you mean 'max_autotune'"),
        ("max_autotune", "it is one of Inductor's, which are given as 'inductor.max_autotune'"),
        ("triton.cudagraphs", "it is one of Inductor's, which are given as 'inductor.triton.cudagraphs'"),
        ("qqq.zzz", r"none of the \d+ known names is similar"),
        ("inductor.freezing", "inductor.freezing cannot be set: say freeze"),
        ("inductor.pattern_matcher", "Triptych's passes take the place of Inductor's own"),
        ("inductor.fallback_random", "an option of Triptych's by the same name"),
    ],
)
def test_wrong_options_of_inductor(name, message):
    with pytest.raises(TriptychError, match=message):
        Options.make({name: True})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("inductor.max_autotune", "maybe", "inductor.max_autotune is of type bool, not 'maybe'"),
        ("inductor.cpp.threads", "two", "inductor.cpp.threads is of type int, not 'two'"),
    ],
)
def test_options_of_inductor_of_the_wrong_kind(name, value, message):
    with pytest.raises(TriptychError, match=message):
        Options.make({name: value})


def test_rules_that_run_anyway_can_be_added():
    """The catalogue names rules and passes alike: a rule of a pass that runs by default is no unknown name."""
    assert Options.make({"add_passes": "addmm,prepare_softmax"}).add_passes == ("addmm", "prepare_softmax")
    with pytest.raises(TriptychError, match="unknown pass 'split_cat_aten'; did you mean 'split_cat_aten_pass'"):
        Options.make({"add_passes": "split_cat_aten"})


def test_settings_that_are_ours_are_settings_of_inductor():
    from triptych.codegen.inductor import OWN_PASSES_OFF
    from triptych.options import OURS_INSTEAD_OF_INDUCTORS
    from triptych.pipeline import inductor_settings

    assert OURS_INSTEAD_OF_INDUCTORS.keys() <= set(inductor_settings())
    assert OWN_PASSES_OFF.keys() <= OURS_INSTEAD_OF_INDUCTORS.keys()


def test_options_of_inductor_are_part_of_the_cache_key():
    keys = [cache_key(o) for o in ({}, {"inductor.max_autotune": True}, {"inductor.max_autotune": False})]
    assert len({*keys, None}) == 4


def test_options_of_inductor_reach_its_code_generator_and_a_reproduction():
    from triptych.repro.option_source import OptionSource

    options = {"inductor.size_asserts": False, "inductor.cpp.simdlen": 0}
    with_options, without = (triptych.explain(lambda x: x.sin() + 1, X, options=o).kernels for o in (options, None))
    assert "Vectorized" not in with_options["forward"] and "Vectorized" in without["forward"]
    assert OptionSource().options(Options.make(options)) == str(options).replace("'", '"')


# ---- what a function in a hook gets ----


class HasNodes(Protocol):
    nodes: Any


def by_name(gm): ...
def annotated_graph(gm: Graph): ...
def annotated_module(graph: GraphModule): ...
def annotated_by_base(graph: nn.Module): ...
def annotated_optional(graph: GraphModule | None): ...
def annotated_protocol(graph: HasNodes): ...
def annotated_unknown(graph: fx.GraphModule): ...  # noqa: F821
def annotated_unknown_graph(gm: fx.Graph): ...  # noqa: F821
def second_annotated(limit, graph: GraphModule): ...


class Callable_:
    def __call__(self, gm: Graph): ...


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (by_name, False), (lambda gm: None, False), (annotated_graph, False), (annotated_module, True),
        (annotated_by_base, True), (annotated_optional, True), (annotated_unknown, True),
        (annotated_protocol, False), (annotated_unknown_graph, False), (functools.partial(second_annotated, 3), True), (Callable_(), False),
    ],
)  # fmt: skip
def test_the_annotation_decides(function, module):
    assert wants_module(function) is module


def test_a_function_that_takes_the_graph_for_the_module_is_told():
    def clumsy(gm):
        gm.recompile()

    options = {**EAGER, "on_error": "fallback", "pre_grad_custom_pass": clumsy}
    explanation = triptych.explain(lambda x: x + 1, X, options=options)
    assert "annotated as torch.fx.GraphModule" in explanation.warnings[0]


def test_a_setting_of_inductor_that_may_be_none():
    name = "triton.cudagraph_dynamic_shape_warn_limit"
    assert Options.make({f"inductor.{name}": None}).inductor_options == {name: None}
