"""The seam of the library: form a message, let the neighborhood mix it, use the mix.

    message = algorithm.message(x, g, state, step)      # reads, never writes
    mixed   = the weighted sum over the neighborhood    # simulator or network
    algorithm.update(x, g, mixed, state, step)          # the only writer of x and state

The last dimension of every tensor is parameters, anything before it is nodes: the same two
functions run n simulated nodes, (n, d), and one real node, (d,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

Message = Tensor | tuple[Tensor, ...]
State = Mapping[str, Tensor]


class Reach(Enum):
    """Who takes part in the averaging of one step."""

    NEIGHBORS = "neighbors"  # mixed = W @ message
    EVERYONE = "everyone"  # mixed = the exact mean over all nodes
    NOBODY = "nobody"  # mixed = the node's own message


@dataclass(frozen=True)
class Step:
    """What an algorithm may know of the step it takes."""

    index: int
    lr: float
    lr_ratio: float = 1.0  # lr over that of the step before; see `lr_ratio`
    sync_lr_ratio: float = 1.0  # lr over that of the last step that reached everyone
    weight_decay: float = 0.0  # already inside g
    adaptive: bool = True  # whether a layer-wise rate applies to this layer
    out: Tensor | None = None  # where a one-payload message may be written, to save a copy


def lr_ratio(lr: float, previous_lr: float | None) -> float:
    """lr / previous lr, defined also around zeros: 0 at a zero, 1 after one and at the start.

    A step with lr = 0 is then plain gossip, and the one after it starts from what gossip moved.
    """
    if lr == 0:
        return 0.0
    return lr / previous_lr if previous_lr else 1.0


class Algorithm:
    """What a node computes. Subclasses are frozen dataclasses of their hyper-parameters."""

    buffers: ClassVar[tuple[str, ...]] = ()  # state tensors, zero at the start
    needs_gradient: ClassVar[bool] = True  # False: the message is known before the gradient

    @property
    def layerwise(self) -> bool:
        """Whether message and update must be called on one layer at a time."""
        return False

    @property
    def needs_symmetric(self) -> bool:
        """Whether the recursion is only sound with symmetric weights."""
        return False

    def steady(self) -> tuple[Algorithm, ...]:
        """Forms of the method for weights on which it would be unstable."""
        return ()

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(x) for name in self.buffers}

    def reach(self, index: int) -> Reach:
        return Reach.NEIGHBORS

    def payloads(self, index: int) -> int:
        """How many tensors of the size of x the message of this step has."""
        return 1

    def message(self, x: Tensor, g: Tensor, state: State, step: Step) -> Message:
        raise NotImplementedError

    def update(self, x: Tensor, g: Tensor, mixed: Message, state: State, step: Step) -> None:
        raise NotImplementedError


def momentum(g: Tensor, m: Tensor, beta: float, nesterov: bool) -> Tensor:
    """The direction of momentum SGD: beta m + g, or g + beta (beta m + g) with Nesterov."""
    h = torch.add(g, m, alpha=beta)
    return torch.add(g, h, alpha=beta) if nesterov else h


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
    """The fused kernel takes whole stretches of memory of one precision."""
    first = tensors[0].dtype
    return first in (torch.float32, torch.float64) and all(
        t.is_contiguous() and t.dtype == first for t in tensors
    )


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
    """torch's own SGD kernel: one pass over memory where separate operations take four.

    m = momentum m + (1 - dampening) g;  x = x - lr m, in place.
    """
    torch._fused_sgd_(
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


def check_between(owner: Algorithm, **values: float) -> None:
    """Refuses coefficients outside [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(
                f"{type(owner).__name__}: {name} must be in [0, 1), got {value!r}; 0.9 is usual"
            )
