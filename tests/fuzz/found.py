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
    "two names of one tensor beside a view of it": Program(
        seed=101001,
        setup=("x0 = torch.randn(1, 1, 1)",),
        body=("v0 = x0 * 2", "v1 = torch.flatten(v0, 2)", "v2 = torch.reshape(v0, (1, 1, 1))"),
        returned=("v1", "v2"),
    ),
    "pieces of tensor_split may be written": Program(
        seed=101170,
        setup=("x0 = torch.randn(4).requires_grad_()",),
        body=("v0 = torch.roll(x0, 1)", "v1, v2 = torch.tensor_split(v0, 2)", "v2.add_(1)"),
        returned=("v1", "v0"),
        train=True,
    ),
}
