"""A node that dies or stops in the midst of a run."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist
from runs_steps import message_of, quadratic_loss, start, train

import decentlam
from decentlam.exchange.network import connect
from decentlam.membership import watch

VICTIM = 2


def one_leaves(orderly: bool) -> str | None:
    """Process 2 ends after its last step, while another still works: who calls it lost?"""
    node, model, optimizer = start(dist.group.WORLD, "decentlam", heartbeat_seconds=2.0)
    train(optimizer, model, node, range(3))
    if node == VICTIM:
        if orderly:
            decentlam.leave()
        os._exit(0)
    found = watch.of_default_group()
    assert found is not None
    while VICTIM not in found.lost:
        time.sleep(0.05)
    found.wait_for_cause(0.3)
    return None if found.trouble is None else found.trouble.text


def with_victim(
    method: str,
    overlap: bool,
    when: str,
    asleep: float | str,
    timeout_seconds: float,
    per_node: int = 1,
    shared_memory: bool = True,
) -> tuple[str, float]:
    """Process 2 dies, sleeps or freezes at step 3: the error of this one, and after how long."""
    assert dist.group.WORLD is not None
    if when == "at construction" and dist.get_rank() == VICTIM:
        connect()  # it is there, and gone before it agrees with the others
        os._exit(7)
    begun = time.monotonic()
    if when == "at construction":
        return message_of(lambda: start(dist.group.WORLD, method)), time.monotonic() - begun
    node, model, optimizer = start(
        dist.group.WORLD,
        method,
        overlap=overlap,
        timeout_seconds=timeout_seconds,
        heartbeat_seconds=5.0,
        processes_per_node=per_node,
        shared_memory=shared_memory,
    )

    def accident(*arguments: Any) -> None:
        if asleep == "stop":  # as SIGSTOP does it, until the others have ended
            os.kill(os.getpid(), signal.SIGSTOP)
        elif isinstance(asleep, float) and asleep:
            time.sleep(asleep)
        else:
            os._exit(7)

    begun = time.monotonic()

    def go_on() -> None:
        train(optimizer, model, node, range(3))  # what the victim had not sent yet fails here
        for step in range(3, 20):
            optimizer.zero_grad()
            loss = quadratic_loss(model, node, step)
            struck = node == VICTIM and step == 3
            if struck and when == "before backward":
                accident()
            if struck and when == "in backward":
                model.weights[2].register_post_accumulate_grad_hook(accident)
            loss.backward()
            if struck and when == "before step":
                accident()
            optimizer.step()

    return message_of(go_on), time.monotonic() - begun
