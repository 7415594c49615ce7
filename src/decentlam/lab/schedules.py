"""The paper's learning-rate schedules: factors of the epoch, applied at every step.

The rate is lr times the factor, lr being already scaled to the batch. Warm-up is a line from
`warmup_from` to 1. On CIFAR-10 the paper warms up from 0.1, the rate before scaling (appendix,
"More Experimental Details"); on ImageNet it follows Goyal et al. (2017), who start there too: that
is `warmup_from=unscaled(batch)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Factor = Callable[[float], float]  # of the epoch; 1 is the full learning rate


def steps(*milestones: float, gamma: float = 0.1) -> Factor:
    """Times `gamma` from each milestone on."""
    return lambda epoch: gamma ** sum(epoch >= milestone for milestone in milestones)


def half_cosine(first: float, last: float) -> Factor:
    """From 1 at epoch `first` down to 0 at epoch `last`, along half a cosine wave."""

    def factor(epoch: float) -> float:
        done = (epoch - first) / (last - first)
        return (1 + math.cos(math.pi * min(max(done, 0.0), 1.0))) / 2

    return factor


def warmed_up(epochs: float, start: float, then: Factor) -> Factor:
    """On a line from `start` to what `then` is after `epochs` epochs; from there on, `then`."""

    def factor(epoch: float) -> float:
        if epoch >= epochs:
            return then(epoch)
        return start + (then(epochs) - start) * epoch / epochs

    return factor


def constant(epochs: float, warmup_epochs: float | None = None, warmup_from: float = 0.0) -> Factor:
    """1 all the way; no warm-up unless asked for."""
    return warmed_up(warmup_epochs or 0.0, warmup_from, lambda epoch: 1.0)


def cosine(epochs: float, warmup_epochs: float | None = None, warmup_from: float = 0.0) -> Factor:
    """Half a cosine wave from the end of the warm-up (none unless asked for) to the last epoch."""
    warmup = warmup_epochs or 0.0
    return warmed_up(warmup, warmup_from, half_cosine(warmup, epochs))


def imagenet_step(
    epochs: float = 90, warmup_epochs: float | None = None, warmup_from: float = 0.0
) -> Factor:
    """ImageNet with batches of up to 8K: 5 warm-up epochs of 90, a tenth at 30, 60 and 80."""
    warmup = epochs * 5 / 90 if warmup_epochs is None else warmup_epochs
    return warmed_up(warmup, warmup_from, steps(*(epochs * m / 90 for m in (30, 60, 80))))


def imagenet_cosine(
    epochs: float = 120, warmup_epochs: float | None = None, warmup_from: float = 0.0
) -> Factor:
    """ImageNet with batches over 8K: 20 warm-up epochs of 120, half a cosine wave in the rest."""
    return cosine(
        epochs, epochs * 20 / 120 if warmup_epochs is None else warmup_epochs, warmup_from
    )


def cifar_step(
    epochs: float = 200, warmup_epochs: float | None = None, warmup_from: float = 0.0
) -> Factor:
    """CIFAR-10: 5 warm-up epochs of 200, a tenth at 100 and 150."""
    warmup = epochs * 5 / 200 if warmup_epochs is None else warmup_epochs
    return warmed_up(warmup, warmup_from, steps(epochs * 100 / 200, epochs * 150 / 200))


def detection_1x(
    epochs: float = 12, warmup_epochs: float | None = None, warmup_from: float = 0.0
) -> Factor:
    """The 1x schedule of detectors: 12 epochs, a tenth at 8 and 11.

    Warm-up takes one epoch of the 12: the usual 500 steps, on COCO with batches of 256.
    """
    warmup = epochs / 12 if warmup_epochs is None else warmup_epochs
    return warmed_up(warmup, warmup_from, steps(epochs * 8 / 12, epochs * 11 / 12))


SCHEDULES: dict[str, Callable[..., Factor]] = {
    "constant": constant,
    "cosine": cosine,
    "imagenet-step": imagenet_step,
    "imagenet-cosine": imagenet_cosine,
    "cifar-step": cifar_step,
    "detection-1x": detection_1x,
}


def factor(
    name: str,
    epochs: float,
    warmup_epochs: float | None = None,
    steps_per_epoch: int = 1,
    warmup_from: float = 0.0,
) -> Callable[[int], float]:
    """The factor as a function of the step, for a run of `epochs`.

    Milestones and warm-up keep their place in proportion to the paper's number of epochs, unless
    `warmup_epochs` says how long to warm up (0: not at all).

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
    of_epoch = SCHEDULES[name](epochs, warmup_epochs, warmup_from)
    return lambda step: of_epoch(step / steps_per_epoch)


def scheduler(optimizer: Optimizer, factor_of_step: Callable[[int], float]) -> LambdaLR:
    """Call its `step()` after every `optimizer.step()`: the rates are factor times lr."""
    return LambdaLR(optimizer, factor_of_step)


def paper_schedule(batch: int) -> str:
    """The paper's schedule on ImageNet for a total batch: up to 8K counts as small."""
    return "imagenet-step" if batch <= 8192 else "imagenet-cosine"


def linear_scaling(base_lr: float, batch: int, base_batch: int = 256) -> float:
    """The learning rate in proportion to the total batch (Goyal et al., 2017).

    >>> linear_scaling(0.1, 32 * 1024)
    12.8
    """
    return base_lr * batch / base_batch


def unscaled(batch: int, base_batch: int = 256) -> float:
    """The factor that undoes `linear_scaling`, where the paper's warm-up starts; 1 at most."""
    return min(1.0, base_batch / batch)
