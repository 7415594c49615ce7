"""The batches of a run of steps, one per node, loaded in this process or ahead by others."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from decentlam.lab.data.ahead import ahead
from decentlam.lab.data.batches import Batches

Step = list[Any]  # the batch of each node


class Source(Protocol):
    """What batches are made of."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Any: ...


def feed(
    data: Source,
    batches: Batches,
    nodes: Sequence[int],
    first_step: int,
    last_step: int,
    workers: int = 0,
) -> Generator[Step, None, None]:
    """What `data.train_batch` makes for each of the nodes, at steps first to last - 1.

    With `workers` > 0 that many processes load ahead, a whole step each; the values are the same.
    It pays where images are decoded (imagenet). What is in memory is faster without.
    """
    if not nodes or not all(0 <= node < len(batches.shards) for node in nodes):
        raise ValueError(f"nodes must be some of 0 to {len(batches.shards) - 1}, got {list(nodes)}")
    if not 0 <= first_step <= last_step:
        raise ValueError(f"steps from {first_step} up to {last_step} are not 0 <= first <= last")
    steps = _Steps(data, batches, tuple(nodes), first_step, last_step)
    return ahead(steps, len(steps), workers)


@dataclass(frozen=True, eq=False)
class _Steps(Dataset[Step]):
    """A data set whose items are whole steps."""

    data: Source
    batches: Batches
    nodes: tuple[int, ...]
    first_step: int
    last_step: int

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __getitem__(self, item: int) -> Step:
        step = self.first_step + item
        return [
            self.data.train_batch(
                self.batches.indices(step, node), self.batches.generator(step, node)
            )
            for node in self.nodes
        ]
