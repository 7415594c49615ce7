"""A node that dies or stops is an error that names it, on every other node."""

from __future__ import annotations

import pytest
import runs
import runs_deaths

pytestmark = pytest.mark.timeout(300)

N = 4


DEATHS = [
    ("decentlam", True, "before backward"),
    ("decentlam", True, "in backward"),
    ("decentlam", "forward", "before backward"),
    ("decentlam", "forward", "in backward"),
    ("dmsgd", False, "before step"),
    ("awc-dmsgd", True, "before backward"),
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
    """Within seconds, although the timeout is a minute: it is gone, or its connection closed."""
    arguments = (method, overlap, when, 0.0, 60.0, 1, shared_memory)
    results = runs.run_processes(runs_deaths.with_victim, N, arguments, 50)
    assert results[runs_deaths.VICTIM] == 7
    for node in (0, 1, 3):
        error, seconds = results[node]
        assert error.startswith(f"ExchangeError: node {node}, step "), error
        assert "bucket " in error and "process 2 (pid " in error and "died or stopped" in error
        assert seconds < 25


@pytest.mark.parametrize("orderly", [True, False])
def test_who_leaves_before_os_exit_is_not_lost(orderly: bool) -> None:
    """The exit status of another's child cannot be seen: 0 may be a crash as well."""
    results = runs.run_processes(runs_deaths.one_leaves, N, (orderly,), 50)
    assert results[runs_deaths.VICTIM] == 0
    for node in (0, 1, 3):
        assert (results[node] is None) == orderly, results


def test_death_at_construction_is_an_error_that_names_it() -> None:
    arguments = ("decentlam", True, "at construction", 0.0, 60.0)
    results = runs.run_processes(runs_deaths.with_victim, N, arguments, 50)
    assert results[runs_deaths.VICTIM] == 7
    for node in (0, 1, 3):
        error, seconds = results[node]
        assert error.startswith("ExchangeError") and "process 2 (pid " in error, error
        assert seconds < 40


@pytest.mark.parametrize("method", ["decentlam", "pmsgd"])
def test_node_that_freezes_is_named_by_all_others(method: str) -> None:
    """Long before the timeout of a minute: it gives no sign of life."""
    arguments = (method, True, "before backward", "stop", 60.0)
    results = runs.run_processes(runs_deaths.with_victim, N, arguments, 50)
    for node in (0, 1, 3):
        error, seconds = results[node]
        assert "process 2 (pid " in error and "no heartbeat for" in error, error
        assert seconds < 40


@pytest.mark.parametrize("method", ["decentlam", "pmsgd"])
def test_node_that_stops_is_an_error_after_the_timeout(method: str) -> None:
    arguments = (method, True, "before backward", 5.0, 2.0)
    results = runs.run_processes(runs_deaths.with_victim, N, arguments, 50)
    for node, (error, seconds) in enumerate(results):
        assert error.startswith("ExchangeError"), error
        assert seconds < 25
        if node != runs_deaths.VICTIM:
            assert seconds > 1.5
    assert any("slower than 2 s" in error for error, _ in results)
