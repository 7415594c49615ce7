"""Updates that are made after step(), as messages arrive or parameters are read."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from decentlam.errors import StaleMessageError
from decentlam.runtime.bucket import Bucket
from decentlam.runtime.forward.parameter import AwaitedParameter, await_all, release
from decentlam.runtime.round import Phase, Round
from decentlam.runtime.shard import Plan
from decentlam.runtime.worker import Worker


class Unfinished(Protocol):
    """Whoever has postponed updates."""

    def finish(self) -> None: ...


class Forward:
    """The updates of a step that are still to come: none before `postpone` and after `release`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # anybody may read a parameter, from any thread
        self._rounds: Sequence[Round] = ()
        self._plans: Sequence[Plan] = ()
        self._worker: Worker | None = None
        self._futures: dict[int, Future[None]] = {}
        self.failed = False  # an update failed; the others were given up
        self.waited_seconds = 0.0  # by those who read parameters

    def postpone(
        self,
        owner: Unfinished,
        rounds: Sequence[Round],
        plans: Sequence[Plan],
        worker: Worker | None,
    ) -> bool:
        """Leaves the updates to the worker, or to whoever reads a parameter. False if a parameter
        cannot be awaited, and nothing was postponed."""
        with self._lock:
            self._rounds, self._plans, self._worker = rounds, plans, worker
            self.failed, self.waited_seconds = False, 0.0
            for round in rounds:
                if not await_all(round.bucket.params, functools.partial(self._update, round)):
                    self.release(owner)
                    return False
            _watch(owner)
            if worker is not None:
                for round in reversed(rounds):  # as the next forward needs them
                    job = functools.partial(_make, round, plans[round.number])
                    self._futures[round.number] = worker.submit(job)
        return True

    def check_read(self, bucket: Bucket, i: int) -> None:
        """Refuses the gradient of a parameter whose value nobody asked for."""
        if isinstance(bucket.params[i], AwaitedParameter):
            raise StaleMessageError(
                f"{bucket.names[i]} has a gradient, but its value of the step before was "
                "never asked for: forward ran before step(), or outside of torch's Python "
                "functions (a scripted function, an extension, a CUDA graph). Use "
                "overlap='backward'."
            )

    def wait(self) -> None:
        """Makes every update that is still to come."""
        with self._lock:
            for round in self._rounds:
                self._update(round)

    def release(self, owner: Unfinished) -> None:
        """Nothing is postponed any more."""
        with self._lock:
            rounds, self._rounds, self._plans, self._futures = self._rounds, (), (), {}
            for round in rounds:
                release(round.bucket.params)
            _forget(owner)

    def _update(self, round: Round) -> None:
        """The update of one bucket. Its other parameters stay awaited until they are asked for:
        one that gets a gradient without that was read behind our back."""
        with self._lock, torch.no_grad():
            if self.failed or round not in self._rounds:
                return
            begun = time.perf_counter()
            try:
                future = self._futures.get(round.number)
                if future is not None:
                    assert self._worker is not None
                    self._worker.wait(future)
                else:
                    _make(round, self._plans[round.number])
            except Exception:  # what there is can still be saved
                self.failed = True
                for other in self._rounds:
                    release(other.bucket.params)
                raise
            self.waited_seconds += time.perf_counter() - begun


def _make(round: Round, plan: Plan) -> None:
    """The gradient may be dropped after step(), but must not be written to until it was used."""
    if round.phase is not Phase.SENT:
        return
    round.fresh.check_values_used()
    round.update(plan)
    round.fresh.check_values_used()  # it may have changed meanwhile, by another thread


_unfinished: weakref.WeakSet[Unfinished] = weakref.WeakSet()
_hook: Any = None  # before every module's forward, while anything is unfinished


def _watch(owner: Unfinished) -> None:
    """From here on, compiled models and the end of the process wait for `owner.finish()`."""
    global _hook
    _unfinished.add(owner)
    if _hook is None:
        _hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)
        # Again each time, so that it runs before whatever leaves the process group at the end.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def _forget(owner: Unfinished) -> None:
    global _hook
    _unfinished.discard(owner)
    if _hook is not None and not _unfinished:
        _hook.remove()
        _hook = None


def _before_forward(module: nn.Module, args: Any) -> None:
    """A compiled model guards on the type of its parameters, and would be compiled anew; a
    scripted one reads them unseen."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        finish_all()


def finish_all() -> None:
    """Finishes what everybody has postponed; the first error is raised at the end."""
    errors = []
    for owner in list(_unfinished):
        try:
            owner.finish()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _at_exit() -> None:
    """Neighbors still wait for this process's last messages."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            finish_all()
