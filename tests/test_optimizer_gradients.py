"""What happens to gradients between backward and step(): refused, or as in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import runs_gradients
import runs_steps
import torch
from runs import Scenarios, assert_equal

import decentlam

N = 4
scenarios = Scenarios(N)


# Something changes between backward and step() --------------------------------------------------

CHANGES = {
    "clip": "max_grad_norm=",
    "lr": "overlap='none'",
    "momentum": "overlap='none'",
    "weight decay": "overlap='none'",
    "zero_grad": "overlap='none'",
    "new gradient": "overlap='none'",
    "parameter": "between step() and backward",
    "second backward": "no_sync",
}
for change in CHANGES:
    scenarios.add(f"stale {change}", runs_gradients.stale, what=change)
scenarios.add("stale PmSGD", runs_gradients.stale, what="clip", method="pmsgd")


@pytest.mark.parametrize("change", CHANGES)
def test_stale_message_is_refused_with_the_cure(change: str) -> None:
    for error in scenarios.outcomes(f"stale {change}"):
        assert error.startswith("StaleMessageError"), error
        assert CHANGES[change] in error


def test_stale_gradient_of_an_all_reduce_is_refused() -> None:
    assert all(error.startswith("StaleMessageError") for error in scenarios.outcomes("stale PmSGD"))


def test_changed_lr_is_named_with_both_values() -> None:
    for error in scenarios.outcomes("stale lr"):
        assert "'lr': 0.05" in error and "'lr': 0.01" in error


def test_second_backward_is_named_by_parameter() -> None:
    assert all("weights." in error for error in scenarios.outcomes("stale second backward"))


scenarios.add("awc changes", runs_gradients.awc_may_change_gradient_and_lr)
scenarios.add("awc parameter", runs_gradients.awc_parameter_changed_after_step)


def test_awc_may_clip_and_change_lr_after_backward() -> None:
    expected = runs_steps.simulate(
        "awc-dmsgd",
        N,
        6,
        change=runs_steps.clipped(2.0),
        lr=lambda step: runs_steps.LR / (1 + step),
    )
    assert_equal(scenarios.outcomes("awc changes"), expected)


AWC_STALE = [("gradient", 0), ("gradient", 4), ("lr", 0), ("lr", 4)]
for what, steps in AWC_STALE:
    scenarios.add(f"awc stale {what} {steps}", runs_gradients.awc_stale, what=what, steps=steps)
scenarios.add("awc between", runs_gradients.awc_between_backward_and_step)


@pytest.mark.parametrize(("what", "steps"), AWC_STALE)
def test_awc_that_updates_in_backward_refuses_later_changes(what: str, steps: int) -> None:
    """From the first step on, although its first messages are still updated in step()."""
    for error in scenarios.outcomes(f"awc stale {what} {steps}"):
        assert error.startswith("StaleMessageError"), error


def test_awc_that_updates_in_backward_shows_it_in_step() -> None:
    assert all(scenarios.outcomes("awc between"))


def test_awc_refuses_parameters_changed_while_its_message_travels() -> None:
    assert all(
        error.startswith("StaleMessageError") for error in scenarios.outcomes("awc parameter")
    )


# Clipping, scaling, non-finite gradients --------------------------------------------------------

for how in ("built in", "by hand"):
    scenarios.add(f"clip {how}", runs_gradients.clip, how=how)


@pytest.mark.parametrize("how", ["built in", "by hand"])
def test_clipping_equals_simulator_with_clipped_gradients(how: str) -> None:
    assert_equal(
        scenarios.outcomes(f"clip {how}"),
        runs_steps.simulate("decentlam", N, 6, change=runs_steps.clipped(2.0)),
    )


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"nonfinite": "skip"}])
def test_what_needs_the_whole_gradient_is_refused_with_overlap(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="overlap='none'"):
        decentlam.DecentLaM(runs.Quadratic().parameters(), lr=0.1, overlap=True, **option)


SCALED = ("decentlam", "awc-dmsgd", "pmsgd", "slowmo")
for method in SCALED:
    scenarios.add(f"scaler {method}", runs_gradients.scaler, method=method)
scenarios.add("scaler unscaled", runs_gradients.scaler, method="decentlam", unscale=True)
scenarios.add("scaler overlap", runs_gradients.scaler_with_overlap)
scenarios.add("scaler in some", runs_gradients.scaler_in_some)


def overflowed(node: int, step: int) -> bool:
    return node == 1 and step == 2


@pytest.mark.parametrize("method", SCALED)
def test_node_whose_gradient_overflows_answers_with_gradient_zero(method: str) -> None:
    results = scenarios.outcomes(f"scaler {method}")
    expected = runs_steps.simulate(method, N, 6, absent=overflowed)
    assert_equal([trajectory for trajectory, _, _ in results], expected)
    for node, (_, skipped, scale) in enumerate(results):
        assert skipped == [overflowed(node, step) for step in range(6)]
        assert scale == (2.0**9 if node == 1 else 2.0**10)


def test_scaler_may_unscale_first() -> None:
    results = scenarios.outcomes("scaler unscaled")
    expected = runs_steps.simulate(
        "decentlam", N, 6, absent=overflowed, change=runs_steps.clipped(2.0)
    )
    assert_equal([trajectory for trajectory, _, _ in results], expected)


def test_scaler_with_overlap_is_refused_with_the_cure() -> None:
    for error in scenarios.outcomes("scaler overlap"):
        assert error.startswith("StaleMessageError: GradScaler with overlap")
        assert "overlap='none'" in error and "bfloat16" in error


def test_scaler_in_some_processes_of_a_node_is_refused_by_all_of_them() -> None:
    for rank, error in enumerate(scenarios.outcomes("scaler in some")):
        assert error.startswith(f"RuntimeError: node {rank // 2}: 1 of its 2 processes"), error


for overlap in (True, False):
    scenarios.add(f"autocast {overlap}", runs_gradients.autocast, overlap=overlap)
scenarios.add("dtypes", runs_gradients.mixed_dtypes)


def test_bfloat16_autocast_trains_float32_parameters() -> None:
    for ours, theirs in zip(
        scenarios.outcomes("autocast True"), scenarios.outcomes("autocast False"), strict=True
    ):
        x, losses, dtypes = ours
        assert torch.equal(x, theirs[0])
        assert losses[-1] < 0.5 * losses[0]
        assert set(dtypes) == {"torch.float32"}


def test_parameters_of_several_dtypes_train_together() -> None:
    for dtypes, first, last in scenarios.outcomes("dtypes"):
        assert dtypes == ["torch.float32", "torch.float64", "torch.bfloat16", "torch.float32"]
        assert last < 0.05 * first


RAISING = [
    ("decentlam", True, torch.nan),
    ("decentlam", False, torch.inf),
    ("awc-dmsgd", True, torch.nan),
    ("awc-dmsgd", False, -torch.inf),
    ("da-dmsgd", True, torch.inf),
    ("pmsgd", True, torch.nan),
    ("slowmo", True, torch.nan),
    ("qg-dmsgd", "forward", torch.inf),
]
for method, overlap, value in RAISING:
    scenarios.add(
        f"nonfinite {method} {overlap}",
        runs_gradients.nonfinite_raises,
        method=method,
        overlap=overlap,
        value=value,
    )


@pytest.mark.parametrize(("method", "overlap", "value"), RAISING)
def test_nonfinite_gradient_stops_at_its_node(method: str, overlap: bool, value: float) -> None:
    for node, (error, finite) in enumerate(scenarios.outcomes(f"nonfinite {method} {overlap}")):
        assert finite
        if node == 2:
            assert error.startswith("NonFiniteError: node 2, step 3: weights.1 became"), error
        else:
            assert error.startswith("ExchangeError"), error
            # Who does not talk to node 2 goes on a little; AWC's messages are a step ahead.
            assert any(f"step {step}, " in error for step in (3, 4, 5))


SKIPPING = ("decentlam", "awc-dmsgd", "dmsgd", "pmsgd", "d2-dmsgd")
for method in SKIPPING:
    scenarios.add(f"skip {method}", runs_gradients.nonfinite_skips, method=method)


@pytest.mark.parametrize("method", SKIPPING)
def test_nonfinite_gradient_can_be_left_out(method: str) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 1 and step in (2, 4)

    results = scenarios.outcomes(f"skip {method}")
    expected = runs_steps.simulate(method, N, 6, absent=absent)
    assert_equal([trajectory for trajectory, _ in results], expected)
    for node, (_, skipped) in enumerate(results):
        assert skipped == [absent(node, step) for step in range(6)]


for method in ("awc-dmsgd", "dmsgd"):
    scenarios.add(f"overflow {method}", runs_gradients.parameters_overflow, method=method)


@pytest.mark.parametrize("method", ["awc-dmsgd", "dmsgd"])
def test_parameters_that_overflow_are_not_sent(method: str) -> None:
    for error in scenarios.outcomes(f"overflow {method}"):
        assert error.startswith(("NonFiniteError", "ExchangeError")), error
    assert any(
        error.startswith("NonFiniteError") for error in scenarios.outcomes(f"overflow {method}")
    )
