"""Ctrl-C: the first asks a run to stop after a step, the second ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from decentlam.lab.signals import handled_by
from decentlam.lab.train.engines import Engine

_LOOK_SECONDS = 1.0  # between two looks whether any process was asked to stop
_SAME_SECONDS = 1.0  # launchers pass one Ctrl-C on several times


class Stop:
    """A request to stop this process; SIGINT and SIGTERM count while it listens."""

    def __init__(self, launched: bool = False, notify: Callable[[], object] | None = None) -> None:
        self.requested = False
        self.forward: Callable[[], object] | None = None  # tells whoever does the work
        self._notify = notify
        self._same_seconds = _SAME_SECONDS if launched else 0.0
        self._first = 0.0
        self._process = os.getpid()

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        with handled_by(self._on_signal, signal.SIGINT, signal.SIGTERM):
            yield self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader's, with a copy of this handler
            return
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first = True, now
            if self.forward is not None:
                self.forward()
            if self._notify is not None:
                self._notify()
        elif now - self._first >= self._same_seconds:
            raise KeyboardInterrupt


class Agreement:
    """Lets all processes stop after the same step.

    A node must not leave while a neighbor waits for its next message, so the wish travels in an
    all-reduce. One per step would slow the run down; instead they are a second apart, at steps
    that all processes work out from the same numbers (the highest of each: no rounding). The gap
    at most doubles from one to the next: a fast step may be followed by a slow evaluation.
    """

    def __init__(self, engine: Engine, asked: Callable[[], bool]) -> None:
        self._highest, self._asked = engine.highest, asked
        self._alone = engine.alone
        self._looked, self._at, self._next = time.perf_counter(), 0, 0
        self._gap = 1

    def stop_after(self, step: int) -> bool:
        """Return whether to stop now that `step` steps are done; the same answer on all
        processes."""
        if step < self._next:
            return False
        now = time.perf_counter()
        each = (now - self._looked) / max(1, step - self._at)
        asked, slowest = self._highest([float(self._asked()), each])
        fitting = 1 if self._alone else int(_LOOK_SECONDS / max(slowest, 1e-6))
        self._gap = max(1, min(2 * self._gap, fitting))
        self._looked, self._at, self._next = time.perf_counter(), step, step + self._gap
        return asked > 0
