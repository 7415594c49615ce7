"""Batches for training, made in this process or ahead of time by loading processes."""

from __future__ import annotations

import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from decentlam.lab.data.base import Source
from decentlam.lab.data.batches import Batches

Item = TypeVar("Item")
StepBatches = list[Any]  # the batch of each node


def load_batches(
    data: Source,
    batches: Batches,
    nodes: Sequence[int],
    first_step: int,
    last_step: int,
    workers: int = 0,
) -> Generator[StepBatches, None, None]:
    """Load what `data.train_batch` makes for each of the nodes, at steps first to last - 1.

    With `workers` > 0 that many processes load ahead, a whole step each; the values are the same.
    It pays where images are decoded (imagenet). What is in memory is faster without.
    """
    steps = _Steps(data, batches, tuple(nodes), first_step)
    return load_items(steps, last_step - first_step, workers)


@dataclass(frozen=True, eq=False)
class _Steps(Dataset[StepBatches]):
    """A data set whose items are whole steps."""

    data: Source
    batches: Batches
    nodes: tuple[int, ...]
    first_step: int

    def __getitem__(self, item: int) -> StepBatches:
        step = self.first_step + item
        return [self.batches.load(self.data, step, node) for node in self.nodes]


def load_items(items: Dataset[Item], length: int, workers: int) -> Generator[Item, None, None]:
    """Load items[0] to items[length - 1] in order; with `workers` > 0 that many processes make
    them.

    Closing or dropping the generator stops the processes, and so does a failure in one of them,
    which is raised here as it was there.
    """
    if not workers:
        return (items[k] for k in range(length))
    return _from_processes(_Outcomes(items, length), workers)


@dataclass(frozen=True, eq=False)
class _Outcomes(Dataset[Item | Exception], Generic[Item]):
    """The items, or what went wrong. The loader's own way with exceptions wraps a traceback into
    the message and leaves the workers running for as long as somebody holds the exception."""

    items: Dataset[Item]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, k: int) -> Item | Exception:
        try:
            return self.items[k]
        except Exception as error:
            return error


def _from_processes(outcomes: _Outcomes[Item], workers: int) -> Generator[Item, None, None]:
    loader: DataLoader[Item | Exception] = DataLoader(
        outcomes,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        # The loader draws a seed for its workers, and would draw it from the global generator,
        # which a run without workers leaves alone.
        generator=torch.Generator(),
        worker_init_fn=_ignore_sigterm,
    )
    iterator = iter(loader)
    try:
        for outcome in iterator:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
    finally:
        del iterator, loader  # the last references: this is what stops the workers


def _ignore_sigterm(worker: int) -> None:
    """Whoever stops a job may signal all its processes, but the last step needs its data; workers
    end with the loader, or with the process that they work for."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _unchanged(item: Item) -> Item:
    return item
