"""Progress of a long command: a line on stderr every ten seconds, with the time left."""

from __future__ import annotations

import sys
import threading
import time

from decentlam.lab.formatting import duration

EVERY_SECONDS = 10.0


class Progress:
    """Prints a line every ten seconds from a thread of its own, also while nothing is finished."""

    def __init__(self, what: str, total: int, done: int = 0, doing: str = "") -> None:
        self._what, self._total, self._doing = what, total, doing
        self._first = self._done = done  # a resumed run begins in the middle
        self._begun = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._repeat, name="progress", daemon=True).start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        """Print no more lines."""
        self._closed.set()

    def update(self, done: int, total: int, doing: str) -> None:
        """Remember how far it is; the next line says so."""
        self._done, self._total, self._doing = done, total, doing

    def line(self, now: float | None = None) -> str:
        """Return how much is done, the time left at this pace, and the current item."""
        seconds = (time.monotonic() if now is None else now) - self._begun
        parts = [f"{self._done:,} of {self._total:,}"] if self._total else []
        if self._done > self._first:
            left = seconds / (self._done - self._first) * (self._total - self._done)
            parts += [f"about {duration(left)} left"] if left else []
        elif seconds > 1:
            parts.append(f"{duration(seconds)} so far")
        return f"{self._what} {', '.join(parts)}" + (f"  {self._doing}" if self._doing else "")

    def say(self) -> None:
        """Print the line now."""
        print(self.line(), file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        while not self._closed.wait(EVERY_SECONDS):
            self.say()
