"""When one process of several fails to save or load, all do, and the old checkpoint stays."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import decentlam
from tests.helpers.checkpoints import (
    Holds,
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
from tests.helpers.processes import run_processes


class KilledWhileWritten:
    """Pickled once to see whether it can be loaded; the second time it is being written."""

    times = 0

    def __reduce__(self) -> Any:
        KilledWhileWritten.times += 1
        if KilledWhileWritten.times == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return OrderedDict, ()


class Counts:
    """Refuses a state if it must, after having taken it."""

    def __init__(self, refuses: bool) -> None:
        self.count, self._refuses = 0, refuses

    def state_dict(self) -> Any:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        if self._refuses and self.count == 0:
            raise KeyError("mean")


def fail_on_one_process(directory: str) -> None:
    """Node 1 fails in every way; at last node 0, which tidies up, is killed while it writes."""
    torch.manual_seed(0)
    run, path, one = build_run("decentlam"), f"{directory}/run", dist.get_rank() == 1
    outcomes = {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
            outcomes[name] = "no error"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    def save(path: str = path, **changes: Any) -> None:
        decentlam.save_checkpoint(path, **{**run.parts(), **changes})

    def load(path: str = path, **others: Any) -> None:
        decentlam.load_checkpoint(path, **run.parts(), **others)

    run.train(range(1))
    attempt("first", save)
    run.train(range(1, 2))
    if one:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    attempt("disk full", save)
    if one:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    attempt("after disk full", load)
    attempt("unlike paths", lambda: save(f"{path}-{dist.get_rank()}"))
    attempt("unlike paths to load", lambda: load(f"{path}-{dist.get_rank()}"))
    attempt("below a file", lambda: save(f"{newest(Path(path))}/process-00000.json/run"))
    state = np.zeros(1) if one else torch.zeros(1)
    attempt("state of one", lambda: save(meter=Holds(state)))
    other = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    sound = run.model
    if one:
        run.model = other
    attempt("model of one", load)
    run.model = sound
    if one:
        flip(newest(Path(path)) / "process-00001.pt")
    dist.barrier()
    attempt("file of one", load)
    if one:
        flip(newest(Path(path)) / "process-00001.pt")
    dist.barrier()
    counts = Counts(refuses=one)
    save(f"{path}-counted", counts=counts)
    run.train(range(2, 3))
    counts.count = 7
    before = tensors(run), copy.deepcopy(numbers(run))
    attempt("object of one", lambda: load(f"{path}-counted", counts=counts))
    assert same_tensors(tensors(run), before[0]) and numbers(run) == before[1]
    assert counts.count == 7
    attempt("absent", lambda: load(f"{directory}/absent"))
    run.model(torch.ones(2, 6)).sum().backward()
    attempt("inside a step", save)
    run.optimizer.step()
    Path(f"{directory}/{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    save(meter=Holds({} if one else KilledWhileWritten()))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("failures")
    ended = run_processes(fail_on_one_process, 2, (str(directory),))
    assert ended[0] == -signal.SIGKILL
    return directory


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("first", "no error"),
        ("disk full", r"CheckpointError: process 1: .*cannot be written: File too large"),
        ("after disk full", "no error"),
        ("unlike paths", r"ValueError: .*process 1 has checkpoint path = .*run-1', process 0"),
        ("unlike paths to load", r"ValueError: .*process 1 has checkpoint path = .*run-1'"),
        ("below a file", "ValueError: process 0: .*json/run is or leads through a file"),
        ("state of one", r"ValueError: process 1: the state of meter holds something"),
        ("model of one", r"ValueError: process 1: parameter 0 of the optimizer is not one of"),
        ("file of one", r"CheckpointError: process 1: .*process-00001.pt or its .json is damaged"),
        ("object of one", r"CheckpointError: process 1: KeyError: 'mean'"),
        ("absent", r"FileNotFoundError: there is no complete checkpoint at .*absent"),
        ("inside a step", "CheckpointError: cannot save a checkpoint between backward and step"),
    ],
)
def test_failure_on_one_process_is_an_error_on_all(name: str, outcome: str, failures: Path) -> None:
    texts = [json.loads((failures / f"{rank}.json").read_text())[name] for rank in range(2)]
    assert texts[0] == texts[1]
    assert re.search(outcome, texts[0]), texts[0]


def test_a_crash_while_writing_leaves_the_old_checkpoint(failures: Path) -> None:
    """Written at step 1; the next failed for want of room, and the last for want of a process."""
    assert names_in(failures / "run") == [".000002-step-3.new", "000001-step-1"]
    assert steps_in(failures / "run") == 1
    decentlam.save_checkpoint(failures / "run", **trained_run().parts())
    assert steps_in(failures / "run") == 3
    assert names_in(failures / "run") == ["000001-step-1", "000002-step-3"]
