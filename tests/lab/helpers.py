"""What training leaves in a directory, small runs to look at, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentlam.checkpoint import directory as directory_of_saves
from decentlam.lab.recipes import Recipe

TIMES = ("seconds", "step_seconds", "data_seconds", "compute_seconds", "wait_seconds")


SPEEDS = (*TIMES, "images_per_second")


def records(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Without what a clock measured."""
    lines = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in SPEEDS}
        for record in lines
        if kind is None or record["kind"] == kind
    ]


def tensors(content: Any) -> list[Tensor]:
    """All tensors of a checkpoint, in order."""
    if isinstance(content, Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content
    return [t for part in parts for t in tensors(part)] if isinstance(content, dict | list) else []


def checkpoint(directory: Path) -> list[Tensor]:
    files = sorted(directory_of_saves.locate(directory / "checkpoint").glob("process-*.pt"))
    assert files
    return tensors([torch.load(file, weights_only=True) for file in files])


def assert_same_run(one: Path, other: Path) -> None:
    """Records and all that a checkpoint holds are equal, to the bit."""
    assert records(one) == records(other)
    for a, b in zip(checkpoint(one), checkpoint(other), strict=True):
        assert torch.equal(a, b)


def assert_close(real: Path, simulated: Path) -> None:
    """The same records but for rounding: 1e-9 in float64, relative to 1 or to the value."""
    for a, b in zip(records(real), records(simulated), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == (
                pytest.approx(b[key], rel=1e-9, abs=1e-9) if value != b[key] else b[key]
            )


NODES = 4


def recipe(method: str = "decentlam", **changes: Any) -> Recipe:
    """A few steps on digits in float64, on shards that pull the nodes apart."""
    values: dict[str, Any] = {
        "method": method,
        "nodes": NODES,
        "shards": "label-sorted",
        "batch": 64,
        "epochs": 9 / 22,  # 22 steps are an epoch
        "warmup_epochs": 1 / 22,
        "warmup_from": 0.1,
        "weight_decay": 1e-3,
        "precision": "float64",
        "evaluate_every": 4 / 22,
        "log_every": 2,
        "seed": 3,
    }
    return Recipe(**{**values, **changes})


class StopAfter:
    """Asks a simulated run to stop after so many more step records."""

    forward = None

    def __init__(self, records: int) -> None:
        self.left = records

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left <= 0
