"""How far the exchange reaches into other work, chosen by the user or by measurement.

    "none"      everything happens in step()
    "early"     as "none", but messages that need no gradient leave as the step before ends
    "backward"  messages travel during the rest of backward; early ones are also mixed in it
    "forward"   during backward and the next forward; see `decentlam.runtime.forward`
    "auto"      "none" (or "early") and "backward" for some steps each, then the faster one

When no core is free, overlap only costs; when the processor waits for the network or a GPU, it
hides the wire. The values are the same to the bit in each. Every process chooses for itself, so
"auto" is only for messages that tags keep apart in whatever order they are posted: not for
collectives inside a node, and not for NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Literal

from decentlam.options import Overlap
from decentlam.runtime.freshness import Freshness, Hyper

Mode = Literal["none", "early", "backward", "forward"]

_WATCHED = 3  # first steps, without overlap, that show what the script does with gradients
_BLOCK = 5  # steps in one mode; the first belongs half to the mode before and does not count
_ROUNDS = 3
_WORTH = 0.97  # of the time without overlap that overlap must need at most


class OverlapChoice:
    """The mode of the next step; `least` is what "auto" begins with and compares."""

    def __init__(self, overlap: Overlap | Mode, least: Mode = "none") -> None:
        self.mode: Mode = least if overlap == "auto" else overlap
        self._tried: tuple[Mode, Mode] = (least, "backward")
        self.undecided = overlap == "auto"
        self.reason = ""  # of a choice, in words
        self._steps = 0
        self._last: float | None = None
        self._seconds: dict[Mode, list[float]] = {mode: [] for mode in self._tried}
        self._hypers: Sequence[Hyper] = []  # by group, as backward found them

    @property
    def watching(self) -> bool:
        """Whether the script must be watched: overlap may be tried, and is not under way yet."""
        return self.undecided and self.mode == self._tried[0]

    def watch(self, fresh: Freshness, i: int, hypers: Sequence[Hyper]) -> None:
        """Notes gradient i of a bucket as backward left it, and what the groups say."""
        if not fresh.note_gradient(i):
            self._stay("gradients are accumulated over several backwards")
        self._hypers = self._hypers or hypers

    def judge(self, buckets: Sequence[Freshness], hypers: Sequence[Hyper], scaled: bool) -> None:
        """Decides against overlap if the script changes what the messages are made of."""
        if any(fresh.gradients_changed() for fresh in buckets):
            self._stay("gradients change between backward and step()")
        elif self._hypers not in ([], hypers):
            self._stay("the learning rate changes between backward and step()")
        elif scaled:
            self._stay("a GradScaler looks at the whole gradient")
        self._hypers = []

    def decide(self, mode: Mode, reason: str) -> None:
        self.mode, self.reason, self.undecided = mode, reason, False

    def _stay(self, reason: str) -> None:
        self.decide(self._tried[0], reason)

    def step_ended(self) -> bool:
        """Told at the end of every step; True if the trial ended with it."""
        if not self.undecided:
            return False
        now = time.perf_counter()
        tried = self._steps - _WATCHED
        if tried >= 0 and tried % _BLOCK and self._last is not None:
            self._seconds[self.mode].append(now - self._last)
        self._last = now
        self._steps += 1
        tried = self._steps - _WATCHED
        if tried >= _BLOCK * _ROUNDS * len(self._tried):
            self._decide_by_time()
            return True
        if tried >= 0:
            self.mode = self._tried[tried // _BLOCK % len(self._tried)]
        return False

    def _decide_by_time(self) -> None:
        least, backward = (statistics.median(self._seconds[mode]) for mode in self._tried)
        times = f"a step took {1e3 * least:.1f} ms with {self._tried[0]!r}, "
        times += f"{1e3 * backward:.1f} ms with 'backward'"
        if backward >= _WORTH * least:
            self._stay(times)
        elif self._tried[0] == "none":
            self.decide("backward", f"{times}; 'forward' may hide more and is worth trying")
        else:
            self.decide("backward", times)
