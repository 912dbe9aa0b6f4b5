"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import functools
import json
import re
import sys
import textwrap

import pytest
from click.testing import CliRunner

import triptych
from triptych.cli import main
from triptych.explaining import demo as demo_module
from triptych.explaining.demo import run_demo
from triptych.explaining.source import load, split
from triptych.passes.catalogue import ExampleInfo, PassInfo, RuleInfo

EAGER = ["--option", "codegen=eager"]


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "models.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn

            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            args = lambda: (torch.ones(2, 4),)

            def tower(x, scale=1.0):
                return torch.cat([torch.cat([x, x]), x]) * scale

            tower_args = torch.ones(3)
            tower_kwargs = {"scale": 2.0}

            class Net(nn.Module):
                pass

            number = 3

            def broken(x):
                raise ValueError("no such luck")
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    return path


def test_version():
    assert triptych.__version__ in run("--version").output


# ---- explain ----


def test_explain_prints_a_table(file):
    text = run("explain", "models.py", *EAGER).output
    assert text.startswith("Sequential, inference, compiled with triptych") and "total" in text


def test_explain_takes_a_name_and_its_own_inputs(file):
    data = json.loads(run("explain", "models.py:tower", "--json", *EAGER).output)
    assert data["model"] == "tower" and data["train"] is False
    assert "f32[3]" in data["graphs"]["dynamo"]


def test_explain_train_writes_a_page(file):
    text = run("explain", "models.py", "--train", "--html", "out/page.html", *EAGER).output
    assert "training step" in text and "report: out/page.html" in text
    assert "<!doctype html>" in (file.parent / "out" / "page.html").read_text()


def test_explain_takes_the_settings_of_torch_compile(file):
    data = json.loads(run("explain", "models.py", "--json", "--dynamic", "--mode", "max-autotune", *EAGER).output)
    assert "f32[s" in data["graphs"]["dynamo"]
    assert "f32[2, 4]" in json.loads(run("explain", "models.py", "--json", "--static", *EAGER).output)["graphs"]["dynamo"]
    assert "did you mean 'max-autotune'" in run("explain", "models.py", "--mode", "max-autotun", code=2).stderr
    with file.open("a") as more:
        more.write("\ndef talks(x):\n    y = x.sin()\n    print('hello')\n    return y.cos()\n\ntalks_args = torch.ones(3)\n")
    text = run("explain", "models.py:talks", *EAGER).output
    assert "graph break at models.py:" in text and "2 captured programs" in text
    assert "print" in run("explain", "models.py:talks", "--fullgraph", *EAGER, code=1).stderr


def test_explain_compares_kernels_with_those_of_stock_inductor(file):
    text = run("explain", "models.py:tower", "--compare", "--html", "page.html").output
    assert re.search(r"\d+ kernel launch(es)? instead of \d+ by stock Inductor", " ".join(text.split()))
    assert (file.parent / "page.html").read_text().count('-core" data-report="tower, inference, compiled with ') == 2


SCRIPT = """
import sys
import torch
from models import tower  # beside it

def program(x):
    return tower(x).sin()

run = torch.compile(program, backend="triptych", options={"codegen": "eager"})
for size in map(int, sys.argv[2:]):
    print(len(run(torch.ones(size))))
if sys.argv[1] == "--fail":
    raise ValueError("after the compile")
sys.exit(7 if sys.argv[1] == "--leave" else None)
"""


@pytest.mark.parametrize(("how", "code"), [("--end", 0), ("--leave", 7), ("--fail", 1)])
def test_record_runs_a_script_and_reports_it(file, monkeypatch, how, code):
    (file.parent / "train.py").write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    result = run("record", "--html", "run.html", "train.py", how, "2", "3", "4", code=code)
    assert "6\n9\n12\n" in result.stdout and "report: run.html" in result.stdout
    assert "2 compiles (1 recompile)" in result.stdout and "size mismatch" in result.stdout
    assert "train.py, recorded run" in (file.parent / "run.html").read_text()
    if how == "--fail":
        assert "ValueError: after the compile" in result.stderr and "train.py failed" in result.stderr
        assert "runpy" not in result.stderr and "cli_record.py" not in result.stderr  # as python prints it


def test_record_prints_data(file, monkeypatch):
    (file.parent / "train.py").write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    result = run("record", "--json", "train.py", "--end", "2", "3")
    frames = json.loads(result.stdout)["frames"]
    assert [frame["source"] for frame in frames] == ["train.py:6"] * 2
    assert result.stderr == "6\n9\n" and (file.parent / "record.html").exists()


