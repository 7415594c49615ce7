"""A node that dies or stops is an error that names it, on every other node."""

from __future__ import annotations

import pytest
import runs
import runs_deaths

N = 4


DEATHS = [
    ("decentlam", True, "before backward"),
    ("decentlam", True, "in backward"),
    ("decentlam", "forward", "before backward"),
    ("decentlam", "forward", "in backward"),
    ("dmsgd", False, "before step"),
    ("awc-dmsgd", True, "before backward"),
    ("awc-dmsgd", True, "in backward"),  # of another, which mixes there
    ("pmsgd", True, "in backward"),
]
SENT = [("decentlam", True, "in backward"), ("decentlam", "forward", "before backward")]


@pytest.mark.parametrize(
    ("method", "overlap", "when", "shared_memory"),
    [*((*death, True) for death in DEATHS), *((*death, False) for death in SENT)],
)
def test_death_of_a_node_is_an_error_that_names_it(
    method: str, overlap: bool | str, when: str, shared_memory: bool
) -> None:
    """Although the timeout is hours: it is gone, or its connection closed."""
    arguments = (method, overlap, when, "dies", runs_deaths.NEVER, 1, shared_memory)
    results = runs.run_processes(runs_deaths.with_victim, N, arguments)
    assert results[runs_deaths.VICTIM] == 7
    for node in (0, 1, 3):
        error, _ = results[node]
        assert error.startswith(f"ExchangeError: node {node}, step "), error
        assert "bucket " in error and "process 2 (pid " in error and "died or stopped" in error


@pytest.mark.parametrize("orderly", [True, False])
def test_who_leaves_before_os_exit_is_not_lost(orderly: bool) -> None:
    """The exit status of another's child cannot be seen: 0 may be a crash as well."""
    results = runs.run_processes(runs_deaths.one_leaves, N, (orderly,))
    assert results[runs_deaths.VICTIM] == 0
    for node in (0, 1, 3):
        assert (results[node] is None) == orderly, results


def test_death_at_construction_is_an_error_that_names_it() -> None:
    arguments = ("decentlam", True, "at construction")
    results = runs.run_processes(runs_deaths.with_victim, N, arguments)
    assert results[runs_deaths.VICTIM] == 7
    for node in (0, 1, 3):
        error, _ = results[node]
        assert error.startswith("ExchangeError") and "process 2 (pid " in error, error


@pytest.mark.parametrize("method", ["decentlam", "awc-dmsgd", "pmsgd"])
def test_node_that_freezes_is_named_by_all_others(method: str) -> None:
    """Long before the timeout: it gives no sign of life."""
    arguments = (method, True, "before backward", "freezes")
    results = runs.run_processes(runs_deaths.with_victim, N, arguments)
    for node in (0, 1, 3):
        error, _ = results[node]
        assert "process 2 (pid " in error and "no heartbeat for" in error, error


@pytest.mark.parametrize("method", ["decentlam", "awc-dmsgd", "pmsgd"])
def test_node_that_stops_is_an_error_after_the_timeout(method: str) -> None:
    arguments = (method, True, "before backward", "waits", 2.0)
    results = runs.run_processes(runs_deaths.with_victim, N, arguments)
    for node, (error, seconds) in enumerate(results):
        assert error.startswith("ExchangeError"), error
        if node != runs_deaths.VICTIM:
            assert seconds > 1.5
    assert any("slower than 2 s" in error for error, _ in results)


def test_a_step_given_up_in_the_midst_leaves_every_bucket_as_its_momentum_is() -> None:
    """Those that were mixed in backward have taken the step; the others have not."""
    changed = runs.run_processes(runs_deaths.half_sent, 2, ())[0]
    assert all(x == momentum for x, momentum in changed), changed
    assert any(x for x, _ in changed) and not all(x for x, _ in changed), changed
