"""A refusal says which node is at fault, what was wanted and what was found; the text is made from that."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch

import triptych
from triptych.cost import Waiting, Work
from triptych.ir.program import Program
from triptych.ir.refusal import Refusal
from triptych.passes.catalogue import all_rules
from triptych.rewrite.driver import run_rules
from triptych.rewrite.edits import Erase, Respell, Together
from triptych.rewrite.emit import Emitter
from triptych.rewrite.examples import make_inputs
from triptych.rewrite.refusal import Refused
from triptych.rewrite.rewriter import Rewriter
from triptych.rewrite.rule import Match, Rule
from triptych.rewrite.spelling import Spelling
from triptych.testing.capture import capture
from triptych.testing.check import apply_example

X, Y = torch.randn(4, 8), torch.randn(4, 8)


def line_of(function, containing: str) -> str:
    """The one source line of a program with this text, as reports write it."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [n for n, line in enumerate(lines, first) if containing in line]
    return f"test_refusals.py:{number}"


def declined(rule, program, *inputs, dialect="torch"):
    """The one decline of a rule, from the driver; `why_not` of the same graph must agree."""
    gm, _ = capture(program, inputs, dialect)
    asked = triptych.why_not(rule, gm)
    tally = run_rules(Rewriter(Program(gm), "test"), [rule], strict=True)
    assert not tally.fired and not asked.fires
    (decline,) = tally.declines.values()
    assert dataclasses.replace(asked[0], graph="") == decline
    return decline


class DoubleNegation(Rule):
    """neg(neg(x)) -> x * 1"""

    def pattern(self, op, x):
        return op.neg(op.neg(x))

    def rewrite(self, op, x):
        return op.mul(x, 1)


class AddRelu(Rule):
    """relu(x) + y -> y + relu(x)"""

    def pattern(self, op, x, y):
        return op.add(op.relu(x), y)

    def rewrite(self, op, x, y):
        return op.add(y, op.relu(x))


# ---- the text ----

