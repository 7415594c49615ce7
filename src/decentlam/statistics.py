"""What a step cost, measured at every step because it is nearly free."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class StepStatistics:
    """Of the last finished step."""

    step: int = -1
    wait_seconds: float = 0.0  # the training stood still for messages; "forward": and updates
    exchange_seconds: float = 0.0  # from the first message sent to the last one received
    bytes_sent: int = 0
    skipped: bool = False  # the gradient was left out (overflow, non-finite, no data)
    total_wait_seconds: float = 0.0
    total_bytes_sent: int = 0
    skipped_steps: int = 0
    _begun: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the exchange that was hidden behind other work, 0 to 1."""
        if self.exchange_seconds <= 0:
            return 1.0
        return max(0.0, 1.0 - self.wait_seconds / self.exchange_seconds)

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, step: int, wait_seconds: float, bytes_sent: int, skipped: bool) -> None:
        self.step = step
        self.wait_seconds = wait_seconds
        self.exchange_seconds = time.perf_counter() - self._begun
        self.bytes_sent = bytes_sent
        self.skipped = skipped
        self.total_wait_seconds += wait_seconds
        self.total_bytes_sent += bytes_sent
        self.skipped_steps += skipped
