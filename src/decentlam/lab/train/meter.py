"""Measurements of a run, and the agreement of its processes on when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.network.network import Network

_LOOK_SECONDS = 1.0  # between two looks whether any process was asked to stop
FIELDS = ("loss", "step_seconds", "data_seconds", "wait_seconds", "bytes_sent")


def all_reduced(
    values: Sequence[float], how: dist.ReduceOp.RedOpType, network: Network
) -> list[float]:
    """Return the sum, or the highest, of each value over the processes of the network."""
    if network.num_processes == 1:
        return list(values)
    tensor = torch.tensor(list(values), dtype=torch.float64, device=network.control_device)
    with network.errors():
        dist.all_reduce(tensor, how, group=network.group)
    return [float(value) for value in tensor]


class Meter:
    """Sums of measurements since the last step record. They are part of a checkpoint, so that a
    resumed run writes the same records as an uninterrupted one."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums = dict.fromkeys(FIELDS, 0.0)
        self._before = 0.0  # seconds of the run until this process took over
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken, without interruptions."""
        return self._before + time.perf_counter() - self._begun

    def add(self, losses: Tensor, **values: float) -> None:
        self.steps += 1
        self._sums["loss"] += losses.double().mean().item()
        for name, value in values.items():
            self._sums[name] += value

    def take(self, network: Network) -> dict[str, float]:
        """Return the means per step and process, and start anew."""
        values = [self._sums[name] / self.steps for name in FIELDS]
        sums = all_reduced(values, dist.ReduceOp.SUM, network)
        self.steps, self._sums = 0, dict.fromkeys(FIELDS, 0.0)
        means = [total / network.num_processes for total in sums]
        found = dict(zip(FIELDS, means, strict=True))
        found["compute_seconds"] = (
            found["step_seconds"] - found["data_seconds"] - found["wait_seconds"]
        )
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": dict(self._sums), "seconds": self.seconds}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps, self._sums = saved["steps"], dict(saved["sums"])
        self._before, self._begun = saved["seconds"], time.perf_counter()


class Agreement:
    """Lets all processes stop after the same step.

    A node must not leave while a neighbor waits for its next message, so the wish travels in an
    all-reduce. One per step would slow the run down; instead they are a second apart, at steps
    that all processes work out from the same numbers (the highest of each: no rounding). The gap
    at most doubles from one to the next: a fast step may be followed by a slow evaluation.
    """

    def __init__(self, network: Network, asked: Callable[[], bool]) -> None:
        self._network, self._asked = network, asked
        self._looked, self._at, self._next = time.perf_counter(), 0, 0
        self._gap = 1

    def stop_after(self, step: int) -> bool:
        """Return whether to stop now that `step` steps are done; the same answer on all
        processes."""
        if step < self._next:
            return False
        now = time.perf_counter()
        each = (now - self._looked) / max(1, step - self._at)
        own = [float(self._asked()), each]
        asked, slowest = all_reduced(own, dist.ReduceOp.MAX, self._network)
        alone = self._network.num_processes == 1
        fitting = 1 if alone else int(_LOOK_SECONDS / max(slowest, 1e-6))
        self._gap = max(1, min(2 * self._gap, fitting))
        self._looked, self._at, self._next = time.perf_counter(), step, step + self._gap
        return asked > 0
