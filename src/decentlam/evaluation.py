"""The average of all nodes: to evaluate it, to keep it, to measure the distance from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentlam.exchange.network import Network, communication_device


def floating_buffers(model: nn.Module | None) -> list[Tensor]:
    """BatchNorm statistics and the like; counters are not averaged."""
    return [b for b in model.buffers() if b.is_floating_point()] if model is not None else []


@torch.no_grad()
def average_(flat: Sequence[Tensor], model: nn.Module | None, network: Network) -> None:
    """Replaces parameters and floating buffers by their mean over all processes."""
    if network.group is None:
        return
    works = [
        dist.all_reduce(t, group=network.group, async_op=True)
        for t in [*flat, *floating_buffers(model)]
    ]
    for work in works:
        work.wait()
    for t in [*flat, *floating_buffers(model)]:
        t.div_(network.num_processes)


@contextlib.contextmanager
def averaged(flat: Sequence[Tensor], model: nn.Module | None, network: Network) -> Iterator[None]:
    """The mean inside, the node's own values to the bit outside, also after an exception."""
    tensors = [*flat, *floating_buffers(model)]
    own = [t.clone() for t in tensors]
    average_(flat, model, network)
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, own, strict=True):
                t.copy_(value)


@torch.no_grad()
def consensus_distance(flat: Sequence[Tensor], network: Network) -> float:
    """sqrt((1/n) sum_i |x_i - mean|^2)."""
    if network.group is None:
        return 0.0
    device = communication_device(network, flat[0].device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for x in flat:
        mean = x.clone()
        dist.all_reduce(mean, group=network.group)
        mean.div_(network.num_processes)
        total += torch.linalg.vector_norm(mean.sub_(x)).to(total).square()
    dist.all_reduce(total, group=network.group)
    return (total / network.num_processes).sqrt().item()
