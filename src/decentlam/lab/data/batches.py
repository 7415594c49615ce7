"""Which samples a node takes at a step: a pure function of the seed, the step and the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.grouping import arranged

_ORDER, _AUGMENTATION = 2, 3  # separate streams of random numbers; sharding has 1


@dataclass(frozen=True, eq=False)
class Batches:
    """Each node walks its shard in an endless stream of permutations, a new one every pass.

    Batch k is the positions from k b up to (k + 1) b of that stream: all batches have the same
    size, each pass takes every sample of the shard once, and none is left out when shards differ
    in size. Any step can be asked for, so a run resumed at step k sees what it would have seen.

    With `groups`, the group of each sample of the whole set, each run of `piece` samples of a node
    is of one group where that is possible: images of like shape need little padding.

    >>> batches = Batches([torch.arange(6), torch.arange(6, 10)], batch_per_node=2, seed=0)
    >>> sorted(torch.cat([batches.indices(step, node=1) for step in (0, 1)]).tolist())
    [6, 7, 8, 9]
    """

    shards: Sequence[Tensor]
    batch_per_node: int
    seed: int
    groups: Tensor | None = None  # (N,)
    piece: int = 1
    _passes: dict[int, tuple[int, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        empty = [node for node, shard in enumerate(self.shards) if not len(shard)]
        if empty or not self.shards:
            raise ValueError(f"every node needs samples; nodes without any: {empty or 'all'}")
        for name, value, least in (
            ("batch_per_node", self.batch_per_node, 1),
            ("seed", self.seed, 0),
            ("piece", self.piece, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of {least} or more, got {value!r}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which all nodes together take as many samples as there are, rounded down."""
        return max(1, sum(map(len, self.shards)) // (len(self.shards) * self.batch_per_node))

    def indices(self, step: int, node: int) -> Tensor:
        """The samples of `node` at `step`, (batch_per_node,) int64, as indices of the whole set."""
        self._check(step, node)
        size = len(self.shards[node])
        first, last = step * self.batch_per_node, (step + 1) * self.batch_per_node
        pieces = []
        while first < last:
            number, start = divmod(first, size)
            pieces.append(self._pass(node, number)[start : start + last - first])
            first += len(pieces[-1])
        return torch.cat(pieces)

    def generator(self, step: int, node: int) -> torch.Generator:
        """A generator of its own for the augmentation of this batch."""
        self._check(step, node)
        (seed,) = np.random.SeedSequence([_AUGMENTATION, self.seed, step, node]).generate_state(1)
        return torch.Generator().manual_seed(int(seed))

    def _check(self, step: int, node: int) -> None:
        if step < 0 or not 0 <= node < len(self.shards):
            raise ValueError(
                f"steps count from 0 and nodes from 0 to {len(self.shards) - 1}; there is no "
                f"step {step} of node {node}"
            )

    def _pass(self, node: int, number: int) -> Tensor:
        """A node's shard in the order of its pass `number`; the latest one is kept."""
        kept = self._passes.get(node)
        if kept is None or kept[0] != number:
            draw = np.random.default_rng([_ORDER, self.seed, node, number])
            shard = self.shards[node]
            order = shard[torch.from_numpy(draw.permutation(len(shard)))]
            if self.groups is not None:
                order = arranged(order, self.groups[order], self.piece, number * len(shard), draw)
            kept = self._passes[node] = (number, order)
        return kept[1]
