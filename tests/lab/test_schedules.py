"""The paper's schedules."""

from __future__ import annotations

import math

import pytest

from decentlam.lab.schedules import (
    SCHEDULES,
    factor,
    unscaled,
)


def at(name: str, epochs: float, *when: float, **options: float) -> list[float]:
    rate = factor(name, epochs, steps_per_epoch=1000, **options)
    return [rate(round(1000 * epoch)) for epoch in when]


def test_imagenet_step_warms_up_5_epochs_and_drops_at_30_60_80_of_90():
    start = unscaled(8192)
    assert start == 256 / 8192
    found = at("imagenet-step", 90, 0, 2.5, 5, 29.999, 30, 60, 79.999, 80, 90, warmup_from=start)
    expected = [start, (1 + start) / 2, 1, 1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert found == pytest.approx(expected, rel=1e-12)


def test_imagenet_cosine_warms_up_20_epochs_and_ends_at_zero_after_120():
    found = at("imagenet-cosine", 120, 0, 10, 20, 45, 70, 95, 120)
    expected = [0, 0.5, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    assert found == pytest.approx(expected, abs=1e-12)


def test_cifar_step_warms_up_5_epochs_and_drops_at_100_and_150_of_200():
    found = at("cifar-step", 200, 0, 5, 99.999, 100, 149.999, 150, 199.999, warmup_from=0.25)
    assert found == pytest.approx([0.25, 1, 1, 0.1, 0.1, 0.01, 0.01], rel=1e-12)


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
