"""Convolutional networks of torchvision, or of timm where torchvision is not installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .workload import Classes, Unavailable, Workload, workload


def network(name: str, timm_name: str, **without_randomness: Any) -> nn.Module:
    """The network with random weights; stochastic depth and dropout are off, so that results can be compared."""
    reasons = []
    for package in ("torchvision.models", "timm"):
        try:
            module = importlib.import_module(package)
        except Exception as error:  # a build for another torch fails with all kinds of errors
            reasons.append(f"{package}: {error}")
            continue
        if package == "timm":
            return module.create_model(timm_name)  # its rates are 0 unless asked for
        return getattr(module, name)(weights=None, **without_randomness)
    raise Unavailable("needs torchvision or timm (" + "; ".join(reasons) + ")")


def classifier(model: nn.Module, small: bool) -> Workload:
    batch, side = (2, 64) if small else (64, 224)
    images = torch.randn(batch, 3, side, side)
    return Workload(OfImages(model), {"images": images}, Classes(batch, classes=1000), channels_last=True)


class OfImages(nn.Module):
    """Names the argument, which the two packages call differently."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)


@workload
def resnet50(small: bool) -> Workload:
    """ResNet-50, channels last"""
    return classifier(network("resnet50", "resnet50"), small)


@workload
def convnext(small: bool) -> Workload:
    """ConvNeXt-T, channels last"""
    return classifier(network("convnext_tiny", "convnext_tiny", stochastic_depth_prob=0.0), small)


@workload
def efficientnet(small: bool) -> Workload:
    """EfficientNet-B0, channels last"""
    quiet = {"stochastic_depth_prob": 0.0, "dropout": 0.0}
    return classifier(network("efficientnet_b0", "efficientnet_b0", **quiet), small)