def test_record_without_a_script(file):
    assert "no file train.py" in run("record", "train.py", code=2).stderr


def test_explain_inductor_shows_one_pass_line_by_line(file):
    text = run("explain", "models.py:tower", "--backend", "inductor", "--pass", "remove_noop_ops").output
    assert text.startswith("joint remove_noop_ops (joint):")


def test_explain_an_unknown_pass(file):
    result = run("explain", "models.py", "--backend", "inductor", "--pass", "remove_noop_op", code=2)
    assert "did you mean 'remove_noop_ops'" in result.stderr


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("model.py", "no file model.py; did you mean 'models.py'?"),
        ("models.py:towe", "models.py defines no 'towe'; did you mean 'tower'?"),
        ("models.py:Net", "is a class"),
        ("models.py:number", "models.py:number is neither a module nor a function but of type int"),
        ("empty.py", "empty.py defines no 'model' (say empty.py:NAME for another name)"),
        ("bare.py", "inputs for 'model': set args = (...,) or model_args = (...,); did you mean 'arg_list'"),
        ("makers.py:number", "makers.py:number has no parameters and returned int: return a module"),
        ("makers.py:turned_round", "returned (int, Linear): return a module, or a module and its inputs (`return model, x`)"),
        ("raises.py", "raises.py:2 raised KeyError: 'here'"),
        ("syntax.py", "syntax.py:1 raised SyntaxError"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(file, spec, message):
    (file.parent / "empty.py").write_text("")
    (file.parent / "bare.py").write_text("def model(x): return x\narg_list = []\n")
    (file.parent / "makers.py").write_text(
        "import torch\ndef number(): return 7\ndef turned_round(): return 7, torch.nn.Linear(2, 2)\n"
    )
    (file.parent / "raises.py").write_text("import math\n{}['here']\n")
    (file.parent / "syntax.py").write_text("def :\n")
    result = run("explain", spec, code=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("explain FILE --option codegn=x", "did you mean 'codegen'"),
        ("explain FILE --option codegen", "NAME=VALUE"),
        ("explain FILE --option codegen=x", "unknown codegen 'x'"),
        ("explain FILE --option inductor.max_autotun=1", "did you mean 'max_autotune'"),
        ("explain FILE --backend inducter", "'inductor'"),
        ("explain FILE --pass fuse_attentio", "did you mean 'fuse_attention'"),
        ("explain FILE --pass nope", "names is similar; 'triptych passes --no-run' lists them"),
        ("passes add_zeros", "did you mean 'add_zero'"),
        ("passes qqqq", "names is similar; 'triptych passes --no-run' lists them"),
        ("why-not add_rules FILE", "'add_rules' is a hook, which has no rules of its own"),
        ("explain FILE --html .", ". cannot be written: it is a folder"),
        ("explain FILE --html models.py/page.html", "models.py/page.html cannot be written"),
        ("why-not fuse_attentio FILE", "did you mean 'fuse_attention'"),
        ("why-not fuse_attention FILE --option codegn=x", "did you mean 'codegen'"),
        ("bisect FILE --option codegn=x", "did you mean 'codegen'"),
        ("bisect FILE --out models.py/repro.py", "models.py/repro.py cannot be written"),
        ("repro FILE --option codegn=x", "did you mean 'codegen'"),
        ("repro FILE --out models.py/repro.py", "models.py/repro.py cannot be written"),
        ("demo --out models.py", "triptych-demo.html cannot be written"),
        ("passes --operations linaer", "did you mean 'linear'"),
    ],
)  # fmt: skip
def test_names_and_paths_are_checked_before_the_file_is_read(file, call, message):
    (file.parent / "never.py").write_text("raise AssertionError('this file was read')")
    result = run(*call.replace("FILE", "never.py").split(), code=2)
    assert message in result.stderr and result.stderr.startswith("triptych: ") and result.stderr.count("\n") == 1


def test_missing_folders_are_created_before_the_file_is_read(file):
    (file.parent / "never.py").write_text("raise AssertionError('this file was read')")
    assert "this file was read" in run("explain", "never.py", "--html", "new/folder/page.html", code=2).stderr
    assert (file.parent / "new" / "folder").is_dir()


