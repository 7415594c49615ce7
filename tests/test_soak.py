"""Nodes that are late at random, run after run: no hang, and always the simulator's model."""

from __future__ import annotations

import pytest
import runs
import runs_soak as soak

import decentlam

MANY = range(200)


def test_a_few_runs_with_random_delays() -> None:
    numbers = range(10)
    everyone = runs.run_processes(soak.run_jobs, 4, (numbers,))
    assert soak.worst(numbers, everyone) < 1e-12


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_runs_in_one_group() -> None:
    assert soak.worst(MANY, decentlam.launch(soak.run_jobs, 4, (MANY,))) < 1e-12


@pytest.mark.slow
def test_runs_in_fresh_processes() -> None:
    for number in range(10):
        once = range(number, number + 1)
        assert soak.worst(once, decentlam.launch(soak.run_jobs, 4, (once,))) < 1e-12
