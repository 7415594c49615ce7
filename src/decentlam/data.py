"""Data of a node: `ResumableLoader` is a DataLoader whose position can be saved; `Deal` deals
batches to the members of an elastic run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler


class ResumableLoader(DataLoader[Any]):
    """A DataLoader over this node's share of a data set that can resume in the middle of an epoch.

    It shards the data with a DistributedSampler and calls `set_epoch`. Each `for` over the loader
    is one epoch, counted in `loader.epoch`. Pass the loader to `save_checkpoint` and
    `load_checkpoint`: the first `for` after loading yields the rest of the epoch in which the
    checkpoint was saved, without reading the samples before.

    Args:
        dataset: A data set with `__len__` and `__getitem__`.
        batch_size: The number of samples per batch on this node.
        shuffle: Draw a new order in every epoch, from `seed` and the number of the epoch.
        seed: The seed of the order and of random numbers in workers.
        drop_last: Drop the last batch if it is not full.
        sampler: A sampler to use instead. It must repeat its order for the same epoch.
        options: num_workers, collate_fn, pin_memory and so on, as for DataLoader.

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
            rank, size = _rank_and_size()
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
        self._check_rank()
        if self._open:  # the last `for` was left early
            self.epoch, self.batches = self.epoch + 1, 0
        self._open = True
        self.batch_sampler.begin(self.epoch, self.batches)  # type: ignore[union-attr]
        if self._own_generator:
            rank, size = _rank_and_size()
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

    def _check_rank(self) -> None:
        sampler = self.sampler
        if isinstance(sampler, DistributedSampler):
            given, here = (sampler.rank, sampler.num_replicas), _rank_and_size()
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


def _rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@dataclass(frozen=True)
class Change:
    """The effect of one change of members; all of them together say who had which samples."""

    step: int  # the first that the new members take together
    size: int  # members from then on
    lost: tuple[int, ...] = ()  # nodes among the members before that are gone
    since: int = 0  # the first step from which on their batches are dealt again
    skipped: tuple[tuple[int, int], ...] = ()  # (step, node) that a member before skipped

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Change:
        """Return the change of which JSON has made lists."""
        skipped = tuple((step, node) for step, node in content["skipped"])
        return cls(
            content["step"], content["size"], tuple(content["lost"]), content["since"], skipped
        )


@dataclass(frozen=True)
class Place:
    """The place of a process at its next step."""

    step: int
    node: int
    history: tuple[Change, ...]  # of the members up to this step


@dataclass(frozen=True)
class Deal:
    """Batches of sample indices for the members of an elastic run.

    Every pass over the data is a permutation, and in each step every node takes the next batch of
    it. If a member is lost, or skips steps to catch up, the others take its remaining batches
    first. Only the batch with which a node was lost is not seen in that pass.

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
        """Return the samples that a node takes at a step, (batch,) int64."""
        return self.batch_at(self.position(place))

    def batch_at(self, first: int) -> Tensor:
        """Return the batch that begins at this position of the stream."""
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
        """Return where in the stream that batch begins."""
        now, base, owed = place.history[0], 0, list[int]()
        for change in place.history[1:]:
            if change.step > place.step:
                break
            turns = [
                (step, node)
                for step in range(max(change.since, now.step), change.step)
                for node in change.lost
            ]
            missed = [
                self._begin(now, base, owed, step, node) for step, node in (*turns, *change.skipped)
            ]
            taken = (change.step - now.step) * now.size
            base += max(0, taken - len(owed)) * self.batch
            now, owed = change, owed[taken:] + missed
        return self._begin(now, base, owed, place.step, place.node)

    def _begin(self, change: Change, base: int, owed: Sequence[int], step: int, node: int) -> int:
        """Members first take what is owed, then what follows in the stream."""
        turn = (step - change.step) * change.size + node
        return owed[turn] if turn < len(owed) else base + (turn - len(owed)) * self.batch


@lru_cache(maxsize=2)  # a batch may end in the next pass
def _permutation(samples: int, seed: int, number: int) -> Tensor:
    """Return the order of the samples in one pass; of a large data set it takes long to draw."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(samples, generator=generator)
