"""How far the exchange reaches into other work, chosen by the user or by measurement.

    False      everything in step()
    True       behind the rest of backward
    "forward"  behind backward and the next forward: step() returns, parameters arrive late
    "auto"     each of them for some steps in turn, then the fastest

When no core is free, overlap only costs; when the processor waits for the network or a GPU, it
hides the wire. The values are the same to the bit in each. Every process chooses for itself, so
"auto" is only for messages that tags keep apart in whatever order they are posted: not for
collectives inside a node, not for NCCL, and not for messages that leave before the gradient.
"""

from __future__ import annotations

import statistics
import time

Mode = bool | str

MODES: tuple[Mode, ...] = (False, True, "forward")
CHOICES: tuple[Mode, ...] = (*MODES, "auto")

_WATCHED = 3  # first steps, without overlap, that show what the script does with gradients
_BLOCK = 5  # steps in one mode; the first belongs half to the mode before and does not count
_ROUNDS = 3
_WORTH = 0.97  # of the time of a simpler mode that a further one must need at most


class Pace:
    """The mode of the next step."""

    def __init__(self, overlap: Mode) -> None:
        self.mode: Mode = False if overlap == "auto" else overlap
        self.undecided = overlap == "auto"
        self.reason = ""  # of a choice, in words
        self._steps = 0
        self._last: float | None = None
        self._seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}

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
        if tried >= _BLOCK * _ROUNDS * len(MODES):
            self._decide_by_time()
            return True
        if tried >= 0:
            self.mode = MODES[tried // _BLOCK % len(MODES)]
        return False

    def _decide_by_time(self) -> None:
        medians = {mode: statistics.median(times) for mode, times in self._seconds.items()}
        best: Mode = MODES[0]
        for mode in MODES[1:]:
            if medians[mode] < _WORTH * medians[best]:
                best = mode
        words = ", ".join(f"{1e3 * t:.1f} ms with {mode!r}" for mode, t in medians.items())
        self.decide(best, f"a step took {words}")
