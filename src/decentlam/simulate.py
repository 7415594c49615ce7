"""n nodes in one process: exactly the recursion that n real processes run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decentlam.algorithms import Algorithm, Message, Reach, Step, check_compatible, lr_ratio, make
from decentlam.errors import NonFiniteError
from decentlam.exchange.dense import DenseExchange
from decentlam.topology import Topology, resolve

LearningRate = float | Callable[[int], float]


def simulate(
    algorithm: str | Algorithm,
    topology: str | Topology,
    x0: Tensor,
    gradient: Callable[[Tensor, int], Tensor],
    lr: LearningRate,
    steps: int,
    momentum: float | None = None,
    callback: Callable[[int, Tensor], object] | None = None,
    *,
    weight_decay: float = 0.0,
    layers: Sequence[int] | None = None,
    **hyper: Any,
) -> Tensor:
    """Runs `steps` steps of n nodes from x0 (n, d) and returns their models (n, d).

    `gradient(x, step)` gives every node's gradient, (n, d). `lr` is a number or a function of the
    step. `callback(step, x)` sees the models after each step. `layers` are the sizes of the
    layers in d, for layer-wise methods (default: one layer). momentum is 0.9 unless given.

    >>> import torch, decentlam
    >>> target = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    >>> x = decentlam.simulate("decentlam", "ring", torch.zeros(4, 1),
    ...                        lambda x, step: x - target, lr=0.01, steps=500)
    >>> round(x.mean().item(), 3)
    3.0
    """
    if not isinstance(x0, Tensor) or x0.ndim != 2:
        shape = tuple(x0.shape) if isinstance(x0, Tensor) else type(x0).__name__
        raise ValueError(f"x0 must be a tensor (n, d), one row per node, got {shape}")
    if x0.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x0 must be float32 or float64, got {x0.dtype}; try x0.double()")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be a whole number of 0 or more, got {steps!r}")
    nodes = Nodes(
        algorithm, topology, x0, momentum, weight_decay=weight_decay, layers=layers, **hyper
    )
    for k in range(steps):
        nodes.step(gradient(nodes.x, k), lr(k) if callable(lr) else lr)
        if callback is not None:
            callback(k, nodes.x)
    return nodes.x


class Nodes:
    """The models of n nodes and their algorithm's state, advanced one step at a time."""

    def __init__(
        self,
        algorithm: str | Algorithm,
        topology: str | Topology,
        x0: Tensor,
        momentum: float | None = None,
        *,
        weight_decay: float = 0.0,
        layers: Sequence[int] | None = None,
        adaptive: Sequence[bool] | None = None,
        **hyper: Any,
    ) -> None:
        self.algorithm = make(algorithm, momentum, **hyper)
        self.topology = resolve(topology, len(x0))
        check_compatible(self.algorithm, self.topology)
        if not (isinstance(weight_decay, int | float) and 0 <= weight_decay < math.inf):
            raise ValueError(f"weight_decay must be 0 or more, got {weight_decay!r}")
        self.weight_decay = weight_decay
        self.exchange = DenseExchange(self.topology)
        self.x = x0.detach().clone()
        self.index = 0
        self._previous_lr: float | None = None
        self._sync_lr: float | None = None
        sizes = [x0.shape[1]] if layers is None or not self.algorithm.layerwise else list(layers)
        if sum(sizes) != x0.shape[1] or any(size < 1 for size in sizes):
            raise ValueError(
                f"layers {sizes} add up to {sum(sizes)}, but x0 has {x0.shape[1]} columns"
            )
        self._pieces = self.x.split(sizes, dim=1)
        self._adaptive = [True] * len(sizes) if adaptive is None else list(adaptive)
        self._states = [self.algorithm.init(piece) for piece in self._pieces]

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float) -> None:
        """One averaging round of all nodes with these gradients, (n, d)."""
        g = self._checked(gradient)
        lr = check_lr(lr)
        if self.weight_decay:
            g = torch.add(g, self.x, alpha=self.weight_decay)
        ratios = lr_ratio(lr, self._previous_lr), lr_ratio(lr, self._sync_lr)
        reach = self.algorithm.reach(self.index)
        gradients = g.split([piece.shape[1] for piece in self._pieces], dim=1)
        for x, g_piece, state, adaptive in zip(
            self._pieces, gradients, self._states, self._adaptive, strict=True
        ):
            step = Step(self.index, lr, *ratios, self.weight_decay, adaptive)
            message: Message = self.algorithm.message(x, g_piece, state, step)
            mixed = self.exchange.mix(message, self.index, reach)
            self.algorithm.update(x, g_piece, mixed, state, step)
        self.index += 1
        self._previous_lr = lr
        if reach is Reach.EVERYONE:
            self._sync_lr = lr

    def consensus_distance(self) -> float:
        """sqrt of the mean squared distance of the nodes from their average."""
        return (self.x - self.x.mean(0)).square().sum(1).mean().sqrt().item()

    def _checked(self, g: Tensor) -> Tensor:
        if not isinstance(g, Tensor) or g.shape != self.x.shape:
            got = tuple(g.shape) if isinstance(g, Tensor) else type(g).__name__
            raise ValueError(
                f"the gradient must have the shape of x, {tuple(self.x.shape)}, got {got}"
            )
        if g.dtype != self.x.dtype:
            raise ValueError(
                f"the gradient is {g.dtype} but x is {self.x.dtype}; compute both in one precision"
            )
        if not math.isfinite(g.sum().item()):  # one cheap pass; look closer only if it fails
            bad = (~torch.isfinite(g)).any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise NonFiniteError(
                    f"the gradient at step {self.index} is NaN or infinite on node(s) {bad}; "
                    "check the gradient function, lower lr or momentum, or, if the weights change "
                    "with the step, use a static topology or qg-dmsgd"
                )
        return g


def check_lr(lr: float) -> float:
    """The learning rate as a number of 0 or more."""
    value = lr.item() if isinstance(lr, Tensor) else lr
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"lr must be a finite number of 0 or more, got {lr!r}")
    return float(value)
