"""overlap="forward" leaves parameters awaited; whoever looks sees the new value. And "auto"."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import runs_auto as auto
import runs_background as background
import runs_forward as forward
import runs_steps
import torch
from runs import Scenarios
from torch import nn

import decentlam
from decentlam.options import Options
from decentlam.runtime import overlap as overlaps
from decentlam.runtime.build import usual_overlap

N = 4
SCENARIOS: dict[str, tuple[Any, dict[str, Any]]] = {
    "looks": (forward.looks, {}),
    "momentum": (forward.state_of_momentum, {}),
    "metadata": (forward.metadata, {}),
    "zeroed decentlam": (forward.zeroed_in_place, {"method": "decentlam"}),
    "zeroed steady": (forward.zeroed_in_place, {"method": "decentlam-steady"}),
    "zeroed pmsgd": (forward.zeroed_in_place, {"method": "pmsgd"}),
    "written": (forward.written, {}),
    "evaluated": (forward.evaluated, {}),
    "compiled": (forward.compiled, {}),
    "subclassed": (forward.subclassed, {}),
    "auto decentlam": (auto.automatic, {"method": "decentlam"}),
    "auto pmsgd": (auto.automatic, {"method": "pmsgd"}),
    "auto awc-dmsgd": (auto.automatic, {"method": "awc-dmsgd"}),
    "careful decentlam": (auto.careful_scripts, {"method": "decentlam"}),
    "careful awc-dmsgd": (auto.careful_scripts, {"method": "awc-dmsgd"}),
    "topology shared": (auto.automatic_topology, {"method": "decentlam", "shared_memory": True}),
    "topology pmsgd": (auto.automatic_topology, {"method": "pmsgd"}),
    "topology sent": (auto.automatic_topology, {"method": "decentlam"}),
    "scripted": (forward.scripted, {}),
    "unseen": (forward.unseen, {}),
    "changed gradient": (background.changed_gradient, {}),
    "dawdling": (background.dawdling, {}),
    "interrupted": (background.interrupted, {}),
    "twice": (background.twice, {}),
}


scenarios = Scenarios(N)
for name, (function, arguments) in SCENARIOS.items():
    scenarios.add(name, function, **arguments)


@pytest.mark.parametrize("look", forward.LOOKS)
def test_whoever_looks_sees_the_finished_value(look: str) -> None:
    expected = runs_steps.simulate("decentlam", N, forward.STEPS)[-1]
    for node, seen in enumerate(scenarios.outcomes("looks")):
        assert (seen[look] - expected[node]).abs().max() < 1e-12


def test_the_saved_state_is_of_the_same_step() -> None:
    for expected, found in scenarios.outcomes("momentum"):
        assert torch.equal(expected, found)


def test_shapes_and_gradients_taken_away_wait_for_nothing() -> None:
    assert scenarios.outcomes("metadata") == [True] * N


@pytest.mark.parametrize("method", ["decentlam", "steady", "pmsgd"])
def test_gradients_zeroed_in_place_do_not_reach_a_late_update(method: str) -> None:
    for expected, found in scenarios.outcomes(f"zeroed {method}"):
        assert torch.equal(expected[0], found[0])


def test_a_batch_dropped_after_backward_leaves_the_error_of_its_messages() -> None:
    for error in scenarios.outcomes("twice"):
        assert error.startswith("NonFiniteError"), error


def test_nobody_sees_a_parameter_in_the_midst_of_its_update() -> None:
    for expected, found in scenarios.outcomes("dawdling"):
        assert runs.same(expected, found)


@pytest.mark.parametrize("how", ["written", "subclassed", "scripted", "interrupted"])
def test_late_or_not_the_steps_are_the_same_to_the_bit(how: str) -> None:
    for expected, found in scenarios.outcomes(how):
        assert torch.equal(expected, found)


def test_evaluation_and_merging_see_the_finished_value() -> None:
    for found in scenarios.outcomes("evaluated"):
        for expected, real in zip(found["False"], found["forward"], strict=True):
            assert torch.equal(torch.as_tensor(expected), torch.as_tensor(real))


def test_a_compiled_model_takes_the_same_steps_and_is_compiled_once() -> None:
    for expected, found, graphs in scenarios.outcomes("compiled"):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert graphs == 1


def test_reading_behind_our_back_is_refused_and_never_silently_stale() -> None:
    for error in scenarios.outcomes("unseen"):
        assert error.startswith("StaleMessageError") and "never asked for" in error, error


def test_a_gradient_changed_under_a_late_update_is_refused() -> None:
    for errors in scenarios.outcomes("changed gradient"):
        for error in errors:
            assert error.startswith("StaleMessageError") and "after step()" in error, error


@pytest.mark.parametrize("method", ["decentlam", "pmsgd", "awc-dmsgd"])
def test_auto_takes_the_same_steps_and_ends_with_a_choice(method: str) -> None:
    for expected, found, mode in scenarios.outcomes(f"auto {method}"):
        assert mode in ("early" if method == "awc-dmsgd" else "none", "backward")
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(a, b), step


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("clip", "gradients change between"),
        ("scale", "gradients change between"),
        ("accumulate", "accumulated over several backwards"),
        ("schedule", "learning rate changes between"),
    ],
)
@pytest.mark.parametrize(("method", "least"), [("decentlam", "none"), ("awc-dmsgd", "early")])
def test_auto_never_gets_in_the_way_of_a_script(
    script: str, reason: str, method: str, least: str
) -> None:
    for found in scenarios.outcomes(f"careful {method}"):
        expected, real, (mode, undecided, why) = found[script]
        assert torch.equal(expected, real)
        assert mode == least and not undecided and reason in why


def test_auto_chooses_only_where_processes_may_differ() -> None:
    """Collectives inside a node need one mode everywhere."""
    one_per_node = decentlam.exchange.network.Network(None, 0, 4)
    two_per_node = decentlam.exchange.network.Network(None, 0, 4, processes_per_node=2)
    usual, clipping = Options(), Options(max_grad_norm=1.0)
    ours, early = decentlam.algorithms.DecentLaM(), decentlam.algorithms.AWCDmSGD()
    assert usual_overlap(ours, usual, one_per_node) == "auto"
    assert usual_overlap(ours, usual, two_per_node) == "none"
    assert usual_overlap(early, usual, one_per_node) == "auto"
    assert usual_overlap(early, usual, two_per_node) == "early"
    assert usual_overlap(ours, clipping, one_per_node) == "none"
    into_forward = Options(overlap="forward")
    assert usual_overlap(ours, into_forward, one_per_node) == "forward"
    assert usual_overlap(ours, into_forward, two_per_node) == "backward"
    assert usual_overlap(early, into_forward, one_per_node) == "backward"


@pytest.mark.parametrize(("name", "said"), [("shared", [True]), ("sent", [False]), ("pmsgd", [])])
def test_topology_auto_is_the_same_on_all_nodes_and_measures_what_carries(
    name: str, said: list[bool]
) -> None:
    found = scenarios.outcomes(f"topology {name}")
    assert len({(topology, distance) for topology, distance, _ in found}) == 1
    assert [reasons for _, _, reasons in found] == [said, [], [], []]


def test_auto_keeps_the_faster_and_prefers_the_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    for best, backward in (("backward", 0.9), ("none", 0.98), ("none", 1.5)):
        clock, seconds = [0.0], {"none": 1.0, "backward": backward}
        monkeypatch.setattr(overlaps.time, "perf_counter", lambda clock=clock: clock[0])
        trial = overlaps.OverlapChoice("auto")
        for _ in range(100):
            clock[0] += seconds[trial.mode]
            if trial.step_ended():
                break
        assert trial.mode == best and not trial.undecided
        assert "ms with 'backward'" in trial.reason
        assert ("'forward' may hide more" in trial.reason) == (best == "backward")


@pytest.mark.parametrize("overlap", ["iteration", 1, None, 2.0])
def test_unknown_overlap_is_refused_with_the_choices(overlap: Any) -> None:
    choices = "choose from 'none', 'backward', 'forward', 'auto', True or False"
    with pytest.raises(ValueError, match=choices):
        decentlam.DecentLaM(nn.Linear(2, 1).parameters(), lr=0.1, overlap=overlap)


def test_true_and_false_are_names_of_overlaps() -> None:
    assert Options(overlap=True) == Options(overlap="backward")
    assert Options(overlap=False) == Options(overlap="none")
