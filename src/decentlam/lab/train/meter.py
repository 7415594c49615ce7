"""Measurements of a run."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.network.network import Network

FIELDS = ("loss", "step_seconds", "data_seconds", "wait_seconds", "bytes_sent")


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

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": dict(self._sums), "seconds": self.seconds}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps, self._sums = saved["steps"], dict(saved["sums"])
        self._before, self._begun = saved["seconds"], time.perf_counter()
