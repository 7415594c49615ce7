"""The thread beside the training does what it is given, in order, until something goes wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import runs
import torch

from decentlam.errors import NonFiniteError
from decentlam.runtime.worker import Worker


def test_jobs_are_done_one_after_the_other_beside_the_caller() -> None:
    worker, go, done = Worker(), threading.Event(), []

    def first() -> None:
        assert go.wait(runs.HANG_SECONDS)
        done.append((1, threading.current_thread().name))

    jobs = [worker.submit(first), worker.submit(lambda: done.append((2, "")))]
    assert done == []
    go.set()
    for job in jobs:
        worker.wait(job)
    assert done == [(1, "decentlam worker"), (2, "")]


def test_nothing_is_done_after_an_error_and_everybody_who_waits_hears_of_it() -> None:
    worker, done = Worker(), []

    def fail() -> None:
        raise NonFiniteError("node 2, step 3: a weight became NaN")

    failed, later = worker.submit(fail), worker.submit(lambda: done.append(1))
    for job in (failed, later, failed, worker.submit(lambda: done.append(2))):
        with pytest.raises(NonFiniteError, match="node 2, step 3"):
            worker.wait(job)
    assert done == []


class PartsError(Exception):
    """Cannot be made of its arguments again."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")


def test_an_error_of_any_kind_reaches_everybody() -> None:
    def fail() -> None:
        raise PartsError(3, "broken")

    worker = Worker()
    first, second = worker.submit(fail), worker.submit(lambda: None)
    with pytest.raises(PartsError, match="step 3: broken"):
        worker.wait(first)
    with pytest.raises(RuntimeError, match="PartsError: step 3: broken"):
        worker.wait(second)


def test_who_waits_for_a_worker_that_is_gone_is_told() -> None:
    worker = Worker()
    worker.wait(worker.submit(lambda: None))
    worker.stop()
    with pytest.raises(RuntimeError, match="is gone"):
        worker.wait(worker.submit(lambda: None))


BUSY = """
import time, torch, decentlam
from decentlam.runtime.worker import Worker
def work():
    for _ in range(1000):
        torch.sub(x, x, out=x)
worker, x = Worker(), torch.zeros(100)
for _ in range(100_000):
    worker.submit(work)
time.sleep(0.1)
raise SystemExit(5)
"""


@pytest.mark.system
def test_a_process_that_ends_while_its_worker_works_ends_as_it_was_told() -> None:
    for _ in range(2):
        command = [sys.executable, "-c", BUSY]
        done = subprocess.run(command, capture_output=True, timeout=runs.HANG_SECONDS)
        assert done.returncode == 5, done.stderr


def test_updates_leave_no_history() -> None:
    worker, x, enabled = Worker(), torch.ones(2, requires_grad=True), []
    worker.wait(worker.submit(lambda: enabled.append((2 * x).requires_grad)))
    assert enabled == [False] and torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_neither_thread_nor_job_outlives_the_worker(fails: bool) -> None:
    class Owner:
        def __init__(self) -> None:
            self.worker = Worker()

        def work(self) -> None:
            if fails:
                raise RuntimeError("broken")

    owner = Owner()
    job = owner.worker.submit(owner.work)
    thread, gone = owner.worker._thread, weakref.ref(owner)
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            owner.worker.wait(job)
    else:
        owner.worker.wait(job)
    del owner, job
    gc.collect()
    assert gone() is None
    assert thread is not None
    thread.join(runs.HANG_SECONDS)
    assert not thread.is_alive()
