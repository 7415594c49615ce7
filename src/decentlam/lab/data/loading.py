"""Batches for training, made in this process or ahead of time by loading processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
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
    load_step = partial(_load_step, data, batches, nodes, first_step)
    return load_items(load_step, last_step - first_step, workers)


def _load_step(
    data: Source, batches: Batches, nodes: Sequence[int], first_step: int, k: int
) -> StepBatches:
    return [batches.load(data, first_step + k, node) for node in nodes]


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
class _Outcomes(Dataset[Item | Exception], Generic[Item]):
    """The items, or the exceptions that were raised instead of them. The loader's own handling puts
    a traceback into the message and keeps the workers alive as long as the exception lives."""

    load: Callable[[int], Item]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Item | Exception:
        try:
            return self.load(k)
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
    """Keep a worker alive when a scheduler signals all processes of a job: the last step needs its
    data. Workers end with the loader, or with the process that they work for."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _unchanged(item: Item) -> Item:
    return item