def test_an_unknown_command_names_the_near_ones():
    assert run("explane", code=2).stderr == "triptych: unknown command 'explane'; did you mean 'explain'?\n"


def test_an_error_of_the_model_is_one_line_with_a_traceback_on_request(file):
    (file.parent / "bad.py").write_text("def model(x):\n    raise ValueError('no such luck')\nargs = (1,)\n")
    short = run("explain", "bad.py", *EAGER, code=1).stderr
    assert short == "triptych: bad.py:2 raised ValueError: no such luck (--traceback shows more)\n"
    (file.parent / "shapes.py").write_text(
        "import torch\ndef model(x):\n    y = x + 1\n    return y @ torch.ones(7, 2)\nargs = (torch.ones(3, 4),)\n"
    )
    short = run("explain", "shapes.py", *EAGER, code=1).stderr
    assert short.startswith("triptych: shapes.py:4 raised ") and short.count("\n") == 1 and "[3, 4] X [7, 2]" in short
    full = run("explain", "bad.py", "--traceback", *EAGER, code=1).stderr
    assert "Traceback" in full and "bad.py" in full


def test_a_model_that_breaks_the_graph_is_explained_in_parts(file):
    """Exit code 0: the parts were compiled, and the table says that there are several."""
    (file.parent / "breaks.py").write_text(
        "import torch\ndef model(x):\n    y = x + 1\n    print('hello')\n    return y.sin()\nargs = (torch.ones(3),)\n"
    )
    assert "2 captured programs" in run("explain", "breaks.py", *EAGER).output
    short = run("explain", "breaks.py", "--fullgraph", *EAGER, code=1).stderr
    assert short.startswith("triptych: breaks.py:4 raised Unsupported: ") and "Explanation" not in short
    result = run("explain", "breaks.py", "--json", *EAGER)
    data = json.loads(result.stdout)  # what the model prints goes to stderr
    assert "hello" in result.stderr and {record["program"] for record in data["passes"]} == {1, 2}


def test_a_file_brings_its_settings(file):
    """As it does for why-not, bisect and repro; the call goes before the file."""
    (file.parent / "own.py").write_text(
        "import torch, triptych\n"
        "class SinForCos(triptych.Rule):\n"
        "    def pattern(self, op, x): return op.cos(x)\n"
        "    def rewrite(self, op, x): return op.sin(x)\n"
        "def model(x): return x.cos()\n"
        "args = (torch.ones(3, requires_grad=True),)\n"
        "options, train, dynamic = {'codegen': 'inductor', 'add_rules': [SinForCos]}, True, True\n"
    )
    data = json.loads(run("explain", "own.py", "--json", *EAGER).stdout)
    fired = {record["name"]: record["rewrites"] for record in data["passes"] if record["rewrites"]}
    assert fired["add_rules"] == 1 and data["train"] and not data["kernels"]
    assert "sin(" in run("explain", "own.py", "--pass", "add_rules", *EAGER).stdout


def test_a_pass_that_did_not_run_is_said_to(file):
    message = run("explain", "models.py:tower", "--pass", "add_rules", *EAGER, code=2).stderr
    assert message == "triptych: add_rules did not run in this compile\n"


def test_a_file_can_import_its_neighbours(file):
    file.rename(file.with_name("neighbour.py"))
    (file.parent / "beside.py").write_text("from neighbour import tower as model, tower_args as args\n")
    assert "tower" in run("explain", "beside.py", *EAGER).output


def test_file_and_name_are_split_at_the_last_colon(file):
    assert split("models.py")[1] == "model"
    assert split("models.py:tower") == (split("models.py")[0], "tower")
    assert split(f"{file}:tower")[0] == file


# ---- passes ----

INFOS = [
    PassInfo(
        "first_pass", "pre_grad", 1, True, "makes things first", "x + 0", {"limit": 3},
        (
            RuleInfo(
                "drop_zero", "x + 0 -> x", False, (ExampleInfo("x + 0", "f32[4]"),),
                (ExampleInfo("x + 0", "i8[4]"), ExampleInfo("def f(x):\n    return x + 1", "", "not a zero")),
            ),
            RuleInfo("drop_one", "x * 1 -> x", True, (), ()),
        ),
    ),
    PassInfo("second_pass", "pre_grad", 2, False, "makes things second"),
    PassInfo("first_pass", "joint", 1, True, "makes things first"),
]  # fmt: skip


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(
        triptych, "list_passes", lambda stage=None: [i for i in INFOS if stage in (None, i.stage)]
    )


