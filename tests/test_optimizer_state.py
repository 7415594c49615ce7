"""Saved, copied and regrouped runs go on as if nothing had happened; networks may change."""

from __future__ import annotations

import pytest
import runs
import runs_state
import runs_steps
import torch
from runs import Scenarios, assert_equal, same

N = 4
scenarios = Scenarios(N)


RESUMED = ("decentlam", "awc-dmsgd", "slowmo", "d2-dmsgd", "qg-dmsgd", "da-dmsgd", "pmsgd")
for method in RESUMED:
    scenarios.add(f"resume {method}", runs_state.resume, method=method)
scenarios.add("copied", runs_state.copied)
LATE = ("decentlam", "awc-dmsgd", "da-dmsgd", "pmsgd", "slowmo")
for method in LATE:
    scenarios.add(f"late {method}", runs_state.late_group, method=method)


@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    for whole, resumed in scenarios.outcomes(f"resume {method}"):
        assert same(whole, resumed)


def test_deep_copy_runs_beside_the_original() -> None:
    for ours, theirs in scenarios.outcomes("copied"):
        assert same(ours, theirs)


@pytest.mark.parametrize("method", LATE)
def test_group_added_mid_run(method: str) -> None:
    """What joins is equal on all nodes from then on, though each built it by itself."""
    results, expected = (
        scenarios.outcomes(f"late {method}"),
        runs_state.simulate_late_group(method, N),
    )
    early = sum(torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES[:3])
    assert_equal(
        [[x[:early] for x in r[:3]] for r in results], [x[:, :early] for x in expected[:3]]
    )
    assert_equal([r[3:] for r in results], expected[3:])


for method in ("decentlam", "da-dmsgd"):
    scenarios.add(f"groups {method}", runs_state.groups, method=method)


@pytest.mark.parametrize("method", ["decentlam", "da-dmsgd"])
def test_groups_have_their_own_lr_decay_and_momentum(method: str) -> None:
    assert_equal(scenarios.outcomes(f"groups {method}"), runs_state.simulate_groups(method, N))


CHANGING = [("dmsgd", True), ("dmsgd", False), ("awc-dmsgd", True)]
for method, overlap in CHANGING:
    scenarios.add(
        f"topology {method} {overlap}", runs_state.new_topology, method=method, overlap=overlap
    )
scenarios.add("network", runs_state.new_network)
scenarios.add("refused networks", runs_state.refused_networks)


@pytest.mark.parametrize(("method", "overlap"), CHANGING)
def test_topology_replaced_between_steps(method: str, overlap: bool) -> None:
    expected = runs_steps.simulate(method, N, 8, before_step=runs_state.use_topology)
    assert_equal(scenarios.outcomes(f"topology {method} {overlap}"), expected)


def test_survivors_go_on_in_a_smaller_network() -> None:
    results, four = scenarios.outcomes("network"), runs_steps.simulate("dmsgd", N, 3)
    assert_equal([r[:3] for r in results], four)
    assert_equal([r[3:] for r in results[:3]], runs_state.simulate_without_last("dmsgd", N, 3, 6))


def test_network_that_does_not_fit_is_refused() -> None:
    for errors in scenarios.outcomes("refused networks"):
        assert "ValueError: DecentLaM needs symmetric weights" in errors["directed"]
        assert "ValueError: ring(5) is made for 5 nodes" in errors["wrong size"]
        assert "between backward and step()" in errors["between"]
