"""A handler for signals, for as long as a block lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Send these signals to the handler; only the main thread may ask for that, others do not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