def test_passes_lists_them_in_order(known):
    lines = [line.split() for line in run("passes", "--no-run").output.splitlines() if line.strip()]
    assert lines[1] == ["pre_grad", "1", "first_pass", "always", "makes", "things", "first"]
    assert lines[2] == ["2", "second_pass", "if", "added", "makes", "things", "second"]
    assert lines[3][0] == "joint"


def test_passes_shows_one(known):
    text = run("passes", "first_pass").output
    for part in (
        "pre_grad step 1, joint step 1", "makes things first", "option first_pass.limit, by default 3",
        "drop_zero  (equal up to rounding)", "x + 0 -> x", "fires     x + 0  on f32[4]\n", "declines  x + 0  on i8[4]\n",
        "declines  def f(x):  # not a zero\n                  return x + 1\n", "drop_one",
    ):  # fmt: skip
        assert part in text


def test_passes_says_what_cannot_be_removed():
    runs = {name: run("passes", name).output.splitlines()[1] for name in ("lift_constants", "reinplace")}
    assert runs["lift_constants"].endswith("; always runs")
    assert runs["reinplace"].endswith("; runs unless removed")


def test_passes_shows_a_rule_by_its_own_name(known):
    text = run("passes", "drop_zero").output
    assert text.startswith("first_pass\npre_grad step 1;") and "x + 0 -> x" in text and "drop_one" not in text


def test_the_name_of_a_stage_is_known_as_one(known):
    message = "triptych: joint is a stage: triptych passes --stage joint lists its passes\n"
    assert run("passes", "joint", code=2).stderr == message


def test_passes_shows_a_part_of_a_pass():
    text = run("passes", "batch_aten_tanh").output
    assert "that part of `group_batch_fusion_passes` alone" in text and "runs if added" in text
    assert "x.tanh() for x in v" in text and "add_passes=batch_aten_tanh" in text
    (data,) = json.loads(run("passes", "batch_aten_tanh", "--json").output)
    assert data["run"]["rewrites"] == 1 and data["run"]["forward"] in ("equal", "close")


def test_passes_as_data(known):
    data = json.loads(run("passes", "--stage", "joint", "--json").output)
    assert [(info["name"], info["stage"], info["step"]) for info in data] == [("first_pass", "joint", 1)]


def test_passes_real_list_agrees_with_the_pipeline():
    from triptych.pipeline import FAMILIES, STAGES

    data = json.loads(run("passes", "--no-run", "--json").output)
    entries = [e for entries in STAGES.values() for e in entries]
    first = {members[0]: family for family, members in FAMILIES.items()}
    # the name of a family before its first member, a pass, then the parts of it that can be added
    names = [n for e in entries for n in (*filter(None, [first.get(e)]), e.name, *getattr(e, "parts", ()))]
    assert [info["name"] for info in data] == names
    for name in sorted(set(names))[::12]:
        assert name in run("passes", name).output


def test_passes_shows_each_on_an_example(monkeypatch):
    ours = [i for i in triptych.list_passes("pre_grad") if i.name in ("remove_noop_pass", "apply_gumbel_max_trick")]
    monkeypatch.setattr(triptych, "list_passes", lambda stage=None: ours)
    lines = [line.split() for line in run("passes", "--stage", "pre_grad").output.splitlines()]
    assert lines[0][-3:] == ["nodes", "forward", "gradient"]
    assert lines[1][-5:] == ["4", "->", "3", "equal", "equal"]
    assert any("x.view(4, 8) + 1" in " ".join(line) for line in lines)
    assert any("if added" in " ".join(line) and line[-1] == "none" for line in lines)
    first = json.loads(run("passes", "--stage", "pre_grad", "--json").output)[0]
    assert first["run"] == {
        "example": "x.view(4, 8) + 1", "rewrites": 1, "nodes_before": 4, "nodes_after": 3, "forward": "equal",
        "gradient": "equal", "problem": "",
    }  # fmt: skip


def test_passes_fails_where_results_differ(known, monkeypatch):
    from triptych.testing import gallery
    from triptych.testing.gallery import Exhibit

    wrong = Exhibit("x + 1", 1, 4, 3, "equal", "DIFFERS", "gradients differ")
    monkeypatch.setattr(gallery, "gallery", lambda infos: iter([wrong, None, None]))
    result = run("passes", code=1)
    assert "DIFFERS" in result.output and "differ from eager: first_pass" in result.stderr


