"""What members of an elastic run agree on, decided against a store without any other process."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.errors import ExchangeError, RunOverError
from decentlam.launch.place import LAUNCHED
from decentlam.launch.processes import variables
from decentlam.membership import generations, spare, watch
from decentlam.membership.deal import Deal, Place
from decentlam.membership.generations import Membership
from decentlam.membership.record import Change, Generation, read
from decentlam.membership.store import StoreCalls, StoreError, StoreGoneError, ask
from decentlam.runtime import elastic

DEAL = Deal(samples=10_000, batch=2)


@pytest.fixture(autouse=True)
def no_heartbeat_is_left() -> Iterator[None]:
    yield
    watch.stop()


def member(store: dist.Store, rank: int = 0, host: str | None = None) -> Membership:
    return Membership(store, rank, num_processes=1, timeout=20.0, wait=20.0, host=host)


def ready(step: int | None, everyone: bool = False) -> dict[str, Any]:
    return {"step": step, "whole": True, "everyone": everyone, "store": "", "left": []}


def first_of(size: int) -> Generation:
    members = tuple(range(size))
    return Generation(0, members, 0, 0, (), (Change(0, size),), ("",) * size, size)


def under_way(generation: Generation) -> dist.Store:
    """The store of a run in this generation."""
    store = dist.HashStore()
    inner = dist.PrefixStore(spare.PREFIX, store)
    inner.set(f"generation/{generation.number}", generation.as_json())
    inner.set("latest", str(generation.number))
    return store


# Who may decide -----------------------------------------------------------------------------------


def test_a_newcomer_that_formed_no_generation_decides_none() -> None:
    """Processes 1 and 2 are cut off from it, and may go on together."""
    generation = Generation(1, (0, 1, 2, 3), 5, 0, (3,), (Change(0, 3), Change(5, 4)), ("",) * 4, 4)
    store = under_way(generation)
    newcomer = member(store, host="127.0.0.1")
    newcomer.me, newcomer.generation = 3, generation
    newcomer.publish("ready/2/0", ready(6))
    newcomer._watch._lost = dict.fromkeys((0, 1, 2), "no heartbeat")
    with pytest.raises(RunOverError):
        newcomer._agree(2, {"step": None})
    assert not dist.PrefixStore(spare.PREFIX, store).check(["generation/2"])


def test_all_generations_have_the_name_of_their_run() -> None:
    names = set[str]()
    for _ in range(2):
        run = member(dist.HashStore())
        first = run._propose(0, {0: ready(0), 1: ready(0)})
        run.generation = first
        second = run._propose(1, {0: ready(3)})
        assert second.run == first.run
        names.add(first.run)
    assert len(names) == 2 and "" not in names


# Stores that are gone, or of another run ----------------------------------------------------------


@pytest.fixture
def served() -> Iterator[tuple[int, dist.Store]]:
    """A store in a process of its own, and the number of that process."""
    here, there = forks.context.Pipe()
    process = forks.context.Process(target=serve, args=(there,))
    process.start()
    assert process.pid is not None
    yield process.pid, dist.TCPStore("127.0.0.1", here.recv(), is_master=False)
    process.kill()
    process.join()


def serve(pipe: Connection) -> None:
    store = spare.open_store("127.0.0.1")
    pipe.send(store.port)
    signal.pause()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_store_that_is_stopped_does_not_hold_up_init(served: tuple[int, dist.Store]) -> None:
    pid, store = served
    os.kill(pid, signal.SIGSTOP)
    while not watch._is_stopped(pid):
        time.sleep(0.01)
    with pytest.raises(StoreError, match="rendezvous store did not answer within"):
        Membership(store, 0, num_processes=1, timeout=0.2, wait=0.2)


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process may take part in one, as long as the test lasts."""
    monkeypatch.setattr(generations, "_current", None)
    yield
    watch.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_where_there_is_no_spare_the_end_of_the_store_is_told(
    no_run: None, served: tuple[int, dist.Store]
) -> None:
    pid, store = served
    run = generations.begin(member(store))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StoreGoneError, match="the rendezvous store is gone"):
        elastic.renew(run, lambda: None, lambda: None)


