"""The whole gradient before anything is sent: unscaled, checked, clipped, or left out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentlam.errors import NonFiniteError
from decentlam.exchange.network import Network

log = logging.getLogger(__name__)

Sum = Callable[[Tensor], None]  # over the processes of this node, in place


def all_finite(tensor: Tensor) -> bool:
    """One read without a temporary; a sum that overflowed is looked at again, element-wise."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


class DeferredLook:
    """Whether the buckets of a step were finite, looked at one step later: by then the GPU has
    long copied it to the host, and nobody waits."""

    def __init__(self) -> None:
        self._noted: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def note(self, step: int, finite: Sequence[Tensor | None]) -> None:
        flags = [flag for flag in finite if flag is not None]
        if not flags:
            return
        together = torch.stack(flags)
        on_host = together.to("cpu", non_blocking=True)
        copied = None
        if together.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._noted = step, on_host, copied

    def look(self, node: int) -> None:
        """Raises if a bucket of the step that was noted last was not finite."""
        if self._noted is None:
            return
        (step, on_host, copied), self._noted = self._noted, None
        if copied is not None:
            copied.synchronize()
        bad = [str(bucket) for bucket, finite in enumerate(on_host.tolist()) if not finite]
        if bad:
            raise NonFiniteError(
                f"node {node}, step {step}: the gradient or message of bucket {', '.join(bad)} "
                "became NaN or infinite. Such a gradient counted as zero, and no neighbor got it. "
                "Lower lr, or pass nonfinite='skip' with overlap='none' to leave it out."
            )


def unscale(
    gradients: Sequence[Tensor],
    network: Network,
    sum_in_node: Sum,
    found_inf: Tensor | None,
    scale: Tensor | None,
) -> bool:
    """Divides by what a GradScaler multiplied the loss with; False if a gradient overflowed in any
    process of this node, so that the step must leave it out."""
    if _any_in_node(network, sum_in_node, found_inf is not None and float(found_inf) > 0):
        return False
    if scale is not None:
        for g in gradients:
            g.mul_(1.0 / float(scale))
    return True


def finite_in_node(
    gradients: Sequence[Tensor], network: Network, sum_in_node: Sum, step: int
) -> bool:
    """Whether the gradients of all processes of this node are finite; says so if they are not."""
    finite = all(all_finite(g) for g in gradients)
    if _any_in_node(network, sum_in_node, not finite):
        log.warning("node %d, step %d: gradient is NaN or infinite, left out", network.node, step)
        return False
    return True


def clip(gradients: Sequence[Tensor], network: Network, sum_in_node: Sum, max_norm: float) -> None:
    """Scales the node's gradient to a norm of at most `max_norm`, by the rule of torch's
    clip_grad_norm_. The node's gradient is the mean over its processes."""
    if network.intra_node_group is not None:
        for g in gradients:
            sum_in_node(g)
            g.div_(network.processes_per_node)
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    squares = torch.stack([n.to(norms[0].device) for n in norms]).double().square()
    factor = max_norm / (squares.sum().sqrt().item() + 1e-6)
    if factor < 1.0:
        for g in gradients:
            g.mul_(factor)


def _any_in_node(network: Network, sum_in_node: Sum, flag: bool) -> bool:
    """Whether the flag is set in any process of this node."""
    if network.intra_node_group is None:
        return flag
    flags = torch.tensor(float(flag), device=network.control_device)
    sum_in_node(flags)
    return flags.item() > 0
