"""The heartbeat with a real store; test_optimizer_deaths and test_elastic have whole runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import runs
import torch.distributed as dist

from decentlam.membership import watch as watching
from decentlam.membership.watch import Watch


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def patient_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits here are short; on a busy machine the store may take longer than twice as long."""
    monkeypatch.setattr(watching, "_STORE_LIMITS", 100)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Process 1 of four, with a limit of a second."""
    store = open_store()
    watch = Watch(store, 1, range(4), 0)
    watch.limit = 1.0
    yield watch
    watch.leave()


def say(watch: Watch, member: int, **facts: Any) -> None:
    """Another process's heartbeat; by default one of another machine."""
    beat = {"pid": 1, "host": "far", "machine": None, "net": None, "count": 1, "left": False}
    text = json.dumps({**beat, **facts})
    watch.calls.call(lambda store: store.set(f"beat/{member}", text), runs.HANG_SECONDS)


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + runs.HANG_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def ended() -> int:
    """The number of a process that is over."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_silent_process_is_lost_and_named(watch: Watch) -> None:
    say(watch, 2)
    assert wait_for(lambda: watch.trouble is not None)
    assert watch.trouble is not None and watch.trouble.lost == (2,)
    assert "process 2 (pid 1 on far)" in watch.trouble.text


@pytest.mark.parametrize("nccl", [False, True])
def test_a_loss_that_ends_no_wait_is_logged(
    watch: Watch, nccl: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch.waits_for_nccl = nccl
    say(watch, 2)
    assert wait_for(lambda: watch.trouble is not None and (not nccl or bool(caplog.records)))
    assert [r.levelname for r in caplog.records] == (["ERROR"] if nccl else [])
    assert not nccl or "process 2 (pid 1 on far)" in caplog.messages[0]


def test_who_trains_something_else_may_be_lost(watch: Watch) -> None:
    watch.concern([0, 1])
    say(watch, 2)
    assert wait_for(lambda: 2 in watch.lost)
    watch.report("process 2 died or stopped", [2])  # as the others of its training say
    say(watch, 0)
    assert wait_for(lambda: watch.trouble is not None)
    assert watch.trouble is not None and watch.trouble.lost == (0,)


def test_heartbeats_go_on_where_processes_cannot_be_polled(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    say(watch, 0, machine=watch._facts["machine"], pid=os.getpid())
    before = watch._count
    assert wait_for(lambda: watch._count > before + 3)


def test_who_has_left_and_ended_costs_nothing(watch: Watch) -> None:
    """Its end stays readable for ever: looked at without a rest, a thread would do nothing else."""
    watch.limit = runs.HANG_SECONDS  # it is silent, which is not what this is about
    process = subprocess.Popen(["sleep", "3600"])
    say(watch, 2, machine=watch._facts["machine"], pid=process.pid)
    assert wait_for(lambda: 2 in watch._seen)
    say(watch, 2, machine=watch._facts["machine"], pid=process.pid, left=True)
    assert wait_for(lambda: 2 in watch.left)
    process.kill()
    process.wait()
    before, begun = watch._count, time.monotonic()
    time.sleep(1.0)
    beats_a_second = (watch._count - before) / (time.monotonic() - begun)
    assert beats_a_second < 100  # one is due; thousands were made
    assert watch.trouble is None


def test_a_process_that_ends_without_a_word_is_lost_at_once(watch: Watch) -> None:
    watch.limit = 60.0
    say(watch, 3, machine=watch._facts["machine"], pid=ended())
    assert wait_for(lambda: watch.trouble is not None)
    assert watch.trouble is not None and "it has ended" in watch.trouble.text


@pytest.mark.parametrize("in_order", [True, False])
def test_a_store_that_goes_with_process_0_fails_nobody_if_that_left_in_order(
    in_order: bool,
) -> None:
    host = open_store()
    watch = Watch(dist.TCPStore("127.0.0.1", host.port, is_master=False), 1, range(2), 0)
    watch.limit = 2.0
    say(watch, 0, left=in_order)
    assert wait_for(lambda: 0 in watch._seen)
    del host  # closes it
    assert wait_for(lambda: not watch._thread.is_alive())
    assert (watch.trouble is None) == in_order
    watch.leave()


def test_a_process_that_is_alone_waits_for_nobody_to_be_lost() -> None:
    watch = Watch(open_store(), 0, range(1), 0)
    watch.limit = runs.HANG_SECONDS  # half as long again would be more than a test may take
    assert watch.wait_for_cause(math.inf) is None
    watch.leave()


def test_nothing_stays_open() -> None:
    store = open_store()

    def use() -> None:
        watch = Watch(store, 1, range(2), 0)
        say(watch, 0, machine=watch._facts["machine"], pid=os.getpid())
        assert wait_for(lambda: 0 in watch._seen)
        watch.leave()
        watch._thread.join(runs.HANG_SECONDS)

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        use()
    assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)
