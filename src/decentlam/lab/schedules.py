"""The paper's learning-rate schedules: factors of lr, which is already scaled to the batch.

Warm-up is a line from `warmup_from` to 1. On CIFAR-10 the paper warms up from 0.1, the rate before
scaling (appendix, "More Experimental Details"); on ImageNet it follows Goyal et al. (2017), who
start there too: that is `warmup_from=unscaled(batch)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Epochs of the whole run and of its warm-up, and the epochs from which on the rate is a tenth; None
# is half a cosine wave from the end of the warm-up to 0. All keep their place in proportion.
SCHEDULES: dict[str, tuple[int, int, tuple[int, ...] | None]] = {
    "constant": (1, 0, ()),
    "cosine": (1, 0, None),
    "imagenet-step": (90, 5, (30, 60, 80)),  # ImageNet with batches of up to 8K
    "imagenet-cosine": (120, 20, None),  # with larger ones
    "cifar-step": (200, 5, (100, 150)),
    "detection-1x": (12, 1, (8, 11)),  # one epoch of COCO with batches of 256: the usual 500 steps
}


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
    usual, usual_warmup, milestones = SCHEDULES[name]
    warmup = epochs * usual_warmup / usual if warmup_epochs is None else warmup_epochs

    def rate(step: int) -> float:
        epoch = step / steps_per_epoch
        if epoch < warmup:
            return warmup_from + (warm - warmup_from) * epoch / warmup
        return after_warmup(epoch)

    def after_warmup(epoch: float) -> float:
        if milestones is None:
            return (1 + math.cos(math.pi * min(1.0, (epoch - warmup) / (epochs - warmup)))) / 2
        return 0.1 ** sum(epoch >= epochs * milestone / usual for milestone in milestones)

    warm = after_warmup(warmup)
    return rate


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
