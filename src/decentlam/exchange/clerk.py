"""A thread beside the training: forms messages, hands them to the wire, updates what has arrived.

While the training thread waits for a GPU or for data, this work costs it nothing; where every core
is busy, it is the same work in another thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch


class Job:
    """Some work, and whether it is over."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._over = threading.Event()

    def wait(self) -> None:
        """Blocks until it is over and raises what it raised; all it waits for has a timeout."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> BaseException | None:
        """Does the work and returns what went wrong; raised where somebody waits for it."""
        work, self._work = self._work, None  # it may keep messages alive
        assert work is not None
        try:
            work()
        except BaseException as error:
            return self.end(error)
        return self.end()

    def end(self, error: BaseException | None = None) -> BaseException | None:
        self._error, self._work = error, None
        self._over.set()
        return error


class Clerk:
    """Does one job after the other, in the order given; after an error none any more."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def hand(self, work: Callable[[], None]) -> Job:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="decentlam clerk", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        job = Job(work)
        self._jobs.put(job)
        return job


def _work(jobs: SimpleQueue[Job | None]) -> None:
    torch.set_grad_enabled(False)  # of this thread
    failed: tuple[type[BaseException], tuple[object, ...]] | None = None
    while (job := jobs.get()) is not None:
        if failed is not None:
            job.end(failed[0](*failed[1]))
        elif (error := job.run()) is not None:
            failed = type(error), error.args  # its traceback would keep the optimizer alive
        job = error = None  # nor may anything else, while there is nothing to do
