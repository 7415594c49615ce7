"""Checkpoints are replaced safely, and refused where they are damaged."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import decentlam
from decentlam.checkpoint import directory
from tests.helpers.checkpoints import (
    build_run,
    flip,
    names_in,
    newest,
    numbers,
    same_tensors,
    steps_in,
    tensors,
    trained_run,
)


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
    run = build_run("decentlam")
    decentlam.load_checkpoint(path, **run.parts())
    run.optimizer.param_groups[0]["step"] += 1
    decentlam.save_checkpoint(path, **run.parts())
    os._exit(0)


def test_a_kill_at_any_touch_of_the_disk_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Each process goes on from what the killed one before it left."""
    path = tmp_path / "run"
    decentlam.save_checkpoint(path, **trained_run(steps=1).parts())
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


def test_what_cannot_be_cleared_away_stops_no_save(tmp_path: Path) -> None:
    left = ".000001-step-3.new"
    (tmp_path / left).write_text("no directory, so rmtree refuses it, even to root")
    decentlam.save_checkpoint(tmp_path, **trained_run().parts())
    assert names_in(tmp_path) == [left, "000002-step-3"]


def test_a_file_that_cannot_be_synced_is_no_failure() -> None:
    directory._sync(Path("/dev/null"))  # EINVAL, as on some network file systems


def test_the_last_ones_are_kept_and_each_can_be_loaded(tmp_path: Path) -> None:
    run = trained_run(steps=1)
    for step in range(1, 5):
        run.train(range(step, step + 1))
        decentlam.save_checkpoint(tmp_path, **run.parts(), keep=3)
    names = ["000002-step-3", "000003-step-4", "000004-step-5"]
    assert names_in(tmp_path) == names
    assert [steps_in(tmp_path / name) for name in names] == [3, 4, 5]
    decentlam.load_checkpoint(tmp_path / names[0], **run.parts())
    decentlam.save_checkpoint(tmp_path, **run.parts(), keep=1)  # the newest, not the furthest
    assert names_in(tmp_path) == ["000005-step-3"] and steps_in(tmp_path) == 3


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "run"
    decentlam.save_checkpoint(path, **trained_run().parts())
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


def change(meta: Path, **changes: Any) -> None:
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **changes}))


def replace(file: Path, make: Any) -> None:
    file.unlink()
    make(file)


@pytest.mark.timeout(60)
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
        (
            lambda file, meta: change(meta, num_nodes=0),
            r"foreign: .*num_nodes is 0, it must be a whole number of 1 or more",
        ),
        (lambda file, meta: change(meta, processes_per_node=True), "processes_per_node is True"),
        (lambda file, meta: change(meta, rank=1), "it describes process 1"),
        (lambda file, meta: change(meta, more="x" * (1 << 20)), "it has more than 1048576 bytes"),
        (lambda file, meta: replace(file, os.mkfifo), "pt is damaged or foreign: .*not a regular"),
        (lambda file, meta: replace(file, Path.mkdir), "pt is damaged or foreign: .*not a regular"),
        (
            lambda file, meta: replace(file, lambda path: path.symlink_to("/dev/zero")),
            "pt is damaged or foreign: it is not a regular file",
        ),
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
    run = build_run("decentlam")
    before = tensors(run)
    with pytest.raises(decentlam.CheckpointError, match=message):
        decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert same_tensors(tensors(run), before) and not (tmp_path / "hostile").exists()


def put(*keys: str | int, value: Any) -> Any:
    """Changes one value deep in a content: a function makes the new one from the old."""

    def change(content: Any) -> None:
        *path, last = keys
        for key in path:
            content = content[key]
        content[last] = value(content[last]) if callable(value) else value

    return change


