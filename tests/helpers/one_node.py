"""Every optimizer on one node without a group, a small network and its data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import decentlam


class Net(nn.Module):
    """Two layers, one parameter that the loss may leave out, one frozen."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.second = nn.Linear(8, 3, dtype=dtype)
        self.sometimes = nn.Parameter(torch.ones(3, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, everything: bool = True) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return y * self.sometimes + self.frozen if everything else y


def beside_sgd() -> tuple[Net, decentlam.DecentLaM, Net, torch.optim.SGD]:
    """Two equal networks, one with our optimizer and one with torch's."""
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    return ours, optimizer, theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 4, generator=generator, dtype=dtype)
    y = torch.randn(16, 3, generator=generator, dtype=dtype)
    return nn.functional.mse_loss(model(x, **options), y)


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> list[Tensor]:
    trajectory = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([loss.detach()] if plateau else []))
        trajectory.append(flat(model))
    return trajectory


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a - b).abs().max() < tolerance, f"step {step}"


def one_step_each(model: nn.Module, optimizer: Any, reference: Any, theirs: nn.Module) -> None:
    for m, opt in ((model, optimizer), (theirs, reference)):
        opt.zero_grad()
        loss_of(m, 0).backward()
        opt.step()
    assert_close([flat(model)], [flat(theirs)])
