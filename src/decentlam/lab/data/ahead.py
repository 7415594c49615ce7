"""Items that are costly to make, made in this process or ahead of time by others."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Item = TypeVar("Item")


def ahead(items: Dataset[Item], length: int, workers: int) -> Generator[Item, None, None]:
    """items[0] to items[length - 1] in order; with `workers` > 0 that many processes make them.

    Closing or dropping the generator stops the processes, and so does a failure in one of them,
    which is raised here as it was there.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"workers must be a whole number of 0 or more, got {workers!r}")
    if not workers:
        return (items[k] for k in range(length))
    return _by_others(_Outcomes(items, length), workers)


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


def _by_others(outcomes: _Outcomes[Item], workers: int) -> Generator[Item, None, None]:
    loader: DataLoader[Item | Exception] = DataLoader(
        outcomes,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        # The loader draws a seed for its workers, and would draw it from the global generator,
        # which a run without workers leaves alone.
        generator=torch.Generator(),
    )
    with _deaf_to_sigterm():
        iterator = iter(loader)
    try:
        for outcome in iterator:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
    finally:
        del iterator, loader  # the last references: this is what stops the workers


@contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    """Around the start of workers, who inherit it. Whoever stops a job may signal all its
    processes, but the last step needs its data; workers end with the loader, or with the process
    that they work for."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_it_is(item: Item) -> Item:
    return item
