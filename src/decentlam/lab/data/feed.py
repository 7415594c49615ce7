"""The batches of a run of steps, stacked over nodes, loaded in this process or ahead by others."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from decentlam.lab.data.ahead import ahead
from decentlam.lab.data.base import Data
from decentlam.lab.data.batches import Batches

Step = tuple[Tensor, Tensor]


def feed(
    data: Data,
    batches: Batches,
    nodes: Sequence[int],
    first_step: int,
    last_step: int,
    workers: int = 0,
) -> Generator[Step, None, None]:
    """Inputs (len(nodes), b, C, H, W) and labels (len(nodes), b) of steps first to last - 1.

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

    data: Data
    batches: Batches
    nodes: tuple[int, ...]
    first_step: int
    last_step: int

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __getitem__(self, item: int) -> Step:
        step = self.first_step + item
        loaded = [
            self.data.train_batch(
                self.batches.indices(step, node), self.batches.generator(step, node)
            )
            for node in self.nodes
        ]
        if len(loaded) == 1:  # one node per process: nothing to copy together
            return loaded[0][0].unsqueeze(0), loaded[0][1].unsqueeze(0)
        return torch.stack([x for x, _ in loaded]), torch.stack([y for _, y in loaded])
