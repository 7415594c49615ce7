"""n nodes in one process: exactly the recursion that n real processes run."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentlam.algorithms import (
    Algorithm,
    Message,
    Reach,
    Step,
    check_compatible,
    check_count,
    check_number,
    check_period,
    lr_ratio,
    make,
)
from decentlam.algorithms.turns import parts
from decentlam.analysis.stability import choose
from decentlam.errors import NonFiniteError
from decentlam.exchange.dense import DenseMix
from decentlam.topology import Topology, resolve

log = logging.getLogger(__name__)

LearningRate = float | Callable[[int], float]

_BLOCK_BYTES = 2**20  # what a step works on at a time, so that its temporaries stay in the cache
_BLOCK_COLUMNS = 64  # but no fewer columns than this, or the rows become too short


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
    """Run `steps` steps of n nodes from x0 (n, d) and return their models (n, d).

    `gradient(x, step)` returns the gradients of all nodes, (n, d). `lr` is a number or a function
    of the step. `callback(step, x)` gets the models after each step; they change in place, so clone
    what you keep. `layers` are the sizes of the layers in d, for layer-wise methods (default: one
    layer). momentum is 0.9 by default. The method runs even if it diverges; pass `stable="auto"` or
    `"refuse"` to check first, as the optimizers do.

    >>> import torch, decentlam
    >>> target = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    >>> x = decentlam.simulate("decentlam", "ring", torch.zeros(4, 1),
    ...                        lambda x, step: x - target, lr=0.01, steps=500)
    >>> round(x.mean().item(), 3)
    3.0
    """
    check_count("steps", steps, least=0)
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
        stable: str = "ignore",
        **hyper: Any,
    ) -> None:
        if not isinstance(x0, Tensor) or x0.ndim != 2 or x0.numel() == 0:
            shape = tuple(x0.shape) if isinstance(x0, Tensor) else type(x0).__name__
            raise ValueError(f"x0 must be a tensor (n, d), one row per node, got {shape}")
        if x0.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"x0 must be float32 or float64, got {x0.dtype}; try x0.double()")
        method, network = make(algorithm, momentum, **hyper), resolve(topology, len(x0))
        check_period(method)
        check_compatible(method, network)
        self.algorithm, self.topology, note = choose(method, network, stable)
        if note is not None:
            log.debug("%s", note)
        self.weight_decay = check_number("weight_decay", weight_decay)
        self._mix = DenseMix(self.topology)
        self.x = x0.detach().clone(memory_format=torch.contiguous_format)
        self.index = 0
        self._previous_lr: float | None = None
        self._sync_lr: float | None = None
        sizes = _check_layers(layers, x0.shape[1])
        self._adaptive = [True] * len(sizes) if adaptive is None else adaptive  # by layer
        self._layers = _spans(sizes)
        if not self.algorithm.layerwise:
            sizes = column_blocks(self.x)
            self._adaptive = [True] * len(sizes)
        _keep_freed_memory()
        self._pieces = self.x.split(sizes, dim=1)
        self._windows = _spans(sizes)
        self._states = [self.algorithm.init(piece) for piece in self._pieces]

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float) -> None:
        """One averaging round of all nodes with these gradients, (n, d)."""
        gradient = self._checked(gradient)
        lr = check_number("lr", lr)
        reach = self.algorithm.reach(self.index)
        gradients = gradient.split([piece.shape[1] for piece in self._pieces], dim=1)
        decays = self.weight_decay and not self.algorithm.decoupled_decay
        averaged = self.algorithm.averaged_state
        for x, g, state, adaptive, window in zip(
            self._pieces, gradients, self._states, self._adaptive, self._windows, strict=True
        ):
            if decays:
                g = torch.add(g, x, alpha=self.weight_decay)
            step = Step(
                index=self.index,
                lr=lr,
                lr_ratio=lr_ratio(lr, self._previous_lr),
                sync_lr_ratio=lr_ratio(lr, self._sync_lr),
                weight_decay=self.weight_decay,
                adaptive=adaptive,
                gradients=self.index + 1,
            )
            message: Message = self.algorithm.message(x, g, state, step)
            mixed = self._mix(message, self.index, reach)
            if averaged is None:
                self.algorithm.update(x, g, mixed, state, step)
                continue
            self.algorithm.update(x, g, mixed[0], state, step)
            for part in parts(self._layers, window, self.index):
                state[averaged][:, part] = mixed[1][:, part]
        self.index += 1
        self._previous_lr = lr
        if reach is Reach.EVERYONE:
            self._sync_lr = lr

    def consensus_distance(self) -> float:
        """sqrt of the mean squared distance of the nodes from their average."""
        return (self.x - self.x.mean(0)).square().sum(1).mean().sqrt().item()

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that `load_state_dict` needs to go on to the bit."""
        names = self._states[0]
        state = {name: torch.cat([piece[name] for piece in self._states], dim=1) for name in names}
        return {
            "x": self.x.clone(),
            "state": state,
            "step": self.index,
            "previous_lr": self._previous_lr,
            "sync_lr": self._sync_lr,
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` saved, of the same algorithm and number of nodes."""
        given, expected = sorted(saved["state"]), sorted(self._states[0])
        if given != expected or saved["x"].shape != self.x.shape:
            raise ValueError(
                f"the saved state has models {tuple(saved['x'].shape)} and buffers {given}, but "
                f"{type(self.algorithm).__name__} here has {tuple(self.x.shape)} and {expected}; "
                "build both with the same model, algorithm and number of nodes"
            )
        self.x.copy_(saved["x"])
        for name, whole in saved["state"].items():
            parts = whole.split([piece.shape[1] for piece in self._pieces], dim=1)
            for state, part in zip(self._states, parts, strict=True):
                state[name].copy_(part)
        self.index = saved["step"]
        self._previous_lr = saved["previous_lr"]
        self._sync_lr = saved["sync_lr"]

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


def column_blocks(x: Tensor) -> list[int]:
    """The widths of the blocks of columns that a step takes x (n, d) in; they add up to d.

    Only a layer-wise method couples columns. In blocks, message, mix and drift stay in the cache;
    in one piece, tensors of 40 MB cost 4 times as much per step (1024 nodes, 10,000 columns).
    """
    n, d = x.shape
    width = max(_BLOCK_COLUMNS, _BLOCK_BYTES // (n * x.element_size()))
    if x.device.type != "cpu" or d < 2 * width:
        return [d]
    return [width] * (d // width) + ([d % width] if d % width else [])


def _spans(sizes: Sequence[int]) -> list[slice]:
    """The places of consecutive stretches of these sizes."""
    stops = itertools.accumulate(sizes)
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _keep_freed_memory() -> None:
    """Makes the allocator keep the blocks a step frees for the next step.

    glibc returns what is free beyond twice the largest block it has seen to the system, and to
    fault pages in again costs more than the arithmetic on them. It need only be shown a larger one.
    """
    torch.empty(16 * _BLOCK_BYTES, dtype=torch.uint8)


def _check_layers(layers: Sequence[int] | None, columns: int) -> list[int]:
    sizes = [columns] if layers is None else list(layers)
    if sum(sizes) != columns or any(size < 1 for size in sizes):
        raise ValueError(
            f"layers {sizes} add up to {sum(sizes)}, but x0 has {columns} columns; every layer "
            "needs at least one"
        )
    return sizes
