"""The loop goes by the step of its nodes, which may jump ahead in an elastic run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from decentlam.errors import ExchangeError
from decentlam.lab.train.loop import train_steps
from decentlam.lab.train.meter import Meter
from tests.lab.helpers import recipe

JUMPS = {3: 6, 8: 12}  # after these steps this node goes on where the furthest is


class JumpingEngine:
    """A node that was behind twice; in its second evaluation another dies."""

    alone = writes = True
    num_nodes, lr, cost = 2, 0.1, {"wait_seconds": 0.0, "bytes_sent": 0.0}

    def __init__(self, *survives: type[Exception]) -> None:
        self.survives, self.step = survives, 0
        self.trained: list[int] = []
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    def batches(self, *arguments: Any) -> Iterator[Any]:
        yield from repeat([None])

    def train(self, batches: Any) -> torch.Tensor:
        self.trained.append(self.step)
        self.step = JUMPS.get(self.step, self.step + 1)
        return torch.ones(1)

    def evaluate(self, workers: int) -> Any:
        self.evaluated.append(self.step)
        if self.step == 12:
            raise ExchangeError("process 1 died")
        return {"averaged_top1": 0.5}

    def mean(self, values: list[float]) -> list[float]:
        return values

    highest = mean

    def save(self, path: Path, meter: Meter) -> Any:
        self.saved.append(self.step)
        return Mock()


def run(engine: Any) -> tuple[str, list[tuple[str, int]]]:
    """The status, and (kind, step) of the records."""
    writer = Mock(steps=15, steps_per_epoch=4, directory=Path("run"))
    plan = recipe(nodes=2, evaluate_every=1.0, log_every=2)
    status = train_steps(plan, Mock(), engine, writer, Meter(), 0, bool)
    return status, [call.args for call in writer.write.call_args_list]


def test_skipped_steps_are_neither_trained_nor_recorded_and_a_death_ends_nothing():
    engine = JumpingEngine(ExchangeError)
    status, records = run(engine)
    assert status == "finished"
    assert engine.trained == [0, 1, 2, 3, 6, 7, 8, 12, 13, 14]
    assert [step for kind, step in records if kind == "step"] == [2, 6, 8, 12, 14, 15]
    assert engine.evaluated == [8, 12, 15]
    assert [step for kind, step in records if kind == "evaluation"] == [8, 15]
    assert engine.saved == [8, 15]  # not after the evaluation that failed


def test_an_error_that_a_run_does_not_survive_ends_it():
    with pytest.raises(ExchangeError, match="process 1 died"):
        run(JumpingEngine())
