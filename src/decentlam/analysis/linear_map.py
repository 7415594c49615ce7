"""A method as the linear map it is: models and buffers in, the same out.

Without gradients every method is linear. With gradients g_i = h_i x_i, those of a quadratic, it
still is, and what matters of lr and curvature is their product: a step sees lr g only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from decentlam.algorithms import Algorithm, Message, Reach, Step
from decentlam.exchange.dense import DenseMix
from decentlam.topology import SparseWeights, Topology

_DIRECTIONS = 2  # random starts followed at once; the fastest takes over
_RESCALE = 8  # steps after which what grows or shrinks is brought back to the size of 1
_KEPT = 2**17  # rows of random weights that are kept for the next method


class LinearMap:
    """Steps of a method at lr = 1 on y, (blocks, nodes, columns): the model, then its buffers.

    The nodes are `groups` of equal size that do not meet: runs side by side, or modes of one node
    each. `curvature`, (nodes of a group, variants), holds lr h of every node; the variants are
    followed side by side, each in its share of the columns. `center` follows the disagreement
    alone and takes the average of a group out of every block: where all nodes have the same
    curvature, mixing keeps the two apart.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        topology: Topology,
        groups: int = 1,
        curvature: np.ndarray | None = None,
        *,
        center: bool = False,
        shift: int = 0,  # from the steps of the method to those of the weights
    ) -> None:
        self.algorithm, self._gain = algorithm.linear()
        self.nodes, self.groups = topology.num_nodes, groups
        self.members = self.nodes // groups
        self.names = tuple(self.algorithm.init(torch.zeros(1, 1, dtype=torch.float64)))
        self.blocks = 1 + len(self.names)
        self.rows = self.blocks * self.members  # of a group
        self.variants = 1 if curvature is None else curvature.shape[1]
        self._curvature = None
        if curvature is not None:
            self._curvature = torch.from_numpy(curvature).repeat(groups, 1)
        self._mix = DenseMix(topology)
        self._center = center
        self._shift = shift
        self._start = (topology.period or 1) * algorithm.period  # `directions` goes back from it

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        topology: Topology,
        curvature: np.ndarray | None = None,
        center: bool = True,
    ) -> LinearMap:
        """The nodes of a topology, or the modes of their disagreement: on static symmetric weights
        these do not meet, so that each is a node of its own."""
        groups = 1
        if center and topology.static and topology.symmetric and algorithm.period == 1:
            modes = np.sort(topology.eigenvalues(0).numpy())[:-1]
            groups = len(modes)
            weights = SparseWeights(np.arange(groups + 1), np.arange(groups), modes)
            topology = Topology("modes", groups, 1, lambda step: weights)
            curvature = None if curvature is None else curvature[:1]
        return cls(algorithm, topology, groups, curvature, center=center)

    @classmethod
    def side_by_side(
        cls,
        algorithm: Algorithm,
        topology: Topology,
        runs: int,
        apart: int,
        first: int,
        curvature: np.ndarray | None = None,
        center: bool = True,
    ) -> LinearMap:
        """Several runs at once, on weights of steps `first`, `first` + `apart`, ... and so on."""
        joint = _side_by_side(topology, runs, apart)
        shift = first - algorithm.period
        return cls(algorithm, joint, runs, curvature, center=center, shift=shift)

    def step(self, y: Tensor, index: int, push: Tensor | None = None) -> Tensor:
        """One step of everything in y, (blocks, nodes, columns), with a gradient added to h x."""
        return self._centered(self._step(y, index, push))

    @torch.no_grad()
    def _step(self, y: Tensor, index: int, push: Tensor | None = None) -> Tensor:
        """The same where an average that rounding lets in is taken out later."""
        y = y.clone()
        x, state = y[0], dict(zip(self.names, y[1:], strict=True))
        g = torch.zeros_like(x) if push is None else push
        if self._curvature is not None:
            shape = (self.nodes, self.variants, -1)
            g = torch.addcmul(g.reshape(shape), self._curvature[:, :, None], x.view(shape))
            g = g.view_as(x)
        g = g if self._gain == 1 else g * self._gain
        here = Step(index=self._start + index, lr=1.0)
        message = self.algorithm.message(x, g, state, here)
        self.algorithm.update(x, g, self._mixed(message, here.index), state, here)
        return y

    def _mixed(self, message: Message, index: int) -> Message:
        reach = self.algorithm.reach(index)
        if reach is not Reach.EVERYONE or self.groups == 1:
            return self._mix(message, index + self._shift, reach)
        if isinstance(message, tuple):
            return tuple(self._group_mean(part[None])[0] for part in message)
        return self._group_mean(message[None])[0]

    def _group_mean(self, y: Tensor) -> Tensor:
        """Every node of y, (blocks, nodes, columns), with the average of its group."""
        apart = y.reshape(len(y), self.groups, self.members, -1)
        return apart.mean(2, keepdim=True).expand_as(apart).reshape(y.shape)

    def _centered(self, y: Tensor) -> Tensor:
        return y - self._group_mean(y) if self._center and self.members > 1 else y

    def matrix(self, gradients: Tensor, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return what steps make of every state of a group, and of these gradients without one.

        The gradients of all groups are (steps, nodes of a group, columns). Returned are
        (groups, variants, rows, rows) and (groups, variants, rows, columns).
        """
        columns = self.rows + gradients.shape[2]
        y = torch.eye(self.rows, columns, dtype=torch.float64).view(self.blocks, self.members, -1)
        y = self._centered(y.repeat(1, self.groups, self.variants))
        for index, gradient in enumerate(gradients, start=first):
            push = torch.nn.functional.pad(gradient, (self.rows, 0))
            y = self.step(y, index, push.repeat(self.groups, self.variants))
        y = y.view(self.blocks, self.groups, self.members, self.variants, columns)
        made = y.permute(1, 3, 0, 2, 4).reshape(self.groups, self.variants, self.rows, columns)
        return made[..., : self.rows].numpy(), made[..., self.rows :].numpy()

    def radii(self, period: int) -> np.ndarray:
        """The spectral radius over a period of each variant, (variants,).

        A centered map has no state that a run cannot reach. Of others, what no gradient changes is
        left out, such as the sum over the nodes that D2 and GT keep at zero, which has an
        eigenvalue of 1.
        """
        random = torch.Generator().manual_seed(0)
        shape = (period, self.members, _DIRECTIONS)
        matrix, pushed = self.matrix(torch.randn(shape, generator=random, dtype=torch.float64))
        if self._center:
            return np.abs(np.linalg.eigvals(matrix)).max((0, 2))
        pairs = zip(matrix[0], pushed[0], strict=True)
        return np.array([_radius(one, start) for one, start in pairs])

    def mean_square_cycle(self, period: int) -> float:
        """The mean square of the model over the cycle it settles in under constant gradients of
        mean square 1."""
        gradient = torch.eye(self.members, dtype=torch.float64)
        gradient -= 1 / self.members if self.members > 1 else 0.0
        matrix, pushed = self.matrix(gradient.expand(period, -1, -1))
        settled = np.linalg.solve(np.eye(self.rows) - matrix, pushed)
        y = torch.from_numpy(settled).view(self.groups, self.blocks, self.members, -1)
        y = y.transpose(0, 1).reshape(self.blocks, self.nodes, -1)
        total = 0.0
        for index in range(period):
            y = self.step(y, index, gradient.repeat(self.groups, 1))
            total += float(y[0].square().sum())
        return total / period / (self.groups * float(gradient.square().sum()))

    def mean_square_run(self, settle: int, steps: int) -> float:
        """The same from a run with random gradients, for weights that never repeat."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(1, self.nodes, _DIRECTIONS, generator=generator, dtype=torch.float64)
        gradient = self._centered(drawn.repeat(1, 1, self.variants))[0]
        y = torch.zeros(self.blocks, *gradient.shape, dtype=torch.float64)
        total = 0.0
        for index in range(settle + steps):
            y = self._step(y, index, gradient)
            total += float(self._centered(y)[0].square().sum()) if index >= settle else 0.0
        return total / steps / float(gradient.square().sum())

    def impulse(self, steps: int) -> np.ndarray:
        """Return how far one node's model moves in each step after a gradient of 1 in the first."""
        period = self.algorithm.period
        one = torch.ones(1, 1, 1, dtype=torch.float64)
        each = [self.matrix(one, first=index) for index in range(min(period, steps))]
        y = each[0][1][0, 0, :, 0]
        moved = [-y[0]]
        for index in range(1, steps):
            following = each[index % period][0][0, 0] @ y
            moved.append(y[0] - following[0])
            y = following
        return np.array(moved)

    def log_growth(self, settle: int, steps: int) -> np.ndarray:
        """The logarithm of the growth per step of each group and variant, (groups, variants)."""
        y = self.directions()
        total = torch.zeros(self.groups, self.variants, dtype=torch.float64)
        for index in range(settle + steps):
            y = self._step(y, index)
            if index == settle - 1 or index % _RESCALE == 0 or index == settle + steps - 1:
                apart = self._centered(y).view(
                    self.blocks, self.groups, -1, self.variants, _DIRECTIONS
                )
                size = apart.square().sum((0, 2, 4)).sqrt_()
                y = (apart / size.clamp(min=1e-280)[:, None, :, None]).view(y.shape)
                if index >= settle:
                    total += torch.where(size > 1e-280, size, 0.0).log()
        return (total / steps).numpy()

    def feeds_back(self) -> bool:
        """Return True if buffers that were empty are so no longer after a step without gradient."""
        y = self.directions()
        y[1:] = 0.0
        return any(bool((self.step(y, index)[1:] != 0).any()) for index in range(2))

    def directions(self) -> Tensor:
        """Random states that a run can reach, (blocks, nodes, variants * directions).

        Centered maps reach all; others what random gradients lead to: where a method keeps a sum
        over the nodes at zero, as D2 and GT do, a state in which it is not is no state of a run.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (self.blocks, self.nodes, _DIRECTIONS)
        y = torch.randn(shape, generator=generator, dtype=torch.float64).repeat(1, 1, self.variants)
        if self._center:
            return self._centered(y)
        push, y = y[0], torch.zeros_like(y)
        for index in range(-self.algorithm.period, 0):
            y = self.step(y, index, push)
        return y


@lru_cache(maxsize=16)
def _side_by_side(topology: Topology, runs: int, apart: int) -> Topology:
    """`runs` networks in one, so many steps `apart`, put together once for all methods."""
    weights = partial(_block_diagonal, _drawn(topology), [run * apart for run in range(runs)])
    rule = lru_cache(maxsize=_KEPT // topology.num_nodes // runs)(weights)
    return Topology("side by side", topology.num_nodes * runs, None, rule)


@lru_cache(maxsize=1)
def _drawn(topology: Topology) -> Topology:
    """The same random weights, each drawn once for all runs and methods."""
    rule = lru_cache(maxsize=_KEPT // topology.num_nodes)(topology.rule)
    return replace(topology, rule=rule)


def _block_diagonal(topology: Topology, shifts: list[int], step: int) -> SparseWeights:
    """The weights of several steps as one network, without a link between them."""
    weights = [topology.sparse(step + shift) for shift in shifts]
    entries = np.cumsum([0, *(len(w.columns) for w in weights)])
    starts = [w.starts[:-1] + before for w, before in zip(weights, entries, strict=False)]
    columns = [w.columns + i * topology.num_nodes for i, w in enumerate(weights)]
    return SparseWeights(
        np.concatenate([*starts, entries[-1:]]),
        np.concatenate(columns),
        np.concatenate([w.values for w in weights]),
    )


def _radius(matrix: np.ndarray, start: np.ndarray) -> float:
    """The largest |eigenvalue| on the span of start, matrix @ start, ...: what start can reach."""
    basis = np.zeros((len(start), 0))
    new = _beyond(basis, start)
    while new.shape[1]:
        basis = np.concatenate([basis, new], axis=1)
        new = _beyond(basis, matrix @ new)
    return float(np.abs(np.linalg.eigvals(basis.T @ matrix @ basis)).max(initial=0.0))


def _beyond(basis: np.ndarray, new: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what `new` adds to a basis; no columns if that is rounding."""
    before = np.linalg.norm(new, axis=0).max()
    for _ in range(2):  # twice is enough
        new = new - basis @ (basis.T @ new)
    directions, sizes, _ = np.linalg.svd(new, full_matrices=False)
    return directions[:, sizes > 1e-9 * before]
