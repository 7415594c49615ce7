"""Measurements of a run."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.network.network import Network

FIELDS = ("loss", "step_seconds", "data_seconds", "wait_seconds", "bytes_sent")


class Meter:
    """Sums of measurements since the last step record."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums = dict.fromkeys(FIELDS, 0.0)
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the run began, or was resumed."""
        return time.perf_counter() - self._begun

    def add(self, losses: Tensor, **values: float) -> None:
        self.steps += 1
        self._sums["loss"] += losses.double().mean().item()
        for name, value in values.items():
            self._sums[name] += value

    def take(self, network: Network, asked_to_stop: bool) -> tuple[dict[str, float], bool]:
        """Return the means per step and process, and whether any process was asked to stop; start
        anew. All processes get the same."""
        values = [*(self._sums[name] / self.steps for name in FIELDS), float(asked_to_stop)]
        if network.num_processes > 1:
            tensor = torch.tensor(values, dtype=torch.float64, device=network.control_device)
            with network.errors():
                dist.all_reduce(tensor, group=network.group)
            values = (tensor / network.num_processes).tolist()
        self.steps, self._sums = 0, dict.fromkeys(FIELDS, 0.0)
        *means, asked = values
        found = dict(zip(FIELDS, means, strict=True))
        found["compute_seconds"] = (
            found["step_seconds"] - found["data_seconds"] - found["wait_seconds"]
        )
        return found, asked > 0
