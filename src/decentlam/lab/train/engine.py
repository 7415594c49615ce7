"""What the training loop asks of the nodes, whether they are simulated or real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from decentlam.algorithms import Algorithm, always_everyone
from decentlam.checkpoint import Saving
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.tasks.base import Batch, Numbers, Outcome
from decentlam.topology import Topology

KEEP = 2  # checkpoints of a run


@dataclass(frozen=True)
class Cost:
    """What the last step cost a node of this process, in the mean."""

    wait_seconds: float
    bytes_sent: float


@dataclass(frozen=True)
class Evaluation:
    """Scores of the averaged model and of the nodes' own, and what the averaged model did."""

    numbers: Numbers
    averaged: list[Outcome]  # on every test batch


class Engine(Protocol):
    """All nodes of a run, or the one of this process. Methods marked * are for all processes."""

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""

    @property
    def nodes(self) -> Sequence[int]:
        """The nodes of this process: those whose batches `step` is given."""

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""

    @property
    def cost(self) -> Cost: ...

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Trains on a batch for each of `nodes`; returns the losses (len(nodes),) before it.*"""

    def evaluate(self, workers: int) -> Evaluation:
        """The averaged model and every node's own, on the whole test set.*"""

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each value in the mean over all processes.*"""

    def highest(self, values: Sequence[float]) -> list[float]:
        """The highest of each value over all processes.*"""

    def save(self, path: Path, meter: Meter) -> Saving:
        """Writes a checkpoint, in the background.*"""

    def load(self, path: Path, meter: Meter) -> int:
        """Goes back to a checkpoint; returns how many steps had been taken.*"""


def models_sent(algorithm: Algorithm, network: Topology, step: int) -> float:
    """What a node sends at a step, in the mean, in units of one tensor of the model's size."""
    peers = network.messages(step).double().mean().item()
    sent = algorithm.reach(step).messages_sent(network.num_nodes, peers)
    return algorithm.payloads(step) * sent


def traffic(recipe: Recipe, parameters: int, bytes_each: int) -> dict[str, Any]:
    """What run.json says about messages."""
    algorithm, network, _ = recipe.chosen()
    steps = range(16 if network.period is None else network.period)
    sent = sum(models_sent(algorithm, network, step) for step in steps) / len(steps)
    return {
        "message_bytes": algorithm.payloads(0) * parameters * bytes_each,
        "peers": sent / algorithm.payloads(0),
        "rho": None if always_everyone(algorithm) else network.rho,
    }
