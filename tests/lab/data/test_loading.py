"""Batches are the same however they are loaded: in turn, in any order, by workers."""

from __future__ import annotations

import doctest
import gc
import importlib
import multiprocessing
from pathlib import Path

import pytest
import torch

from decentlam.lab.data import Batches, load, load_batches, split
from tests.helpers.processes import HANG_SECONDS
from tests.lab.data.images import WORKERS, forks, in_memory, write_image_folder


def test_loaded_is_the_batch_of_each_node():
    data = in_memory()
    batches = Batches(split(data.labels, 3, "iid", seed=0), 4, seed=0)
    steps = list(load_batches(data, batches, [2, 0], range(5, 8)))
    assert len(steps) == 3
    for step, of_nodes in enumerate(steps, start=5):
        assert len(of_nodes) == 2
        for (inputs, labels), node in zip(of_nodes, [2, 0], strict=True):
            indices = batches.indices(step, node)
            expected = data.train_batch(indices, batches.generator(step, node))
            assert inputs.shape == (4, 3, 8, 8) and torch.equal(inputs, expected[0])
            assert torch.equal(labels, data.labels[indices])
    ((alone, _),), *_ = load_batches(data, batches, [0], range(5, 6))
    assert torch.equal(alone, steps[0][1][0])
    assert list(load_batches(data, batches, [0], range(5, 5))) == []


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("imagenet"))


@forks
@pytest.mark.parametrize("kind", ["in memory", "folder"])
def test_workers_give_the_same_values_and_leave_the_global_generator_alone(
    kind: str, image_folder: Path
):
    data = in_memory() if kind == "in memory" else load("imagenet", image_folder)
    batches = Batches(split(data.labels, 2, "iid", seed=0), 3, seed=0)
    before = torch.get_rng_state()
    here = list(load_batches(data, batches, [0, 1], range(2, 6)))
    ahead = list(load_batches(data, batches, [0, 1], range(2, 6), workers=WORKERS))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(here) == len(ahead) == 4
    for one, other in zip(here, ahead, strict=True):
        for (x, y), (same_x, same_y) in zip(one, other, strict=True):
            assert torch.equal(x, same_x) and torch.equal(y, same_y)


def assert_no_workers() -> None:
    """torch waits for some seconds, which may not be enough on a busy machine."""
    for process in multiprocessing.active_children():
        process.join(HANG_SECONDS)
    assert multiprocessing.active_children() == []


@forks
@pytest.mark.parametrize("how", ["closed", "dropped", "used up"])
def test_workers_stop_with_the_loader(how: str):
    data = in_memory()
    batches = Batches(split(data.labels, 2, "iid", seed=0), 3, seed=0)
    steps = load_batches(data, batches, [0], range(5), workers=WORKERS)
    next(steps)
    assert len(multiprocessing.active_children()) == WORKERS
    if how == "closed":
        steps.close()
    elif how == "dropped":
        del steps
        gc.collect()
    else:
        assert len(list(steps)) == 4
    assert_no_workers()


@forks
def test_a_failure_in_a_worker_reaches_the_training_and_stops_the_workers(tmp_path: Path):
    for part in ("train", "val"):
        (tmp_path / part / "n01").mkdir(parents=True)
        (tmp_path / part / "n01" / "broken.png").write_bytes(b"no image")
    batches = Batches([torch.arange(1)], 1, seed=0)
    with pytest.raises(ValueError, match=r"broken\.png is not an image"):
        next(load_batches(load("imagenet", tmp_path), batches, [0], range(5), workers=1))
    assert_no_workers()


@pytest.mark.parametrize("name", ["data.batches", "data.shards", "models", "schedules"])
def test_examples_in_docstrings_print_what_they_say(name: str):
    done = doctest.testmod(importlib.import_module(f"decentlam.lab.{name}"))
    assert done.attempted and not done.failed
