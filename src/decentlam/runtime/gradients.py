"""The whole gradient before anything is sent: unscaled, looked at, clipped, or left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.exchange.network import Network
from decentlam.runtime import within_node
from decentlam.runtime.finite import all_finite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WholeGradient:
    """Of one process; what is decided is decided for all processes of its node."""

    tensors: Sequence[Tensor]
    network: Network
    step: int
    timeout: timedelta

    def unscale(self, found_inf: Tensor | None, scale: Tensor | None) -> bool:
        """Divides by what a GradScaler multiplied the loss with; False if a gradient overflowed, so
        that the step must leave it out."""
        if self._any(found_inf is not None and float(found_inf) > 0):
            return False
        if scale is not None:
            for g in self.tensors:
                g.mul_(1.0 / float(scale))
        return True

    def finite(self) -> bool:
        """Whether all of it is finite; says so in the log if it is not."""
        if self._any(not all(all_finite(g) for g in self.tensors)):
            text = "node %d, step %d: gradient is NaN or infinite, left out"
            log.warning(text, self.network.node, self.step)
            return False
        return True

    def clip(self, max_norm: float) -> None:
        """Scales the node's gradient to a norm of at most `max_norm`, by the rule of torch's
        clip_grad_norm_. The node's gradient is the mean over its processes."""
        if self.network.intra_node_group is not None:
            for g in self.tensors:
                self._sum(g)
                g.div_(self.network.processes_per_node)
        norms = [torch.linalg.vector_norm(g) for g in self.tensors]
        squares = torch.stack([n.to(norms[0].device) for n in norms]).double().square()
        factor = max_norm / (squares.sum().sqrt() + 1e-6)
        if self.network.is_nccl:  # without a look, for which the host would wait
            for g in self.tensors:
                g.mul_(factor.clamp(max=1.0).to(g.device))
        elif factor.item() < 1.0:
            for g in self.tensors:
                g.mul_(factor.item())

    def _any(self, flag: bool) -> bool:
        """Whether the flag is set in any process of this node."""
        if self.network.intra_node_group is None:
            return flag
        flags = torch.tensor(float(flag), device=self.network.control_device)
        self._sum(flags)
        return flags.item() > 0

    def _sum(self, tensor: Tensor) -> None:
        """Over the processes of this node, in place."""
        network, timeout = self.network, self.timeout
        within_node.start(network, timeout, self.step, 0, dist.all_reduce, tensor).wait()
