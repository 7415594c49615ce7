"""A node that dies or stops in the midst of a run."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist
from runs import HANG_SECONDS
from runs_steps import message_of, quadratic_loss, start, train

import decentlam
from decentlam.checkpoint import save_checkpoint
from decentlam.exchange.network import connect
from decentlam.membership import watch

VICTIM = 2
NEVER = 1e4  # seconds of a timeout that cannot be the cause


def one_leaves(orderly: bool) -> str | None:
    """Process 2 ends after its last step, while another still works: who calls it lost?"""
    node, model, optimizer = start(dist.group.WORLD, "decentlam")
    train(optimizer, model, node, range(3))
    if node == VICTIM:
        if orderly:
            decentlam.leave()
        os._exit(0)
    found = watch.of_default_group()
    assert found is not None
    while VICTIM not in found.lost:
        time.sleep(0.05)
    found.wait_for_cause(HANG_SECONDS)
    return None if found.trouble is None else found.trouble.text


def with_victim(
    method: str,
    overlap: bool,
    when: str,
    how: str = "dies",
    timeout_seconds: float = NEVER,
    per_node: int = 1,
    shared_memory: bool = True,
) -> tuple[str, float]:
    """Process 2 dies, waits or freezes at step 3, until all others have their error: that of this
    one, and after how long."""
    assert dist.group.WORLD is not None
    store = dist.PrefixStore("victim", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == VICTIM:
        store.set("pid", str(os.getpid()))
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
        heartbeat_seconds=5.0 if how == "freezes" else 60.0,
        processes_per_node=per_node,
        shared_memory=shared_memory,
    )

    def accident(*arguments: Any) -> None:
        if how == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "waits":
            store.get("all others")
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

    error, seconds = message_of(go_on), time.monotonic() - begun
    if node != VICTIM and store.add("errors", 1) == dist.get_world_size() - 1:
        store.set("all others", "")
        if how == "freezes":
            os.kill(int(store.get("pid")), signal.SIGKILL)
    return error, seconds


def half_sent() -> list[tuple[bool, bool]]:
    """Process 1 sends only the first bucket of a step of AWC-DmSGD, which mixes in backward. What
    process 0 then has of every bucket: whether x changed in the step it gave up, and momentum."""
    store = dist.PrefixStore("half", dist.distributed_c10d._get_default_store())
    node, model, optimizer = start(
        dist.group.WORLD, "awc-dmsgd", topology="ring", overlap="backward", timeout_seconds=2.0
    )
    train(optimizer, model, node, range(4))
    rounds = optimizer.runtime.rounds

    for step in range(4, 7):
        before = [(r.shard.x.clone(), r.shard.state["m"].clone()) for r in rounds]
        if node == 1 and step == 5:
            for round in rounds[1:]:
                round.send_next = lambda worker: None
        try:
            train(optimizer, model, node, range(step, step + 1))
        except decentlam.ExchangeError:
            if node == 0:
                store.set("given up", "")
            after = [(r.shard.x, r.shard.state["m"]) for r in rounds]
            pairs = zip(before, after, strict=True)
            return [(not x.equal(a), not m.equal(b)) for (x, m), (a, b) in pairs]
        if node == 1 and step == 5:
            store.get("given up")
            break
    return []


def in_collective(kind: str, directory: str) -> str:
    """Process 2 dies when the others have begun to do something together: their error."""
    node, model, optimizer = start(dist.group.WORLD, "decentlam", heartbeat_seconds=5.0)
    train(optimizer, model, node, range(2))

    def average() -> None:
        with optimizer.averaged(model):
            pass

    works = {
        "averaged": average,
        "merge": optimizer.merge,
        "consensus_distance": optimizer.consensus_distance,
        "checkpoint": lambda: save_checkpoint(directory, model=model, optimizer=optimizer),
    }
    if node == VICTIM:
        os._exit(7)
    return message_of(works[kind])
