"""Models by name, for images of any size: four small ones of our own, the rest torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def _resnet(name: str) -> Callable[[Shape, int], nn.Module]:
    """Adapt torchvision's: small images begin as on CIFAR, 3 x 3, no stride and no max-pool."""

    def build(shape: Shape, classes: int) -> nn.Module:
        model = _torchvision(name, classes)
        if shape[1] <= SMALL:
            model.conv1 = _stem(model.conv1, shape[0], kernel=3, stride=1)
            model.maxpool = nn.Identity()
        elif shape[0] != 3:
            model.conv1 = _stem(model.conv1, shape[0], kernel=7, stride=2)
        return model

    return build


def _mobile(name: str) -> Callable[[Shape, int], nn.Module]:
    """Adapt torchvision's: on small images the first convolution has no stride."""

    def build(shape: Shape, classes: int) -> nn.Module:
        model, stride = _torchvision(name, classes), 1 if shape[1] <= SMALL else 2
        if (shape[0], stride) != (3, 2):
            model.features[0][0] = _stem(model.features[0][0], shape[0], kernel=3, stride=stride)
        return model

    return build


def _torchvision(name: str, classes: int) -> Any:
    from torchvision.models import get_model

    return get_model(name, weights=None, num_classes=classes)


def _stem(old: nn.Conv2d, channels: int, kernel: int, stride: int) -> nn.Conv2d:
    """Return a first convolution like the old one, drawn from the distribution torchvision uses."""
    new = nn.Conv2d(channels, old.out_channels, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    return new


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "resnet20": resnet20,
    "resnet18": _resnet("resnet18"),
    "resnet34": _resnet("resnet34"),
    "resnet50": _resnet("resnet50"),
    "mobilenet-v2": _mobile("mobilenet_v2"),
    "efficientnet-b0": _mobile("efficientnet_b0"),
}


def make_model(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build the model of that name, initialized by `seed`; torch's global generator stays as it is.

    >>> sum(p.numel() for p in make_model("resnet20", (3, 32, 32), 10, seed=0).parameters())
    269722
    """
    from decentlam.lab.gpt import GPTS

    known = MODELS | GPTS
    if name not in known:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(known)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
        return known[name](shape, classes)
