"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import decentlam
from decentlam.checkpoint.saving import settle
from tests.helpers.checkpoints import build_run, names_in, same_tensors, tensors, trained_run
from tests.helpers.processes import HANG_SECONDS


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Every write of the thread waits until training has changed what it writes."""
    run, gate = trained_run(), threading.Event()
    before = tensors(run)
    main = threading.get_ident()

    def audit(name: str, arguments: Any) -> None:
        if name == "open" and str(arguments[0]).endswith(".pt") and threading.get_ident() != main:
            assert gate.wait(HANG_SECONDS)

    sys.addaudithook(audit)
    saving = decentlam.save_checkpoint(tmp_path, **run.parts(), background=True)
    run.train(range(3, 5))
    assert names_in(tmp_path) == [".000001-step-3.new"]
    gate.set()
    saving.wait()
    again = build_run("decentlam")
    assert decentlam.load_checkpoint(tmp_path, **again.parts()).step == 3
    assert same_tensors(tensors(again), before)


def test_a_background_save_that_fails_says_so(tmp_path: Path, caplog: Any) -> None:
    run = trained_run()
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
