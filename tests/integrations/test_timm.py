"""timm's parameter groups, schedulers and moving average around an optimizer of decentlam."""

from __future__ import annotations

from typing import Any

import pytest
import timm.optim
import timm.scheduler
import timm.utils
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decentlam
from tests.helpers.quadratic import flat

pytestmark = pytest.mark.timeout(600)


def build() -> tuple[nn.Module, list[dict[str, Any]], Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    groups = timm.optim.param_groups_weight_decay(model, weight_decay=0.05)
    x = torch.randn(12, 8, 6, generator=torch.Generator().manual_seed(0))
    return model, groups, x, x[..., :3].argmax(-1)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """As timm's train.py: the schedule counts updates and epochs, the average is of every step."""
    schedule = timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=12, warmup_t=3, warmup_lr_init=0.0, t_in_epochs=False
    )
    ema = timm.utils.ModelEmaV3(model, decay=0.9)
    rates = []
    for step in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x[step]), y[step]).backward()
        optimizer.step()
        ema.update(model, step=step)
        schedule.step_update(step + 1)
        rates.append(optimizer.param_groups[1]["lr"])
    return [flat(model), flat(ema.module), torch.tensor(rates)]


def test_one_node_is_sgd() -> None:
    model, groups, x, y = build()
    ours = train(model, decentlam.DecentLaM(groups, lr=0.1, momentum=0.9), x, y)
    model, groups, x, y = build()
    theirs = train(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), x, y)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
