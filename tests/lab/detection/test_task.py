"""Detectors train: real nodes do what simulated ones do, a short run learns, all recipes run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentlam.lab.detection.detectors import make_detector
from decentlam.lab.recipes import Recipe, make
from decentlam.lab.train import Summary, train
from decentlam.lab.train.tasks import Numerics, make_task
from tests.helpers.processes import run_processes
from tests.lab.detection.boxes import draw_shapes, write_voc
from tests.lab.helpers import StopAfter, assert_close, assert_same_run, records

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
        "batch": 4,
        "micro_batch": 1,
        "epochs": 1.0,
        "evaluate_every": 1.0,
        "warmup_epochs": 0.0,
        "log_every": 1,
        "precision": "float64",
        "seed": 1,
    }
    return make(f"bccd-{detector}", **{**values, **changes})


def all_scenarios(directory: Path) -> dict[str, Summary]:
    torch.set_num_threads(1)
    return {
        name: train(recipe(name, directory, NODES), directory / "real" / name) for name in DETECTORS
    }


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Images and weights that all processes read."""
    directory = tmp_path_factory.mktemp("detection")
    draw_shapes(directory / "shapes", train=8, test=3)
    for detector in DETECTORS:
        model = make_detector(f"{detector}-small", classes=3, image_size=32, seed=7)
        torch.save(model.state_dict(), directory / f"{detector}.pt")
    return directory


@pytest.fixture(scope="module")
def real(prepared: Path) -> Path:
    everyone = run_processes(all_scenarios, NODES, (prepared,))
    assert all(isinstance(summaries, dict) for summaries in everyone), everyone
    return prepared


@pytest.mark.parametrize("detector", DETECTORS)
def test_processes_and_simulation_write_the_same_records(detector: str, real: Path):
    """With pieces that have no object and a frozen stem; nobody waits for ever."""
    plan = recipe(detector, real, NODES)
    here, there = (real / kind / detector for kind in ("simulated", "real"))
    assert train(plan, here, simulate=True).step == 2
    assert_close(there, here)
    (evaluation,) = records(here, "evaluation")
    assert evaluation["consensus_distance"] > 1e-6


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_batch_without_objects_has_a_loss_and_a_gradient(detector: str, prepared: Path):
    task = make_task(recipe(detector, prepared, 2), Numerics("float32", CPU))
    empty = [k for k, image in enumerate(task.data.train) if not len(image.boxes)]
    batch = task.data.train_batch(torch.tensor(empty), torch.Generator().manual_seed(0))
    model = task.model().train()
    loss = task.loss(model, batch)
    loss.backward()
    assert torch.isfinite(loss) and loss > 0
    assert torch.equal(loss, task.loss(model, batch))  # it draws from the batch's seed alone


def test_a_resumed_detector_ends_where_an_uninterrupted_one_does(prepared: Path, tmp_path: Path):
    plan = recipe("faster-rcnn", prepared, 2, epochs=1.5, precision="float32")
    train(plan, tmp_path / "whole", simulate=True)
    assert train(plan, tmp_path / "parts", simulate=True, stop=StopAfter(1)).step == 1
    assert train(plan, tmp_path / "parts", simulate=True, resume=True).step == 3
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.system
def test_shapes_are_found_after_a_short_training(tmp_path: Path):
    """Far above the untrained model, on a ring of 4 nodes."""
    plan = make(
        "bccd-faster-rcnn",
        data="voc",
        data_path=str(draw_shapes(tmp_path / "shapes", train=40, test=10)),
        image_size=48,
        nodes=4,
        topology="ring",
        batch=8,
        epochs=7.0,
        evaluate_every=7.0,
        schedule="constant",
        warmup_epochs=0.5,
    )
    task = make_task(plan, Numerics("float32", CPU))
    untrained = task.numbers([task.score(task.model(), batch) for batch in task.test_batches(0)])
    summary = train(plan, tmp_path / "run", simulate=True)
    assert summary.evaluation is not None and untrained["ap50"] is not None
    assert summary.evaluation["averaged_ap50"] > 0.15 > 5 * untrained["ap50"]
    for score in ("ap", "ap75", "ap_small"):
        assert np.isfinite(summary.evaluation[f"averaged_{score}"])
        assert np.isfinite(summary.evaluation[f"nodes_{score}"])


PUBLISHED = ("voc-retinanet", "voc-faster-rcnn", "coco-retinanet", "coco-faster-rcnn")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_settings(name: str):
    plan = make(name)
    assert (plan.nodes, plan.topology, plan.batch) == (8, "symmetric-exponential", 256)
    assert (plan.micro_batch, plan.momentum, plan.weight_decay) == (2, 0.9, 1e-4)
    assert plan.lr == pytest.approx(0.32 if name == "coco-faster-rcnn" else 0.16)
    rate = plan.factor(steps_per_epoch=460)
    assert rate(0) == 0.001 and rate(460) == 1
    assert [rate(460 * epoch) for epoch in (7.9, 8, 11)] == pytest.approx([1, 0.1, 0.01])
    assert make(name, batch=16).lr == pytest.approx(plan.lr / 16)


def test_what_was_left_out_of_the_data_is_said_and_written_down(tmp_path: Path, caplog):
    year = write_voc(tmp_path)
    text = (year / "Annotations" / "a.xml").read_text().replace("<xmax>20<", "<xmax>2<")
    (year / "Annotations" / "a.xml").write_text(text)
    changes = {"data": "voc", "data_path": str(tmp_path), "image_size": 32, "nodes": 1, "batch": 1}
    plan = make("bccd-retinanet", **changes, epochs=1.0, warmup_epochs=0.0)
    train(plan, tmp_path / "run", simulate=True, quiet=False)
    (note,) = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    assert note == caplog.messages[-1]
    assert note.startswith("left out 1 bad box: ") and "object 1 (person)" in note
