"""How far the exchange reaches into other work, chosen by the user or by measurement.

    "none"      everything happens in step()
    "backward"  messages travel during the rest of backward
    "forward"   during backward and the next forward; see `decentlam.runtime.forward`
    "auto"      "none" and "backward" for some steps each, then the faster one

When no core is free, overlap only costs; when the processor waits for the network or a GPU, it
hides the wire. The values are the same to the bit in each. Every process chooses for itself, so
"auto" is only for messages that tags keep apart in whatever order they are posted: not for
collectives inside a node, not for NCCL, and not for messages that leave before the gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Literal

from decentlam.options import Overlap
from decentlam.runtime.freshness import Freshness, Hyper

Mode = Literal["none", "backward", "forward"]

_TRIED: tuple[Mode, ...] = ("none", "backward")
_WATCHED = 3  # first steps, without overlap, that show what the script does with gradients
_BLOCK = 5  # steps in one mode; the first belongs half to the mode before and does not count
_ROUNDS = 3
_WORTH = 0.97  # of the time without overlap that overlap must need at most


class OverlapChoice:
    """The mode of the next step."""

    def __init__(self, overlap: Overlap) -> None:
        self.mode: Mode = "none" if overlap == "auto" else overlap
        self.undecided = overlap == "auto"
        self.reason = ""  # of a choice, in words
        self._steps = 0
        self._last: float | None = None
        self._seconds: dict[Mode, list[float]] = {mode: [] for mode in _TRIED}
        self._hypers: Sequence[Hyper] = []  # by group, as backward found them

    @property
    def watching(self) -> bool:
        """Whether the script must be watched: overlap may be tried, and is not under way yet."""
        return self.undecided and self.mode == "none"

    def watch(self, fresh: Freshness, i: int, hypers: Sequence[Hyper]) -> None:
        """Notes gradient i of a bucket as backward left it, and what the groups say."""
        if not fresh.note_gradient(i):
            self.decide("none", "gradients are accumulated over several backwards")
        self._hypers = self._hypers or hypers

    def judge(self, buckets: Sequence[Freshness], hypers: Sequence[Hyper], scaled: bool) -> None:
        """Decides against overlap if the script changes what the messages are made of."""
        if any(fresh.gradients_changed() for fresh in buckets):
            self.decide("none", "gradients change between backward and step()")
        elif self._hypers not in ([], hypers):
            self.decide("none", "the learning rate changes between backward and step()")
        elif scaled:
            self.decide("none", "a GradScaler looks at the whole gradient")
        self._hypers = []

    def decide(self, mode: Mode, reason: str) -> None:
        self.mode, self.reason, self.undecided = mode, reason, False

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
        if tried >= _BLOCK * _ROUNDS * len(_TRIED):
            self._decide_by_time()
            return True
        if tried >= 0:
            self.mode = _TRIED[tried // _BLOCK % len(_TRIED)]
        return False

    def _decide_by_time(self) -> None:
        none, backward = (statistics.median(self._seconds[mode]) for mode in _TRIED)
        times = f"a step took {1e3 * none:.1f} ms with 'none', {1e3 * backward:.1f} ms with "
        times += "'backward'"
        if backward < _WORTH * none:
            self.decide("backward", f"{times}; 'forward' may hide more and is worth trying")
        else:
            self.decide("none", times)
