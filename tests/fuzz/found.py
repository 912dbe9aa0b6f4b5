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
    "a call that returns its operand, after a change of shape in place": Program(
        seed=7000160,
        setup=("x0 = torch.randn(3, 1, 2)",),
        body=(
            "v0 = x0 * 1.5", "v0.squeeze_()", "v1 = +v0", "v2 = v1.contiguous().float()", "v3 = torch.atleast_2d(v2)",
            "v4 = F.dropout(v3, 0.5, False)", "v5 = v4.reshape(v4.shape)", "v6 = x0.contiguous()",
        ),
        returned=("v0", "v1", "v2", "v3", "v4", "v5", "v6"),
        route="compile",
    ),
    "numbers drawn in place are read after the draw": Program(
        seed=5000305,
        setup=("x0 = torch.randn(4, 4, 4)",),
        body=(
            "v0 = torch.einsum('...ij,...kj->...ik', x0, x0)", "v0.addcmul_(x0, x0)", "v1 = x0.log_softmax(1)",
            "v2 = F.alpha_dropout(x0, 0.3, True)", "v3 = F.leaky_relu(v1)",
        ),
        returned=("v3", "v2", "v0"),
        route="compile",
        codegen="inductor",
    ),
    "pieces of tensor_split may be written": Program(
        seed=101170,
        setup=("x0 = torch.randn(4).requires_grad_()",),
        body=("v0 = torch.roll(x0, 1)", "v1, v2 = torch.tensor_split(v0, 2)", "v2.add_(1)"),
        returned=("v1", "v0"),
        train=True,
    ),
    "exp(x - logsumexp(x)) of an infinite score": Program(
        seed=1003727,
        setup=("x0 = torch.tensor([[math.inf, 1.0]])",),
        body=("v0 = torch.exp(x0 - x0.logsumexp(1, True))",),
        returned=("v0",),
    ),
    "a clone that a higher-order operator reads beside its source": Program(
        seed=1004490,
        setup=("x0 = torch.randn(2)",),
        body=(
            "v0 = x0.clone()",
            "v1, v2 = v0",
            "v3 = torch.cond(x0.sum() > 0, lambda a, b: a * b, lambda a, b: a + b, (x0, v1))",
        ),
        returned=("v3", "v1"),
        route="compile",
    ),
    "attention whose result is written keeps its product": Program(
        seed=1004972,
        setup=("x0 = torch.randn(1, 1)", "x1 = torch.randn(1, 2, 1, 1)", "x2 = torch.randn(1, 1).requires_grad_()"),
        body=("v0 = torch.matmul(x0, x1)", "v1 = v0.softmax(-1) @ x2", "v1[:] = 2.0"),
        returned=("v1",),
        train=True,
    ),
    "running statistics carry no gradient": Program(
        seed=1007399,
        setup=(
            "x0 = torch.randn(2)", "b0 = torch.randn(2, 2)", "b1 = torch.randn(2)", "b2 = torch.randn(2)",
            "p0 = nn.Parameter(torch.randn(2))",
        ),
        body=(
            "v0 = F.batch_norm(b0, b1, b2, p0, p0, True)",
            "v1 = torch.minimum(x0, p0)",
            "v1[...] = b1",
        ),
        returned=("v1",),
        train=True,
        route="graph",
    ),
    "an operator that returns its operand where nothing is to do": Program(
        seed=3000708,
        setup=("x0 = torch.randn(0)",),
        body=("v0 = torch.diff(x0)", "v1, v2, v3 = torch.tensor_split(v0, 3)"),
        returned=("v3",),
    ),
    "two names of one tensor beside a view that does nothing": Program(
        seed=3003215,
        setup=("x0 = torch.randn(1)",),
        body=("v0 = torch.eye(2)", "v1 = torch.permute(v0, (0, 1))", "v2 = v0.float()"),
        returned=("v2", "v1"),
        route="compile",
    ),
    "a tensor and what wrote it are one object": Program(
        seed=920195,
        setup=("x0 = torch.randn(3)",),
        body=("v0 = x0.double()", "v5 = v0.zero_()"),
        returned=("v5", "v0"),
    ),
    "a tensor returned twice is one object": Program(
        seed=3018566,
        setup=("x0 = torch.randn(2, 2, 2).requires_grad_()",),
        body=("v0 = torch.bmm(x0, x0)", "v1 = v0.to()"),
        returned=("v1", "v0"),
        train=True,
        route="compile",
    ),
    "cat of tensors without elements takes any dim": Program(
        seed=3016639,
        setup=("x0 = torch.randn(0)",),
        body=("v0, v1 = torch.chunk(x0, 2)", "v2 = torch.concat([v0 * 2, v1 * 2], 1)"),
        returned=("v2",),
    ),
    "dropout of everything draws nothing": Program(
        seed=3018731,
        setup=("x0 = torch.randn(3)",),
        body=("v0 = F.dropout(x0, 1.0)", "v1 = torch.rand(1)"),
        returned=("v1",),
        route="compile",
    ),
    "a view of a written input lies where it lay": Program(
        seed=3019084,
        setup=("x0 = torch.randn(N)",),
        body=("v0, v1 = torch.chunk(x0, 2)", "x0.zero_()"),
        returned=("v1",),
        dynamic=True,
        route="compile",
    ),
    "a detached result requires no gradient": Program(
        seed=1005530,
        setup=("x0 = torch.randn(2).requires_grad_()",),
        body=("v0 = torch.cat([x0])", "v1 = v0.detach()", "v2, v3 = torch.chunk(v0, 2)"),
        returned=("v2", "v1"),
        train=True,
        route="compile",
    ),
    "a detached view of a parameter requires no gradient": Program(
        seed=4010147,
        setup=("x0 = torch.randn(2)", "p0 = nn.Parameter(torch.randn(2))"),
        body=("v0 = p0.expand(2)", "v1 = v0.detach()"),
        returned=("v1",),
        route="compile",
    ),
    "a size that depends on data, in the backward only": Program(
        seed=6002192,
        setup=("x1 = torch.randn(1).requires_grad_()",),
        body=("v8 = x1.tanh()", "v10 = v8.clone()", "v10[v8 > 0] *= 0"),
        returned=("v8",),
        train=True,
    ),
    "two views of all of the same memory": Program(
        seed=5000863,
        setup=("x2 = torch.randint(2, (0,))",),
        body=("v0 = torch.zeros_like(x2)", "v7, v8 = v0.chunk(2)"),
        returned=("v7", "v8"),
        codegen="inductor",
    ),
}
