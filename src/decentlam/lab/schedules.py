"""The paper's learning-rate schedules: factors of the epoch, applied at every step.

The rate is lr times the factor, lr being already scaled to the batch. Warm-up is a line from
`warmup_from` to 1. On CIFAR-10 the paper warms up from 0.1, the rate before scaling (appendix,
"More Experimental Details"); on ImageNet it follows Goyal et al. (2017), who start there too: that
is `warmup_from=unscaled(batch)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Factor = Callable[[float], float]  # of the epoch; 1 is the full learning rate


def steps(*milestones: float, gamma: float = 0.1) -> Factor:
    """Multiply by `gamma` from each milestone on."""
    return lambda epoch: gamma ** sum(epoch >= milestone for milestone in milestones)


def half_cosine(first: float, last: float) -> Factor:
    """Fall from 1 at epoch `first` to 0 at epoch `last`, along half a cosine wave."""

    def factor(epoch: float) -> float:
        done = (epoch - first) / (last - first)
        return (1 + math.cos(math.pi * min(max(done, 0.0), 1.0))) / 2

    return factor


def warmed_up(epochs: float, start: float, then: Factor) -> Factor:
    """Go on a line from `start` to what `then` is after `epochs` epochs; from there on, `then`."""

    def factor(epoch: float) -> float:
        if epoch >= epochs:
            return then(epoch)
        return start + (then(epochs) - start) * epoch / epochs

    return factor


# Of a run of `epochs`: how long it warms up unless told otherwise, and what comes then. Milestones
# and warm-up keep their place in proportion to the paper's number of epochs.
SCHEDULES: dict[str, tuple[float, Callable[[float, float], Factor]]] = {
    # 1 all the way.
    "constant": (0.0, lambda epochs, warmup: steps()),
    # Half a cosine wave from the end of the warm-up to the last epoch.
    "cosine": (0.0, lambda epochs, warmup: half_cosine(warmup, epochs)),
    # ImageNet with batches of up to 8K: 5 warm-up epochs of 90, a tenth at 30, 60 and 80.
    "imagenet-step": (5 / 90, lambda epochs, _: _milestones(epochs, 90, 30, 60, 80)),
    # ImageNet with batches over 8K: 20 warm-up epochs of 120, half a cosine wave in the rest.
    "imagenet-cosine": (20 / 120, lambda epochs, warmup: half_cosine(warmup, epochs)),
    # CIFAR-10: 5 warm-up epochs of 200, a tenth at 100 and 150.
    "cifar-step": (5 / 200, lambda epochs, _: _milestones(epochs, 200, 100, 150)),
    # The 1x schedule of detectors: 12 epochs, a tenth at 8 and 11. Warm-up takes one: the usual
    # 500 steps, on COCO with batches of 256.
    "detection-1x": (1 / 12, lambda epochs, _: _milestones(epochs, 12, 8, 11)),
}


def _milestones(epochs: float, usual: int, *milestones: int) -> Factor:
    return steps(*(epochs * milestone / usual for milestone in milestones))


def factor(
    name: str,
    epochs: float,
    warmup_epochs: float | None = None,
    steps_per_epoch: int = 1,
    warmup_from: float = 0.0,
) -> Callable[[int], float]:
    """Return the factor as a function of the step, for a run of `epochs`.

    `warmup_epochs` says how long to warm up (0: not at all), unless the schedule is to say it.

    >>> rate = factor("imagenet-step", epochs=9, steps_per_epoch=100)
    >>> rate(0), rate(25), rate(50), rate(300), rate(899)  # warm-up is half an epoch here
    (0.0, 0.5, 1.0, 0.1, 0.0010000000000000002)
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    if not 0 < epochs < math.inf or steps_per_epoch < 1:
        raise ValueError(
            "a schedule needs epochs > 0 and 1 step per epoch or more, got "
            f"{epochs} and {steps_per_epoch}"
        )
    if warmup_epochs is not None and not 0 <= warmup_epochs < epochs:
        raise ValueError(f"warm-up takes from 0 to less than all {epochs} epochs: {warmup_epochs}")
    if not 0 <= warmup_from <= 1:
        raise ValueError(f"warm-up starts from 0 to 1 times the rate, got {warmup_from}")
    usual, then = SCHEDULES[name]
    warmup = epochs * usual if warmup_epochs is None else warmup_epochs
    of_epoch = warmed_up(warmup, warmup_from, then(epochs, warmup))
    return lambda step: of_epoch(step / steps_per_epoch)


def paper_schedule(batch: int) -> str:
    """Return the paper's schedule on ImageNet for a total batch: up to 8K counts as small."""
    return "imagenet-step" if batch <= 8192 else "imagenet-cosine"


def linear_scaling(base_lr: float, batch: int, base_batch: int = 256) -> float:
    """Return the learning rate in proportion to the total batch (Goyal et al., 2017).

    >>> linear_scaling(0.1, 32 * 1024)
    12.8
    """
    return base_lr * batch / base_batch


def unscaled(batch: int, base_batch: int = 256) -> float:
    """Return the factor that undoes `linear_scaling`, where the paper's warm-up starts; 1 at
    most."""
    return min(1.0, base_batch / batch)
