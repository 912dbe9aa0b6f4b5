"""An explanation outside the process that made it: as JSON with a documented form, as a pickle, in a notebook."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import triptych
from triptych.communication.example_group import NAME, register
from triptych.errors import TriptychError
from triptych.explaining.explanation import Explanation
from triptych.explaining.page import page
from triptych.explaining.saved import SavedGraph
from triptych.explaining.why_not import WhyNot
from triptych.options import Options
from triptych.passes.record import Listing, PassRecord
from triptych.passes.session import Session
from triptych.rewrite.record import Decline, Firing

ROOT = Path(__file__).parent.parent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.cat([torch.cat([x, x]), x]) + 0).relu()


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / 2, dim=-1) @ v


@pytest.fixture(scope="module")
def explanation():
    return triptych.explain(
        Net(), torch.ones(2, 4), train=True, stock=True, profile=True, options={"pre_grad_custom_pass": lambda graph: None}
    )


# ---- JSON ----


def two_programs(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def communicating(x):
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.sin(), "sum", NAME)).cos()


def documented() -> dict[str, dict[str, str]]:
    """The tables of docs/json.md: by heading, the type of every field."""
    text = (ROOT / "docs" / "json.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    rows = {s.partition("\n")[0]: re.findall(r"^\| `(\w+)` \| ([^|]+) \|", s, re.MULTILINE) for s in sections}
    return {name: dict(fields) for name, fields in rows.items()}


KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool}


def check(value, kind: str, tables, seen, where: str) -> None:
    if kind.endswith(" or null"):
        if value is None:
            return
        kind = kind.removesuffix(" or null")
    if kind.startswith("list of "):
        assert isinstance(value, list), where
        for item in value:
            check(item, kind.removeprefix("list of "), tables, seen, where)
    elif kind.startswith("dict of "):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check(item, kind.removeprefix("dict of "), tables, seen, f"{where}.{key}")
    elif kind in tables:
        seen.add(kind)
        assert list(value) == list(tables[kind]), where
        for name, one in tables[kind].items():
            check(value[name], one, tables, seen, f"{kind}.{name}")
    else:
        assert isinstance(value, KINDS[kind]), where
        assert isinstance(value, bool) == (kind == "bool"), where


def test_the_documented_form_is_the_written_one(explanation):
    tables, seen = documented(), set()
    data = json.loads(explanation.to_json())
    check(data, "Explanation", tables, seen, "")
    fused = triptych.explain(attention, *torch.ones(3, 1, 2, 64, 8), options={"codegen": "eager"})
    check(json.loads(fused.to_json()), "Explanation", tables, seen, "")
    broken = triptych.explain(two_programs, torch.ones(3), options={"codegen": "eager"})
    check(json.loads(broken.to_json()), "Explanation", tables, seen, "")
    register()
    ranks = triptych.explain(communicating, torch.ones(4, 4), options={"codegen": "eager"})
    check(json.loads(ranks.to_json()), "Explanation", tables, seen, "")
    assert seen == set(tables)  # each kind of record was there to be looked at
    assert data["version"] == 1 and data["stock"]["backend"] == "inductor"


def test_a_path_is_where_it_is_written(explanation, tmp_path):
    path = explanation.to_json(tmp_path / "deep" / "report.json")
    data = json.loads(explanation.to_json())
    assert path == tmp_path / "deep" / "report.json" and json.loads(path.read_text()) == data
    path = explanation.to_json(str(path), indent=None)
    assert path.read_text().count("\n") == 0
    assert explanation.to_json() == json.dumps(explanation.to_dict(), indent=2)
    with pytest.raises(TriptychError, match="the path of a file is wanted, not 4"):
        explanation.to_json(4)


# ---- pickles ----


def test_a_pickle_says_all_that_the_explanation_says(explanation):
    copied = pickle.loads(pickle.dumps(explanation))
    for one in (copied, pickle.loads(pickle.dumps(copied))):
        assert str(one) == str(explanation) and one.to_dict() == explanation.to_dict()
        assert one._repr_html_() == explanation._repr_html_()
        assert page(one, one.stock) == page(explanation, explanation.stock)
    assert isinstance(copied.graphs["joint"], SavedGraph) and "relu" in str(copied.graphs["joint"])
    assert isinstance(explanation.graphs["joint"], torch.fx.GraphModule)


def test_a_pickle_has_no_weights():
    model = nn.Linear(300, 300)
    data = pickle.dumps(triptych.explain(model, torch.ones(2, 300), options={"codegen": "eager"}))
    assert len(data) < model.weight.nbytes / 4


# ---- at a prompt and in a notebook ----


def test_records_say_what_they_are(explanation):
    (record,) = [r for r in explanation.passes if r.name == "merge_concats_pass"]
    assert re.fullmatch(r"<PassRecord merge_concats_pass \(pre_grad\): 1 rewrite, \d+ -> \d+ nodes, [\d.]+ ms>", repr(record))
    assert re.search(r"^- cat: .*\n(?:.*\n)*^\+ cat_\d: f32\[6, 4\] = cat\(.*\[l_x_, l_x_, l_x_\]", record.diff, re.MULTILINE)
    quiet = next(r for r in explanation.passes if not r.changed)
    assert quiet.diff == "" and "nothing changed" in repr(quiet)
    decline = next(d for r in explanation.passes for d in r.declines)
    assert repr(decline).startswith(f"Decline(rule={decline.rule!r}, node=") and "raised" not in repr(decline)
    assert "pre_grad" in repr(explanation.sessions[0]) and len(repr(explanation.sessions[0])) < 200
    assert repr(triptych.Options(codegen="eager")) == "Options(codegen='eager')"


def test_a_record_in_a_notebook_is_escaped(explanation):
    record = next(r for r in explanation.passes if r.name == "merge_concats_pass")
    html = record._repr_html_()
    assert "<b>merge_concats_pass</b>" in html and '<span style="color: #107c10">+ cat_' in html
    assert "&lt;- cat_of_cat" in html and "<- cat_of_cat" not in html
    options = {"codegen": "eager", "on_error": "fallback", "pre_grad_custom_pass": raises}
    broken = triptych.explain(lambda x: x + 1, torch.ones(2), options=options)
    (record,) = broken.runs_of("pre_grad_custom_pass")
    assert "&lt;script&gt;" in record._repr_html_() and "<script>" not in record._repr_html_()


SCRIPT = "<script>globalThis.injected = 1</script>"


def test_markup_in_any_name_shape_or_source_line_is_text(tmp_path):
    """On the page all of it is compressed data, which becomes text nodes; the browser test looks at the result."""
    listing = Listing([f"x: f32[{SCRIPT}] = input  # {SCRIPT}.py:1", f"{SCRIPT}: f32[4] = relu(x)", "return (x,)"])
    listing.add([f"y: f32[{SCRIPT}] = {SCRIPT}(x)  <- {SCRIPT}", "return (y,)"])
    decline = Decline(SCRIPT, SCRIPT, SCRIPT, SCRIPT, at=SCRIPT, wanted=SCRIPT, found=SCRIPT)
    record = PassRecord(
        SCRIPT, SCRIPT, SCRIPT, changed=True, rewrites=1, listing=listing, versions=(0, 1), declines=[decline],
        note=SCRIPT, stop=SCRIPT, sites=[Firing(SCRIPT, SCRIPT, SCRIPT)],
    )  # fmt: skip
    record.fired[SCRIPT] = 1
    session = Session(Options(), records=[record], kernels={"forward": SCRIPT}, warnings=[SCRIPT])
    explanation = Explanation([session], model=SCRIPT)
    text = page(explanation)
    assert SCRIPT not in text and text.count("<script") == page(Explanation([])).count("<script")
    for html in (explanation._repr_html_(), record._repr_html_()):
        assert "<script" not in html and "&lt;script&gt;" in html
    assert SCRIPT in str(explanation) and json.loads(explanation.to_json())["model"] == SCRIPT
    answer = WhyNot(SCRIPT, [Firing(SCRIPT, SCRIPT)], [decline], True)
    assert "<script" not in answer._repr_html_() and "&lt;script&gt;" in answer._repr_html_()


def raises(graph):
    raise ValueError("<script>alert(1)</script>")


def test_why_not_at_a_prompt():
    answer = triptych.why_not("fuse_attention", lambda x: x + 1, torch.ones(2))
    assert repr(answer) == "<WhyNot fuse_attention: fires at 0 places, nearly at 0>"
    assert "none of its operations is here" in answer._repr_html_()
