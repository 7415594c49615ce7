"""One thread beside the training, which does one job after the other in the order given.

With overlap and messages that gloo sends, its jobs are to post receives, to form messages and to
post them; with overlap="forward" also to wait for mixes and to update parameters. A job may touch
the message buffers, state and parameters of its own bucket and the exchange; the training thread
leaves these alone until it has waited for the job. While the training waits for a GPU or for data
this work costs it nothing; where every core is busy it is the same work in another thread.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import torch

_LOOK_SECONDS = 1.0  # between two looks at whether the thread is still there
_STOP_SECONDS = 5.0

Job = tuple[Callable[[], None], "Future[None]"]


class Worker:
    """After a job that failed, none is done any more: what follows it depends on it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="decentlam worker", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
            _workers.add(self)
        future: Future[None] = Future()
        self._jobs.put((work, future))
        return future

    def wait(self, future: Future[None]) -> None:
        """Blocks until the job is over, raises what it raised; all it waits for has a timeout."""
        while True:
            try:
                return future.result(_LOOK_SECONDS)
            except TimeoutError:
                if future.done():
                    return future.result()
                if self._thread is None or not self._thread.is_alive():
                    raise RuntimeError(
                        "the thread that was to send and update is gone: the process is about to "
                        "end, or was forked in the midst of a step"
                    ) from None

    def stop(self) -> None:
        """Waits for the job under way; the others are not done any more."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before the process ends: a thread that is stopped inside of torch aborts it."""
    for worker in list(_workers):
        worker.stop()


def _work(jobs: SimpleQueue[Job | None]) -> None:
    torch.set_grad_enabled(False)  # of this thread
    failure: Callable[[], BaseException] | None = None
    while (job := jobs.get()) is not None:
        work, future = job
        try:
            if failure is not None:
                raise failure()
            work()
        except BaseException as error:
            failure = failure or _again(error)
            future.set_exception(error)
        else:
            future.set_result(None)
        job = work = future = None  # type: ignore[assignment]  # they may keep messages alive


def _again(error: BaseException) -> Callable[[], BaseException]:
    """Makes the same error anew: the traceback of the first would keep the optimizer alive."""
    kind, arguments, text = type(error), error.args, f"{type(error).__name__}: {error}"

    def make() -> BaseException:
        try:
            return kind(*arguments)
        except Exception:
            return RuntimeError(text)

    return make
