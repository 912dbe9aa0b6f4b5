"""Programs that were once different from eager, shrunk: each is a test."""

from __future__ import annotations

from .program import Program

FOUND: dict[str, Program] = {
    "a view of a written argument is not the argument": Program(
        seed=100103,
        setup=("x0 = torch.randn(1)",),
        body=("x0 *= 2", "v0, v1 = x0.split([0, 1])"),
        returned=("v1",),
    ),
    "a view that is written and returned is not its base": Program(
        seed=100215,
        setup=("x0 = torch.randn(1)",),
        body=("v0 = x0.transpose(0, 0).tanh_()",),
        returned=("v0",),
    ),
}
