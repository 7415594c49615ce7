"""The paper's schedules."""

from __future__ import annotations

import math

import pytest

from decentlam.lab.schedules import SCHEDULES, factor, unscaled


def at(name: str, epochs: float, *when: float, **options: float) -> list[float]:
    rate = factor(name, epochs, steps_per_epoch=1000, **options)
    return [rate(round(1000 * epoch)) for epoch in when]


HALF = math.sqrt(0.5)
START = 256 / 8192
PAPER = {  # by schedule: epochs, where warm-up starts, and the factor at some epochs
    "imagenet-step": (90, START, {0: START, 2.5: (1 + START) / 2, 5: 1, 29.999: 1, 30: 0.1,
                                  60: 0.01, 79.999: 0.01, 80: 0.001, 90: 0.001}),
    "imagenet-cosine": (120, 0.0, {0: 0, 10: 0.5, 20: 1, 45: (1 + HALF) / 2, 70: 0.5,
                                   95: (1 - HALF) / 2, 120: 0}),
    "cifar-step": (200, 0.25, {0: 0.25, 5: 1, 99.999: 1, 100: 0.1, 149.999: 0.1, 150: 0.01,
                               199.999: 0.01}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER)
def test_schedules_are_the_papers(name: str):
    epochs, start, factors = PAPER[name]
    found = at(name, epochs, *factors, warmup_from=start)
    assert found == pytest.approx(list(factors.values()), rel=1e-12, abs=1e-12)
    assert unscaled(8192) == START


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("epochs", [3, 90, 240])
def test_a_schedule_keeps_its_shape_when_the_number_of_epochs_changes(name: str, epochs: int):
    fractions = [0.0, 0.02, 0.11, 0.4, 0.55, 0.77, 0.95]
    usual = at(name, 100, *(100 * f for f in fractions))
    assert at(name, epochs, *(epochs * f for f in fractions)) == pytest.approx(usual, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", 10), "unknown schedule 'linear'; choose from constant"),
        (("cosine", 0), "epochs > 0"),
        (("cosine", float("nan")), "epochs > 0"),
        (("cosine", 10, 10), "less than all 10 epochs: 10"),
        (("cosine", 10, -1), "less than all 10 epochs: -1"),
        (("cosine", 10, None, 0), "1 step per epoch or more"),
        (("cosine", 10, None, 5, 2.0), "got 2.0"),
    ],
)
def test_bad_schedules_are_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        factor(*arguments)
