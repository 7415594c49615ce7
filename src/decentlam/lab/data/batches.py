"""The samples of a node at a step, and their batches, made here or ahead by other processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_ORDER, _AUGMENTATION = 2, 3  # separate streams of random numbers; sharding has 1
Item = TypeVar("Item")
StepBatches = list[Any]  # the batch of each node


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

    def load(self, data: Any, step: int, node: int) -> Any:
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


def load_batches(
    data: Any, batches: Batches, nodes: Sequence[int], steps: range, workers: int = 0
) -> Generator[StepBatches, None, None]:
    """Load what `data.train_batch` makes for each of the nodes at each of the steps.

    With `workers` > 0 that many processes load ahead, a whole step each; the values are the same.
    It pays where images are decoded (imagenet). What is in memory is faster without.
    """
    return load_items(partial(_load_step, data, batches, nodes, steps), len(steps), workers)


def _load_step(
    data: Any, batches: Batches, nodes: Sequence[int], steps: range, k: int
) -> StepBatches:
    return [batches.load(data, steps[k], node) for node in nodes]


def load_items(
    load: Callable[[int], Item], count: int, workers: int
) -> Generator[Item, None, None]:
    """Yield load(0) to load(count - 1); with `workers` > 0 that many processes call it ahead.

    Closing or dropping the generator stops the processes, and so does a failure in one of them,
    which is raised here as it was there.
    """
    if not workers:
        return (load(k) for k in range(count))
    return _from_processes(_Outcomes(load, count), workers)


@dataclass(frozen=True, eq=False)
class _Outcomes(Dataset[Any]):
    """The items, or the exceptions that were raised instead of them: the loader would put their
    tracebacks into their messages."""

    load: Callable[[int], Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Any:
        try:
            return self.load(k)
        except Exception as error:
            return error


def _from_processes(outcomes: _Outcomes, workers: int) -> Generator[Any, None, None]:
    # The loader draws a seed for its workers, and would draw it from the global generator, which a
    # run without workers leaves alone.
    own = torch.Generator()
    for outcome in DataLoader(
        outcomes, None, num_workers=workers, generator=own, worker_init_fn=_ignore_sigterm
    ):
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


def _ignore_sigterm(worker: int) -> None:
    """Keep a worker alive when a scheduler signals all processes of a job: the last step needs its
    data. Workers end with the loader, or with the process that they work for."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
