"""The momentum of SGD, as torch.optim.SGD has it."""

from __future__ import annotations

import torch
from torch import Tensor


def momentum(g: Tensor, m: Tensor, beta: float, nesterov: bool) -> Tensor:
    """Return the direction of momentum SGD: beta m + g, or g + beta (beta m + g) with Nesterov."""
    h = torch.add(g, m, alpha=beta)
    return torch.add(g, h, alpha=beta) if nesterov else h


def momentum_step_(x: Tensor, g: Tensor, m: Tensor, lr: float, beta: float, nesterov: bool) -> None:
    """Update m = beta m + g and x = x - lr m (or g + beta m with Nesterov), in place."""
    m.mul_(beta).add_(g)
    x.sub_(torch.add(g, m, alpha=beta) if nesterov else m, alpha=lr)
