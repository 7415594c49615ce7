"""A process that dies or stops is named by all others, long before any timeout."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import decentlam
from decentlam.checkpoint import directory, save_checkpoint
from decentlam.network import heartbeat as watching
from decentlam.network.heartbeat import Heartbeat as Watch
from decentlam.network.network import connect
from decentlam.network.store import StoreCalls
from tests.helpers.processes import (
    HANG_SECONDS,
    message_of,
    run_processes,
    store_elsewhere,
    wait_for,
)
from tests.helpers.quadratic import start, train
from tests.helpers.scripts import three_processes

# With a real store and no other process ---------------------------------------------------------


def open_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def patient_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits here are short; on a busy machine the store may take longer than twice as long."""
    monkeypatch.setattr(watching, "_STORE_LIMITS", 100)


@pytest.fixture
def watch(patient_with_the_store: None) -> Iterator[Watch]:
    """Process 1 of four, with a limit of a second."""
    store = open_store()
    watch = Watch(store, 1, range(4), 0)
    watch.limit = 1.0
    yield watch
    watch.leave()


def say(watch: Watch, member: int, **facts: Any) -> None:
    """Another process's heartbeat; by default one of another machine."""
    beat = {"pid": 1, "host": "far", "machine": None, "net": None, "count": 1, "left": False}
    beat |= {"at": [0, 0], "doing": ""}
    text = json.dumps({**beat, **facts})
    watch.calls.call(lambda store: store.set(f"beat/{member}", text), HANG_SECONDS)


