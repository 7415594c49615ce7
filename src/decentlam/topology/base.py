"""Topology: who talks to whom, and with which weights, as a pure function of the step."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from decentlam.topology import spectrum
from decentlam.topology.weights import SparseWeights

_CACHED_STEPS = 64
_MOST_NODES = 1_000_000
_SAMPLED_STEPS = 16  # a random topology's properties are checked on this many steps


@dataclass(frozen=True, eq=False)
class Topology:
    """A network of `num_nodes` nodes and its mixing weights W at every step.

    Row i of `weights(step)` has the weights with which node i averages itself and its neighbors:
    x_i+ = sum_j w_ij x_j. A topology needs no process group.

    >>> from decentlam.topology import ring
    >>> net = ring(4)
    >>> net.neighbors(0)
    [1, 3]
    >>> net.weights(0)[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64)
    """

    name: str
    num_nodes: int
    period: int | None  # steps after which the weights repeat; None when they are random
    rule: Callable[[int], SparseWeights]  # step -> W; picklable
    description: str = ""
    # Random pairs: largest eigenvalue off the average of the mean exchange; gives rho exactly.
    pairing: float | None = None
    pairings: int = 1  # that a step averages, drawn independently
    _cache: dict[int, SparseWeights] = field(default_factory=dict, init=False, repr=False)

    def sparse(self, step: int = 0) -> SparseWeights:
        """Return W at `step` as a sparse matrix."""
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"step must be 0 or more, got {number}")
        key = number if self.period is None else number % self.period
        found = self._cache.get(key)  # two threads may ask: what is there may be cleared meanwhile
        if found is None:
            if len(self._cache) >= _CACHED_STEPS:
                self._cache.clear()
            found = self._cache[key] = self.rule(key)
        return found

    def weights(self, step: int = 0) -> Tensor:
        """Return W at `step` as a dense float64 (n, n) tensor."""
        return torch.from_numpy(self.sparse(step).dense())

    def row(self, rank: int, step: int = 0) -> dict[int, float]:
        """Return the weights of node `rank` at `step` as {node: weight}, its own included."""
        if not 0 <= rank < self.num_nodes:
            raise ValueError(f"{self!r} has nodes 0 to {self.num_nodes - 1}; there is no {rank}")
        return self.sparse(step).row(rank)

    def neighbors(self, rank: int, step: int = 0) -> list[int]:
        """Return the nodes from which `rank` receives at `step`."""
        return [j for j in self.row(rank, step) if j != rank]

    def listeners(self, rank: int, step: int = 0) -> list[int]:
        """Return the nodes to which `rank` sends at `step`: its neighbors, unless directed."""
        heard = self.neighbors(rank, step)
        if self.symmetric:
            return heard
        w = self.sparse(step)
        return [int(i) for i in w.rows[w.columns == rank] if i != rank]

    def messages(self, step: int = 0) -> Tensor:
        """Return the number of messages that each node sends at `step`, (n,)."""
        w = self.sparse(step)
        sent = np.bincount(w.columns[w.rows != w.columns], minlength=self.num_nodes)
        return torch.from_numpy(sent)

    def lazy(self, rate: float = 0.5) -> Topology:
        """Return the same network with weights (1 - rate) I + rate W, 0 < rate <= 1.

        At rate 0.5 no eigenvalue is negative.
        """
        if not 0 < rate <= 1:
            raise ValueError(
                f"rate must be in (0, 1], got {rate}; 1 leaves the weights as they are"
            )
        return replace(
            self,
            name=f"lazy({self.name}, {rate:g})",
            rule=partial(_lazy, self.rule, rate),
            description=f"{self.description}, mixed at rate {rate:g}",
        )

    @property
    def static(self) -> bool:
        return self.period == 1

    @cached_property
    def symmetric(self) -> bool:
        """True if W equals its transpose at every step."""
        return all(w.same_as(w.transpose()) for w in self._sampled())

    @cached_property
    def doubly_stochastic(self) -> bool:
        """True if rows and columns of W sum to one at every step: mixing keeps the average."""
        return all(
            np.allclose(np.bincount(side, w.values, self.num_nodes), 1, atol=1e-9)
            for w in self._sampled()
            for side in (w.rows, w.columns)
        )

    @cached_property
    def positive_definite(self) -> bool:
        """True if W is symmetric with positive eigenvalues at every step."""
        return self.symmetric and all(
            float(spectrum.eigenvalues(w).real.min()) > 1e-12 for w in self._sampled()
        )

    def eigenvalues(self, step: int = 0) -> Tensor:
        """Return the eigenvalues of W at `step`, largest first; complex if directed."""
        values = spectrum.eigenvalues(self.sparse(step))
        if self.symmetric:
            return torch.from_numpy(np.sort(values.real)[::-1].copy())
        return torch.from_numpy(values[np.argsort(-np.abs(values))])

    @cached_property
    def rho(self) -> float:
        """The share of the disagreement that one step keeps: 0 is the exact average.

        Static W: max(|lambda_2|, |lambda_n|). Periodic W: spectral radius of one period's product
        off the average, per step. Random W: sqrt of the second eigenvalue of E[W'W].
        """
        if self.exact_after is not None:
            return 0.0
        if self.static:
            return spectrum.second_largest(self.sparse(0))
        if self.period is not None:
            return spectrum.periodic_rho(self._cycle(), self.num_nodes)
        return spectrum.random_rho(self.sparse, self.num_nodes, self.pairing, self.pairings)

    @cached_property
    def exact_after(self) -> int | None:
        """The number of steps from the start of a period that give the exact average.

        None if a whole period does not, or if the weights are random.
        """
        if self.period is None:
            return 1 if self.num_nodes == 1 else None
        return spectrum.exact_after(self._cycle(), self.num_nodes)

    @cached_property
    def max_peers(self) -> int:
        """The most messages that a node sends in a step."""
        return max(int(self.messages(k).max()) for k in self._sampled_steps())

    def fingerprint(self) -> str:
        """Return a short hash of the weights, to check that all nodes have the same network."""
        digest = hashlib.sha256(f"{self.num_nodes} {self.period}".encode())
        for w in self._sampled():
            digest.update(w.columns.tobytes() + np.round(w.values, 12).tobytes())
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        return f"{self.name}({self.num_nodes})"

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cache": {}}

    def _cycle(self) -> Iterable[SparseWeights]:
        return map(self.sparse, range(self.period or 0))

    def _sampled_steps(self) -> range:
        return range(min(self.period or _SAMPLED_STEPS, 4 * _SAMPLED_STEPS))

    def _sampled(self) -> Iterable[SparseWeights]:
        return map(self.sparse, self._sampled_steps())


def _lazy(rule: Callable[[int], SparseWeights], rate: float, step: int) -> SparseWeights:
    return rule(step).lazy(rate)


def check_num_nodes(n: int, name: str, most: int = _MOST_NODES) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise TypeError(f"{name} needs a whole number of nodes, got {n!r}")
    if n < 1:
        raise ValueError(f"{name} needs at least 1 node, got {n}")
    if n > most:
        raise ValueError(f"{name} can have at most {most:,} nodes, got more")
    return int(n)  # numpy's integers lack bit_length
