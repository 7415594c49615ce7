"""Models by name, for images of any size: four small ones of our own, the rest torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decentlam.errors import unknown

Shape = tuple[int, int, int]  # channels, height, width
SMALL = 64  # images up to this height are CIFAR-like, and torchvision's models are adapted to them


def linear(shape: Shape, classes: int) -> nn.Module:
    """Build logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Build two hidden layers of width 128, ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Build two convolutions of 3 x 3 with batch norm, each followed by halving; one linear
    layer."""
    channels, height, width = shape
    if min(height, width) < 4:
        raise ValueError(f"cnn halves images twice and needs 4 x 4 or more, got {height} x {width}")
    return nn.Sequential(
        *_convolution(channels, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *_convolution(16, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


def resnet20(shape: Shape, classes: int) -> nn.Module:
    """Build ResNet-20 (He et al., 2015, section 4.2): 3 x 3 blocks of widths 16, 32, 64; 0.27M."""
    layers: list[nn.Module] = [*_convolution(shape[0], 16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for _ in range(3):
            layers.append(Block(before, width))
            before = width
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Block(nn.Module):
    """relu(x + F(x)), F two convolutions. Where F halves the image and widens, the shortcut takes
    every second pixel and fills the new channels with zeros: option A, which has no parameters."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if before == width else 2
        self.added_channels = width - before
        self.residual = nn.Sequential(
            *_convolution(before, width, self.stride), nn.ReLU(), *_convolution(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride > 1:
            shortcut = x[..., :: self.stride, :: self.stride]
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.added_channels))
        return F.relu(shortcut + self.residual(x))


def _convolution(before: int, width: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)


def _torchvision(name: str, shape: Shape, classes: int) -> nn.Module:
    """Build torchvision's. Small images begin as on CIFAR: with a convolution of 3 x 3 without
    stride, and without max-pool."""
    from torchvision.models import get_model

    model: Any = get_model(name, weights=None, num_classes=classes)
    small, resnet = shape[1] <= SMALL, name.startswith("resnet")
    if small or shape[0] != 3:
        kernel, stride = 7 if resnet and not small else 3, 1 if small else 2
        place, key = (model, "conv1") if resnet else (model.features[0], "0")
        width = getattr(place, key).out_channels
        stem = nn.Conv2d(shape[0], width, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        setattr(place, key, stem)
    if small and resnet:
        model.maxpool = nn.Identity()
    found: nn.Module = model
    return found


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "resnet20": resnet20,
    "resnet18": partial(_torchvision, "resnet18"),
    "resnet34": partial(_torchvision, "resnet34"),
    "resnet50": partial(_torchvision, "resnet50"),
    "mobilenet-v2": partial(_torchvision, "mobilenet_v2"),
    "efficientnet-b0": partial(_torchvision, "efficientnet_b0"),
}


def make_model(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build the model of that name, initialized by `seed`; torch's global generator stays as it is.

    >>> sum(p.numel() for p in make_model("resnet20", (3, 32, 32), 10, seed=0).parameters())
    269722
    """
    from decentlam.lab.gpt import GPTS

    known = MODELS | GPTS
    if name not in known:
        raise ValueError(unknown("model", name, known))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
        return known[name](shape, classes)
