"""Elastic runs go on from their checkpoint: the run is the same one."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decentlam.checkpoint import directory
from decentlam.lab.train import Summary, records, train
from tests.lab.helpers import recipe

STEPS = 300  # enough that it is stopped before the last one
PLAN = recipe(nodes=2, shards="iid", epochs=STEPS / 22, seed=5)


def run(where: Path, **options: Any) -> Summary:
    return train(PLAN, where, elastic=True, note=print, **options)


class StopWhenSaved:
    """Asks a run to stop once it has a checkpoint."""

    def __init__(self, where: Path) -> None:
        self._where = where

    @property
    def requested(self) -> bool:
        return directory.find(self._where / records.CHECKPOINT) is not None


def models(where: Path) -> list[dict[str, torch.Tensor]]:
    place = directory.locate(where / records.CHECKPOINT)
    number = directory.read_meta(place, 0)["num_nodes"]
    return [directory.read(place, rank)[1]["model"] for rank in range(number)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_elastic_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole, part, more = tmp_path / "whole", tmp_path / "part", tmp_path / "more"
    run(whole)
    stopped = run(part, stop=StopWhenSaved(part))
    end = records.read(part)[-1]
    assert (end["kind"], end["status"], end["step"]) == ("end", "interrupted", stopped.step)
    shutil.copytree(part, more)
    assert run(part, resume=True).status == "finished"
    for expected, found in zip(models(whole), models(part), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert records.read(whole)[-2]["averaged_top1"] == records.read(part)[-2]["averaged_top1"]
    assert run(more, resume=True, processes=3).step == STEPS
    assert len(models(more)) == 3


class Killing:
    """Kills the process that writes the records, once it has written some; asks for no stop."""

    def __init__(self, where: Path) -> None:
        self._where, self.notes = where, list[str]()
        self._killed = False

    @property
    def requested(self) -> bool:
        if not self._killed and len(records.read(self._where)) > 3:
            self._killed = True
            os.kill(int(self.notes[0].split()[1].strip(",")), signal.SIGKILL)
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_node_writes_on_when_the_writer_dies_and_a_new_process_joins(
    tmp_path: Path,
) -> None:
    killing = Killing(tmp_path)
    plan = replace(PLAN, epochs=12_000 / 22, evaluate_every=100.0, log_every=50)
    summary = train(plan, tmp_path, elastic=True, note=killing.notes.append, stop=killing)
    assert summary.status == "finished" and summary.evaluation is not None
    said = "\n".join(killing.notes)
    assert "killed by SIGKILL" in said and "was started again" in said
    written = [record for record in records.read(tmp_path) if record["kind"] == "step"]
    steps, nodes = ([record[key] for record in written] for key in ("step", "nodes"))
    assert steps == sorted(set(steps)) and steps[-1] == 12_000
    assert [size for size, _ in itertools.groupby(nodes)] == [2, 1, 2]


def test_a_run_that_was_not_elastic_is_resumed_without(tmp_path: Path) -> None:
    plan = recipe(nodes=2, shards="iid", epochs=5 / 22)
    train(plan, tmp_path / "run", simulate=True)
    with pytest.raises(ValueError, match="it was simulated; it was not elastic"):
        train(plan, tmp_path / "run", resume=True, elastic=True)
