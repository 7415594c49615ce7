"""What the processes of the detection tests run, and the recipes that they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from decentlam.lab.data.detection.drawn import draw
from decentlam.lab.detectors import make_detector
from decentlam.lab.recipes import Recipe, make
from decentlam.lab.train import Summary, train

NODES = 2
DETECTORS = ("retinanet", "faster-rcnn")


def recipe(detector: str, directory: Path, nodes: int, **changes: Any) -> Recipe:
    """Two steps in float64 on drawn shapes, from weights, so that the stem is frozen.

    A node takes its images one at a time: a piece may have no object. Shards are sorted by what is
    in the images. Two nodes of DecentLaM agree after every step, those of AWC-DmSGD do not.
    """
    values: dict[str, Any] = {
        "data": "voc",
        "data_path": str(directory / "shapes"),
        "weights": str(directory / f"{detector}.pt"),
        "image_size": 32,
        "method": "awc-dmsgd" if nodes == 2 else "decentlam",
        "topology": "star",
        "nodes": nodes,
        "shards": "label-sorted:1",
        "batch": 8 // nodes * nodes,
        "micro_batch": 1,
        "epochs": 1.0,
        "evaluate_every": 1.0,
        "warmup_epochs": 0.0,
        "log_every": 1,
        "precision": "float64",
        "seed": 1,
    }
    return make(f"bccd-{detector}", **{**values, **changes})


def prepare(directory: Path) -> None:
    """Images and weights that all processes read."""
    draw(directory / "shapes", train=16, test=5)
    for detector in DETECTORS:
        model = make_detector(f"{detector}-small", classes=3, image_size=32, seed=7)
        torch.save(model.state_dict(), directory / f"{detector}.pt")


def all_scenarios(directory: Path, nodes: int) -> dict[str, Summary]:
    torch.set_num_threads(1)
    return {
        name: train(recipe(name, directory, nodes), directory / "real" / name) for name in DETECTORS
    }
