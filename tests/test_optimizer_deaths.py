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
        assert "bucket " in error and "died or stopped" in error
        assert seconds < 25
        if method != "pmsgd" and node != 0:  # its neighbors on the ring; all-reduce knows no peer
            assert "with node 2 failed" in error or f"with node {4 - node} failed" in error
    if method != "pmsgd":
        assert any("with node 2 failed" in results[node][0] for node in (1, 3))


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
