"""One engine: every shipped transformation is a rule, and only the rewriter edits graphs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import triptych
from triptych.passes.catalogue import all_passes, all_rules
from triptych.rewrite.passes import Pass

ROOT = Path(triptych.__file__).parent
OF_RULES = ("rules", "pre_grad", "joint", "post_grad", "attention", "batching", "pieces")
EDITS = frozenset(
    "erase_node create_node call_function call_method call_module get_attr replace_all_uses_with replace_input_with "
    "prepend append inserting_before inserting_after node_copy graph_copy eliminate_dead_code".split()
)
"""Methods of torch.fx that change a graph."""
FIELDS = frozenset(["args", "kwargs", "target", "op"])


@pytest.mark.parametrize("name", sorted(all_passes()))
def test_a_pass_is_a_list_of_rules(name):
    for pass_ in all_passes()[name]:
        assert pass_.run is Pass.run and pass_().rules()


def test_rules_have_names_of_their_own():
    assert len(all_rules()) > 150


ALLOWED = {
    "pre_grad/module_calls.py": "the graph that a module's forward is traced into, not the program's",
    "joint/canonicalize_aten_ir_passes.py": "an example prepares a graph that no program gives",
    "post_grad/copy_operands_of_cat.py": "an example prepares a graph that no program gives",
    "post_grad/launch_triton_kernels.py": "the graph that an operator is traced into, not the program's",
    "post_grad/lift_constants.py": "an example prepares a graph as our passes leave it",
    "post_grad/reinplace_calls.py": "an example prepares a graph that no program gives",
}


def edits(path: Path) -> list[str]:
    """Where a file changes a graph without the rewriter."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EDITS:
            of = ast.unparse(node.func.value)
            if of.endswith(("graph", "node", "anchor")):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}")
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in FIELDS and ast.unparse(target.value) != "self":
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(target)} = ...")
    return found


def test_no_rule_edits_a_graph_itself():
    files = [path for package in OF_RULES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): edits(path) for path in files}
    assert {name for name, where in found.items() if where} == set(ALLOWED)


def test_the_check_sees_an_edit(tmp_path, monkeypatch):
    file = tmp_path / "rule.py"
    file.write_text("def f(graph, node):\n    graph.erase_node(node)\n    node.args = ()\n")
    monkeypatch.setattr("tests.test_engine.ROOT", tmp_path)
    assert len(edits(file)) == 2
