"""What the loop and the nodes ask of a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decentlam.algorithms import Algorithm
from decentlam.topology import Topology

Batch = Any  # of one node, as `train_batch` makes it
Outcome = Any  # what a model did on a test batch; plain values that processes can send each other
Numbers = dict[str, float | None]


class SimulatedNodes(Protocol):
    """All nodes' models in one process."""

    @property
    def x(self) -> Tensor:
        """All parameters that are trained, (n, d)."""

    def step(self, batches: Sequence[Batch], lr: float, micro_batch: int | None) -> Tensor:
        """One step of all nodes on their batches; returns their losses before it, (n,)."""

    def node(self, rank: int) -> nn.Module: ...

    def averaged(self) -> nn.Module: ...

    def consensus_distance(self) -> float: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


class Task(Protocol):
    """What is learned: from data to batches, from a batch to a loss, from a model to its scores."""

    @property
    def main(self) -> str:
        """The score that tells the most, as records name it."""

    @property
    def labels(self) -> Tensor:
        """One for each training sample, (N,): shards are sorted by them."""

    @property
    def shapes(self) -> Tensor | None:
        """The group of each training sample, (N,), if samples of a batch should be of one."""

    @property
    def notes(self) -> list[str]:
        """What a user should know of the data before training starts."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch: ...

    def pieces(self, batch: Batch, size: int | None) -> list[tuple[Batch, float]]:
        """The batch in pieces of so many samples, each with its share of them."""

    def model(self) -> nn.Module:
        """The model at its start, the same on every node."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the samples, one number to call `backward` on."""

    def simulated(self, algorithm: Algorithm, network: Topology) -> SimulatedNodes:
        """All nodes in this process."""

    def settle(self, average: nn.Module) -> None:
        """Makes the averaged model ready to be scored."""

    def test_batches(self, workers: int) -> Iterator[Any]: ...

    def score(self, model: nn.Module, batch: Any) -> Outcome:
        """What the model does on a test batch; it is left in evaluation mode."""

    def numbers(self, outcomes: Sequence[Outcome]) -> Numbers:
        """The scores of a model from what it did on all test batches, in any order."""

    def illustrate(self, directory: Path, outcomes: Sequence[Outcome]) -> None:
        """Writes examples of what the averaged model does, for the report."""


def record(task: Task, averaged: Numbers, nodes: Sequence[Numbers], distance: float) -> Numbers:
    """The numbers of an evaluation record: of the averaged model, and of the nodes' own models."""

    def mean(name: str) -> float | None:
        values = [own[name] for own in nodes]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(values) else None

    main = [own[task.main] or 0.0 for own in nodes]
    return {
        **{f"averaged_{name}": value for name, value in averaged.items()},
        **{f"nodes_{name}": mean(name) for name in averaged},
        f"nodes_{task.main}_min": min(main),
        f"nodes_{task.main}_max": max(main),
        "consensus_distance": distance,
    }
