"""The whole gradient before anything is sent: unscaled, checked, clipped, or left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from decentlam import gradients
from decentlam.exchange.network import communication_device
from decentlam.flight import Flight
from decentlam.options import Options

log = logging.getLogger(__name__)


def prepare(
    flights: Sequence[Flight],
    options: Options,
    index: int,
    found_inf: Tensor | None,
    scale: Tensor | None,
) -> bool:
    """Prepares the gradients of all buckets in place; True if this step must leave them out.

    `found_inf` and `scale` are what a GradScaler found and multiplied the loss with.
    """
    if not flights:  # every parameter is frozen
        return False
    for flight in flights:
        flight.bucket.gather_gradients()
    gathered = [g for flight in flights for g in flight.bucket.gradients()]
    if _any_in_node(flights, index, found_inf is not None and float(found_inf) > 0):
        return True
    if scale is not None:
        for g in gathered:
            g.mul_(1.0 / float(scale))
    if options.nonfinite == "skip":
        finite = all(gradients.all_finite(g) for g in gathered)
        if _any_in_node(flights, index, not finite):
            node = flights[0].network.node
            log.warning("node %d, step %d: gradient is NaN or infinite, left out", node, index)
            return True
    if options.max_grad_norm is not None:
        _clip(flights, gathered, index, options.max_grad_norm)
    return False


def _any_in_node(flights: Sequence[Flight], index: int, flag: bool) -> bool:
    """Whether the flag is set in any process of this node."""
    network = flights[0].network
    if network.node_group is None:
        return flag
    flags = torch.tensor(float(flag), device=communication_device(network, flights[0].x.device))
    flights[0].sum_in_node(flags, index)
    return flags.item() > 0


def _clip(flights: Sequence[Flight], gathered: list[Tensor], index: int, max_norm: float) -> None:
    network = flights[0].network
    if network.node_group is not None:  # the node's gradient is the mean over its processes
        for g in gathered:
            flights[0].sum_in_node(g, index)
            g.div_(network.processes_per_node)
    factor = gradients.clip_factor(gradients.squared_norm(gathered).sqrt().item(), max_norm)
    if factor < 1.0:
        for g in gathered:
            g.mul_(factor)
