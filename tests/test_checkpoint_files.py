"""Checkpoints of one process: replaced safely, and refused where they do not fit."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from runs_checkpoint import (
    Holds,
    build,
    flip,
    names_in,
    newest,
    numbers,
    same,
    steps_in,
    tensors,
    trained,
)
from torch import nn

import decentlam
from decentlam.checkpoint import directory
from decentlam.checkpoint.saving import settle


def test_one_process_resumes_to_the_bit(tmp_path: Path) -> None:
    run = trained()
    decentlam.save_checkpoint(tmp_path / "deep" / "run", **run.parts())
    run.train(range(3, 6))
    again = build("decentlam")
    facts = decentlam.load_checkpoint(str(tmp_path / "deep" / "run"), **again.parts())
    assert facts == decentlam.Resumed(3, 1, 1, averaged=False)
    again.train(range(3, 6))
    assert same(tensors(again), tensors(run)) and numbers(again) == numbers(run)


def killed_at(event: int, path: Path) -> bool:
    """Saves in a process of its own, which dies by SIGKILL at its n-th touch of the file system.

    False: there is no such touch, and the save was finished.
    """
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    left = itertools.count(event, -1)

    def audit(name: str, arguments: Any) -> None:
        if name.startswith(("open", "os.", "shutil.")) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    run = build("decentlam")
    decentlam.load_checkpoint(path, **run.parts())
    run.optimizer.param_groups[0]["step"] += 1
    decentlam.save_checkpoint(path, **run.parts())
    os._exit(0)


def test_a_kill_at_any_touch_of_the_disk_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Each process goes on from what the killed one before it left."""
    path = tmp_path / "run"
    decentlam.save_checkpoint(path, **trained(steps=1).parts())
    before, event = 1, 0
    while killed_at(event, path):
        found = steps_in(path)
        assert found in (before, before + 1), event
        before, event = found, event + 1
    assert event > 20, "the events of a save were not seen"
    assert before > 2, "kills after the rename were not seen"
    assert len(names_in(path)) == 2 and steps_in(path) == before + 1


def test_an_unfinished_first_checkpoint_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "run" / ".000001-step-3.new").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint at"):
        steps_in(tmp_path / "run")


def test_a_complete_save_that_nobody_renamed_counts_at_the_next(tmp_path: Path) -> None:
    """On NFS the last two writers may not have seen each other's files."""
    run = trained(steps=1)
    decentlam.save_checkpoint(tmp_path, **run.parts())
    newest(tmp_path).rename(tmp_path / ".000001-step-1.new")
    (tmp_path / ".000002-step-1.new").mkdir()
    run.train(range(1, 2))
    decentlam.save_checkpoint(tmp_path, **run.parts())
    assert names_in(tmp_path) == ["000001-step-1", "000002-step-2"]
    assert steps_in(tmp_path / "000001-step-1") == 1


def test_what_cannot_be_cleared_away_stops_no_save(tmp_path: Path) -> None:
    left = ".000001-step-3.new"
    (tmp_path / left).write_text("no directory, so rmtree refuses it, even to root")
    decentlam.save_checkpoint(tmp_path, **trained().parts())
    assert names_in(tmp_path) == [left, "000002-step-3"]


def test_a_file_that_cannot_be_synced_is_no_failure() -> None:
    directory._sync(Path("/dev/null"))  # EINVAL, as on some network file systems


