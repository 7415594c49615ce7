"""On one machine neighbors read messages where they are; the steps are those of sent messages."""

from __future__ import annotations

import pytest
import runs
import runs_shared_memory as shared
import runs_steps
from runs import Scenarios

N = 4
RUNS = [
    ("decentlam", "ring", False),
    ("dmsgd", "one-peer-exponential", True),
    ("decentlam", "one-peer-symmetric-exponential", "forward"),
    ("decentlam", "bipartite-random-match", "forward"),
    ("decentlam", "star", "auto"),
    ("da-dmsgd", "ring", "forward"),
    ("slowmo", "ring", True),
    ("qg-dmsgd", "bipartite-random-match", "auto"),
]

scenarios = Scenarios(N)
for method, topology, overlap in RUNS:
    name = str((method, topology, overlap))
    scenarios.add(name, shared.delayed, method=method, topology=topology, overlap=overlap)
scenarios.add("again", shared.again)
scenarios.add("held", shared.held)
scenarios.add("without room", shared.without_room)
scenarios.add("less room later", shared.less_room_later, shared_memory=True)
scenarios.add("sent", shared.less_room_later, shared_memory=False)
scenarios.add("usual", shared.usual_kind)
scenarios.add("switched off", shared.kind, method="decentlam", shared_memory=False)
scenarios.add("needs no gradient", shared.kind, method="awc-dmsgd")
scenarios.add("everyone", shared.kind, method="pmsgd")
scenarios.add("two per node", shared.kind, method="dmsgd", processes_per_node=2)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_nodes_that_are_late_at_random_take_the_simulators_steps(
    run: tuple[str, str, bool | str],
) -> None:
    expected = runs_steps.simulate(run[0], N, shared.STEPS, topology=run[1])
    runs.assert_equal(scenarios.outcomes(str(run)), expected)


def test_a_state_of_an_earlier_step_may_be_loaded() -> None:
    for first, second in scenarios.outcomes("again"):
        assert runs.same(first, second)


def test_messages_are_kept_twice_and_never_received() -> None:
    for found in scenarios.outcomes("held"):
        sizes = found["sizes"]
        assert sizes["messages"] == 2 * sizes["parameters"]
        assert sizes["received"] == 0


def test_nothing_stays_mapped_when_the_optimizer_is_gone() -> None:
    for found in scenarios.outcomes("held"):
        before, during, after = found["maps"]
        assert during == before + N
        assert after == before


def test_without_memory_on_one_node_all_send_their_messages() -> None:
    found = scenarios.outcomes("without room")
    assert {name for name, _ in found} == {"Neighbors"}
    runs.assert_equal([t for _, t in found], runs_steps.simulate("decentlam", N, 6))


def test_without_memory_for_another_group_of_parameters_all_send_their_messages() -> None:
    both = zip(scenarios.outcomes("less room later"), scenarios.outcomes("sent"), strict=True)
    for (found, trajectory), (_, expected) in both:
        assert found == ["SharedMemory", "Neighbors"]
        assert runs.same(trajectory, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("usual", "SharedMemory"),
        ("two per node", "SharedMemory"),
        ("switched off", "Neighbors"),
        ("needs no gradient", "Neighbors"),
        ("everyone", "AllReduce"),
    ],
)
def test_who_shares(name: str, expected: str) -> None:
    assert set(scenarios.outcomes(name)) == {expected}
