"""Accumulated gradients, and nodes that have no data left."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from runs import Quadratic, flat
from runs_steps import Group, build, message_of, quadratic_loss, start, train
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join


def accumulate(process_group: Group, overlap: bool) -> list[Tensor]:
    """Three backwards per step; parameter 0 is only used in the first of them."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        with optimizer.no_sync():
            quadratic_loss(model, node, step).backward()
            (0.5 * quadratic_loss(model, node, step + 1)).backward()
        part = sum(0.5 * w.square().sum() for w in list(model.weights)[1:])
        part.backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def accumulated_loss(model: nn.Module, node: int, step: int) -> Tensor:
    whole = quadratic_loss(model, node, step) + 0.5 * quadratic_loss(model, node, step + 1)
    return whole + sum(0.5 * w.square().sum() for w in list(model.weights)[1:])


BATCHES = (3, 6, 2, 5)  # of nodes 0 to 3


def join(process_group: Group, method: str, overlap: bool) -> list[Tensor]:
    """Two epochs of uneven batches, with a step of all in between; (steps, d) of this node."""
    node, model, optimizer = start(process_group, method, overlap=overlap)
    trajectory: list[Tensor] = []
    original = optimizer.runtime.step

    def step_and_note(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        trajectory.append(flat(model))

    optimizer.runtime.step = step_and_note  # sees the steps without data too
    with Join([optimizer]):
        train(optimizer, model, node, range(BATCHES[node]))
    model.zero_grad()
    train(optimizer, model, node, range(6, 7))
    with Join([optimizer]):
        train(optimizer, model, node, range(7, 7 + BATCHES[(node + 1) % 4]))
    return trajectory


def join_absent(node: int, step: int) -> bool:
    if step < 6:
        return step >= BATCHES[node]
    return step > 6 and step - 7 >= BATCHES[(node + 1) % 4]


def join_two(process_group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """Two optimizers in one context, as a GAN has."""
    node = dist.get_rank(process_group)
    a, b = Quadratic(seed=0), Quadratic(seed=1)
    first = build("decentlam", a, process_group)
    second = build("pmsgd", b, process_group)
    with Join([first, second]):
        for step in range(BATCHES[node]):
            train(first, a, node, range(step, step + 1))
            train(second, b, node, range(step, step + 1))
    return [flat(a)], [flat(b)]


def join_throws(process_group: Group) -> str:
    node, model, optimizer = start(process_group, "decentlam")

    def run() -> None:
        with Join([optimizer], throw_on_early_termination=True):
            train(optimizer, model, node, range(BATCHES[node]))

    return message_of(run)
