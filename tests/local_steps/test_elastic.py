"""LocalSteps in an elastic run: who dies is left out, who comes gets the inner state."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import decentlam
from decentlam.elastic import membership
from tests.helpers.processes import HANG_SECONDS
from tests.helpers.scripts import fork

EVERY = 4


def train(directory: Path) -> tuple[int, float, int]:
    """Train until the newcomer, which comes for node 1, has taken twenty steps; return the steps,
    the steps that AdamW counts, and how many it counted when it was built."""
    run = membership.current()
    assert run is not None
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = decentlam.LocalSteps(inner, EVERY, elastic=True, model=model)
    counted = int(inner.state[model.weight]["step"]) if run.joins else 0
    done, begun = directory / "done", optimizer.steps
    while not done.exists() or optimizer.steps % EVERY:
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if os.environ["RANK"] == "1" and not run.joins and optimizer.steps == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.joins and optimizer.steps == begun + 20:
            done.touch()
        time.sleep(0.002)
    return optimizer.steps, float(inner.state[model.weight]["step"]), counted


def launch(directory: Path) -> None:
    found = decentlam.launch(train, nodes=3, args=(directory,), elastic=True)
    steps = {steps for steps, *_ in found}
    assert len(found) == 3 and max(steps) - min(steps) <= EVERY, found
    assert min(steps) >= 20, found
    newcomer = [counted for *_, counted in found if counted]
    assert len(newcomer) == 1 and newcomer[0] >= 8, found
    print("went on", flush=True)


def test_a_newcomer_gets_the_state_of_the_inner_optimizer(tmp_path: Path) -> None:
    process = fork(launch, tmp_path / "out", tmp_path)
    process.join(HANG_SECONDS)
    process.kill()
    assert "went on" in (tmp_path / "out").read_text(), (tmp_path / "out").read_text()