def ended() -> int:
    """The number of a process that is over."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_silent_process_is_lost_and_named(watch: Watch) -> None:
    say(watch, 2)
    assert wait_for(lambda: watch.interruption is not None)
    assert watch.interruption is not None and watch.interruption.lost == (2,)
    assert "process 2 (pid 1 on far)" in watch.interruption.text


@pytest.mark.parametrize("nccl", [False, True])
def test_a_loss_that_ends_no_wait_is_logged(
    watch: Watch, nccl: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch.waits_for_nccl = nccl
    say(watch, 2)
    assert wait_for(lambda: watch.interruption is not None and (not nccl or bool(caplog.records)))
    assert [r.levelname for r in caplog.records] == (["ERROR"] if nccl else [])
    assert not nccl or "process 2 (pid 1 on far)" in caplog.messages[0]


def test_who_trains_something_else_may_be_lost(watch: Watch) -> None:
    watch.concern([0, 1])
    say(watch, 2)
    assert wait_for(lambda: 2 in watch.lost)
    watch.report("process 2 died or stopped", [2])  # as the others of its training say
    say(watch, 0)
    assert wait_for(lambda: watch.interruption is not None)
    assert watch.interruption is not None and watch.interruption.lost == (0,)


@pytest.mark.parametrize("at", [[0, 4], [0, 5]], ids=["here", "ahead"])
def test_who_waits_for_a_member_that_has_gone_on_is_interrupted(
    watch: Watch, at: list[int]
) -> None:
    watch.position = lambda: 4
    begun = time.monotonic()
    with watch.meeting():
        for count in range(1000):
            say(watch, 2, at=at, count=count)  # it is alive
            if watch.interruption is not None or time.monotonic() > begun + 3 * watch.limit:
                break
            time.sleep(0.05)
    assert (watch.interruption is not None) == (at == [0, 5])
    if watch.interruption is not None:
        assert "process 2 (pid 1 on far) has gone on without this call" in watch.interruption.text


def test_heartbeats_go_on_where_processes_cannot_be_polled(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    say(watch, 0, machine=watch._facts["machine"], pid=os.getpid())
    before = watch._count
    assert wait_for(lambda: watch._count > before + 3)


def test_who_has_left_and_ended_costs_nothing(watch: Watch) -> None:
    """Its end stays readable for ever: looked at without a rest, a thread would do nothing else."""
    watch.limit = HANG_SECONDS  # it is silent, which is not what this is about
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
    assert watch.interruption is None


def test_a_process_that_ends_without_a_word_is_lost_at_once(watch: Watch) -> None:
    watch.limit = 60.0
    say(watch, 3, machine=watch._facts["machine"], pid=ended())
    assert wait_for(lambda: watch.interruption is not None)
    assert watch.interruption is not None and "it has ended" in watch.interruption.text


@pytest.mark.parametrize("value", [b"\xff", b"[" * 100_000, b'{"text": 1, "lost": 2}'], ids=len)
def test_a_value_that_nobody_of_the_run_wrote_is_named_once_and_ignored(
    watch: Watch, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("trouble/0", "beat/0"):
        watch.calls.call(lambda store, key=key: store.set(key, value), HANG_SECONDS)
    assert wait_for(lambda: len(caplog.messages) == 2)
    say(watch, 2)  # and is silent from here on
    assert wait_for(lambda: watch.interruption is not None)
    assert watch.interruption is not None and watch.interruption.lost == (2,)
    assert sorted(m.partition(" = ")[0].split()[-1] for m in caplog.messages) == [
        "beat/0",
        "trouble/0",
    ]
    kept = watch.calls.call(lambda store: store.get("trouble/0"), HANG_SECONDS)
    assert "process 2" in json.loads(kept)["text"]  # the others name the same


@pytest.mark.parametrize("facts", [{"pid": "1"}, {"pid": 1 << 40}, {"at": 3}], ids=str)
def test_a_heartbeat_of_wrong_types_is_ignored(
    watch: Watch, facts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    machine = watch._facts["machine"]
    say(watch, 0, **{"machine": machine, "net": machine, **facts})
    say(watch, 2)
    assert wait_for(lambda: watch.interruption is not None)
    assert watch.interruption is not None and watch.interruption.lost == (2,)
    assert ["beat/0" in message for message in caplog.messages] == [True]


def test_the_process_of_the_store_does_not_wait_for_who_dies_meanwhile(
    patient_with_the_store: None,
) -> None:
    """The first death ends the script; the second comes while it leaves."""
    watch = Watch(open_store(), 0, range(3), 0)
    watch.limit = 60.0
    others = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
    for member, process in enumerate(others, start=1):
        say(watch, member, machine=watch._facts["machine"], pid=process.pid)
    assert wait_for(lambda: len(watch._seen) == 2)
    others[0].kill()
    assert wait_for(lambda: watch.interruption is not None)
    timer = threading.Timer(0.5, others[1].kill)
    timer.start()
    begun = time.monotonic()
    watch.leave()
    assert time.monotonic() - begun < watching._READ_SECONDS / 2
    for process in others:
        process.wait()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_store_that_goes_with_process_0_fails_nobody_if_that_left_in_order(
    in_order: bool, patient_with_the_store: None
) -> None:
    host = open_store()
    watch = Watch(dist.TCPStore("127.0.0.1", host.port, is_master=False), 1, range(2), 0)
    watch.limit = 2.0
    say(watch, 0, left=in_order)
    assert wait_for(lambda: 0 in watch._seen)
    del host  # closes it
    assert wait_for(lambda: not watch._thread.is_alive())
    assert (watch.interruption is None) == in_order
    watch.leave()


def test_a_process_that_is_alone_waits_for_nobody_to_be_lost(
    patient_with_the_store: None,
) -> None:
    watch = Watch(open_store(), 0, range(1), 0)
    watch.limit = HANG_SECONDS  # half as long again would be more than a test may take
    assert watch.wait_for_cause(math.inf) is None
    watch.leave()


def test_who_had_the_store_and_is_frozen_gets_what_is_left_of_its_limit(
    patient_with_the_store: None,
) -> None:
    """In the next store, in which the others have a whole limit to come."""
    with store_elsewhere() as (pid, store):
        watch = Watch(store, 1, range(1, 4), 0)
        watch.limit, watch.moves = 3.0, True
        for member in (2, 3):
            say(watch, member)
        assert wait_for(lambda: {2, 3} <= watch._seen.keys())
        os.kill(pid, signal.SIGSTOP)
        assert wait_for(lambda: watch.store_error is not None)
        moved = time.monotonic()
        watch.use(StoreCalls(open_store()), range(1, 4), 0, 2)
        assert wait_for(lambda: 2 in watch.lost)
        assert time.monotonic() - moved < watch.limit / 2
        assert wait_for(lambda: 3 in watch.lost)
        assert time.monotonic() - moved > watch.limit
        watch.leave()


def test_who_was_never_heard_has_a_limit_to_come_to_the_next_store(
    patient_with_the_store: None,
) -> None:
    """Somebody dies so early that the others have not read each other's first beat."""
    with store_elsewhere() as (pid, store):
        watch = Watch(store, 1, range(1, 4), 0)
        watch.limit, watch.moves = 3.0, True
        os.kill(pid, signal.SIGSTOP)
        assert wait_for(lambda: watch.store_error is not None)
        moved = time.monotonic()
        watch.use(StoreCalls(open_store()), range(1, 4), 0, None)
        say(watch, 2)
        assert wait_for(lambda: 2 in watch._seen)
        assert not watch.lost
        assert wait_for(lambda: 3 in watch.lost)
        assert time.monotonic() - moved > watch.limit
        watch.leave()


