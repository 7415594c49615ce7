"""What processes of one machine do that read each other's messages in memory."""

from __future__ import annotations

import copy
import gc
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import runs_steps
import torch
from runs import Quadratic, flat
from runs_steps import Group, quadratic_loss, train
from torch import Tensor, nn

import decentlam

STEPS = 24
LONGEST = 0.02  # seconds that a node may be late, again and again


def start(process_group: Group, method: str, **options: Any) -> Any:
    return runs_steps.start(process_group, method, **{"shared_memory": True, **options})


def kind(process_group: Group, **options: Any) -> str:
    return type(start(process_group, **options)[2].runtime.exchange).__name__


def usual_kind(process_group: Group) -> str:
    """Of an optimizer that is told nothing about it."""
    parameters = Quadratic().parameters()
    optimizer = decentlam.DecentLaM(parameters, topology="ring", process_group=process_group)
    return type(optimizer.runtime.exchange).__name__


def delayed_loss(draw: random.Random) -> Any:
    """The quadratic, on a node that is late at random, before forward and before backward."""

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        if draw.random() < 0.3:
            time.sleep(LONGEST * draw.random())
        value = quadratic_loss(model, node, step)
        if draw.random() < 0.3:
            time.sleep(LONGEST * draw.random())
        return value

    return loss


def delayed(process_group: Group, method: str, topology: str, overlap: bool | str) -> list[Tensor]:
    node, model, optimizer = start(
        process_group, method, topology=topology, overlap=overlap, stable="ignore"
    )
    return late_steps(optimizer, model, node, STEPS)


def late_steps(optimizer: Any, model: nn.Module, node: int, steps: int) -> list[Tensor]:
    """The trajectory of a node that is late at random, as forward sees it: a look after step()
    would end what is under way."""
    trajectory: list[Tensor] = []
    loss_of = delayed_loss(random.Random(node))
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, node, step)
        trajectory.append(flat(model))
        loss.backward()
        optimizer.step()
    return [*trajectory[1:], flat(model)]


def again(process_group: Group) -> list[list[Tensor]]:
    """Twice the same steps: the number of the step goes back while neighbors may be behind."""
    node, model, optimizer = start(process_group, "dmsgd", topology="one-peer-exponential")
    late = delayed_loss(random.Random(node))
    train(optimizer, model, node, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = train(optimizer, model, node, range(3, 12), late)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return [first, train(optimizer, model, node, range(3, 12), late)]


def maps() -> int:
    """How often memory of ours is mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:decentlam")


def held(process_group: Group) -> dict[str, Any]:
    before = maps()
    node, model, optimizer = start(process_group, "decentlam")
    train(optimizer, model, node, range(2))
    sizes, during = optimizer.memory_bytes(), maps()
    del optimizer
    gc.collect()
    return {"sizes": sizes, "maps": (before, during, maps())}


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    """A process may not have files, nor memory that looks like one, of more than 64 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def without_room(process_group: Group) -> tuple[str, list[Tensor]]:
    with no_room(process_group.rank() == 1):
        node, model, optimizer = start(process_group, "decentlam")
    return type(optimizer.runtime.exchange).__name__, train(optimizer, model, node, range(6))


def less_room_later(process_group: Group, shared_memory: bool) -> tuple[list[str], list[Tensor]]:
    """One process has no memory left when parameters are added."""
    node, model, optimizer = start(process_group, "decentlam", shared_memory=shared_memory)
    kinds = [type(optimizer.runtime.exchange).__name__]
    trajectory = train(optimizer, model, node, range(3))
    more = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    with no_room(node == 1):
        optimizer.add_param_group({"params": [("more", more)]})
    kinds.append(type(optimizer.runtime.exchange).__name__)
    for step in range(3, 6):
        optimizer.zero_grad()
        (quadratic_loss(model, node, step) + (more - node).square().sum()).backward()
        optimizer.step()
        trajectory += [flat(model), more.detach().clone()]
    return kinds, trajectory
