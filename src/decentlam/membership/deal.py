"""Samples dealt to the members of a run whose number changes: nobody's share is lost with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from decentlam.membership.record import Change


@dataclass(frozen=True)
class Place:
    """Where a process stands at its next step."""

    step: int
    node: int
    history: tuple[Change, ...]  # of the members up to this step

    def after(self, past: tuple[Change, ...], step: int) -> Place:
        """The same in a run that began with a checkpoint of this step; `past` was its history."""
        first, *rest = self.history
        return Place(self.step, self.node, (*past, Change(step, first.size), *rest))


@dataclass(frozen=True)
class Deal:
    """Batches from one endless stream of permutations, a pure function of the place.

    In each step every node takes the next batch of the stream. When nodes are lost, the batches
    they had not come to are taken by those who are left, before the stream goes on; only the batch
    a node was lost with is not seen again in that pass.

    >>> deal = Deal(samples=8, batch=2, seed=0)
    >>> everyone = [deal.indices(Place(0, node, (Change(0, 4),))) for node in range(4)]
    >>> sorted(torch.cat(everyone).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    samples: int
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"Deal: {name} must be a whole number of 1 or more, got {value!r}")

    def indices(self, place: Place) -> Tensor:
        """The samples that a node takes at a step, (batch,) int64."""
        return self.batch_at(self.position(place))

    def batch_at(self, first: int) -> Tensor:
        """The batch that begins at this position of the stream."""
        positions = torch.arange(first, first + self.batch)
        passes = positions // self.samples
        parts = [
            _permutation(self.samples, self.seed, number)[
                positions[passes == number] % self.samples
            ]
            for number in passes.unique().tolist()
        ]
        return torch.cat(parts)

    def position(self, place: Place) -> int:
        """Where in the stream that batch begins."""
        base, owed = 0, list[int]()
        dealt = [(place.history[0], base, owed)]  # in each generation: what was owed, then the rest
        for before, change in pairwise(place.history):
            if change.step > place.step:
                break
            turns = [
                (step, node, 1)
                for step in range(max(change.since, before.step), change.step)
                for node in change.lost
            ]
            lost = [
                self._begin(*dealt[-ago], step, node) for step, node, ago in (*turns, *change.owed)
            ]
            taken = (change.step - before.step) * before.size
            base += max(0, taken - len(owed)) * self.batch
            owed = owed[taken:] + lost
            dealt.append((change, base, owed))
        return self._begin(*dealt[-1], place.step, place.node)

    def _begin(self, change: Change, base: int, owed: Sequence[int], step: int, node: int) -> int:
        turn = (step - change.step) * change.size + node
        return owed[turn] if turn < len(owed) else base + (turn - len(owed)) * self.batch


@lru_cache(maxsize=2)  # a batch may end in the next pass
def _permutation(samples: int, seed: int, number: int) -> Tensor:
    """The order of the samples in one pass; of a large data set it takes long to draw."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(samples, generator=generator)