def test_nothing_stays_open(patient_with_the_store: None) -> None:
    store = open_store()

    def use() -> None:
        watch = Watch(store, 1, range(2), 0)
        say(watch, 0, machine=watch._facts["machine"], pid=os.getpid())
        assert wait_for(lambda: 0 in watch._seen)
        watch.leave()
        watch._thread.join(HANG_SECONDS)

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        use()
    assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)


# Whole runs -------------------------------------------------------------------------------------


VICTIM = 2
NEVER = 1e4  # seconds of a timeout that cannot be the cause


def train_until_an_error(heartbeat_seconds: float) -> None:
    decentlam.init("gloo")
    node, model, optimizer = start(
        dist.group.WORLD, "decentlam", heartbeat_seconds=heartbeat_seconds
    )
    train(optimizer, model, node, range(2))
    print("trains", flush=True)
    print(message_of(lambda: train(optimizer, model, node, range(2, 10**9))), flush=True)
    decentlam.leave()


@pytest.mark.parametrize(
    ("how", "limit", "words"),
    [
        (signal.SIGKILL, 60.0, "died or stopped: it has ended"),
        (signal.SIGSTOP, 5.0, "died or stopped: the rendezvous store did not answer within 5 s"),
    ],
)
def test_process_0_is_named_although_the_store_goes_with_it(
    how: signal.Signals, limit: float, words: str, tmp_path: Path
) -> None:
    outs = [tmp_path / str(rank) for rank in range(3)]
    with three_processes(train_until_an_error, tmp_path, limit) as processes:
        assert wait_for(lambda: all(o.exists() and "trains" in o.read_text() for o in outs))
        pid = processes[0].pid
        assert pid is not None
        os.kill(pid, how)
        for rank in (1, 2):
            processes[rank].join(HANG_SECONDS)
            said = outs[rank].read_text()
            assert f"process 0 (pid {pid} on " in said and words in said, said


def with_victim(
    method: str,
    when: str = "between steps",
    how: str = "dies",
    timeout_seconds: float = NEVER,
    **options: Any,
) -> tuple[str, float]:
    """Process 2 dies, waits or freezes at step 3, until all others have their error: that of this
    one, and after how long."""
    assert dist.group.WORLD is not None
    store = dist.PrefixStore("victim", dist.distributed_c10d._get_default_store())
    node, model, optimizer = start(
        dist.group.WORLD,
        method,
        timeout_seconds=timeout_seconds,
        heartbeat_seconds=5.0 if how == "freezes" else 60.0,
        **{"shared_memory": True, **options},
    )

    def accident(*arguments: Any) -> None:
        if how == "freezes":
            store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "waits":
            store.get("all others")
        else:
            os._exit(7)

    def go_on() -> None:
        train(optimizer, model, node, range(3))  # what the victim had not sent yet fails here
        if node == VICTIM and when == "between steps":
            accident()
        elif node == VICTIM:
            model.weights[2].register_post_accumulate_grad_hook(accident)
        train(optimizer, model, node, range(3, 20))

    begun = time.monotonic()
    error, seconds = message_of(go_on), time.monotonic() - begun
    if node != VICTIM and store.add("errors", 1) == dist.get_world_size() - 1:
        store.set("all others", "")
        if how == "freezes":
            os.kill(int(store.get("pid")), signal.SIGKILL)
    return error, seconds


