"""A method without gradients as the linear map it is: models and buffers in, the same out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decentlam.algorithms import Algorithm, Message, Reach, Step
from decentlam.exchange.dense import DenseExchange
from decentlam.topology import Topology

_DIRECTIONS = 16  # random disagreements followed at once; the fastest takes over


class Mix(Protocol):
    def __call__(self, message: Message, index: int, reach: Reach) -> Message: ...


class LinearMap:
    """Steps of a method at lr = 1 on (blocks, nodes, columns): the model, then its buffers.

    The node average is taken out of every block: mixing keeps it apart from the disagreement.
    """

    def __init__(
        self, algorithm: Algorithm, nodes: int, mix: Mix, center: bool, start: int
    ) -> None:
        self.algorithm = algorithm
        self.nodes = nodes
        self.names = tuple(algorithm.init(torch.zeros(1, 1, dtype=torch.float64)))
        self._mix = mix
        self._center = center
        self._start = start  # a whole number of periods after the first step, which may be special

    @classmethod
    def of(cls, algorithm: Algorithm, topology: Topology) -> LinearMap:
        exchange = DenseExchange(topology)
        cycle = (topology.period or 1) * getattr(algorithm, "tau", 1)
        return cls(algorithm, topology.num_nodes, exchange.mix, True, cycle)

    @classmethod
    def by_mode(cls, algorithm: Algorithm, eigenvalues: np.ndarray) -> LinearMap:
        """On static symmetric weights the modes do not meet: each is a node of its own."""
        column = torch.from_numpy(eigenvalues)[:, None]

        def mix(message: Message, index: int, reach: Reach) -> Message:
            if reach is not Reach.NEIGHBORS:
                return message
            if isinstance(message, tuple):
                return tuple(column * part for part in message)
            return column * message

        return cls(algorithm, len(eigenvalues), mix, False, getattr(algorithm, "tau", 1))

    @property
    def blocks(self) -> int:
        return 1 + len(self.names)

    @property
    def rows(self) -> int:
        return self.blocks * self.nodes

    @torch.no_grad()
    def step(self, y: Tensor, index: int, gradient: Tensor | None = None) -> Tensor:
        """One step of everything in y, (blocks, nodes, columns)."""
        y = y.clone()
        x, state = y[0], dict(zip(self.names, y[1:], strict=True))
        g = torch.zeros_like(x) if gradient is None else gradient
        here = Step(index=self._start + index, lr=1.0)
        message = self.algorithm.message(x, g, state, here)
        mixed = self._mix(message, here.index, self.algorithm.reach(here.index))
        self.algorithm.update(x, g, mixed, state, here)
        return y - y.mean(1, keepdim=True) if self._center else y

    def matrix(self, period: int) -> np.ndarray:
        """All steps of a period in one matrix, (rows, rows)."""
        y = torch.eye(self.rows, dtype=torch.float64).view(self.blocks, self.nodes, self.rows)
        y = y - y.mean(1, keepdim=True)
        for index in range(period):
            y = self.step(y, index)
        return y.reshape(self.rows, self.rows).numpy()

    def matrices(self) -> np.ndarray:
        """The matrix of every mode, (modes, blocks, blocks)."""
        y = torch.eye(self.blocks, dtype=torch.float64)[:, None].repeat(1, self.nodes, 1)
        return self.step(y, 0).permute(1, 0, 2).numpy()

    def fixed_points(self) -> np.ndarray:
        """Where each mode's model comes to rest under a constant gradient of 1."""
        nothing = torch.zeros(self.blocks, self.nodes, 1, dtype=torch.float64)
        pushed = self.step(nothing, 0, torch.ones(self.nodes, 1, dtype=torch.float64))
        left = np.eye(self.blocks) - self.matrices()
        return np.linalg.solve(left, pushed.permute(1, 0, 2).numpy())[:, 0, 0]

    def mean_square_cycle(self, period: int) -> float:
        """The mean square of the model over the cycle it settles in under constant gradients."""
        gradient = torch.eye(self.nodes, dtype=torch.float64) - 1 / self.nodes
        pushed = torch.zeros(self.blocks, self.nodes, self.nodes, dtype=torch.float64)
        for index in range(period):
            pushed = self.step(pushed, index, gradient)
        left = np.eye(self.rows) - self.matrix(period)
        settled = np.linalg.solve(left, pushed.reshape(self.rows, self.nodes).numpy())
        y = torch.from_numpy(settled).view_as(pushed)
        total = 0.0
        for index in range(period):
            y = self.step(y, index, gradient)
            total += float(y[0].square().sum())
        return total / period

    def mean_square_run(self, warm_up: int, steps: int, seed: int) -> float:
        """The same from a run, for weights that never repeat."""
        gradient = self._directions(seed)[0]
        y = torch.zeros(self.blocks, *gradient.shape, dtype=torch.float64)
        total = 0.0
        for index in range(warm_up + steps):
            y = self.step(y, index, gradient)
            total += float(y[0].square().sum()) if index >= warm_up else 0.0
        return total / steps

    def impulse(self, steps: int) -> np.ndarray:
        """How far the models move in each step after a gradient of 1 in the first one."""
        y = torch.zeros(self.blocks, 1, 1, dtype=torch.float64)
        moved = []
        for index in range(steps):
            pushed = self.step(y, index, torch.full((1, 1), float(index == 0), dtype=torch.float64))
            moved.append(float((y - pushed)[0, 0, 0]))
            y = pushed
        return np.array(moved)

    def log_growth(self, batches: int, steps: int, seed: int) -> np.ndarray:
        """The logarithm of the growth per step in each batch of steps, after one to warm up."""
        y, logs, index = self._directions(seed), [], 0
        for _ in range(batches + 1):
            total = 0.0
            for _ in range(steps):
                y = self.step(y, index)
                size = float(y.norm())
                total += np.log(size) if size > 1e-280 else -np.inf
                y = y / max(size, 1e-280)
                index += 1
            logs.append(total / steps)
        return np.array(logs[1:])

    def feeds_back(self) -> bool:
        """Whether the buffers, empty before, are so no longer after a step without gradient."""
        y = self._directions(0)
        y[1:] = 0.0
        return any(bool((self.step(y, index)[1:] != 0).any()) for index in range(2))

    def _directions(self, seed: int) -> Tensor:
        """Random disagreements, (blocks, nodes, directions)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.blocks, self.nodes, _DIRECTIONS)
        y = torch.randn(shape, generator=generator, dtype=torch.float64)
        return y - y.mean(1, keepdim=True)


def dominant_eigenvalue(steps: LinearMap, period: int, seed: int = 0, size: int = 60) -> float:
    """The largest modulus of an eigenvalue over a period, by restarted Arnoldi iteration."""
    generator = np.random.default_rng(seed)
    start = generator.standard_normal(steps.rows)
    apply = _on_vectors(steps, period)
    found = 0.0
    for _ in range(20):
        basis, projected = _arnoldi(apply, start, size)
        values, vectors = np.linalg.eig(projected[: len(projected[0])])
        largest = int(np.abs(values).argmax())
        found = float(np.abs(values[largest]))
        if len(projected) == len(projected[0]):  # an invariant subspace: nothing is left out
            break
        residual = abs(projected[-1, -1] * vectors[-1, largest])
        start = (basis[:, : len(projected[0])] @ vectors[:, largest]).real
        if residual < 1e-8 * max(found, 1e-12):
            break
    return found


def _on_vectors(steps: LinearMap, period: int) -> Callable[[np.ndarray], np.ndarray]:
    def apply(vector: np.ndarray) -> np.ndarray:
        y = torch.from_numpy(vector).view(steps.blocks, steps.nodes, 1)
        y = y - y.mean(1, keepdim=True)
        for index in range(period):
            y = steps.step(y, index)
        return y.reshape(-1).numpy()

    return apply


def _arnoldi(
    apply: Callable[[np.ndarray], np.ndarray], start: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """An orthonormal basis of the Krylov space and the map in it, (size + 1, size)."""
    basis = np.zeros((len(start), size + 1))
    projected = np.zeros((size + 1, size))
    basis[:, 0] = start / np.linalg.norm(start)
    for k in range(size):
        image = apply(basis[:, k].copy())
        for _ in range(2):  # twice is enough
            overlap = basis[:, : k + 1].T @ image
            projected[: k + 1, k] += overlap
            image -= basis[:, : k + 1] @ overlap
        rest = float(np.linalg.norm(image))
        if rest < 1e-12:
            return basis[:, : k + 1], projected[: k + 1, : k + 1]
        projected[k + 1, k] = rest
        basis[:, k + 1] = image / rest
    return basis, projected
