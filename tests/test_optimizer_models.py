"""Models that use only parts of themselves, or are compiled, take the simulator's steps."""

from __future__ import annotations

import pytest
import runs
import runs_models
import runs_steps
from runs import Scenarios, assert_equal

import decentlam

N = 4
OVERLAPS = ("none", "backward", "forward")
scenarios = Scenarios(N)


# The first optimizer of a process is where its messages could be taken for the script's own.
scenarios.add("chatter", runs_models.branches, method="decentlam", overlap=True, chatter=True)


def test_messages_of_the_script_are_not_mixed_up_with_ours() -> None:
    expected = runs_steps.simulate(
        "decentlam", N, 8, model=runs_models.Branches, loss=runs_models.branches_loss
    )
    assert_equal(scenarios.outcomes("chatter"), expected)


BRANCHING = [
    ("decentlam", True, False),
    ("decentlam", False, False),
    ("decentlam", "forward", False),
    ("pmsgd", True, False),
    ("pmsgd", True, True),
    ("awc-dmsgd", True, True),
    ("da-dmsgd", True, False),
    ("slowmo", True, True),
]
for method, overlap, chatter in BRANCHING:
    scenarios.add(
        f"branches {method} {overlap} {chatter}",
        runs_models.branches,
        method=method,
        overlap=overlap,
        chatter=chatter,
    )


@pytest.mark.parametrize(("method", "overlap", "chatter"), BRANCHING)
def test_branches_that_nodes_take_in_different_order(
    method: str, overlap: bool | str, chatter: bool
) -> None:
    """Tied, frozen, unused parameters too; with chatter the script sends messages of its own."""
    expected = runs_steps.simulate(
        method, N, 8, model=runs_models.Branches, loss=runs_models.branches_loss
    )
    assert_equal(scenarios.outcomes(f"branches {method} {overlap} {chatter}"), expected)


for first in ("front", "back"):
    scenarios.add(f"disjoint {first}", runs_models.disjoint, first=first)
for overlap in OVERLAPS:
    for reentrant in (True, False):
        scenarios.add(
            f"checkpointed {reentrant} {overlap}",
            runs_models.checkpointed,
            reentrant=reentrant,
            overlap=overlap,
        )
    for how in ("deepcopy", "pickle"):
        scenarios.add(f"{how} {overlap}", runs_models.twins, overlap=overlap, how=how)
    scenarios.add(f"habits {overlap}", runs_models.habits, overlap=overlap)
    scenarios.add(f"swa {overlap}", runs_models.swa, overlap=overlap)
LARGE = ("decentlam", "da-dmsgd", "awc-dmsgd", "d2-dmsgd", "slowmo", "pmsgd")
for method in LARGE:
    scenarios.add(f"large {method}", runs_models.large, method=method)
scenarios.add("no backward", runs_models.no_backward_at_all)
scenarios.add("channels last", runs_models.channels_last)
scenarios.add("aot", runs_models.compiled, backend="aot_eager")


@pytest.mark.parametrize("first", ["front", "back"])
def test_losses_over_different_parameters_need_no_no_sync(first: str) -> None:
    assert_equal(scenarios.outcomes(f"disjoint {first}"), runs_steps.simulate("decentlam", N, 5))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_in_backward(reentrant: bool, overlap: str) -> None:
    expected = runs_steps.simulate(
        "decentlam", N, 4, model=runs_models.mlp, loss=runs_models.mlp_loss
    )
    assert_equal(scenarios.outcomes(f"checkpointed {reentrant} {overlap}"), expected)


@pytest.mark.parametrize("method", LARGE)
def test_parameters_larger_than_one_piece(method: str) -> None:
    expected = runs_steps.simulate(
        method, N, 4, model=runs_models.Large, loss=runs_models.large_loss
    )
    assert_equal(scenarios.outcomes(f"large {method}"), expected)


@pytest.mark.parametrize("what", ["habits", "swa"])
def test_habits_of_scripts_give_the_same_bits_in_every_overlap_mode(what: str) -> None:
    expected = scenarios.outcomes(f"{what} none")
    for overlap in OVERLAPS[1:]:
        for ours, theirs in zip(scenarios.outcomes(f"{what} {overlap}"), expected, strict=True):
            assert runs.same(ours, theirs)
    assert not runs.same(expected[0], expected[1])  # the nodes have data of their own


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_made_in_the_midst_of_training_goes_on_like_the_original(
    how: str, overlap: str
) -> None:
    expected = runs_steps.simulate("decentlam", N, 6)[3:]
    for k in range(2):
        assert_equal([both[k] for both in scenarios.outcomes(f"{how} {overlap}")], expected)


def test_a_node_without_data_may_step_with_zero_gradients() -> None:
    expected = runs_steps.simulate(
        "dmsgd", N, 6, absent=lambda node, step: node == 1 and step % 2 == 1, weight_decay=0.0
    )
    assert_equal(scenarios.outcomes("no backward"), expected)


def test_channels_last_convolutions() -> None:
    results = scenarios.outcomes("channels last")
    expected = runs_steps.simulate(
        "decentlam", N, 4, model=runs_models.conv_model, loss=runs_models.conv_loss
    )
    assert_equal([trajectory for trajectory, _ in results], expected)
    assert all(kept for _, kept in results)


def test_compiled_model() -> None:
    expected = runs_steps.simulate(
        "decentlam", N, 5, model=runs_models.mlp, loss=runs_models.mlp_loss
    )
    assert_equal(scenarios.outcomes("aot"), expected)


@pytest.mark.slow
def test_model_compiled_with_inductor() -> None:
    listed = [("inductor", runs_models.compiled, {"backend": "inductor"})]
    results = decentlam.launch(runs.run_scenarios, 2, (listed, True))
    expected = runs_steps.simulate(
        "decentlam", 2, 5, model=runs_models.mlp, loss=runs_models.mlp_loss
    )
    assert_equal(runs.outcomes(results, "inductor"), expected)