def test_an_unknown_pass_names_the_near_ones(known):
    assert "did you mean 'first_pass'" in run("passes", "frst_pass", code=2).stderr


def test_an_unknown_stage_names_the_near_ones():
    assert "did you mean 'joint'" in run("passes", "--stage", "jiont", code=2).stderr


def test_operations_are_listed():
    text = run("passes", "--operations", "t").output
    assert text.startswith("permute(self, dims)\n    also spelled ") and "view" in text
    data = json.loads(run("passes", "--operations", "--json").output)
    assert {"permute", "reshape", "matmul"} <= {one["name"] for one in data}


# ---- why-not ----


def test_why_not_prints_near_misses(file, monkeypatch):
    from triptych.explaining.why_not import WhyNot
    from triptych.rewrite.record import Decline, Firing

    asked = []

    def answer(rule, model, *args, train, options, **kwargs):
        asked.append((rule, model(*args, **kwargs).tolist()))
        miss = Decline(rule, "cat", "dim differs", "models.py:9", at="relu", matched=2, complete=False, graph="dynamo")
        return WhyNot(rule, [Firing(rule, "cat_1", graph="joint")], [miss], True)

    monkeypatch.setattr(triptych, "why_not", answer)
    text = run("why-not", "merge_concats_pass", "models.py:tower").output
    assert asked == [("merge_concats_pass", [2.0] * 9)]
    assert text.splitlines() == [
        "merge_concats_pass at cat_1 (joint): fires",
        "merge_concats_pass at cat (dynamo): matched 2 of its nodes; dim differs, at relu  # models.py:9",
    ]
    data = json.loads(run("why-not", "merge_concats_pass", "models.py:tower", "--json").output)
    assert data["misses"][0]["reason"] == "dim differs" and data["fires"][0]["node"] == "cat_1"


def test_why_not_an_unknown_rule(file):
    assert "unknown rule or pass 'no_such_rule'" in run("why-not", "no_such_rule", "models.py", code=2).stderr


# ---- demo ----


eager_run = functools.cache(lambda tolerance: run_demo(options={"codegen": "eager"}))


@pytest.fixture
def eager_demo(monkeypatch):
    monkeypatch.setattr(demo_module, "run_demo", lambda device, tell: eager_run(demo_module.TOLERANCE))


def test_demo_checks_and_writes_a_report(eager_demo, tmp_path):
    text = run("demo", "--out", str(tmp_path / "report")).output
    assert text.count("equal to eager, largest difference") == 3
    assert "SmallTransformer, inference" in text and "SmallTransformer, training step" in text
    data = json.loads((tmp_path / "report" / "triptych-demo.json").read_text())
    assert data["passed"] is True and set(data["training"]["graphs"]) >= {"joint", "backward"}
    page = (tmp_path / "report" / "triptych-demo.html").read_text()
    assert page.count('-core" data-report="SmallTransformer, ') == 2  # the data of both explanations


def test_demo_as_data(eager_demo, tmp_path):
    data = json.loads(run("demo", "--out", str(tmp_path), "--json").output)
    assert data["passed"] and data == json.loads((tmp_path / "triptych-demo.json").read_text())


def test_demo_fails_if_numbers_differ(eager_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "TOLERANCE", -1.0)
    result = run("demo", "--out", str(tmp_path), code=1)
    assert "DIFFERS from eager" in result.output and "differ from eager" in result.stderr


def test_compare_sees_missing_wrong_and_nan():
    import torch

    one = torch.ones(3)
    assert demo_module.compare("x", [one], [one]).passed
    assert not demo_module.compare("x", [one + 1], [one]).passed
    assert not demo_module.compare("x", [one * float("nan")], [one]).passed
    assert not demo_module.compare("x", [None], [one]).passed
    assert not demo_module.compare("x", [], [one]).passed
    assert not demo_module.compare("x", [one.double()], [one]).passed


@pytest.mark.parametrize("returned, count", [("model, x", 1), ("lambda x: model(x).sum(), x", 1), ("lambda x, y: x + y, x, x", 2)])
def test_a_function_may_return_the_model_with_its_inputs(tmp_path, returned, count):
    file = tmp_path / "made.py"
    file.write_text(f"import torch\n\ndef make():\n    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)\n    return {returned}\n")
    subject = load(f"{file}:make")
    assert len(subject.args) == count and subject.call()(*subject.args) is not None
