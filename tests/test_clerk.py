"""The thread beside the training does what it is handed, in order, until something goes wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from decentlam.errors import NonFiniteError
from decentlam.exchange.clerk import Clerk


def test_jobs_are_done_one_after_the_other_beside_the_caller() -> None:
    clerk, go, done = Clerk(), threading.Event(), []

    def first() -> None:
        assert go.wait(20)
        done.append((1, threading.current_thread().name))

    jobs = [clerk.hand(first), clerk.hand(lambda: done.append((2, "")))]
    assert done == []
    go.set()
    for job in jobs:
        job.wait()
    assert done == [(1, "decentlam clerk"), (2, "")]


def test_nothing_is_done_after_an_error_and_everybody_who_waits_hears_of_it() -> None:
    clerk, done = Clerk(), []

    def fail() -> None:
        raise NonFiniteError("node 2, step 3: a weight became NaN")

    failed, later = clerk.hand(fail), clerk.hand(lambda: done.append(1))
    for job in (failed, later, failed, clerk.hand(lambda: done.append(2))):
        with pytest.raises(NonFiniteError, match="node 2, step 3"):
            job.wait()
    assert done == []


class PartsError(Exception):
    """Cannot be made of its arguments again."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")


def test_an_error_of_any_kind_reaches_everybody() -> None:
    def fail() -> None:
        raise PartsError(3, "broken")

    clerk = Clerk()
    first, second = clerk.hand(fail), clerk.hand(lambda: None)
    with pytest.raises(PartsError, match="step 3: broken"):
        first.wait()
    with pytest.raises(RuntimeError, match="PartsError: step 3: broken"):
        second.wait()


def test_who_waits_for_a_clerk_that_is_gone_is_told() -> None:
    clerk = Clerk()
    clerk.hand(lambda: None).wait()
    clerk.dismiss()
    with pytest.raises(RuntimeError, match="is gone"):
        clerk.hand(lambda: None).wait()


BUSY = """
import time, torch, decentlam
from decentlam.exchange.clerk import Clerk
def work():
    for _ in range(1000):
        torch.sub(x, x, out=x)
clerk, x = Clerk(), torch.zeros(100)
for _ in range(100_000):
    clerk.hand(work)
time.sleep(0.1)
raise SystemExit(5)
"""


def test_a_process_that_ends_while_its_clerk_works_ends_as_it_was_told() -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, timeout=60)
        assert done.returncode == 5, done.stderr


def test_updates_leave_no_history() -> None:
    clerk, x, enabled = Clerk(), torch.ones(2, requires_grad=True), []
    clerk.hand(lambda: enabled.append((2 * x).requires_grad)).wait()
    assert enabled == [False] and torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_neither_thread_nor_job_outlives_the_clerk(fails: bool) -> None:
    class Owner:
        def __init__(self) -> None:
            self.clerk = Clerk()

        def work(self) -> None:
            if fails:
                raise RuntimeError("broken")

    owner = Owner()
    job = owner.clerk.hand(owner.work)
    thread, gone = owner.clerk._thread, weakref.ref(owner)
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            job.wait()
    else:
        job.wait()
    del owner, job
    gc.collect()
    assert gone() is None
    assert thread is not None
    thread.join(20)
    assert not thread.is_alive()
