"""The whole gradient before anything is sent: unscaled, looked at, clipped, or left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.network.network import Network
from decentlam.runtime.bucket import inside_node
from decentlam.runtime.checks import all_finite, finite_flag

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WholeGradient:
    """The gradients of one process. What is decided is decided for all processes of its node."""

    params: Sequence[Tensor]
    network: Network
    step: int
    timeout: timedelta
    first: bool = False  # of a runtime: what all processes of a node must do alike is checked

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients that are there, of empty shards none."""
        return [p.grad.detach() for p in self.params if p.grad is not None and p.grad.numel()]

    def unscale(self, found_inf: Tensor | None, scale: Tensor | None) -> bool:
        """Divide by what a GradScaler multiplied the loss with; return False if a gradient
        overflowed, so that the step must leave it out."""
        if self.first:
            self._check_scaler(found_inf is not None)
        if found_inf is None:  # no scaler: nobody looks, and nobody in the node asks
            return True
        if self._any(found_inf):
            return False
        if scale is not None:
            for g in self.tensors:
                # By the device: float(scale) would be a look. A float16 has no 1 / scale.
                wide = torch.promote_types(g.dtype, torch.float32)
                inverse = scale.to(g.device, wide).reciprocal()
                if wide is g.dtype:
                    g.mul_(inverse)
                else:
                    g.copy_(g.to(wide).mul_(inverse))
        return True

    def finite(self) -> bool:
        """Return True if all of it is finite, and log it if not."""
        tensors = self.tensors
        if self._on_gpu and tensors:
            bad = ~finite_flag(tensors, None)
        else:  # a look costs nothing here, and a sum less than a norm
            bad = torch.tensor(not all(map(all_finite, tensors)))
        if self._any(bad):
            text = "node %d, step %d: gradient is NaN or infinite, left out"
            log.warning(text, self.network.node, self.step)
            return False
        return True

    def clip(self, max_norm: float) -> None:
        """Scale the node's gradient to a norm of at most `max_norm`, by the rule of torch's
        clip_grad_norm_. The node's gradient is the mean over its processes."""
        if self.network.intra_node_group is not None:
            for p in self.params:
                if p.grad is None:  # another process of the node may have one
                    p.grad = torch.zeros_like(p)
                self._sum(p.grad)
                p.grad.div_(self.network.processes_per_node)
        tensors, square = self.tensors, torch.zeros((), dtype=torch.float64)
        if tensors:
            norms = [torch.linalg.vector_norm(g) for g in tensors]
            square = torch.stack([n.to(norms[0].device) for n in norms]).double().square().sum()
        if self.network.shard_group is not None:
            self._sum(square := square.to(self.network.device))
        factor = max_norm / (square.sqrt() + 1e-6)
        if self._on_gpu:  # without a look, for which the host would wait
            for g in tensors:
                g.mul_(factor.clamp(max=1.0).to(g.device))
        elif factor.item() < 1.0:
            for g in tensors:
                g.mul_(factor.item())

    @property
    def _on_gpu(self) -> bool:
        """Return True if the host would wait for a device at every look at a value."""
        return self.network.is_nccl or self.params[0].is_cuda

    def _check_scaler(self, given: bool) -> None:
        """Refuse a GradScaler in some processes of this node: only they would ask the others
        whether a gradient overflowed, and wait. It is asked once, because whoever asks looks."""
        group = self.network.node_group
        if group is None:
            return
        scalers = torch.full((), float(given), device=self.network.device)
        self._sum(scalers)
        found, processes = int(scalers.item()), group.size()
        if found not in (0, processes):
            raise RuntimeError(
                f"node {self.network.node}: {found} of its {processes} processes step with a "
                "GradScaler; call scaler.step(optimizer) in all processes of a node, or in none"
            )

    def _any(self, here: Tensor) -> bool:
        """Return True if it is set here or in another process of this node; this is one look."""
        if self.network.node_group is not None:
            here = here.to(self.network.device, torch.float32, copy=True)
            self._sum(here)
        return here.item() > 0

    def _sum(self, tensor: Tensor) -> None:
        """Sum over the processes of this node, in place."""
        inside_node(self.network, self.timeout, self.step, 0, dist.all_reduce, tensor).wait()