def test_the_last_ones_are_kept_and_each_can_be_loaded(tmp_path: Path) -> None:
    run = trained(steps=1)
    for step in range(1, 5):
        run.train(range(step, step + 1))
        decentlam.save_checkpoint(tmp_path, **run.parts(), keep=3)
    names = ["000002-step-3", "000003-step-4", "000004-step-5"]
    assert names_in(tmp_path) == names
    assert [steps_in(tmp_path / name) for name in names] == [3, 4, 5]
    decentlam.load_checkpoint(tmp_path / names[0], **run.parts())
    decentlam.save_checkpoint(tmp_path, **run.parts(), keep=1)  # the newest, not the furthest
    assert names_in(tmp_path) == ["000005-step-3"] and steps_in(tmp_path) == 3


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Every write of the thread waits until training has changed what it writes."""
    run, gate = trained(), threading.Event()
    before = tensors(run)
    main = threading.get_ident()

    def audit(name: str, arguments: Any) -> None:
        if name == "open" and str(arguments[0]).endswith(".pt") and threading.get_ident() != main:
            assert gate.wait(runs.HANG_SECONDS)

    sys.addaudithook(audit)
    saving = decentlam.save_checkpoint(tmp_path, **run.parts(), background=True)
    run.train(range(3, 5))
    assert names_in(tmp_path) == [".000001-step-3.new"]
    gate.set()
    saving.wait()
    again = build("decentlam")
    assert decentlam.load_checkpoint(tmp_path, **again.parts()).step == 3
    assert same(tensors(again), before)


def test_a_background_save_that_fails_says_so(tmp_path: Path, caplog: Any) -> None:
    run = trained()
    decentlam.save_checkpoint(tmp_path / "run", **run.parts())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        saving = decentlam.save_checkpoint(tmp_path / "run", **run.parts(), background=True)
        with pytest.raises(decentlam.CheckpointError, match=r"cannot be written: File too large"):
            saving.wait()
        decentlam.save_checkpoint(tmp_path / "run", **run.parts(), background=True)
        assert caplog.text == "", "it was raised, and need not be told again"
    finally:
        settle()  # the thread must meet the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "the last checkpoint could not be written" in caplog.text
    decentlam.save_checkpoint(tmp_path / "run", **run.parts())
    assert names_in(tmp_path / "run") == ["000001-step-3", "000002-step-3"]


def test_several_optimizers_in_evaluation(tmp_path: Path) -> None:
    """One must not save what the other has averaged, nor load what its train() would undo."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    first, second = (decentlam.DecentLaM(model[i].parameters(), lr=0.1) for i in (0, 2))
    own = copy.deepcopy(model.state_dict())
    parts = {"path": tmp_path, "model": model, "optimizer": first}
    second.eval(model)
    with torch.no_grad():  # as if other nodes had had a part in the average
        for tensor in (model[1].running_mean, *model[2].parameters()):
            tensor.add_(1)
    for evaluating in (False, True):
        if evaluating:
            first.eval()
        with pytest.raises(decentlam.CheckpointError, match=r"2.weight and 3 more .* its train()"):
            decentlam.save_checkpoint(**parts)
    with first.runtime.own_parameters(), second.runtime.own_parameters():
        decentlam.save_checkpoint(**parts)
    first.train()
    with pytest.raises(decentlam.CheckpointError, match=r"cannot load .*2.weight and 3 more"):
        decentlam.load_checkpoint(**parts)
    with first.runtime.own_parameters():  # it has them already
        second.train()
    decentlam.load_checkpoint(**parts)
    assert same(own, model.state_dict())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "run"
    decentlam.save_checkpoint(path, **trained().parts())
    return path


def digest(file: Path, meta: Path) -> None:
    """Makes the checksum fit again, as whoever forges a file would."""
    told = json.loads(meta.read_text())
    told.pop("sha256")
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode() + file.read_bytes())
    meta.write_text(json.dumps({**told, "sha256": found.hexdigest()}))


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


def forge(content: Any) -> Any:
    def damage(file: Path, meta: Path) -> None:
        torch.save(content, file)
        digest(file, meta)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file, meta: file.unlink(), "incomplete: process-00000.pt is missing"),
        (lambda file, meta: file.write_bytes(file.read_bytes()[:-9]), "damaged: the checksum"),
        (lambda file, meta: flip(file), "damaged: the checksum"),
        (lambda file, meta: meta.write_text("{"), r"json is damaged or foreign"),
        (lambda file, meta: meta.write_text("{}"), r"json is damaged or foreign: KeyError"),
        (lambda file, meta: meta.write_text("[" * 99_999), r"json is damaged or foreign"),
        (
            lambda file, meta: meta.write_text(meta.read_text().replace("method", "metxod")),
            "damaged or foreign: it does not say what was saved",
        ),
        (lambda file, meta: change(meta, saved=[3]), "damaged or foreign: it does not say"),
        (lambda file, meta: change(meta, step=2), "damaged: the checksum"),
        (lambda file, meta: change(meta, format=9), "format 9, this version of decentlam reads"),
        (forge({"model": Hostile()}), "nothing of it was run.*posix.system"),
        (forge([1]), "it holds a list"),
        (forge({"model": {}}), "not those of a checkpoint: KeyError"),
        (forge({"model": 3, "groups": 4, "others": 5}), "not those of a checkpoint"),
    ],
)
def test_a_damaged_or_hostile_checkpoint_is_refused(
    damage: Any, message: str, sound: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, tmp_path / "run")
    save = newest(tmp_path / "run")
    damage(save / "process-00000.pt", save / "process-00000.json")
    run = build("decentlam")
    before = tensors(run)
    with pytest.raises(decentlam.CheckpointError, match=message):
        decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert same(tensors(run), before) and not (tmp_path / "hostile").exists()


