"""Small modules, their batches, and n separate copies stepped one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decentlam
from decentlam import topology

N, BATCH = 4, 6


class TiedAndFrozen(nn.Module):
    """Decodes with its encoder's weights, behind a first layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.encode = nn.Linear(5, 3)
        self.again = nn.Linear(5, 3)
        self.again.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x))
        return self.encode(x) + torch.sin(self.again(x))


class ReplacesItsBuffer(nn.Module):
    """A running mean that is assigned and not written to, at the root and with no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.seen = self.seen + len(x)
        return self.linear(x - self.mean)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def cnn(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 2),
        nn.BatchNorm2d(5, momentum=momentum, affine=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "cnn with batch norm": (cnn, (1, 8, 8)),
    "cnn with cumulative batch norm": (lambda: cnn(None), (1, 8, 8)),
    "tied and frozen": (TiedAndFrozen, (5,)),
    "replaces its buffer": (ReplacesItsBuffer, (5,)),
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def batch(name: str, k: int, n: int = N) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(k)
    inputs = torch.randn(n, BATCH, *MODELS[name][1], generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (n, BATCH), generator=random)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class OneByOne:
    """n ordinary modules, backward on each; only the averaging is the simulator's."""

    def __init__(self, model: nn.Module, algorithm: str, net: topology.Topology, **kwargs) -> None:
        self.models = [copy.deepcopy(model) for _ in range(net.num_nodes)]
        layers = [p.numel() for p in trained(model)]
        adaptive = [p.ndim > 1 for p in trained(model)]
        self.nodes = decentlam.Nodes(
            algorithm, net, self.flat(), layers=layers, adaptive=adaptive, **kwargs
        )

    def flat(self, grad: bool = False) -> Tensor:
        return torch.stack(
            [
                torch.cat([(p.grad if grad else p).detach().flatten() for p in trained(model)])
                for model in self.models
            ]
        )

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> Tensor:
        losses = []
        for model, x, y in zip(self.models, inputs, targets, strict=True):
            model.zero_grad()
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
        self.nodes.step(self.flat(grad=True), lr)
        with torch.no_grad():
            for model, row in zip(self.models, self.nodes.x, strict=True):
                nn.utils.vector_to_parameters(row, trained(model))
        return torch.stack(losses).detach()


def assert_close(got: Tensor, expected: Tensor) -> None:
    np.testing.assert_allclose(got.detach(), expected.detach(), rtol=0, atol=1e-12)
