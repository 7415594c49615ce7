"""overlap="auto" takes the same steps, tries both modes and gets in nobody's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from decentlam.runtime import overlap as overlaps
from tests.helpers.processes import Group, Scenarios, every
from tests.helpers.quadratic import LR, flat, quadratic_loss, same, start, train

scenarios = Scenarios(4)


STEPS = 36  # after 33 it has chosen


def automatic(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor], bool]:
    node, model, optimizer = start(process_group, method, overlap=False)
    expected = train(optimizer, model, node, range(STEPS))
    node, model, optimizer = start(process_group, method, overlap="auto")
    found = train(optimizer, model, node, range(STEPS))
    return expected, found, optimizer.runtime.overlap.undecided


@scenarios.run(automatic, every(method=("decentlam", "pmsgd", "awc-dmsgd")))
def test_auto_takes_the_same_steps_and_ends_with_a_choice(results: list[Any]) -> None:
    for expected, found, undecided in results:
        assert same(expected, found) and not undecided


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


SCRIPTS = {
    "clip": "gradients change between",
    "scale": "gradients change between",
    "accumulate": "accumulated over several backwards",
    "schedule": "learning rate changes between",
}


@scenarios.run(careful_scripts, every(method=("decentlam", "awc-dmsgd")))
def test_auto_never_gets_in_the_way_of_a_script(results: list[Any], method: str) -> None:
    for script, reason in SCRIPTS.items():
        for found in results:
            expected, real, (mode, undecided, why) = found[script]
            assert torch.equal(expected, real), script
            if method == "decentlam":  # the message of the other needs no gradient
                assert mode == "none" and not undecided and reason in why, script


def modes_of_auto(process_group: Group) -> list[str]:
    """A plain model whose biases share a bucket, and a script that touches no gradient."""
    torch.manual_seed(dist.get_rank(process_group))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = decentlam.DecentLaM(
        model.parameters(), lr=0.01, topology="ring", process_group=process_group
    )
    modes = []
    for _ in range(34):
        modes.append(optimizer.runtime.overlap.mode)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return modes


@scenarios.run(modes_of_auto)
def test_auto_tries_overlap_on_a_model_with_small_parameters(results: list[list[str]]) -> None:
    """A write to one gathered gradient must not look like a change of the others."""
    for modes in results:
        assert modes[:3] == ["none"] * 3 and modes.count("backward") >= 15


def test_auto_keeps_the_faster_and_prefers_the_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    for best, backward in (("backward", 0.9), ("none", 0.98), ("none", 1.5)):
        clock, seconds = [0.0], {"none": 1.0, "backward": backward}
        monkeypatch.setattr(overlaps.time, "perf_counter", lambda clock=clock: clock[0])
        trial = overlaps.OverlapChoice("auto")
        for _ in range(100):
            clock[0] += seconds[trial.mode]
            if trial.step_ended():
                break
        assert trial.mode == best and not trial.undecided
        assert "ms with 'backward'" in trial.reason
