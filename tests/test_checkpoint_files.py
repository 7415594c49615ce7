"""Checkpoints of one process: replaced safely, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs_checkpoint import Holds, build, flip, names_in, numbers, same, steps_in, tensors, trained
from torch import nn

import decentlam


def test_one_process_resumes_to_the_bit(tmp_path: Path) -> None:
    run = trained()
    decentlam.save_checkpoint(tmp_path / "deep" / "run", **run.parts())
    run.train(range(3, 6))
    again = build("decentlam")
    facts = decentlam.load_checkpoint(str(tmp_path / "deep" / "run"), **again.parts())
    assert facts == decentlam.Resumed(3, 1, 1, averaged=False)
    again.train(range(3, 6))
    assert same(tensors(again), tensors(run)) and numbers(again) == numbers(run)


def test_a_replacement_interrupted_anywhere_leaves_one_that_loads(tmp_path: Path) -> None:
    run, path = trained(steps=1), tmp_path / "run"
    decentlam.save_checkpoint(path, **run.parts())
    run.train(range(1, 2))
    decentlam.save_checkpoint(tmp_path / "other", **run.parts())
    old, new = tmp_path / ".run.old", tmp_path / ".run.new"

    (tmp_path / "other").rename(new)  # killed before the first rename
    assert steps_in(path) == 1
    path.rename(old)  # killed between the renames: the new one is complete
    assert steps_in(path) == 2
    (new / "meta.json").rename(tmp_path / "meta.json")  # not a state that can happen, but safe
    assert steps_in(path) == 1
    (tmp_path / "meta.json").rename(new / "meta.json")

    run.train(range(2, 3))
    decentlam.save_checkpoint(path, **run.parts())  # clears up whatever is there
    assert names_in(tmp_path) == ["run"] and steps_in(path) == 3

    old.mkdir()  # killed while the old one was being deleted
    assert steps_in(path) == 3
    decentlam.save_checkpoint(path, **run.parts())
    assert names_in(tmp_path) == ["run"]


def test_an_unfinished_first_checkpoint_is_not_one(tmp_path: Path) -> None:
    (tmp_path / ".run.new").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*\.run\.new is one that was"):
        steps_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file, meta: file.unlink(), "incomplete: process-00000.pt is missing"),
        (lambda file, meta: file.write_bytes(file.read_bytes()[:-9]), "bytes instead of"),
        (lambda file, meta: flip(file), "damaged: its checksum"),
        (lambda file, meta: meta.unlink(), r"not a complete checkpoint: it has no meta\.json"),
        (lambda file, meta: meta.write_text("{"), r"meta\.json cannot be read"),
        (lambda file, meta: change(meta, format=9), "format 9, this version of decentlam reads"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    decentlam.save_checkpoint(tmp_path / "run", **trained().parts())
    damage(tmp_path / "run" / "process-00000.pt", tmp_path / "run" / "meta.json")
    with pytest.raises(decentlam.CheckpointError, match=message):
        steps_in(tmp_path / "run")


def change(meta: Path, **changes: Any) -> None:
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **changes}))


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, run = tmp_path / "run", trained()
    decentlam.save_checkpoint(path, **run.parts())

    def refused(kind: type[Exception], match: str, **changes: Any) -> None:
        before = tensors(run)
        with pytest.raises(kind, match=match):
            decentlam.load_checkpoint(path, **{**run.parts(), **changes})
        assert same(before, tensors(run)), "nothing may change when loading fails"

    other = trained("slowmo")
    refused(ValueError, "of a DecentLaM run, this is SlowMo", **other.parts())
    parts = {k: v for k, v in run.parts().items() if k != "scheduler"}
    with pytest.raises(ValueError, match=r"also holds scheduler; .* pass scheduler=None"):
        decentlam.load_checkpoint(path, **parts)
    decentlam.load_checkpoint(path, **parts, scheduler=None)
    refused(ValueError, "holds no meter; .* it has: scheduler", meter=Holds({}))
    wider = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    optimizer = decentlam.DecentLaM(wider.parameters(), lr=0.1)
    refused(
        ValueError,
        r"another model: 0.weight is not in the checkpoint.*and \d+ more",
        model=wider,
        optimizer=optimizer,
    )
    reordered = decentlam.DecentLaM(reversed(list(run.model.parameters())), lr=0.1)
    refused(ValueError, "parameters in another order", optimizer=reordered)
    refused(ValueError, "not one of the model's", optimizer=optimizer)
    with pytest.raises(TypeError, match="for decentlam's optimizers"):
        sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
        decentlam.save_checkpoint(path, model=run.model, optimizer=sgd)  # type: ignore[arg-type]


def test_what_could_never_be_loaded_is_refused_when_saving(tmp_path: Path) -> None:
    run = trained()
    with pytest.raises(ValueError, match=r"state of meter holds something.*numpy"):
        decentlam.save_checkpoint(tmp_path / "run", **run.parts(), meter=Holds([np.float64(1)]))
    assert names_in(tmp_path) == []


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    run, path = trained(), tmp_path / "run"
    path.mkdir()
    decentlam.save_checkpoint(path, **run.parts())  # an empty directory is free to use
    (path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds thesis\.tex, so it is not"):
        decentlam.save_checkpoint(path, **run.parts())
    assert (path / "thesis.tex").read_text() == "precious"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        decentlam.save_checkpoint(tmp_path / "file", **run.parts())
    link = tmp_path / "latest"
    (path / "thesis.tex").unlink()
    link.symlink_to(path)
    decentlam.save_checkpoint(link, **run.parts())
    assert link.is_symlink() and steps_in(link) == 3


def test_other_hyper_parameters_are_mentioned(tmp_path: Path, caplog: Any) -> None:
    decentlam.save_checkpoint(tmp_path / "run", **trained().parts())
    run = build("decentlam", momentum=0.5)
    decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert "DecentLaM(beta=0.9, nesterov=False), this is DecentLaM(beta=0.5" in caplog.text
    assert run.optimizer.param_groups[0]["momentum"] == 0.9
