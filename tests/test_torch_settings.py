"""What a user sets in torch holds without being repeated in our options; an option given explicitly wins."""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F

import triptych
from triptych.cost import Operand
from triptych.cost.clock import measuring_allowed
from triptych.joint import padding_cost


def drop_and_draw(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x * 2, 0.5) + torch.rand_like(x)


def run(function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = function(leaf)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    return y.detach(), gradient


def test_fallback_random_set_in_inductor():
    x = torch.randn(64)
    compiled = torch.compile(drop_and_draw, backend=triptych.compile_fx)
    with inductor_config.patch(fallback_random=True):
        torch.testing.assert_close(run(compiled, x), run(drop_and_draw, x))


def test_the_backward_draws_as_the_forward_did():
    leaf = torch.randn(64).requires_grad_()
    with inductor_config.patch(fallback_random=True):
        y = torch.compile(lambda x: F.dropout(x * 2, 0.5).sin(), backend=triptych.compile_fx)(leaf)
    y.sum().backward()  # compiled here, where the setting is another
    kept = y != 0
    torch.testing.assert_close(leaf.grad, torch.where(kept, 4 * torch.cos(4 * leaf.detach()), 0.0))


def test_an_explicit_option_wins():
    x = torch.randn(64)
    with inductor_config.patch(fallback_random=True):
        theirs, _ = run(torch.compile(drop_and_draw, backend=triptych.compile_fx), x)
        torch._dynamo.reset()
        ours, _ = run(
            torch.compile(drop_and_draw, backend=triptych.compile_fx, options={"fallback_random": False}), x
        )
    torch.testing.assert_close(theirs, run(drop_and_draw, x)[0])
    assert not torch.allclose(ours, theirs)


def test_settings_of_the_code_generator_hold_in_forward_and_backward():
    seen = []

    def look(gm):
        seen.append(inductor_config.emulate_precision_casts)

    x = torch.randn(8).requires_grad_()
    with inductor_config.patch(emulate_precision_casts=True):
        compiled = torch.compile(
            lambda x: (x * 2).sin(), backend=triptych.compile_fx, options={"post_grad_custom_post_pass": look}
        )
        compiled(x).sum().backward()
    assert seen == [True, True]


def test_deterministic_means_that_nothing_is_measured():
    assert measuring_allowed()
    with inductor_config.patch(deterministic=True):
        assert not measuring_allowed()
    torch.use_deterministic_algorithms(True)
    try:
        assert not measuring_allowed()
    finally:
        torch.use_deterministic_algorithms(False)


def test_precision_of_products_is_read_however_it_was_set():
    """torch raises where the older setting is read after the newer one was set."""
    left, right = (Operand.contiguous(shape, torch.float32) for shape in ((64, 63), (63, 64)))
    site = padding_cost.Site(torch.device("cpu"), left, right, padding_cost.Padding(k=1), (True, True, True))
    was = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        plain = site.as_written().seconds()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        unaligned = site.as_written().seconds()
    finally:
        torch.backends.cuda.matmul.fp32_precision = was
    assert unaligned > plain
