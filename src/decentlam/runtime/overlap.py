"""What the exchange hides behind, chosen by the user or by measurement.

    "none"      everything happens in step()
    "backward"  messages travel during the rest of backward; those that need no gradient
                (AWC-DmSGD) leave as the step before ends
    "auto"      "none" and "backward" for some steps each, then the faster one

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

from torch import Tensor

from decentlam.options import Overlap
from decentlam.runtime.bucket import Version
from decentlam.runtime.checks import version
from decentlam.runtime.param_groups import ParamGroup

Mode = Literal["none", "backward"]
_MODES: tuple[Mode, Mode] = ("none", "backward")

_WATCHED = 3  # first steps, without overlap, that show what the script does with gradients
_BLOCK = 5  # steps in one mode; the first belongs half to the mode before and does not count
_ROUNDS = 3
_WORTH = 0.97  # of the time without overlap that overlap must need at most


class OverlapChoice:
    """The mode of the next step. "auto" watches the script, tries both modes and decides."""

    def __init__(self, overlap: Overlap) -> None:
        self.mode: Mode = "none" if overlap == "auto" else overlap
        self.undecided = overlap == "auto"
        self.reason = ""  # of a choice, in words
        self._steps = 0
        self._last: float | None = None
        self._seconds: dict[Mode, list[float]] = {mode: [] for mode in _MODES}
        self._gradients: dict[Tensor, tuple[Tensor, Version]] = {}
        self._lrs: list[float] = []  # by group, as backward found them

    def watch(self, p: Tensor, groups: Sequence[ParamGroup]) -> None:
        """Note the gradient of p as backward left it, and what the groups say."""
        if self.mode == "none":
            if p in self._gradients:
                self._decide("none", "gradients are accumulated over several backwards")
            assert p.grad is not None
            self._gradients[p] = p.grad, version(p.grad, self._compare)
            self._lrs = self._lrs or _rates(groups)

    def judge(self, groups: Sequence[ParamGroup], scaled: bool) -> None:
        """Decide against overlap if the script changes what the messages are made of."""
        if self.mode == "none":
            if any(
                p.grad is not grad or version(grad, self._compare) != before
                for p, (grad, before) in self._gradients.items()
            ):
                self._decide("none", "gradients change between backward and step()")
            elif self._lrs not in ([], _rates(groups)):
                self._decide("none", "the learning rate changes between backward and step()")
            elif scaled:
                self._decide("none", "a GradScaler looks at the whole gradient")
        self._gradients, self._lrs = {}, []

    @property
    def _compare(self) -> bool:
        return self._steps < _WATCHED

    def _decide(self, mode: Mode, reason: str) -> None:
        self.mode, self.reason, self.undecided = mode, reason, False

    def step_ended(self) -> bool:
        """Note the end of a step; return True if the trial ended with it."""
        now = time.perf_counter()
        tried = self._steps - _WATCHED
        if tried >= 0 and tried % _BLOCK and self._last is not None:
            self._seconds[self.mode].append(now - self._last)
        self._last = now
        self._steps += 1
        tried = self._steps - _WATCHED
        if tried >= _BLOCK * _ROUNDS * len(_MODES):
            none, backward = (statistics.median(self._seconds[mode]) for mode in _MODES)
            times = f"{1e3 * none:.1f} ms with 'none', {1e3 * backward:.1f} ms with 'backward'"
            faster: Mode = "backward" if backward < _WORTH * none else "none"
            self._decide(faster, f"a step took {times}")
            return True
        if tried >= 0:
            self.mode = _MODES[tried // _BLOCK % len(_MODES)]
        return False


def _rates(groups: Sequence[ParamGroup]) -> list[float]:
    return [float(group[name]) for group in groups for name in ("lr", "weight_decay")]
