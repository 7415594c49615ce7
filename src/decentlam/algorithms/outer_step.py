"""A step of any method along the way that local steps have gone: DiLoCo, NoLoCo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from torch import Tensor

from decentlam.algorithms.base import Algorithm, Reach


@dataclass(frozen=True)
class OuterStep(Algorithm):
    """One step of a method from the anchor, whose gradient is how far the inner steps have come.

    With PmSGD this is DiLoCo, with DecentLaM NoLoCo in one message instead of two. `delayed` as in
    `LocalAverage`.
    """

    method: Algorithm
    every: str = "16 steps"
    delayed: bool = False

    layerwise = property(attrgetter("method.layerwise"))
    needs_symmetric = property(attrgetter("method.needs_symmetric"))
    balanced = property(attrgetter("method.balanced"))
    averaged_state = property(attrgetter("method.averaged_state"))
    period = property(attrgetter("method.period"))

    @property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("anchor", *(("sent",) if self.delayed else ()), *self.method.buffers)

    def reach(self, index: int) -> Reach:
        return self.method.reach(index)

    def payloads(self, index: int) -> int:
        return self.method.payloads(index)

    def alone(self) -> Algorithm:
        return replace(self, method=self.method.alone())

    def steady(self) -> tuple[Algorithm, ...]:
        return tuple(replace(self, method=form) for form in self.method.steady())

    def linear(self) -> tuple[Algorithm, float]:
        return self.method.linear()

    def init(self, x: Tensor) -> dict[str, Tensor]:
        own = {name: x.clone() for name in ("anchor", "sent")[: 1 + self.delayed]}
        return own | self.method.init(x)

    def message(self, x, g, state, step):
        anchor, there = state["anchor"], state["sent"] if self.delayed else x
        return self.method.message(anchor, anchor - there, state, step)

    def update(self, x, g, mixed, state, step):
        anchor, there = state["anchor"], state["sent"] if self.delayed else x
        self.method.update(anchor, anchor - there, mixed, state, step)
        if self.delayed:
            x.add_(anchor - there)
        else:
            x.copy_(anchor)
