"""Models to time: real ones, and one whose layers sleep instead of computing."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from decentlam.lab import models as lab_models
from decentlam.lab.network.prediction import FORWARD_SHARE

Loss = Callable[[nn.Module], Tensor]

LAYERS = 16
_ONE = torch.ones(1)


class ConvNet(nn.Module):
    """0.14M parameters and much arithmetic: bound by compute."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 32, 32, 64, 64, 96)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2 if b > a > 3 else 1, padding=1)
            for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Linear(widths[-1], 10)
        self.extra = nn.Linear(widths[-1], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(F.relu(self.extra(x.mean(dim=(2, 3)))))


def transformer(width: int, depth: int) -> nn.Module:
    """Return 12 width^2 depth parameters with short sequences: bound by communication."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def resnet50() -> nn.Module:
    """Return torchvision's, for ImageNet; small images keep the arithmetic bearable."""
    return lab_models.make_model("resnet50", (3, 224, 224), 1000, seed=0)


@dataclass(frozen=True)
class TimedModel:
    """A model, how many parameters it has, and the shape of a node's batch."""

    make: Callable[[], nn.Module]
    parameters: int
    batch: tuple[int, ...]


MODELS: dict[str, TimedModel] = {
    "convnet-0.2M": TimedModel(ConvNet, 138_394, (16, 3, 32, 32)),
    "transformer-2M": TimedModel(lambda: transformer(256, 3), 2_369_280, (2, 16, 256)),
    "transformer-9.5M": TimedModel(lambda: transformer(512, 3), 9_457_152, (2, 16, 512)),
    "transformer-25M": TimedModel(lambda: transformer(512, 8), 25_219_072, (2, 16, 512)),
    "resnet50": TimedModel(resnet50, 25_557_032, (2, 3, 64, 64)),
}


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and backward: the CPU stays free, as beside a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.back)
        return gradients[0], None, None


class SleepingLayer(nn.Module):
    """x + weight[0], which sleeps in forward and in backward.

    Its gradient is complete when it has slept in backward, before the layer below starts.
    """

    def __init__(self, parameters: int, there: float, back: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.there, self.back = there, back

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x + self.weight[0], self.there, self.back)


def sleeping(parameters: int, seconds: float, layers: int = LAYERS) -> nn.Module:
    """Return equal layers with so many parameters and seconds in all, a third of it in forward."""
    if parameters < layers:
        raise ValueError(f"a sleeping model has {layers} parameters or more, got {parameters}")
    cuts = [parameters * k // layers for k in range(layers + 1)]
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    there = seconds * FORWARD_SHARE / layers
    back = seconds / layers - there
    return nn.Sequential(*(SleepingLayer(size, there, back) for size in sizes))


def make_model(
    name: str, sleep_seconds: float | None = None, parameters: int | None = None
) -> tuple[nn.Module, Loss]:
    """Return the model, alike in all processes, and its loss on this process's batch.

    With `sleep_seconds` it is one of equal, sleeping layers, of the named model's size or of so
    many parameters.
    """
    torch.manual_seed(0)
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(MODELS)}")
    timed = MODELS[name]
    rank = dist.get_rank() if dist.is_initialized() else 0
    if sleep_seconds is not None:
        size, slope = parameters or timed.parameters, 1 + rank / 100  # as if data differed
        asleep = sleeping(size, sleep_seconds)
        return asleep, lambda m: slope * m(_ONE).sum()
    if parameters is not None:
        raise ValueError(f"{name} has {timed.parameters} parameters; others need sleeping compute")
    batch = torch.randn(timed.batch, generator=torch.Generator().manual_seed(rank))
    return timed.make(), lambda m: m(batch).square().mean()


def with_straggler(loss: Loss, seconds: float, seed: int = 0) -> Loss:
    """Return a loss that makes one node per step, drawn anew, late between forward and backward."""
    draw, rank, nodes = random.Random(seed), dist.get_rank(), dist.get_world_size()

    def late(model: nn.Module) -> Tensor:
        value = loss(model)
        if draw.randrange(nodes) == rank:
            time.sleep(seconds)
        return value

    return late
