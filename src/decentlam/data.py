"""ResumableLoader: a DataLoader of this node's samples that goes on where an epoch stood."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler


class ResumableLoader(DataLoader[Any]):
    """torch's DataLoader over this node's share of a data set, with a position that can be saved.

    A share is what DistributedSampler gives: all samples are dealt out to the processes, anew in
    every epoch if shuffled. Each `for` over the loader is one epoch, counted by the loader. Pass
    it to `save_checkpoint` and `load_checkpoint`: the first `for` after loading gives the rest of
    the epoch in which the checkpoint was saved, without reading what was used already.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        batch_size: Samples of this node in a batch.
        shuffle: Draws a new order in every epoch, from `seed` and the number of the epoch.
        seed: Of the order, and of random numbers in workers, which differ by epoch and process.
        drop_last: Leaves out a last batch that is not full.
        sampler: Chooses samples instead; it must give the same order again in the same epoch.
        options: num_workers, collate_fn, pin_memory, ...: as for DataLoader.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(6))
    >>> loader = ResumableLoader(data, batch_size=2, shuffle=False)
    >>> first = next(iter(loader))
    >>> again = ResumableLoader(data, batch_size=2, shuffle=False)
    >>> again.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch, in again]
    [[2, 3], [4, 5]]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Sampler[int] | None = None,
        **options: Any,
    ) -> None:
        if sampler is None:
            rank, size = _place()
            sampler = DistributedSampler(dataset, size, rank, shuffle, seed, drop_last)
        batches = _Batches(sampler, batch_size, drop_last)
        # torch draws a seed for workers at the start of every epoch, also without workers. From
        # the global generator, a resumed epoch would draw once more and dropout would differ.
        self._own_generator = options.get("generator") is None
        if self._own_generator:
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_sampler=batches, **options)
        self._seed = seed
        # Trainers that look for a DistributedSampler, to put one in, find it.
        object.__setattr__(self, "sampler", sampler)
        self.epoch = 0
        self.batches = 0  # of this epoch that were handed out
        self._open = False  # an epoch has begun, and may have been left early

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._check_place()
        if self._open:  # the last `for` was left early
            self.epoch, self.batches = self.epoch + 1, 0
        self._open = True
        self.batch_sampler.begin(self.epoch, self.batches)  # type: ignore[union-attr]
        if self._own_generator:
            rank, size = _place()
            # Another seed in every epoch and process; the hash of numbers is the same everywhere.
            self.generator.manual_seed(hash((self._seed, self.epoch * size + rank)))
        for batch in super().__iter__():
            self.batches += 1  # here, because workers ask for batches ahead of time
            yield batch
        self.epoch, self.batches, self._open = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batches, self._open = state["epoch"], state["batches"], False

    def _check_place(self) -> None:
        sampler = self.sampler
        if isinstance(sampler, DistributedSampler):
            given, here = (sampler.rank, sampler.num_replicas), _place()
            if given != here:
                raise RuntimeError(
                    f"the loader was built for process {given[0]} of {given[1]}, but this is "
                    f"process {here[0]} of {here[1]}: build it when the process group exists, that "
                    "is after decentlam.init(), or in a hook that the trainer calls "
                    "(train_dataloader in Lightning)"
                )


class _Batches(BatchSampler):
    """Batches of indices, from any one of an epoch on."""

    first = 0

    def begin(self, epoch: int, first: int) -> None:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
        self.first = first

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(super().__iter__(), self.first, None)


def _place() -> tuple[int, int]:
    """Rank and number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
