"""g -> g before it becomes a message: the norm it is clipped to, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of squares over all gradients, in float64 where the device has it."""
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    return torch.stack([n.to(norms[0].device) for n in norms]).double().square().sum()


def clip_factor(total_norm: float, max_norm: float) -> float:
    """What to multiply a gradient of that norm with; the rule of torch's clip_grad_norm_."""
    return min(1.0, max_norm / (total_norm + 1e-6))


def all_finite(tensor: Tensor) -> bool:
    """One read without a temporary; a sum that overflowed is looked at again, element-wise."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
