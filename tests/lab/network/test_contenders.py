"""The ways to train that are timed side by side."""

from __future__ import annotations

import pytest

import decentlam
from decentlam.lab.network.contenders import (
    BASE,
    CONTENDERS,
    INNER,
    LOCAL,
    available,
    choose,
    has_decent_dp,
)
from decentlam.lab.network.models import make_model
from decentlam.runtime.overlap import OverlapChoice

README = "DecentLaM as it comes"


def test_the_two_that_all_are_compared_with_are_always_there() -> None:
    assert list(choose(("PmSGD",))) == [LOCAL, BASE, "PmSGD"]
    assert list(choose(())) == list(available())
    assert "AdamW, one peer" in choose((), "adamw")
    assert "PmSGD" not in choose((), "adamw")


def test_what_is_not_installed_or_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown contender 'SGP'; choose from local only"):
        choose(("SGP",))
    if not has_decent_dp():
        with pytest.raises(ValueError, match=r"decent-dp ring.*decent-dp is not installed"):
            choose(("decent-dp ring (1 peer)",))


def test_a_mode_that_is_found_by_trying_is_timed_after_the_trial() -> None:
    choice = OverlapChoice("auto")
    for _ in range(CONTENDERS[README].warm_up):
        choice.step_ended()
    assert not choice.undecided


def train_each(optimizer: str) -> list[str]:
    trained = []
    for name, contender in available(optimizer).items():
        model, loss = make_model("convnet-0.2M")
        training = contender.build(model, loss, INNER[optimizer])
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            training()
        if any((p != b).any() for p, b in zip(model.parameters(), before, strict=True)):
            trained.append(name)
    return trained


@pytest.mark.system
@pytest.mark.parametrize("optimizer", INNER)
def test_every_contender_trains(optimizer: str) -> None:
    for trained in decentlam.launch(train_each, 2, (optimizer,)):
        assert trained == list(available(optimizer))
