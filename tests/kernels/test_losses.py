"""Losses in all their variants, forward and gradients, with kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import triptych
from tests.compare import check_training


def of_classes(scores: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    ignored = torch.where(target == 2, -100, target)
    soft = torch.softmax(scores.detach().flip(1), 1)
    logs = scores.log_softmax(1)
    weight = weight.detach().abs()  # nobody asks for its gradient: torch has none
    return (
        F.cross_entropy(scores, target),
        F.cross_entropy(scores, ignored),
        F.cross_entropy(scores, target, weight, label_smoothing=0.1),
        F.cross_entropy(scores, ignored, weight, reduction="none"),
        F.cross_entropy(scores, soft, reduction="sum"),
        F.nll_loss(logs, target, weight),
        F.nll_loss(logs, ignored, reduction="sum"),
        F.multi_margin_loss(scores, target),
        F.kl_div(logs, soft, reduction="batchmean"),
        F.kl_div(logs, logs.detach().flip(0), log_target=True),
    )


def of_values(x: Tensor, y: Tensor, sign: Tensor) -> tuple[Tensor, ...]:
    chance, wanted = torch.sigmoid(x), torch.sigmoid(y).detach()
    return (
        F.mse_loss(x, y),
        F.l1_loss(x, y, reduction="sum"),
        F.smooth_l1_loss(x, y, beta=0.5),
        F.huber_loss(x, y, delta=0.3, reduction="none"),
        F.binary_cross_entropy(chance, wanted),
        F.binary_cross_entropy_with_logits(x, wanted, pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])),
        F.poisson_nll_loss(x, wanted),
        F.gaussian_nll_loss(x, y, chance),
        F.cosine_embedding_loss(x, y, sign),
        F.margin_ranking_loss(x[:, 0], y[:, 0], sign, margin=0.1),
        F.triplet_margin_loss(x, y, x.flip(0)),
        F.soft_margin_loss(x, torch.where(y > 0, 1.0, -1.0)),
        F.hinge_embedding_loss(x, torch.where(y > 0, 1.0, -1.0)),
    )


def test_losses_of_classes() -> None:
    target = torch.tensor([0, 2, 4, 1])
    check_training(of_classes, (torch.randn(4, 5), target, torch.rand(5)), backend=triptych.compile_fx)


@pytest.mark.slow
def test_losses_of_values() -> None:
    sign = torch.tensor([1, -1, 1, -1])
    check_training(of_values, (torch.randn(4, 5), torch.randn(4, 5), sign), backend=triptych.compile_fx)


def test_losses_of_images_and_sequences() -> None:
    def program(image: Tensor, target: Tensor, sequence: Tensor) -> tuple[Tensor, ...]:
        labels = torch.tensor([[1, 2, 1], [2, 2, 1]])
        lengths = torch.full((2,), 6, dtype=torch.int64), torch.tensor([3, 2])
        return F.cross_entropy(image, target, ignore_index=1), F.ctc_loss(sequence.log_softmax(-1), labels, *lengths)

    given = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4)), torch.randn(6, 2, 3)
    check_training(program, given, backend=triptych.compile_fx)