def test_an_error_names_the_save_before_the_damaged_one(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    decentlam.save_checkpoint(tmp_path / "run", **trained().parts())
    flip(newest(tmp_path / "run") / "process-00000.pt")
    with pytest.raises(decentlam.CheckpointError, match=r"before it is .*000001-step-3; load it"):
        steps_in(tmp_path / "run")


def change(meta: Path, **changes: Any) -> None:
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **changes}))


def test_another_precision_is_refused(sound: Path) -> None:
    run = build("decentlam")
    run.model.double()
    optimizer = decentlam.DecentLaM(run.model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"weight is torch.float32 of .* in the checkpoint, and torch.float64"
    ):
        decentlam.load_checkpoint(sound, model=run.model, optimizer=optimizer, scheduler=None)


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    run, generator = trained(), torch.Generator().manual_seed(5)
    decentlam.save_checkpoint(tmp_path, **run.parts(), shuffle=generator)
    expected = torch.rand(3, generator=generator)
    decentlam.load_checkpoint(tmp_path, **run.parts(), shuffle=generator)
    assert torch.equal(torch.rand(3, generator=generator), expected)


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
    refused(ValueError, "holds no meter; .* it has: scheduler", meter=trained().scheduler)
    wider = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    optimizer = decentlam.DecentLaM(wider.parameters(), lr=0.1)
    refused(
        ValueError,
        r"another model: 0.weight is not in the checkpoint.*and \d+ more",
        model=wider,
        optimizer=optimizer,
    )
    reordered = decentlam.DecentLaM(reversed(list(run.model.parameters())), lr=0.1)
    refused(ValueError, "in other groups or in another order", optimizer=reordered)
    refused(ValueError, "not one of the model's", optimizer=optimizer)
    with pytest.raises(TypeError, match="for decentlam's optimizers"):
        sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
        decentlam.save_checkpoint(path, model=run.model, optimizer=sgd)  # type: ignore[arg-type]
    for changes, message in (
        ({"model": "x"}, "model must be a torch.nn.Module, got 'x'"),
        ({"meter": 3}, r"meter must be an object with state_dict\(\), .*; got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            decentlam.save_checkpoint(path, **{**run.parts(), **changes})
    with pytest.raises(ValueError, match="keep must be a whole number of 1 or more, got 0"):
        decentlam.save_checkpoint(path, **run.parts(), keep=0)


def test_what_could_never_be_loaded_is_refused_when_saving(tmp_path: Path) -> None:
    run = trained()
    with pytest.raises(ValueError, match=r"state of meter holds something.*numpy"):
        decentlam.save_checkpoint(tmp_path / "run", **run.parts(), meter=Holds([np.float64(1)]))
    assert names_in(tmp_path) == []


def test_a_path_that_is_no_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a directory `s3:` here."""
    monkeypatch.chdir(tmp_path)
    for call in (decentlam.save_checkpoint, decentlam.load_checkpoint):
        with pytest.raises(ValueError, match=r"s3://bucket/run is not on a file system.*share"):
            call("s3://bucket/run", **trained().parts())
    assert names_in(tmp_path) == []


def test_nothing_but_checkpoints_is_touched(tmp_path: Path) -> None:
    run, path = trained(), tmp_path / "run"
    path.mkdir()
    (path / "thesis.tex").write_text("precious")
    for _ in range(3):
        decentlam.save_checkpoint(path, **run.parts(), keep=1)
    assert names_in(path) == ["000003-step-3", "thesis.tex"]
    with pytest.raises(ValueError, match=r"thesis.tex is or leads through a file"):
        decentlam.save_checkpoint(path / "thesis.tex", **run.parts())
    link = tmp_path / "latest"
    link.symlink_to(path)
    decentlam.save_checkpoint(link, **run.parts())
    assert link.is_symlink() and steps_in(link) == 3


def test_other_hyper_parameters_are_mentioned(tmp_path: Path, caplog: Any) -> None:
    decentlam.save_checkpoint(tmp_path / "run", **trained().parts())
    run = build("decentlam", momentum=0.5)
    decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert "DecentLaM(beta=0.9, nesterov=False), here: DecentLaM(beta=0.5" in caplog.text
    assert run.optimizer.param_groups[0]["momentum"] == 0.9
