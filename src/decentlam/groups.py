"""What message and update are called with, from a param group: schedulers may change it."""

from __future__ import annotations

import dataclasses
from typing import Any

from decentlam.algorithms import Algorithm, Step, lr_ratio
from decentlam.simulate import check_lr


def algorithm_of(algorithm: Algorithm, group: dict[str, Any]) -> Algorithm:
    """The algorithm with this group's momentum."""
    if "momentum" not in group:
        return algorithm
    changes = {"beta": group["momentum"]}
    if hasattr(algorithm, "nesterov"):
        changes["nesterov"] = group["nesterov"]
    if all(getattr(algorithm, k) == v for k, v in changes.items()):
        return algorithm
    return dataclasses.replace(algorithm, **changes)  # type: ignore[type-var]


def step_of(group: dict[str, Any], skip: bool = False) -> Step:
    lr = check_lr(group["lr"])
    return Step(
        index=group["step"],
        lr=lr,
        lr_ratio=lr_ratio(lr, group["previous_lr"]),
        sync_lr_ratio=lr_ratio(lr, group["sync_lr"]),
        weight_decay=0.0 if skip else group["weight_decay"],
    )


def hyper_of(group: dict[str, Any]) -> dict[str, float]:
    """What a message is made with: it must not change until the update."""
    names = ("lr", "weight_decay", "momentum", "nesterov")
    return {name: float(group[name]) for name in names if name in group}