TEXTS = {
    "a sentence alone": (Refusal("too small"), "too small"),
    "wanted and found alone": (Refusal(wanted="relu", found="tanh"), "wanted relu, found tanh"),
    "a sentence that says neither": (
        Refusal("only for double precision", wanted=torch.float64, found=torch.float32),
        "only for double precision: wanted torch.float64, found torch.float32",
    ),
    "a sentence with both": (
        Refusal("shape {wanted} would become {found}", wanted=torch.Size([4, 8]), found=(8, 4)),
        "shape [4, 8] would become [8, 4]",
    ),
    "a sentence with one of them": (Refusal("costs {found}", wanted="less", found=3), "costs 3"),
    "braces of somebody else": (Refusal("no {key} in {}", found=0), "no {key} in {}: found 0"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_made_from_the_data(case):
    refusal, text = TEXTS[case]
    assert str(refusal) == str(Refused(refusal)) == text


def test_no_text_is_made_before_somebody_reads_it():
    class Loud:
        def __str__(self):
            raise AssertionError("printed")

    refused = Refused("not {wanted}", wanted=Loud(), found=Loud())
    with pytest.raises(AssertionError, match="printed"):
        str(refused)


# ---- checks that every rule has ----


def test_a_value_used_outside_names_that_value_and_its_user():
    def program(x):
        inner = x.neg()
        outer = inner.neg()
        return outer, inner * 2

    decline = declined(DoubleNegation(), program, X)
    assert (decline.node, decline.at, decline.found) == ("outer", "inner", "mul")
    assert decline.reason == "inner is used outside the pattern, by mul"
    assert decline.source == line_of(program, "inner = x.neg()") and decline.matched == 2
    assert str(decline) == f"double_negation at outer: {decline.reason}  # {decline.source}"


def test_different_dtypes_name_the_operand_that_differs():
    def program(x, y):
        half = y.half()
        return x.relu() + half

    decline = declined(AddRelu(), program, X, Y)
    assert (decline.node, decline.at) == ("add", "half")
    assert (decline.wanted, decline.found) == ("torch.float32", "torch.float16")
    assert decline.reason == "different dtypes torch.float32 and torch.float16"
    assert decline.source == line_of(program, "half = y.half()")
    assert str(decline).endswith(f"torch.float16, at half  # {decline.source}")


# ---- checks of the rewriter ----


class ReturnOther(Rule):
    """abs(x) -> something that must not stand there"""

    def __init__(self, made):
        self.made = made

    def pattern(self, op, x):
        return op.abs(x)

    def rewrite(self, op, x):
        return self.made(op, x)


OTHER_VALUES = {
    "dtype": (lambda op, x: op.to(x, dtype=torch.float64), "torch.float32", "torch.float64"),
    "shape": (lambda op, x: op.reshape(x, [8, 4]), "[4, 8]", "[8, 4]"),
    "stride": (lambda op, x: op.transpose(op.clone(op.reshape(x, [8, 4])), 0, 1), "[8, 1]", "[1, 4]"),
}


@pytest.mark.parametrize("what", OTHER_VALUES)
@pytest.mark.parametrize("dialect", ["torch", "aten"])
def test_a_replacement_with_other_facts_names_both(what, dialect):
    made, wanted, found = OTHER_VALUES[what]
    decline = declined(ReturnOther(made), lambda x: x.abs() + 1, X, dialect=dialect)
    assert (decline.wanted, decline.found) == (wanted, found)
    assert decline.reason == f"{what} {wanted} would become {found}"
    assert (decline.at or "") == ("add" if what == "stride" else "")  # other strides are refused where they show


class SwapNegation(Rule):
    """neg(relu(x)) -> relu(x) * -1"""

    def pattern(self, op, x):
        return op.neg(op.relu(x))

    def rewrite(self, op, x):
        return op.mul(op.relu(x), -1)


def test_a_write_in_between_is_at_fault_itself():
    def program(x):
        y = x.relu()
        x.add_(1)
        return y.neg()

    decline = declined(SwapNegation(), program, X)
    assert (decline.node, decline.at) == ("neg", "add_")
    assert decline.reason == "add_ writes a matched value in between"
    assert decline.source == line_of(program, "x.add_(1)")


class DropClone(Rule):
    """clone(x) -> x"""

    def pattern(self, op, x):
        return op.clone(x)

    def rewrite(self, op, x):
        return x


def test_a_later_write_of_the_memory_is_at_fault():
    def program(x):
        y = x.clone()
        y.add_(1)
        return y * 2

    decline = declined(DropClone(), program, X)
    assert (decline.node, decline.at) == ("y", "add_") and decline.source == line_of(program, "y.add_(1)")


def test_what_reads_strides_is_at_fault():
    class OtherStrides(ReturnOther):
        """abs(x) -> the same values with other strides"""

    def program(x):
        y = x.abs()
        return y.view(32) + 1

    decline = declined(OtherStrides(OTHER_VALUES["stride"][0]), program, X)
    assert (decline.node, decline.at) == ("y", "view") and decline.source == line_of(program, "y.view(32)")
    assert (decline.wanted, decline.found) == ("[8, 1]", "[1, 4]")


def test_a_barrier_is_at_fault():
    def program(x):
        y = x.relu()
        with torch.no_grad():
            return y.neg()

    decline = declined(SwapNegation(), program, X)
    assert decline.node == "neg" and decline.at.startswith("_set_grad_enabled")


# ---- a rule's own check ----


class DoubleOnly(Rule):
    """relu(x) + y -> y + relu(x), in double precision"""

    mixed_dtypes = True

    def pattern(self, op, x, y):
        return op.add(op.relu(x), y)

    def check(self, m, x, y):
        m.require(x.rank == 2, "x is no matrix", at=x)
        m.require(y.dtype == torch.float64, "y is too coarse", at=y, wanted=torch.float64, found=y.dtype)

    def rewrite(self, op, x, y):
        return op.add(y, op.relu(x))


def by_hand(x, y):
    coarse = y * 2
    return torch.relu(x) + coarse


def test_a_check_names_the_value_at_fault():
    decline = declined(DoubleOnly(), by_hand, X, Y)
    assert (decline.rule, decline.node, decline.at) == ("double_only", "add", "coarse")
    assert (decline.wanted, decline.found, decline.matched) == ("torch.float64", "torch.float32", 2)
    assert decline.reason == "y is too coarse: wanted torch.float64, found torch.float32"
    assert decline.source == line_of(by_hand, "coarse = y * 2")


def test_the_report_of_a_compile_names_the_node_at_fault():
    source = line_of(by_hand, "coarse = y * 2")
    options = {"codegen": "eager", "add_rules": [DoubleOnly]}
    seen = triptych.explain(by_hand, X, Y, options=options)
    declines = [d for record in seen.passes for d in record.declines if d.rule == "double_only"]
    assert {(d.at, d.source) for d in declines} == {("coarse", source), ("mul", source)}  # at the torch level, in ATen
    assert f"coarse  {source}" in str(seen)
    data = json.loads(seen.to_json())
    kept = [d for record in data["passes"] for d in record["declines"] if d["rule"] == "double_only"]
    assert kept == [dataclasses.asdict(d) for d in declines]
    assert pickle.loads(pickle.dumps(declines)) == declines


def test_an_analysis_names_the_value_at_fault():
    class Sums(Rule):
        """sum(x) -> sum(x)"""

        def sites(self, program):
            for node in program.graph.find_nodes(op="call_method", target="sum"):
                (operand,) = node.all_input_nodes
                yield Match.at(program, node, covers=[operand], problem=Refusal("{at} is no product", at=operand))

        def rewrite(self, op, m):
            raise AssertionError

    decline = declined(Sums(), lambda x: x.relu().sum(), X)
    assert (decline.node, decline.at, decline.matched) == ("sum_1", "relu", 2)
    assert decline.reason == "relu is no product"


def test_the_cost_model_says_what_was_wanted():
    class TooDear(ReturnOther):
        """abs(x) -> relu(x)"""

        def check(self, m):
            m.pays(*(Work.of(torch.device("cpu"), Waiting(seconds)) for seconds in (2e-6, 3e-6)))

    decline = declined(TooDear(None), lambda x: x.abs(), X)
    assert (decline.wanted, decline.found) == ("less than 1.9 us", "3.0 us")
    assert decline.reason == "would cost 3.0 us instead of 2.0 us, modelled"


# ---- the matcher ----


def near_misses(rule, program, *inputs):
    gm, _ = capture(program, inputs, "torch")
    return triptych.why_not(rule, gm)


def test_a_miss_names_the_operation_that_stands_there():
    class Nested(Rule):
        """relu(neg(x)) + y -> y"""

        def pattern(self, op, x, y):
            return op.add(op.relu(op.neg(x)), y)

    def program(x, y):
        inner = x.tanh()
        return inner.relu() + y

    (miss,) = near_misses(Nested, program, X, Y)
    assert (miss.node, miss.at, miss.matched, miss.complete) == ("add", "inner", 2, False)
    assert (miss.wanted, miss.found, miss.reason) == ("neg", "tanh", "wanted neg, found tanh")
    assert miss.source == line_of(program, "x.tanh()")
    assert str(miss) == f"nested at add (graph): matched 2 of its nodes; {miss.reason}, at inner  # {miss.source}"


def test_an_argument_that_differs_is_at_fault_in_its_call():
    class LastSoftmax(Rule):
        """relu(x) + softmax(y, 1) -> ..."""

        def pattern(self, op, x, y):
            return op.add(op.relu(x), op.softmax(op.tanh(y), 1))

    def program(x, y):
        weights = y.tanh().softmax(0)
        return x.relu() + weights

    (miss,) = near_misses(LastSoftmax, program, X, Y)
    assert (miss.node, miss.at, miss.wanted, miss.found) == ("add", "weights", "1", "0")


# ---- edits that are not made ----


def test_erasing_a_value_that_is_used_erases_nothing():
    gm, _ = capture(lambda x: (y := x.relu(), y.abs().neg(), y + 1)[2], [X], "torch")
    (root,) = gm.graph.find_nodes(op="call_method", target="abs")
    names = [n.name for n in gm.graph.nodes]
    program = Program(gm)
    rewriter = Rewriter(program, "test")
    op = Emitter(program, root, "test")
    edit = Erase([*root.users, root, *root.all_input_nodes])
    for refuse in (edit.require_sound, edit.make, Together([edit]).require_sound):
        with pytest.raises(Refused, match="y is used, by add"):
            refuse(rewriter, op)
        assert [n.name for n in gm.graph.nodes] == names


def test_why_not_checks_a_call_that_would_be_written_another_way():
    class OtherShape(ReturnOther):
        """abs(x) -> a sum, written as if it were the same call"""

        def rewrite(self, op, m):
            (x,) = m.root.node.all_input_nodes
            return Respell(m.root.node, Spelling("call_function", torch.sum, (x,), {}))

    decline = declined(OtherShape(None), lambda x: x.abs() + 1, X)
    assert (decline.wanted, decline.found) == ("[4, 8]", "[]")


def test_why_not_checks_a_write_that_would_make_a_new_value():
    def program(x):
        y = x * 2
        view = y.view(-1)
        y.relu_()
        return y + view.sum()

    gm, _ = capture(program, [X], "torch")
    answer = triptych.why_not("out_of_place", gm)
    assert not answer.fires and [m.at for m in answer] == ["view"]
    assert answer[0].source == line_of(program, "view = y.view(-1)")
    before = str(gm.graph)
    assert triptych.why_not("out_of_place", gm) and str(gm.graph) == before


def test_why_not_says_fires_only_where_the_rewriter_agrees():
    def program(x):
        y = x.clone()
        return (y * 2, x.clone())

    gm, _ = capture(program, [X], "torch")
    answer = triptych.why_not(DropClone, gm)
    assert [f.node for f in answer.fires] == ["y"] and [m.node for m in answer] == ["clone_1"]
    assert len(triptych.find(DropClone, gm)) == 2


# ---- all rules ----


def one_of_each(rule):
    """The first example that fires and the first that declines, in its first dialect."""
    return [e for fires in (True, False) for e in [x for x in rule.examples if x.fires is fires][:1]]


@pytest.mark.parametrize("name", sorted(all_rules()))
def test_why_not_says_fires_where_the_driver_rewrites(name):
    rule = all_rules()[name]
    for example in one_of_each(rule):
        gm, _ = capture(example.program, make_inputs(example), example.dialects[0], example.dynamic)
        if example.prepare is not None:
            example.prepare(gm.graph)
        subject = type(rule)(**example.settings) if example.settings else rule
        train = not example.is_inference
        names = [n.name for n in gm.graph.nodes]
        answer = triptych.why_not(subject, gm, train=train, options=example.options)
        assert [n.name for n in gm.graph.nodes] == names
        assert bool(answer.fires) == bool(apply_example(rule, gm, example).fired), str(answer)


def names_in_text(path: Path) -> list[str]:
    """Where a file writes the name of a node into the text of a refusal instead of giving the node."""
    found = []
    for call in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in ("require", "applies", "Refused", "NotConcerned", "Refusal"):
            continue
        texts = [part for text in call.args if isinstance(text, ast.JoinedStr) for part in ast.walk(text)]
        if any(isinstance(part, ast.Attribute) and part.attr == "name" for part in texts):
            found.append(f"{path.name}:{call.lineno}")
    return found


PACKAGES = ("ir", "match", "rewrite", "rules", "pieces", "batching", "pre_grad", "joint", "post_grad")


def test_no_refusal_hides_a_node_in_its_text():
    root = Path(triptych.__file__).parent
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    assert len(files) > 80 and [where for path in files for where in names_in_text(path)] == []


def test_the_check_sees_a_hidden_node(tmp_path):
    file = tmp_path / "rule.py"
    file.write_text('m.require(x, f"{y.node.name} is used")\nraise Refused("{at} is used", at=y)\n')
    assert names_in_text(file) == ["rule.py:1"]
