"""The smallest program that still shows a fault: lines, operands, arguments, results and sizes are removed away in turn."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from dataclasses import replace

from .judge import Verdict, judge
from .program import Program, names_in


def shrink(program: Program, verdict: Verdict, seconds: float = 90) -> tuple[Program, Verdict]:
    """Try smaller programs, keep each one that fails alike, until none does or the time is up."""
    until = time.monotonic() + seconds
    smaller = True
    while smaller and time.monotonic() < until:
        smaller = False
        for candidate in candidates(program):
            if time.monotonic() > until:
                break
            outcome = judge(candidate)
            if outcome.kind == verdict.kind and outcome.signature & verdict.signature:
                program, verdict, smaller = candidate, outcome, True
                break
    return program, verdict


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, those that take most away first."""
    seen = {str(program)}
    for candidate in _all(program):
        candidate = _without_unused(candidate)
        if candidate.returned and str(candidate) not in seen:
            seen.add(str(candidate))
            yield candidate


def _all(program: Program) -> Iterator[Program]:
    for i in range(len(program.returned) if len(program.returned) > 1 else 0):
        yield replace(program, returned=program.returned[:i] + program.returned[i + 1 :])
    for i in reversed(range(len(program.body))):
        yield from _without_line(program, i)
    for i, line in enumerate(program.body):
        for text in simpler(line):
            yield replace(program, body=_changed(program.body, i, text))
    if program.dynamic:
        yield replace(program, dynamic=False)
    if program.train:
        yield replace(program, train=False, setup=tuple(s.replace(".requires_grad_()", "") for s in program.setup))
    for i, line in enumerate(program.setup):
        if ".requires_grad_()" in line:
            yield replace(program, setup=_changed(program.setup, i, line.replace(".requires_grad_()", "")))
        for text in simpler(line):
            yield replace(program, setup=_changed(program.setup, i, text))
    text = "\n".join((*program.setup, *program.body))
    for number in sorted({int(n) for n in re.findall(r"(?<![\w.])\d+(?![\w.])", text) if int(n) > 2}, reverse=True):
        for small in (1, 2, 3):
            if small < number:
                swap = re.compile(rf"(?<![\w.]){number}(?![\w.])")
                yield replace(
                    program,
                    setup=tuple(swap.sub(str(small), s) for s in program.setup),
                    body=tuple(swap.sub(str(small), s) for s in program.body),
                )


def _changed(lines: tuple[str, ...], i: int, text: str) -> tuple[str, ...]:
    return (*lines[:i], text, *lines[i + 1 :])


def _without_line(program: Program, i: int) -> Iterator[Program]:
    """Without a statement; a value it defined is replaced by one of those it was computed from."""
    line = program.body[i]
    head, _, rest = line.partition(" = ")
    defined = sorted(names_in(head)) if rest and "[" not in head else []
    body = program.body[:i] + program.body[i + 1 :]
    later = " ".join((*program.body[i + 1 :], *program.returned))
    if not names_in(later) & set(defined):
        yield replace(program, body=body)
        return
    for other in sorted(names_in(rest)):
        pattern = re.compile(rf"\b({'|'.join(defined)})\b")
        after = tuple(pattern.sub(other, text) for text in program.body[i + 1 :])
        returned = tuple(dict.fromkeys(pattern.sub(other, name) for name in program.returned))
        yield replace(program, body=(*program.body[:i], *after), returned=tuple(n for n in returned if n[0] in "vx"))


def simpler(line: str) -> Iterator[str]:
    """The line with one of its expressions replaced by a part of it, or one argument left out."""
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return
    places = [node for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.BinOp, ast.Subscript, ast.UnaryOp, ast.IfExp))]
    for node in places:
        for part in _parts(node):
            yield ast.unparse(_swapped(tree, node, part))
        if isinstance(node, ast.Call):
            for arguments in (node.args, node.keywords):
                for i in reversed(range(len(arguments))):
                    removed = arguments.pop(i)
                    yield ast.unparse(tree)
                    arguments.insert(i, removed)
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
            for i in reversed(range(len(node.elts))):
                removed = node.elts.pop(i)
                yield ast.unparse(tree)
                node.elts.insert(i, removed)


def _parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*[r for r in receiver if not isinstance(r, ast.Name) or r.id not in ("torch", "F", "nn")], *node.args]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return [node.value] if isinstance(node, ast.Subscript) else [node.operand]  # type: ignore[attr-defined]


def _swapped(tree: ast.Module, node: ast.AST, part: ast.expr) -> ast.Module:
    """A copy of the tree with `part` in place of `node`."""

    class Swap(ast.NodeTransformer):
        def visit(self, other: ast.AST) -> ast.AST:
            return part if other is node else self.generic_visit_copy(other)

        def generic_visit_copy(self, other: ast.AST) -> ast.AST:
            fields = {}
            for name, value in ast.iter_fields(other):
                if isinstance(value, list):
                    fields[name] = [self.visit(v) if isinstance(v, ast.AST) else v for v in value]
                else:
                    fields[name] = self.visit(value) if isinstance(value, ast.AST) else value
            return type(other)(**fields)

    return ast.fix_missing_locations(Swap().visit(tree))


def _without_unused(program: Program) -> Program:
    """Without setup lines that nothing needs; at least one argument stays."""
    needed = names_in(" ".join((*program.body, *program.returned)))
    setup: list[str] = []
    for line in reversed(program.setup):
        name, _, rest = line.partition(" = ")
        if name in needed:
            needed |= names_in(rest)
            setup.append(line)
    if not any(line[0] == "x" for line in setup) and program.setup:
        setup += [line for line in program.setup if line[0] == "x"][:1]
    return replace(program, setup=tuple(reversed(setup)))
