"""What happened since the last step record, and how long the run has taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

FIELDS = ("loss", "step_seconds", "data_seconds", "wait_seconds", "bytes_sent")


class Meter:
    """Sums over steps of this process. It is part of a checkpoint, so that the record around an
    interruption is the one there would have been without it."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums = dict.fromkeys(FIELDS, 0.0)
        self._before = 0.0  # seconds of the run until this process took over
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return how long the run has taken, interruptions left out."""
        return self._before + time.perf_counter() - self._begun

    def add(self, losses: Tensor, **values: float) -> None:
        self.steps += 1
        self._sums["loss"] += losses.double().mean().item()
        for name, value in values.items():
            self._sums[name] += value

    def take(self, mean: Callable[[Sequence[float]], list[float]]) -> dict[str, float]:
        """Return the means per step and node, and start anew; `mean` is over the processes."""
        values = mean([self._sums[name] / self.steps for name in FIELDS])
        self.steps, self._sums = 0, dict.fromkeys(FIELDS, 0.0)
        found = dict(zip(FIELDS, values, strict=True))
        found["compute_seconds"] = (
            found["step_seconds"] - found["data_seconds"] - found["wait_seconds"]
        )
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": dict(self._sums), "seconds": self.seconds}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.steps, self._sums = saved["steps"], dict(saved["sums"])
        self._before, self._begun = saved["seconds"], time.perf_counter()
