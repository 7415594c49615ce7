"""A node that dies or stops in the midst of a run."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist
from runs_steps import message_of, quadratic_loss, start, train

VICTIM = 2


def with_victim(
    method: str,
    overlap: bool,
    when: str,
    asleep: float,
    timeout_seconds: float,
    per_node: int = 1,
    shared_memory: bool = True,
) -> tuple[str, float]:
    """Process 2 dies (or sleeps) at step 3: the error of this one and how long it took to come."""
    assert dist.group.WORLD is not None
    node, model, optimizer = start(
        dist.group.WORLD,
        method,
        overlap=overlap,
        timeout_seconds=timeout_seconds,
        processes_per_node=per_node,
        shared_memory=shared_memory,
    )

    def accident(*arguments: Any) -> None:
        if asleep:
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
