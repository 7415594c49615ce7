"""What members of an elastic run agree on, decided against a store without any other process."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.elastic import membership
from decentlam.elastic import spare_stores as spare
from decentlam.elastic.generation import Change, Generation
from decentlam.elastic.membership import Membership
from decentlam.errors import ExchangeError, RunOverError
from decentlam.launch.environment import LAUNCHED
from decentlam.launch.processes import variables
from decentlam.network import heartbeat as watch
from decentlam.network.peers import is_stopped
from decentlam.network.store import StoreCalls, StoreError, StoreGoneError, ask, open_store
from tests.elastic.test_generation import first_of, member, ready
from tests.helpers.processes import store_elsewhere


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process take part in a run, as long as the test lasts."""
    monkeypatch.setattr(membership, "_current", None)
    yield
    watch.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def run_of_one(no_run: None) -> Membership:
    """An elastic run whose only member is this process."""
    return membership.begin(member(dist.HashStore()))


# Who may decide ---------------------------------------------------------------------------------


def under_way(generation: Generation) -> dist.Store:
    """The store of a run in this generation."""
    store = dist.HashStore()
    inner = dist.PrefixStore(spare.PREFIX, store)
    inner.set(f"generation/{generation.number}", generation.as_json())
    inner.set("latest", str(generation.number))
    return store


def test_a_newcomer_that_formed_no_generation_decides_none() -> None:
    """Processes 1 and 2 are cut off from it, and may go on together."""
    generation = Generation(1, (0, 1, 2, 3), 5, 0, (3,), (Change(0, 3), Change(5, 4)), ("",) * 4, 4)
    store = under_way(generation)
    newcomer = member(store, host="127.0.0.1")
    newcomer.me, newcomer.generation = 3, generation
    newcomer.publish("ready/2/0", ready(6))
    newcomer._heartbeat._lost = dict.fromkeys((0, 1, 2), "no heartbeat")
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


def test_a_generation_that_was_decided_for_nobody_gives_way_to_the_one_of_the_others() -> None:
    """The store was cut off when it had decided; the others have decided otherwise, elsewhere."""
    run = member(dist.HashStore())
    first = Generation(0, (0, 1, 2), 0, 0, (), (Change(0, 3),), ("", "", ""), 3)
    ours, theirs = (
        dataclasses.replace(first, number=1, members=members, history=(Change(0, 3), Change(5, 2)))
        for members in ((0, 2), (1, 2))
    )
    run.generation = ours
    store = dist.HashStore()
    store.set("generation/1", theirs.as_json())
    store.set("latest", "1")
    run._carry(store)
    assert run.generation == theirs


def test_a_newcomer_that_was_killed_while_it_asked_stops_nobody(run_of_one: Membership) -> None:
    """Its number is taken, and what belongs there was never written."""
    run_of_one._store.add("candidates", 1)
    run_of_one.renew(0, whole=True, everyone=False)
    assert run_of_one.generation.members == (0,)


def test_what_was_published_is_found_while_the_members_change(run_of_one: Membership) -> None:
    run_of_one.publish("facts", {"lr": "0.1"})
    run_of_one.report("a member died")
    while not run_of_one.interrupted:
        time.sleep(0.01)
    assert run_of_one.read("facts") == {"lr": "0.1"}
    with pytest.raises(ExchangeError, match="secrets was not published"):
        run_of_one.read("secrets")


def test_a_second_elastic_optimizer_is_refused_while_the_first_lives(
    run_of_one: Membership,
) -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    optimizer = decentlam.DmSGD(first.parameters(), lr=0.1, elastic=True)
    facts = run_of_one.read("facts")
    with pytest.raises(ValueError, match="one optimizer, as param groups"):
        decentlam.DmSGD(second.parameters(), lr=0.1, elastic=True)
    assert run_of_one.read("facts") == facts
    del optimizer
    decentlam.DmSGD(second.parameters(), lr=0.1, elastic=True)


def test_a_param_group_that_newcomers_would_not_know_is_refused(run_of_one: Membership) -> None:
    model, more = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    optimizer = decentlam.DmSGD(model.parameters(), lr=0.1, elastic=True)
    with pytest.raises(ValueError, match="all param groups are given when"):
        optimizer.add_param_group({"params": list(more.parameters())})
    assert len(optimizer.param_groups) == 1


def test_a_copy_of_an_elastic_optimizer_is_not_elastic(run_of_one: Membership) -> None:
    """A run has one optimizer that changes its members; a copy may do what that may not."""
    more = torch.nn.Linear(3, 1)
    model = torch.nn.Linear(2, 1)
    optimizer = decentlam.DmSGD(model.parameters(), lr=0.1, elastic=True)
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": list(more.parameters())})
    assert len(copied.param_groups) == 2 and len(optimizer.param_groups) == 1


# Stores that are gone, or of another run --------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_store_that_is_stopped_does_not_hold_up_init() -> None:
    with store_elsewhere() as (pid, store):
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            time.sleep(0.01)
        with pytest.raises(StoreError, match="rendezvous store did not answer within"):
            Membership(store, 0, num_processes=1, timeout=0.2, wait=0.2)


def test_where_there_is_no_spare_the_end_of_the_store_is_told(no_run: None) -> None:
    with store_elsewhere() as (pid, store):
        run = membership.begin(member(store))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StoreGoneError, match="the rendezvous store is gone"):
            run.renew(0, whole=True, everyone=False)


@pytest.mark.parametrize("launched", [True, False])
def test_only_a_store_that_no_launcher_of_ours_has_may_be_left(
    launched: bool, no_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A launcher's run needs no spares, and no stores that the shell names."""
    store = open_store("127.0.0.1")
    settings = variables(0, 1, local=True) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    other = open_store("127.0.0.1")
    inner = dist.PrefixStore(spare.PREFIX, other)
    inner.set("generation/0", first_of(1).as_json())
    inner.set("latest", "0")
    monkeypatch.chdir(tmp_path)
    notes = Path("run.stores")
    if launched:
        monkeypatch.setenv(LAUNCHED, "1")
        monkeypatch.setenv("DECENTLAM_STORES", "of another run")
        Path("of another run").write_text(f"127.0.0.1:{other.port} theirs\n")
    else:
        monkeypatch.delenv(LAUNCHED, raising=False)
        monkeypatch.setenv("DECENTLAM_STORES", notes.name)
    decentlam.init(elastic=True, join_seconds=20.0)
    run = membership.current()
    assert run is not None and not run.joins
    assert run.can_move is not launched
    assert notes.exists() is not launched


def test_a_store_that_cannot_be_moved_to_is_not_taken_for_the_runs(no_run: None) -> None:
    run = membership.begin(member(dist.HashStore(), host="127.0.0.1"))
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


def test_no_thread_is_left_in_torch_when_a_process_ends() -> None:
    """Python ends threads where they are, and inside of torch that aborts the process."""
    Membership(dist.HashStore(), rank=0, num_processes=1, timeout=20.0, wait=20.0)
    ours = [
        t for t in threading.enumerate() if t.name in ("decentlam heartbeat", "decentlam store")
    ]
    assert len(ours) == 2
    watch.stop()
    assert not any(t.is_alive() for t in ours)
