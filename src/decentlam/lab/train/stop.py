"""Ctrl-C: the first asks a run to stop after a step, the second ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from decentlam.lab.signals import handled_by

_SAME_SECONDS = 1.0  # launchers pass one Ctrl-C on several times


class Stop:
    """A request to stop this process; SIGINT and SIGTERM count while it listens."""

    def __init__(self, launched: bool = False, notify: Callable[[], object] | None = None) -> None:
        self.requested = False
        self.forward: Callable[[], object] | None = None  # tells those that train
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
