"""Long waits: who waits for whom, and where, is said while they last."""

from __future__ import annotations

import time

import torch.distributed as dist

from decentlam.network import waiting
from tests.helpers.processes import Group, Scenarios, message_of, warnings_of
from tests.helpers.quadratic import start, train

scenarios = Scenarios(2)
LATE_SECONDS = 3.0


def late(process_group: Group) -> tuple[list[str], list[str]]:
    """Process 1 comes late to step 2, and then late to an average; return what process 0 says."""
    waiting.SECONDS = 1.0
    node, model, optimizer = start(process_group, "decentlam", overlap="none")
    train(optimizer, model, node, range(2))
    with warnings_of("decentlam.network.heartbeat") as in_step:
        if node == 1:
            time.sleep(LATE_SECONDS)
        train(optimizer, model, node, range(2, 3))
    with warnings_of("decentlam.network.heartbeat") as in_call:
        if node == 1:
            time.sleep(LATE_SECONDS)
        optimizer.consensus_distance()
    return in_step, in_call


@scenarios.run(late)
def test_who_waits_says_for_whom_and_what_that_one_does(
    results: list[tuple[list[str], list[str]]],
) -> None:
    (in_step, in_call), (nothing, nothing_either) = results
    assert in_step[0].startswith("still waiting for node 1 in step 2, for ")
    assert "has finished step 1" in in_step[0]
    assert in_call[0].startswith("still waiting for all processes in the call to measure the")
    assert "has finished step 2" in in_call[0]
    assert len(in_step) <= 2 and len(in_call) <= 2  # after 1 and 2 seconds
    assert nothing == nothing_either == []


def alone(process_group: Group) -> str:
    """Process 0 averages, and process 1 is done; return what is said."""
    node, model, optimizer = start(process_group, "decentlam", timeout_seconds=2.0)
    train(optimizer, model, node, range(1))
    dist.barrier(process_group)
    return message_of(lambda: optimizer.averaged(model).__enter__()) if node == 0 else ""


last = Scenarios(2, own_group=False)


def leave_early() -> str:
    return alone(dist.group.WORLD)


@last.run(leave_early)
def test_a_call_that_only_one_process_makes_is_named(results: list[str]) -> None:
    assert "was to average the model" in results[0]
    assert "every process must make the same call: not behind `if rank == 0`" in results[0]