@pytest.mark.parametrize("launched", [True, False])
def test_only_a_store_that_no_launcher_of_ours_has_may_be_left(
    launched: bool, no_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher's run needs no spares, and no stores that the shell names."""
    store = spare.open_store("127.0.0.1")
    settings = variables(0, 1, local=True) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    other = spare.open_store("127.0.0.1")
    inner = dist.PrefixStore(spare.PREFIX, other)
    inner.set("generation/0", first_of(1).as_json())
    inner.set("latest", "0")
    monkeypatch.chdir(tmp_path)
    notes = Path("run.stores")
    if launched:
        monkeypatch.setenv(LAUNCHED, "1")
        monkeypatch.setenv("DECENTLAM_STORES", f"127.0.0.1:{other.port}")
    else:
        monkeypatch.delenv(LAUNCHED, raising=False)
        monkeypatch.setenv("DECENTLAM_STORES", notes.name)
    decentlam.init(elastic=True, join_seconds=20.0)
    run = generations.current()
    assert run is not None and not run.joins
    assert run.can_move is not launched
    assert notes.exists() is not launched


def test_a_store_that_cannot_be_moved_to_is_not_taken_for_the_runs(no_run: None) -> None:
    run = generations.begin(member(dist.HashStore(), host="127.0.0.1"))
    (address,) = run.generation.stores
    _, broken = spare.connect(address)
    dist.PrefixStore(spare.PREFIX, broken).set("generation/0", "no generation")
    before = (run._store, run._moved, run._addresses)
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="Expecting value"):
        run._move()
    assert (run._store, run._moved, run._addresses) == before
    for thread in set(threading.enumerate()) - threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_nobody_waits_for_a_store_that_was_left() -> None:
    calls, asked, answers = StoreCalls(dist.HashStore()), threading.Event(), threading.Event()

    def request(store: object) -> None:
        asked.set()
        answers.wait(60.0)

    waiting = ask(lambda: calls.call(request, 60.0))
    assert asked.wait(60.0)
    calls.close()
    with pytest.raises(StoreError, match="was left by this process"):
        waiting.result(30.0)
    answers.set()
    with pytest.raises(StoreError, match="was left by this process"):
        calls.call(request, 60.0)


def test_generations_before_the_one_of_the_next_step_are_forgotten(no_run: None) -> None:
    run = generations.begin(member(dist.HashStore()))
    for step in range(5):
        run.renew(step, whole=True, everyone=False)
    assert [g.number for g in run._past] == [5]
    assert run.generation_at(4) == run.generation


def test_a_step_that_is_finished_alone_is_told(
    no_run: None, caplog: pytest.LogCaptureFixture
) -> None:
    generations.begin(member(dist.HashStore()))
    optimizer = decentlam.DmSGD(torch.nn.Linear(2, 1).parameters(), lr=0.1, elastic=True)
    optimizer.runtime._give_up(ExchangeError("node 1 is slow"))
    assert "a step is finished without neighbors: node 1 is slow" in caplog.text


# Steps and batches --------------------------------------------------------------------------------


