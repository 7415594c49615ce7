"""The updates that every step makes, in as few passes over memory as torch has kernels for."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 19  # elements; smaller ones cost calls, larger ones fall out of the cache

# torch's own SGD kernel is private. Without it, or on tensors it does not take, the same update
# runs as separate operations.
_fused_sgd = getattr(torch, "_fused_sgd_", None)


def momentum(
    g: Tensor, m: Tensor, beta: float, nesterov: bool, out: Tensor | None = None
) -> Tensor:
    """The direction of momentum SGD: beta m + g, or g + beta (beta m + g) with Nesterov."""
    h = torch.add(g, m, alpha=beta, out=out)
    return torch.add(g, h, alpha=beta, out=out) if nesterov else h


def momentum_step_(
    x: Tensor, g: Tensor, m: Tensor, lr: float, beta: float, nesterov: bool = False
) -> None:
    """m = beta m + g;  x = x - lr m (or g + beta m with Nesterov), in place."""
    if beta > 0 and fusible(x, g, m):  # the fused kernel takes no m when beta is 0
        fused_step_(x, g, m, lr=lr, momentum=beta, nesterov=nesterov)
    else:
        m.mul_(beta).add_(g)
        x.sub_(torch.add(g, m, alpha=beta) if nesterov else m, alpha=lr)


def heavy_ball_step_(x: Tensor, target: Tensor, v: Tensor, beta: float) -> None:
    """v = beta v + x - target;  x = x - v, in place.

    To the fused kernel, ascending along `target` with weight decay 1 is a gradient x - target.
    """
    if beta > 0 and fusible(x, target, v):
        fused_step_(x, target, v, lr=1.0, momentum=beta, weight_decay=1.0, maximize=True)
    else:
        v.mul_(beta).add_(x - target)  # the difference first: it is small, and exact
        x.sub_(v)


def fusible(*tensors: Tensor) -> bool:
    """Whether the fused kernel is there and takes these: dense memory of one precision."""
    first = tensors[0].dtype
    if _fused_sgd is None or first not in (torch.float32, torch.float64):
        return False
    return all(t.dtype is first and t.is_contiguous() and not t.is_meta for t in tensors)


def fused_step_(
    x: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """One pass over memory where separate operations take four; ask `fusible` first.

    m = momentum m + (1 - dampening) g;  x = x - lr m, in place.
    """
    assert _fused_sgd is not None
    _fused_sgd(
        [x],
        [g],
        [m],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
    )
