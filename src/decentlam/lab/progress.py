"""Progress of a long command: a line on stderr every ten seconds, with the time left."""

from __future__ import annotations

import sys
import time

from decentlam.lab.formatting import duration

EVERY_SECONDS = 10.0


class Progress:
    """Prints how much is done, the time left at this pace, and the current item."""

    def __init__(self, what: str, done: int = 0) -> None:
        self._what, self._first = what, done  # a resumed run begins in the middle
        self._begun = self._said = time.monotonic()

    def update(self, done: int, total: int, doing: str, now: bool = False) -> None:
        """Print a line if the last one is ten seconds old, or `now`."""
        if now or time.monotonic() - self._said >= EVERY_SECONDS:
            self._said = time.monotonic()
            text = self.line(done, total, doing, self._said - self._begun)
            print(text, file=sys.stderr, flush=True)

    def line(self, done: int, total: int, doing: str, seconds: float) -> str:
        parts = [f"{done:,} of {total:,}"]
        if done > self._first:
            left = seconds / (done - self._first) * (total - done)
            parts += [f"about {duration(left)} left"] if left else []
        return f"{self._what} {', '.join(parts)}  {doing}"