DEATHS = [
    ("decentlam", "between steps", {}),
    ("decentlam", "in backward", {"shared_memory": False}),
    ("awc-dmsgd", "between steps", {}),
    ("pmsgd", "in backward", {}),
]


@pytest.mark.parametrize(("method", "when", "options"), DEATHS)
def test_death_of_a_process_is_an_error_that_names_it(
    method: str, when: str, options: dict[str, Any]
) -> None:
    """Although the timeout is hours: it is gone, or its connection closed."""
    results = run_processes(partial(with_victim, method, when, **options), 4)
    assert results[VICTIM] == 7
    for node in (0, 1, 3):
        error, _ = results[node]
        assert error.startswith(f"ExchangeError: node {node}, step "), error
        assert "bucket " in error and "process 2 (pid " in error and "died or stopped" in error


def test_death_of_a_process_of_a_node_is_an_error_of_all_nodes() -> None:
    results = run_processes(partial(with_victim, "decentlam", processes_per_node=2), 4)
    assert results[VICTIM] == 7
    for rank in (0, 1, 3):
        assert results[rank][0].startswith(f"ExchangeError: node {rank // 2}, step "), results
    assert "node 1, step 3, " in results[3][0]
    assert "another process of its node" in results[3][0]


def test_node_that_freezes_is_named_by_all_others() -> None:
    """Long before the timeout: it gives no sign of life."""
    results = run_processes(partial(with_victim, "pmsgd", how="freezes"), 4)
    for node in (0, 1, 3):
        error, _ = results[node]
        assert "process 2 (pid " in error and "no heartbeat for" in error, error


@pytest.mark.parametrize("method", ["decentlam", "pmsgd"])
def test_node_that_stops_is_an_error_after_the_timeout(method: str) -> None:
    results = run_processes(partial(with_victim, method, how="waits", timeout_seconds=2.0), 4)
    for node, (error, seconds) in enumerate(results):
        assert error.startswith("ExchangeError"), error
        if node != VICTIM:
            assert seconds > 1.5
    assert any("slower than 2 s" in error for error, _ in results)


def one_leaves(orderly: bool) -> str | None:
    """Process 2 ends after its last step, while another still works: who calls it lost?"""
    node, model, optimizer = start(dist.group.WORLD, "decentlam")
    train(optimizer, model, node, range(3))
    if node == VICTIM:
        if orderly:
            decentlam.leave()
        os._exit(0)
    found = watching.of_default_group()
    assert found is not None
    while VICTIM not in found.lost:
        time.sleep(0.05)
    found.wait_for_cause(HANG_SECONDS)
    return None if found.interruption is None else found.interruption.text


@pytest.mark.parametrize("orderly", [True, False])
def test_who_leaves_before_os_exit_is_not_lost(orderly: bool) -> None:
    """The exit status of another's child cannot be seen: 0 may be a crash as well."""
    results = run_processes(one_leaves, 3, (orderly,))
    assert results[VICTIM] == 0
    assert [result is None for result in results[:VICTIM]] == [orderly] * 2, results


def in_call(kind: str, directory: str) -> str:
    """Process 2 dies when the others have begun to do something together: their error."""
    if kind == "construction":
        if dist.get_rank() == VICTIM:
            connect()  # it is there, and gone before it agrees with the others
            os._exit(7)
        return message_of(lambda: start(dist.group.WORLD, "decentlam"))
    node, model, optimizer = start(dist.group.WORLD, "decentlam", heartbeat_seconds=5.0)
    train(optimizer, model, node, range(2))
    if node == VICTIM:
        os._exit(7)
    if kind == "averaged":
        return message_of(lambda: optimizer.averaged(model).__enter__())
    return message_of(lambda: save_checkpoint(directory, model=model, optimizer=optimizer))


@pytest.mark.parametrize("kind", ["construction", "averaged", "checkpoint"])
def test_a_death_in_a_common_call_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    results = run_processes(in_call, 3, (kind, str(tmp_path)), 100)
    assert results[VICTIM] == 7
    for error in results[:VICTIM]:
        assert error.startswith("ExchangeError"), error
        assert "process 2 (pid " in error and "died or stopped" in error, error
    assert directory.find(tmp_path) is None  # nothing that counts was written
