"""What training left in a directory, and images to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs_checkpoint import newest
from torch import Tensor

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
    files = sorted(newest(directory / "checkpoint").glob("process-*.pt"))
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


def write_images(root: Path, parts: tuple[str, str], classes: int, each: int, size: int) -> Path:
    draw = np.random.default_rng(0)
    for part in parts:
        for label in range(classes):
            (root / part / f"n{label:02d}").mkdir(parents=True)
            for k in range(each):
                pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / f"n{label:02d}" / f"{k}.png")
    return root
