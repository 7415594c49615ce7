"""A thread beside the training: forms messages, hands them to the wire, updates what has arrived.

While the training thread waits for a GPU or for data, this work costs it nothing; where every core
is busy, it is the same work in another thread.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

_LOOK_SECONDS = 1.0  # between two looks at whether the thread is still there
_DISMISS_SECONDS = 5.0


class Job:
    """Some work of a thread, and whether it is over."""

    def __init__(self, work: Callable[[], None], thread: threading.Thread) -> None:
        self._work: Callable[[], None] | None = work
        self._thread = thread
        self._error: BaseException | None = None
        self._over = threading.Event()

    def wait(self) -> None:
        """Blocks until it is over and raises what it raised; all it waits for has a timeout."""
        while not self._over.wait(_LOOK_SECONDS):
            if not self._thread.is_alive() and not self._over.is_set():
                raise RuntimeError(
                    "the thread that was to send and update is gone: the process is about to end, "
                    "or was forked in the midst of a step"
                )
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
            thread = threading.Thread(
                target=_work, args=(self._jobs,), name="decentlam clerk", daemon=True
            )
            thread.start()
            self._thread = thread
            weakref.finalize(self, self._jobs.put, None)
            _clerks.add(self)
        job = Job(work, self._thread)
        self._jobs.put(job)
        return job

    def dismiss(self) -> None:
        """Waits for the job under way; the others are not done any more."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_DISMISS_SECONDS)


_clerks: weakref.WeakSet[Clerk] = weakref.WeakSet()


def dismiss_all() -> None:
    """Before the process ends: a thread that is stopped inside of torch aborts it."""
    for clerk in list(_clerks):
        clerk.dismiss()


def _work(jobs: SimpleQueue[Job | None]) -> None:
    torch.set_grad_enabled(False)  # of this thread
    failed: tuple[type[BaseException], tuple[object, ...], str] | None = None
    while (job := jobs.get()) is not None:
        if failed is not None:
            job.end(_like(*failed))
        elif (error := job.run()) is not None:  # its traceback would keep the optimizer alive
            failed = type(error), error.args, f"{type(error).__name__}: {error}"
        job = error = None  # nor may anything else, while there is nothing to do


def _like(kind: type[BaseException], arguments: tuple[object, ...], text: str) -> BaseException:
    """The error again, if it can be made of what it was made of."""
    try:
        return kind(*arguments)
    except Exception:
        return RuntimeError(text)
