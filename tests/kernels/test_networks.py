"""Convolutional networks as people write them, small, through kernels, in inference and training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triptych
from tests.compare import check_inference, check_training


def convolution(inner: int, out: int, kernel: int = 3, **how: int) -> nn.Sequential:
    padding = kernel // 2
    return nn.Sequential(nn.Conv2d(inner, out, kernel, padding=padding, bias=False, **how), nn.BatchNorm2d(out))


class ResidualBlock(nn.Module):
    """ResNet: two convolutions beside a projection."""

    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inner, out, stride=stride)
        self.second = convolution(out, out)
        self.beside = convolution(inner, out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x), inplace=True)) + self.beside(x), inplace=True)


class InvertedResidual(nn.Module):
    """MobileNet: wide, depthwise, squeezed and excited, narrow, and the input added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = convolution(width, 2 * width, 1)
        self.depthwise = convolution(2 * width, 2 * width, groups=2 * width)
        self.squeeze, self.excite = nn.Conv2d(2 * width, 2, 1), nn.Conv2d(2, 2 * width, 1)
        self.narrow = convolution(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depthwise(F.relu6(self.widen(x))))
        weight = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.narrow(y * weight)


class DenseBlock(nn.Module):
    """DenseNet: each layer reads all before it, joined."""

    def __init__(self, width: int, grow: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width + i * grow), nn.ReLU(), nn.Conv2d(width + i * grow, grow, 3, padding=1)) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return F.avg_pool2d(torch.cat(features, 1), 2)


class UNet(nn.Module):
    """Down, up, and joined across."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = convolution(3, width)
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(2, 2 * width), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = F.relu(self.down(x))
        deep = self.up(self.deep(shallow))
        wide = F.interpolate(deep, shallow.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(torch.cat([shallow, wide], 1)).flatten(2).softmax(1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    # a stride in the first block, with a gradient for the images, makes stock Inductor's C++ kernels (2.13) write past the
    # end of a buffer
    "resnet": lambda: nn.Sequential(ResidualBlock(3, 8, 1), ResidualBlock(8, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    "mobilenet": lambda: nn.Sequential(convolution(3, 4), InvertedResidual(4), nn.Flatten(2)),
    "densenet": lambda: DenseBlock(3, 2),
    "unet": lambda: UNet(4),
}


QUICK = {("resnet", "training")}
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.slow)
    for name in NETWORKS
    for kind in ("training", "inference")
]


@pytest.mark.parametrize("name, kind", CASES)
def test_network(name: str, kind: str) -> None:
    model, images = NETWORKS[name](), torch.randn(2, 3, 8, 8)
    if kind == "training":
        check_training(model, (images,), backend=triptych.compile_fx)
    else:
        check_inference(model, (images.to(memory_format=torch.channels_last),), backend=triptych.compile_fx)
