"""What processes do that let the optimizer choose: overlap="auto", topology="auto"."""

from __future__ import annotations

import copy
import logging
from typing import Any

from runs import flat
from runs_steps import LR, Group, quadratic_loss, start, train
from torch import Tensor, nn

STEPS = 36  # after 33 it has chosen


def automatic(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor], Any]:
    node, model, optimizer = start(process_group, method, overlap=False)
    expected = train(optimizer, model, node, range(STEPS))
    node, model, optimizer = start(process_group, method, overlap="auto")
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = quadratic_loss(model, node, step)
        if step:
            found.append(flat(model))
        loss.backward()
        optimizer.step()
    return expected, [*found, flat(model)], optimizer.runtime.overlap.mode


def careful_scripts(process_group: Group, method: str) -> dict[str, Any]:
    """What scripts do between backward and step() that overlap cannot stand."""

    def clip(model: nn.Module, optimizer: Any, node: int, step: int) -> None:
        quadratic_loss(model, node, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def accumulate(model: nn.Module, optimizer: Any, node: int, step: int) -> None:
        for _ in range(2):
            quadratic_loss(model, node, step).backward()

    def schedule(model: nn.Module, optimizer: Any, node: int, step: int) -> None:
        quadratic_loss(model, node, step).backward()
        optimizer.param_groups[0]["lr"] = LR / (1 + step)

    def scale(model: nn.Module, optimizer: Any, node: int, step: int) -> None:
        quadratic_loss(model, node, step).backward()
        for p in model.parameters():
            p.grad = 2 * p.grad

    found = {}
    for backward in (clip, accumulate, schedule, scale):
        trajectories, mode = [], None
        for overlap in (False, "auto"):
            node, model, optimizer = start(process_group, method, overlap=overlap)
            for step in range(10):
                optimizer.zero_grad()
                backward(model, optimizer, node, step)
                optimizer.step()
            trajectories.append(flat(model))
            mode = (
                optimizer.runtime.overlap.mode,
                optimizer.runtime.overlap.undecided,
                optimizer.runtime.overlap.reason,
            )
        found[backward.__name__] = (*trajectories, mode)
    return found


def automatic_topology(process_group: Group, method: str, **options: Any) -> tuple[Any, ...]:
    """Every node gets the same network, and a copy of the optimizer measures nothing again."""
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("decentlam.runtime.build")
    level, _ = log.level, log.addHandler(handler)
    log.setLevel(logging.INFO)
    node, model, optimizer = start(process_group, method, topology="auto", **options)
    log.setLevel(level)
    log.removeHandler(handler)
    train(optimizer, model, node, range(3))
    assert repr(copy.deepcopy(optimizer).topology) is not None
    said = [text.endswith("(shared memory)") for text in reasons if "topology='auto'" in text]
    return repr(optimizer.topology), optimizer.consensus_distance(), said
