"""What a step is taken with, from a param group of the optimizer: schedulers may change it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from decentlam.algorithms import Algorithm, Step, check_number, lr_ratio, shown
from decentlam.algorithms.base import layer_norm

ParamGroup = dict[str, Any]
PAST = (
    "previous_lr",
    "sync_lr",
    "skipped_steps",
    "num_nodes",
)  # what a group remembers of steps it took
# Of torch's SGD: values that change nothing where a method has no such thing.
_SGD = {"momentum": 0, "nesterov": False, "dampening": 0, "maximize": False}


def named_parameters(groups: Iterable[ParamGroup]) -> Iterator[tuple[str, Tensor]]:
    """All parameters of all groups, by the names the user gave or by their numbers."""
    number = itertools.count()
    for group in groups:
        names = group.get("param_names") or [f"parameter {next(number)}" for _ in group["params"]]
        yield from zip(names, group["params"], strict=True)


def prepare(groups: Iterable[ParamGroup], method: Algorithm, step: int = 0) -> None:
    """Adds what the recursion remembers of a group besides its tensors; saved with it."""
    for group in groups:
        check_values(group)
        _check_keys(group, method)
        group["method"] = type(method).__name__
        group.setdefault("step", step)
        group.setdefault("previous_lr", None)
        group.setdefault("sync_lr", None)  # of the last step that reached everyone
        group.setdefault("skipped_steps", 0)  # whose gradient was left out


def check_values(group: ParamGroup) -> None:
    """Refuses numbers that no step can be taken with."""
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} of a param group must be one value, got {shown(value)}")
    for name in ("lr", "weight_decay"):
        check_number(name, group[name])
    for name in ("previous_lr", "sync_lr", "skipped_steps"):
        if group.get(name) is not None:
            check_number(name, group[name])


def _check_keys(group: ParamGroup, method: Algorithm) -> None:
    """Refuses what a group sets for itself and the method would not look at."""
    own = method.hyper()
    fields = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    ignored = {name for name in fields & group.keys() if name not in {*own, *_SGD}}
    for name, usual in _SGD.items():
        if name not in own and group.get(name, usual) != usual:
            ignored.add(name)
    if ignored:
        allowed = ", ".join(["lr", "weight_decay", *own])
        raise ValueError(
            f"a param group sets {', '.join(sorted(ignored))}, which {type(method).__name__} has "
            f"for all groups alike or not at all; a group may set {allowed} for itself"
        )


def step_of(
    group: ParamGroup, skip: bool = False, norm: Callable[[Tensor], Tensor] = layer_norm
) -> Step:
    """The step that this group takes next; `skip` leaves its gradient out, decay included."""
    lr, index = check_number("lr", group["lr"]), group["step"]
    ratios = lr_ratio(lr, group["previous_lr"]), lr_ratio(lr, group["sync_lr"])
    weight_decay = 0.0 if skip else group["weight_decay"]
    gradients = index - group.get("skipped_steps", 0) + (not skip)
    return Step(index, lr, *ratios, weight_decay, skip=skip, gradients=gradients, norm=norm)


def advance(groups: Iterable[ParamGroup], reached_everyone: bool, skipped: bool) -> None:
    """The step was taken."""
    for group in groups:
        group["step"] += 1
        group["skipped_steps"] = group.get("skipped_steps", 0) + skipped
        group["previous_lr"] = check_number("lr", group["lr"])
        if reached_everyone:
            group["sync_lr"] = group["previous_lr"]


def check_saved(saved: Iterable[ParamGroup], groups: Iterable[ParamGroup]) -> None:
    """Refuses the state of another method, whose buffers mean something else."""
    for theirs, ours in zip(saved, groups, strict=False):
        if "step" not in theirs:
            raise ValueError(
                "this is not the state of an optimizer of decentlam: its param groups have no "
                "'step'. Load the model alone and begin with an empty momentum"
            )
        method = theirs.get("method", ours["method"])
        if method != ours["method"]:
            raise ValueError(
                f"the state is of {method}, this is {ours['method']}: their buffers mean different "
                "things. Build the same optimizer, or load the model alone"
            )
