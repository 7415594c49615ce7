"""`decentlam train --elastic --resume`: samples are dealt on, and the run is the same one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs_train
import torch

from decentlam.checkpoint import directory
from decentlam.errors import CheckpointError
from decentlam.lab.train import Summary, records, train
from decentlam.lab.train.elastic import _read, train_elastic
from decentlam.membership.deal import Deal, Place
from decentlam.membership.generations import Change

PLAN = runs_train.recipe(nodes=2, shards="iid", epochs=40 / 22, seed=5)


def test_a_resumed_run_deals_every_batch_once_whatever_the_number_of_processes() -> None:
    deal = Deal(samples=1000, batch=2)
    # Node 1 of 3 is lost in step 3; the checkpoint is of step 6; then 4 go on, and 3 from step 8.
    past = (Change(0, 3), Change(5, 2, (1,), 4))
    taken = []
    for step in range(10):
        old = tuple(change for change in past if change.step <= step)
        new = tuple(c for c in (Change(0, 4), Change(8, 3, (), 7)) if c.step <= step)
        for node in range(old[-1].size if step < 6 else new[-1].size):
            lost = step in (3, 4) and node == 1
            place = Place(step, node, old) if step < 6 else Place(step, node, new).after(past, 6)
            if not lost:
                taken.append(deal.position(place))
    missing = 3 * 3 + 1  # the batch of node 1 in step 3, which it was lost with
    assert sorted(taken) == sorted({2 * k for k in range(len(taken) + 1)} - {2 * missing})


def run(where: Path, **options: Any) -> Summary:
    never: Callable[[], bool] = bool
    given = {"quiet": True, "note": print, "stopped": never, **options}
    return train_elastic(PLAN, where, **given)


def models(where: Path) -> list[dict[str, torch.Tensor]]:
    place = directory.locate(where / records.CHECKPOINT)
    number = directory.read_meta(place, 0)["num_nodes"]
    return [directory.read(place, rank)[1]["model"] for rank in range(number)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_elastic_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole, part, more = tmp_path / "whole", tmp_path / "part", tmp_path / "more"
    run(whole)
    run(part, stopped=lambda: directory.find(part / records.CHECKPOINT) is not None)
    shutil.copytree(part, more)
    assert run(part, resume=True).status == "finished"
    for expected, found in zip(models(whole), models(part), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert records.read(whole)[-2]["averaged_top1"] == records.read(part)[-2]["averaged_top1"]
    assert run(more, resume=True, processes=3).step == 40
    assert len(models(more)) == 3


def test_a_run_that_was_not_elastic_is_resumed_without(tmp_path: Path) -> None:
    plan = runs_train.recipe(nodes=2, shards="iid", epochs=5 / 22)
    train(plan, tmp_path / "run", simulate=True)
    with pytest.raises(ValueError, match="it was simulated"):
        train_elastic(
            plan, tmp_path / "run", resume=True, quiet=True, note=print, stopped=lambda: False
        )
    with pytest.raises(CheckpointError, match="was not started with --elastic"):
        _read(tmp_path / "run" / records.CHECKPOINT)
