"""The samples of a node at a step, a pure function of the seed, the step and the shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.data.base import Source

_ORDER, _AUGMENTATION = 2, 3  # separate streams of random numbers; sharding has 1


@dataclass(frozen=True, eq=False)
class Batches:
    """Each node walks its shard in an endless stream of permutations, a new one every pass.

    Batch k is the positions from k b up to (k + 1) b of that stream: all batches have the same
    size, each pass takes every sample of the shard once, and none is left out when shards differ
    in size. Any step can be asked for, so a run resumed at step k sees what it would have seen.

    A run whose nodes come and go has one shard, the whole set, and counts its batches instead of
    its steps: `indices(number, 0)` is the batch of whoever takes the `number`-th.

    >>> batches = Batches([torch.arange(6), torch.arange(6, 10)], batch_per_node=2, seed=0)
    >>> sorted(torch.cat([batches.indices(step, node=1) for step in (0, 1)]).tolist())
    [6, 7, 8, 9]
    """

    shards: Sequence[Tensor]
    batch_per_node: int
    seed: int
    _passes: dict[int, tuple[int, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which all nodes together take as many samples as there are, rounded down."""
        return max(1, sum(map(len, self.shards)) // (len(self.shards) * self.batch_per_node))

    def indices(self, step: int, node: int) -> Tensor:
        """Return the samples of `node` at `step`, (batch_per_node,) int64, as indices of the whole
        set."""
        size = len(self.shards[node])
        first, last = step * self.batch_per_node, (step + 1) * self.batch_per_node
        pieces = []
        while first < last:
            number, start = divmod(first, size)
            pieces.append(self._pass(node, number)[start : start + last - first])
            first += len(pieces[-1])
        return torch.cat(pieces)

    def load(self, data: Source, step: int, node: int) -> Any:
        """Return what `data` makes of the samples of `node` at `step`."""
        return data.train_batch(self.indices(step, node), self.generator(step, node))

    def generator(self, step: int, node: int) -> torch.Generator:
        """Return the random generator for the augmentation of this batch."""
        (seed,) = np.random.SeedSequence([_AUGMENTATION, self.seed, step, node]).generate_state(1)
        return torch.Generator().manual_seed(int(seed))

    def _pass(self, node: int, number: int) -> Tensor:
        """Return a node's shard in the order of its pass `number`; the latest one is kept."""
        kept = self._passes.get(node)
        if kept is None or kept[0] != number:
            draw = np.random.default_rng([_ORDER, self.seed, node, number])
            shard = self.shards[node]
            order = shard[torch.from_numpy(draw.permutation(len(shard)))]
            kept = self._passes[node] = (number, order)
        return kept[1]
