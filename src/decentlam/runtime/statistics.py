"""What a step cost, measured at every step because it is nearly free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class StepStatistics:
    """Of the last finished step."""

    step: int = -1
    wait_seconds: float = 0.0  # the training stood still for messages; "forward": and updates
    exchange_seconds: float = 0.0  # from the first message sent to the last one received
    bytes_sent: int = 0
    skipped: bool = False  # the gradient was left out (overflow, non-finite, no data)
    left_out: tuple[int, ...] = ()  # neighbors that were late; see patience_seconds
    total_wait_seconds: float = 0.0
    total_bytes_sent: int = 0
    skipped_steps: int = 0
    total_left_out: int = 0
    missed_steps: int = 0  # that others took while this node was late
    _begun: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the exchange that was hidden behind other work, 0 to 1."""
        if self.exchange_seconds <= 0:
            return 1.0
        return max(0.0, 1.0 - self.wait_seconds / self.exchange_seconds)

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(
        self,
        step: int,
        wait_seconds: float,
        bytes_sent: int,
        skipped: bool,
        left_out: Sequence[int] = (),
        missed: int = 0,
    ) -> None:
        """A step was taken, without the neighbors that it left out; those it missed are skipped."""
        self.step = step
        self.wait_seconds = wait_seconds
        self.exchange_seconds = time.perf_counter() - self._begun
        self.bytes_sent = bytes_sent
        self.skipped = skipped
        self.left_out = tuple(left_out)
        self.total_wait_seconds += wait_seconds
        self.total_bytes_sent += bytes_sent
        self.skipped_steps += skipped
        self.total_left_out += len(left_out)
        self.missed_steps += missed