class Dealt:
    """Members on a ring that take batches, and are lost; who took which."""

    def __init__(self, size: int) -> None:
        self.run = member(dist.HashStore())
        self.known: dict[int, list[Generation]] = {m: [first_of(size)] for m in range(size)}
        self.step = dict.fromkeys(range(size), 0)
        self.begun: set[int] = set()  # members in the midst of a step
        self.took: dict[int, list[int]] = defaultdict(list)  # of each batch
        self.generation = first_of(size)

    def begin(self, m: int) -> None:
        its = [g for g in self.known[m] if g.step <= self.step[m]][-1]
        place = Place(self.step[m], its.members.index(m), its.history)
        self.took[DEAL.position(place) // DEAL.batch].append(m)
        self.begun.add(m)

    def end(self, m: int) -> None:
        self.begun.discard(m)
        self.step[m] += 1

    def go_on(self, m: int) -> None:
        """Begins its step, or ends it if its neighbors have come as far."""
        members, here = self.generation.members, self.step[m]
        at = members.index(m)
        near = {members[at - 1], members[(at + 1) % len(members)]} - {m}
        if m not in self.begun:
            self.begin(m)
        elif here < self.generation.step or all(
            self.step[n] > here or (self.step[n] == here and n in self.begun) for n in near
        ):
            self.end(m)

    def change(self, *lost: int, newcomers: int = 0, everyone: bool = False) -> Generation:
        """The next generation, without those that are lost."""
        for m in lost:
            self.begun.discard(m)
            del self.step[m]
        for m in list(self.begun):
            self.end(m)
        self.run.generation = self.generation
        said = {m: ready(step, everyone) for m, step in self.step.items()}
        first = self.generation.numbers
        said |= {m: ready(None) for m in range(first, first + newcomers)}
        now = self.run._propose(self.generation.number + 1, said)
        self.generation = read(now.as_json().encode())
        assert self.generation == now
        for m in now.members:
            self.known.setdefault(m, []).append(now)
        for m in {now.source, *now.takers} if now.takers else ():
            self.step[m] = now.step
        return now

    def missing(self) -> list[int]:
        """Batches that nobody has begun, after all have come to the same step."""
        end = max(*self.step.values(), self.generation.step) + 20
        while any(step < end for step in self.step.values()):
            for m in self.step:
                if self.step[m] < end:
                    self.go_on(m)
        upto = max(self.took) - 2 * len(self.step)
        return [batch for batch in range(upto) if batch not in self.took]


def test_a_generation_never_begins_before_the_last_one() -> None:
    """Process 3 dies in step 5. Process 1 is one step further than its neighbors then, and dies
    while the generation that begins there is formed."""
    run = Dealt(4)
    for _ in range(5):
        for m in range(4):
            run.begin(m)
        for m in range(4):
            run.end(m)
    for m in range(4):
        run.begin(m)
    run.end(1)
    run.begin(1)
    assert run.change(3).step == 7
    assert run.change(1).step == 7
    assert run.missing() == []
    assert {batch: who for batch, who in run.took.items() if len(who) > 1} == {
        5 * 4 + 3: [3, 0]  # dealt again: nobody knows whether it was begun
    }


def test_batches_of_a_process_that_dies_while_it_is_behind_are_dealt_again() -> None:
    """Processes 0 and 4 are two steps behind the others, and 4 dies in the first of them."""
    run = Dealt(6)
    for m, steps in {0: 5, 1: 6, 2: 7, 3: 6, 4: 5, 5: 5}.items():
        for _ in range(steps):
            run.begin(m)
            run.end(m)
    run.begin(5)
    assert run.change(5).step == 7
    run.begin(4)
    run.change(4)
    assert run.missing() == []
    lost = 5 * 6 + 4
    assert len(run.took[lost + 6]) == 1  # step 6, which it had not begun


@pytest.mark.parametrize("seed", range(40))
def test_no_batch_is_lost_whoever_is_lost_when(seed: int) -> None:
    """None but those that were begun; only batches of who was lost are taken twice."""
    chance = random.Random(seed)
    run, gone = Dealt(7), set[int]()
    for _ in range(12):
        members = list(run.step)
        for _ in range(chance.choice((0, 3, 40))):
            run.go_on(chance.choice(members))
        struck = chance.sample(members, min(chance.choice((0, 1, 1, 2)), len(members) - 1))
        before = run.generation.step
        now = run.change(
            *struck, newcomers=chance.choice((0, 0, 1, 2)), everyone=chance.random() < 0.1
        )
        assert now.step >= before
        gone.update(struck)
    assert run.missing() == []
    assert all(len([m for m in who if m not in gone]) <= 1 for who in run.took.values())


def test_no_thread_is_left_in_torch_when_a_process_ends() -> None:
    """Python ends threads where they are, and inside of torch that aborts the process."""
    Membership(dist.HashStore(), rank=0, num_processes=1, timeout=20.0, wait=20.0)
    ours = [t for t in threading.enumerate() if t.name in ("decentlam watch", "decentlam store")]
    assert len(ours) == 2
    watch.stop()
    assert not any(t.is_alive() for t in ours)
