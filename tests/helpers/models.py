"""Models that do not use everything, in whatever order, and their losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """Two branches over tied weights, taken in a different order or not at all by each node."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3, bias=False)
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.never = nn.Parameter(torch.randn(5))
        self.double()


def branches_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    if node == 2 and step == 3:
        return model.left(x).square().mean()  # nothing before it is used
    x = torch.tanh(model.tied(model.inner(x)))
    if (node + step) % 3 == 0:
        y = model.left(torch.tanh(model.right(x)[:, :3]))
    elif (node + step) % 3 == 1:
        y = model.right(torch.tanh(model.left(x)[:, :3]))
    else:
        y = model.left(x)
    return (y * model.frozen.abs() - 1).square().mean()


def trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


def mlp_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return (model(x) - x[:, :2]).square().mean()
