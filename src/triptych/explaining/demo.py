"""A small transformer, compiled for inference and for a training step, and compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _private
from .compiled_model import CompileSettings
from .explain import Run, observed_run, run_once
from .explanation import Explanation

TOLERANCE = 1e-4
"""Tolerance of float32 results, relative to the largest value: kernels sum in another order than eager."""


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding."""
    left, right = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.head_width).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = rotate(q, angles), rotate(k, angles)
        scores = (q @ k.transpose(-2, -1)) / self.head_width**0.5
        weights = self.dropout(torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1))
        return self.out((weights @ v).transpose(1, 2).contiguous().view(batch, length, width))


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, dropout), GatedMLP(width)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x), angles, mask))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class SmallTransformer(nn.Module):
    """Written as such models are written, with the detours that code picks up over time."""

    def __init__(
        self, words: int = 64, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.token = nn.Embedding(words, width // 2)
        self.segment, self.place = nn.Embedding(2, width // 4), nn.Embedding(128, width // 4)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        batch, length = tokens.shape
        places = torch.arange(length, device=tokens.device).expand(batch, length)
        features = torch.cat([self.token(tokens), self.segment(torch.zeros_like(tokens))], dim=-1)
        x = torch.cat([features, self.place(places)], dim=2)
        rates = 10_000.0 ** (-torch.arange(self.head_width // 2, device=tokens.device) / self.head_width)
        angles = torch.outer(torch.arange(length, device=tokens.device), torch.cat([rates, rates]))
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            x = block(x, angles, mask)
        states = torch.stack([self.norm(x)]).squeeze(0)
        scores = self.head(states).reshape(batch, length, -1).float()
        if targets is None:
            return scores
        return F.cross_entropy(scores.view(batch * length, -1), targets.view(-1))


@dataclass(frozen=True)
class Check:
    """Compiled against eager: the largest difference, and the largest that rounding explains."""

    what: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit

    def __str__(self) -> str:
        verdict = "equal to eager" if self.passed else "DIFFERS from eager"
        return f"{self.what}: {verdict}, largest difference {self.difference:.1e} (limit {self.limit:.1e})"


@dataclass
class Demo:
    inference: Explanation
    training: Explanation
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "checks": [{**vars(check), "passed": check.passed} for check in self.checks],
            "inference": self.inference.to_dict(),
            "training": self.training.to_dict(),
        }


def run_demo(
    device: str = "cpu",
    tell: Callable[[str], None] = lambda message: None,
    options: dict[str, Any] | None = None,
) -> Demo:
    """Compile, run and compare; `tell` is called with messages about the progress."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # dropout draws other numbers in every compiler, so training is compared without it
        model, tokens = SmallTransformer(), torch.randint(0, 64, (4, 16))
    model, tokens = model.to(device), tokens.to(device)
    targets = tokens.roll(-1, dims=1)

    tell("compiling for inference")
    inference = observed_run(model.eval(), (tokens,), {}, settings=CompileSettings(options=options))
    expected = run_once(model, (tokens,), {}, train=False)
    checks = [compare("inference, outputs", _outputs(inference), _outputs(expected))]

    tell("compiling a training step")
    training = observed_run(model.train(), (tokens, targets), {}, train=True, settings=CompileSettings(options=options))
    expected = run_once(model, (tokens, targets), {}, train=True)
    checks.append(compare("training, loss", _outputs(training), _outputs(expected)))
    actual, wanted = _gradients(training), _gradients(expected)
    what = f"training, gradients of {len(wanted)} parameters"
    checks.append(compare(what, [actual.get(key) for key in wanted], list(wanted.values())))
    return Demo(inference.explanation, training.explanation, checks)


def compare(what: str, actual: Sequence[Tensor | None], expected: Sequence[Tensor]) -> Check:
    """The largest absolute difference; a result that is missing or NaN differs by infinity."""
    if len(actual) != len(expected):
        return Check(what, float("inf"), TOLERANCE)
    worst, largest = 0.0, 0.0
    for one, other in zip(actual, expected, strict=True):
        if one is None or one.shape != other.shape or one.dtype != other.dtype:
            return Check(what, float("inf"), TOLERANCE)
        difference = (one - other).abs().max().item()
        worst = max(worst, float("inf") if difference != difference else difference)
        largest = max(largest, other.abs().max().item())
    return Check(what, worst, TOLERANCE * max(largest, 1e-3))


def _outputs(run: Run) -> list[Tensor]:
    return [t.detach() for t in _private.pytree.tree_leaves(run.outputs)]


def _gradients(run: Run) -> dict[int, Tensor]:
    return {id(leaf): gradient for leaf, gradient in run.gradients if gradient is not None}
