"""Control flow, graph breaks and regions."""

from __future__ import annotations

from ..writer import Writer, statement


@statement("control", 2)
def region(w: Writer) -> str:
    """A statement under no_grad or autocast, or a few."""
    name = f"v{w._count()}"
    x, y = w.floating(), w.value()
    inner = w.pick(f"{name} = {x} * 2", f"{name} = torch.relu({x})", f"{name} = {x} + {y}", f"{name} = {x}.sum(-1)", f"{name} = {x} @ {x}.mT", f"{name} = torch.softmax({x}, 0)")
    guard = w.pick("torch.no_grad()", "torch.no_grad()", "torch.autocast('cpu', torch.bfloat16)", "torch.enable_grad()", "torch.autocast('cpu', enabled=False)")
    return f"with {guard}: {inner}"


@statement("control", 1)
def cond(w: Writer) -> str:
    x = w.floating()
    y = w.floating()
    first, second = w.pick(("a.sin()", "a.cos()"), ("a + 1", "a - 1"), ("a.relu() * 2", "a * 2"), ("a * b.sum()", "a + b.mean()"))
    return f"torch.cond({x}.sum() > 0, lambda a, b: {first}, lambda a, b: {second}, ({x}, {y}))"


@statement("control", 1)
def branch_on_shape(w: Writer) -> str:
    x = w.floating(1)
    return f"({x}.relu() if {x}.shape[0] > 4 else {x} * 2)"


@statement("control", 1)
def branch_on_value(w: Writer) -> str:
    x = w.floating()
    return f"({x} + 1 if {x}.sum() > 0 else {x} - 1)"


@statement("control", 1)
def loop(w: Writer) -> str:
    x, y = w.floating(), w.floating()
    name = f"v{w._count()}"
    return w.pick(f"sum({x} * i for i in range(3))", f"for i in range(2): {name} = torch.tanh({x} + i) if i == 0 else {name} * {y}", f"torch.stack([row * 2 for row in {x}])")


@statement("control", 1)
def graph_break(w: Writer) -> str:
    return "torch._dynamo.graph_break()"


@statement("control", 1)
def number_of_a_tensor(w: Writer) -> str:
    x = w.floating()
    return f"{x} * {x}.shape[{w.dim(x)}]" if w.maybe(0.7) else f"{x} + {x}.sum().item()"
