"""Gradients of several backwards add up, and a node without data answers with gradient zero."""

from __future__ import annotations

import pytest
import runs
import runs_batches
import runs_steps
from runs import Scenarios, assert_equal

N = 4
scenarios = Scenarios(N)


for overlap in (True, False):
    scenarios.add(f"accumulate {overlap}", runs_batches.accumulate, overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulated_gradients_equal_one_large_batch(overlap: bool) -> None:
    expected = runs_steps.simulate("decentlam", N, 5, loss=runs_batches.accumulated_loss)
    assert_equal(scenarios.outcomes(f"accumulate {overlap}"), expected)


JOINING = [
    ("decentlam", True),
    ("decentlam", False),
    ("awc-dmsgd", True),
    ("awc-dmsgd", False),
    ("pmsgd", True),
    ("pmsgd", False),
    ("slowmo", True),
]
for method, overlap in JOINING:
    scenarios.add(f"join {method} {overlap}", runs_batches.join, method=method, overlap=overlap)
scenarios.add("join two", runs_batches.join_two)
scenarios.add("join throws", runs_batches.join_throws)


@pytest.mark.parametrize(("method", "overlap"), JOINING)
def test_nodes_without_data_answer_with_gradient_zero(method: str, overlap: bool) -> None:
    expected = runs_steps.simulate(method, N, 13, absent=runs_batches.join_absent)
    trajectories = scenarios.outcomes(f"join {method} {overlap}")
    assert [len(trajectory) for trajectory in trajectories] == [13] * N
    assert_equal(trajectories, expected)


def test_two_optimizers_join_together() -> None:
    def absent(node: int, step: int) -> bool:
        return step >= runs_batches.BATCHES[node]

    results = scenarios.outcomes("join two")
    steps = max(runs_batches.BATCHES)
    assert_equal(
        [first for first, _ in results],
        runs_steps.simulate("decentlam", N, steps, absent=absent)[-1:],
    )
    second = runs_steps.simulate(
        "pmsgd", N, steps, absent=absent, model=lambda: runs.Quadratic(seed=1)
    )
    assert_equal([second for _, second in results], second[-1:])


def test_join_can_stop_everybody_instead() -> None:
    assert all(error.startswith("RuntimeError") for error in scenarios.outcomes("join throws"))