LAST = "layers.4.bias"


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("model", LAST, value=Tensor.to_sparse), r"layers.4.bias is .* torch.sparse_coo"),
        (put("model", LAST, value=lambda t: t.to("meta")), r"layers.4.bias is .* meta"),
        (put("model", LAST, value=3.0), "not those of a checkpoint"),
        (put("state", LAST, "m", value=Tensor.to_sparse), "state 'm' of layers.4.bias .*sparse"),
        (put("state", LAST, "m", value=lambda t: t[:1]), r"state 'm' of layers.4.bias .*\(1,\)"),
        (put("state", LAST, "m", value=None), "not those of a checkpoint"),
        (put("state", LAST, value=[]), "not those of a checkpoint"),
        (put("groups", 0, "lr", value="fast"), "lr must be a finite number"),
        (put("groups", 0, "momentum", value=7.0), "momentum"),
        (put("groups", 0, "previous_lr", value=[]), "previous_lr must be a finite number"),
        (put("groups", 0, "step", value=-1), "step is -1"),
        (put("groups", 0, "method", value="DmSGD"), "the state is of DmSGD"),
        (put("rng", "cpu", value=lambda t: t[:9]), "not those of a checkpoint"),
        (put("rng", "cpu", value="x"), "not those of a checkpoint"),
    ],
)
def test_nothing_is_changed_by_a_checkpoint_that_is_refused(
    change: Any, message: str, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "run")
    save = newest(tmp_path / "run")
    file = save / "process-00000.pt"
    content = torch.load(file, weights_only=True)
    change(content)
    forge(content)(file, save / "process-00000.json")
    run = build_run("decentlam")
    before = tensors(run), copy.deepcopy(numbers(run))
    with pytest.raises((decentlam.CheckpointError, ValueError), match=message):
        decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert same_tensors(tensors(run), before[0]) and numbers(run) == before[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_device_is_not_read(make: Any, sound: Path, tmp_path: Path) -> None:
    """A pipe would block for ever, and the device be read until memory ends."""
    shutil.copytree(sound, tmp_path / "run")
    replace(newest(tmp_path / "run") / "process-00000.json", make)
    with pytest.raises(decentlam.CheckpointError, match=r"json is damaged.*not a regular file"):
        steps_in(tmp_path / "run")


def test_an_error_names_the_save_before_the_damaged_one(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "run")
    decentlam.save_checkpoint(tmp_path / "run", **trained_run().parts())
    flip(newest(tmp_path / "run") / "process-00000.pt")
    with pytest.raises(decentlam.CheckpointError, match=r"before it is .*000001-step-3; load it"):
        steps_in(tmp_path / "run")


def test_a_path_that_is_no_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a directory `s3:` here."""
    monkeypatch.chdir(tmp_path)
    for call in (decentlam.save_checkpoint, decentlam.load_checkpoint):
        with pytest.raises(ValueError, match=r"s3://bucket/run is not on a file system.*share"):
            call("s3://bucket/run", **trained_run().parts())
    assert names_in(tmp_path) == []


def test_nothing_but_checkpoints_is_touched(tmp_path: Path) -> None:
    run, path = trained_run(), tmp_path / "run"
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


@pytest.mark.parametrize(
    "name",
    [
        ".my-step-notes/a.txt",
        ".000001-step-3.newer/process-00000.pt",
        ".000001-step-3.new/a.txt",
        ".000001-step-3.old/process-00000.pt/a.txt",
        "000001-step-1/a.txt",
    ],
)
def test_a_directory_with_something_of_the_user_is_never_deleted(name: str, tmp_path: Path) -> None:
    precious = tmp_path / "run" / name
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    run = trained_run()
    for _ in range(3):
        decentlam.save_checkpoint(tmp_path / "run", **run.parts(), keep=1)
    assert precious.read_text() == "precious" and steps_in(tmp_path / "run") == 3


def test_what_a_killed_save_or_deletion_left_is_deleted(tmp_path: Path) -> None:
    for name in (".000001-step-1.new", ".000001-step-1.old", ".000002-step-2.new"):
        (tmp_path / name).mkdir()
    for name in ("process-00000.pt", "process-00001.draft", "process-00001.json"):
        (tmp_path / ".000001-step-1.new" / name).write_text("half")
        (tmp_path / ".000001-step-1.old" / name).write_text("half")
    decentlam.save_checkpoint(tmp_path, **trained_run().parts())
    assert names_in(tmp_path) == ["000001-step-3"]
