"""Attention is read, planned and emitted: what each phase may do, and the page that explains them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import triptych
from triptych.attention.draft import Draft, Sheet
from triptych.attention.fuse import AttentionByHand
from triptych.attention.read_scores import SPELLINGS
from triptych.attention.score_rules import apply as apply_to_scores
from triptych.attention.softmax_forms import FORMS
from triptych.attention.terms import Bias, Cast, Dropout, Factor, Mask, Scale, Shift, Sink, Term, View
from triptych.ir.facts import fact
from triptych.ir.program import Program
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.rewrite.refusal import Refused
from triptych.rewrite.rule import compiled
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

from .attention_idioms import IDIOMS
from .test_attention import make_inputs
from .test_docs import ROOT, run_guide

PACKAGE = Path(triptych.__file__).parent / "attention"
READ = ["terms", "paths", "read", "read_scores", "read_probabilities", "softmax_forms", "scaled_softmax"]
PLAN = ["plan", "score_plan", "score_rules", "probability_rules", "mask_plan"]
SAMPLE = sorted(IDIOMS)[::12]


def imported(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    return {f"{'.' * n.level}{n.module}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


@pytest.mark.parametrize("module", READ)
def test_reading_knows_no_emitter(module):
    assert not imported(module) & {"..rewrite.emit", ".draft", ".emit", ".sharing"}


@pytest.mark.parametrize("module", PLAN)
def test_planning_knows_no_emitter(module):
    assert not imported(module) & {"..rewrite.emit", ".emit", ".sharing"}


def captured(program, inputs) -> Program:
    torch._dynamo.reset()
    gm, _ = capture_torch(program, inputs, False)
    run_pass(NormalizationPassAten, gm)
    return Program(gm)


def snapshot(program: Program):
    return [(n, n.args, dict(n.kwargs), list(n.users), id(fact(n)), set(n.meta)) for n in program.graph.nodes]


def test_the_first_two_phases_leave_the_graph_as_it_is():
    rule, planned = AttentionByHand(), 0
    for name in SAMPLE:
        program = captured(IDIOMS[name].program, make_inputs(IDIOMS[name], torch.float32))
        before = snapshot(program)
        for match in rule.sites(program):
            try:
                compiled(rule).check(match)
                planned += 1
            except Refused:
                pass
        assert snapshot(program) == before, name
    assert planned > len(SAMPLE) // 2


def terms(program, *shapes) -> tuple[list[Term], list[Term]]:
    """The normal form of the one attention in a program."""
    inputs = [torch.ones(s[1:], dtype=torch.bool) if s[0] == "mask" else torch.randn(s) for s in shapes]
    (match,) = AttentionByHand().sites(captured(program, inputs))
    attention = match.bindings["ways"][0].reading
    return list(attention.score_terms), list(attention.probability_terms)


QKV = [(2, 6, 8)] * 3


def test_terms_in_their_order():
    def program(q, k, v, b, m):
        scores = (q @ k.mT).mul(0.5).add(b).transpose(1, 2).transpose(1, 2)
        scores = scores - scores.amax(-1, True)
        scores = scores.masked_fill(m, -1e9).double() / q.sum(-1, True).double()
        return torch.nn.functional.dropout(scores.softmax(-1), 0.1).float() @ v

    above, below = terms(program, *QKV, (6, 6), ("mask", 6, 6))
    assert [type(t) for t in above] == [Scale, Bias, View, View, Shift, Mask, Cast, Factor]
    assert [type(t) for t in below] == [Dropout, Cast]
    assert above[0].number == 0.5 and above[4].is_own_maximum and above[5].masks_out and above[7].divide
    assert above[3].before.layout.key == 1 and above[4].before.layout.key == 2
    assert [t.before.dtype for t in above[5:]] == [torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize(
    "spelled",
    [
        lambda s, m: s.masked_fill(m, -1e9),
        lambda s, m: torch.where(m, -1e9, s),
        lambda s, m: torch.where(m, torch.full_like(s, -1e9), s),
        lambda s, m: s.masked_fill(m, torch.tensor(-1e9)),
    ],
)
def test_one_term_for_several_spellings(spelled):
    ((term,), _) = terms(lambda q, k, v, m: spelled(q @ k.mT, m).softmax(-1) @ v, *QKV, ("mask", 6, 6))
    assert isinstance(term, Mask) and (term.fill, term.masks_out, term.mask.op) == (-1e9, True, "placeholder")


def test_a_sink_is_a_term():
    above, _ = terms(lambda q, k, v, s: torch.cat([q @ k.mT, s], -1).softmax(-1)[..., :-1] @ v, *QKV, (2, 6, 1))
    assert [type(t) for t in above] == [Sink]


def test_a_term_without_a_rule_is_an_error():
    with pytest.raises(TypeError, match="no rule for Term"):
        apply_to_scores(Term(None, None), None, None)


@pytest.mark.parametrize(
    ("program", "at", "reason"),
    [
        (lambda q, k, v: (q @ k.mT).add(1).tanh().softmax(-1) @ v, "tanh", "tanh stands between"),
        (lambda q, k, v: (q @ k.mT).clamp(max=5.0).softmax(-1) @ v, "clamp", "cut off above"),
        (lambda q, k, v: (q @ k.mT).masked_fill(v > 0, -1e9).mul(-1).add(1).softmax(-1) @ v, "mul", "negative number"),
        (lambda q, k, v: (q @ k.mT).add(1).softmax(-1).mul(v).sin() @ v, "sin", "sin stands between"),
        (
            lambda q, k, v: torch.nn.functional.dropout((q @ k.mT).softmax(-1), 1.0).mul(2) @ v,
            "dropout",
            "of everything",
        ),
    ],
)
def test_refusals_name_the_operation_at_fault(program, at, reason):
    found = captured(program, [torch.randn(2, 6, 6) for _ in range(3)])
    (match,) = AttentionByHand().sites(found)
    with pytest.raises(Refused, match=reason) as refused:
        compiled(AttentionByHand()).check(match)
    assert refused.value.refusal.node.name == at


def test_expressions_are_not_in_the_graph():
    """Of an expression shape, dtype and elements are known; expressions of one sheet are shared."""
    program = captured(lambda x: x.masked_fill(torch.ones(6, 6).tril() == 0, 0.0), [torch.randn(6, 6)])
    before = snapshot(program)
    (above,) = (n for n in program.graph.nodes if (call := program.call(n)) is not None and call.op == "eq")
    sheet, end = Sheet(program), program.graph.output_node()
    draft = Draft(sheet, end)
    keep = draft.reshape(draft.logical_not(above), [1, 1, 6, 6])
    assert keep.shape == (1, 1, 6, 6) and keep.dtype == torch.bool
    assert sheet.knowledge.is_causal(keep.node) and not sheet.knowledge.is_causal(draft.of(above).node)
    assert Draft(sheet, end).logical_not(above) == draft.logical_not(above)
    assert snapshot(program) == before


def test_the_page_names_every_term():
    page = (ROOT / "docs" / "attention.md").read_text()
    assert all(f"`{term.__name__}`" in page for term in Term.__subclasses__() if term.__module__ == Term.__module__)


@pytest.fixture
def tables():
    """What a page adds to the tables of spellings is taken out again."""
    saved = [(table, dict(table)) for table in (SPELLINGS, FORMS)]
    yield
    for table, content in saved:
        table.clear()
        table.update(content)


def test_add_an_attention_spelling(tables, capsys):
    """The page is run, and the graph that it shows is the one it prints; the new spelling works in a compile too."""
    page = ROOT / "docs" / "attention.md"
    assert "lerp" not in SPELLINGS
    namespace = run_guide(page)
    printed = re.sub(r"  # \S+", "", capsys.readouterr().out)
    assert printed.strip() in page.read_text()
    assert [o.rewrites for o in namespace["outcomes"]] == [1, 1, 0, 0, 0]
    inputs = [*(torch.randn(2, 4, 6, 8) for _ in range(3)), torch.randn(6, 6)]
    for program, given in ((namespace["with_prior"], inputs), (namespace["attention"], inputs[:3])):
        torch._dynamo.reset()
        report = triptych.explain(program, *given, options={"codegen": "eager"})
        assert sum(run.fired.get("fuse_attention", 0) for run in report.runs_of("fuse_attention")) == 1
        compiled_program = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})
        torch.testing.assert_close(compiled_program(*given), program(*given))
