"""elastic=True: the run goes on without who is lost, and with who comes."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import launching
import numpy as np
import pytest
import runs
import runs_elastic
import torch
import torch.distributed as dist

import decentlam
from decentlam.errors import ExchangeError, LaunchError
from decentlam.launch import local
from decentlam.launch.processes import Started
from decentlam.launch.work import Failure
from decentlam.membership import generations, watch
from decentlam.membership.deal import Deal, Place
from decentlam.membership.generations import Change, Membership
from decentlam.runtime import elastic

# Seeds of chaos.py: one process is killed, messages are read in memory or sent; and comes back.
KILLED_SHARED, KILLED_SENT = "8", "2"


@pytest.mark.parametrize("seed", [KILLED_SHARED, KILLED_SENT])
def test_survivors_and_newcomers_compute_what_the_simulator_does(seed: str, tmp_path: Path) -> None:
    """chaos.py checks parameters, samples, exit codes and memory that is left."""
    size = ("--nodes", "4", "--steps", "140", "--faults", "1", "--loopback", "--seed", seed)
    # A kill is seen at once; on a busy machine others may be silent for long.
    process = launching.fork(runs_elastic.chaos, tmp_path / "out", *size, "--heartbeat", "20")
    process.join(runs.HANG_SECONDS)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "out").read_text()


def test_every_batch_is_dealt_once_while_members_come_and_go() -> None:
    deal = Deal(samples=1000, batch=2)
    # Node 1 of 4 is lost in step 3, when the furthest is about to take step 5; then two join.
    history = (Change(0, 4), Change(5, 3, (1,), 4), Change(8, 5))
    taken = []
    for step in range(10):
        upto = tuple(change for change in history if change.step <= step)
        lost = step in (3, 4)
        for node in range(upto[-1].size):
            if not (lost and node == 1):
                taken.append(deal.position(Place(step, node, upto)))
    missing = 3 * 4 + 1  # the batch of node 1 in step 3
    expected = sorted({2 * k for k in range(len(taken) + 1)} - {2 * missing})
    assert sorted(taken) == expected


def test_a_pass_takes_every_sample_once() -> None:
    deal = Deal(samples=12, batch=3, seed=1)
    place = [Place(step, node, (Change(0, 2),)) for step in range(2) for node in range(2)]
    taken = torch.cat([deal.indices(p) for p in place])
    assert sorted(taken.tolist()) == list(range(12))


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (10, 0), (10, -1), (10, 2.5), (True, 1)])
def test_a_deal_of_nothing_is_refused(samples: object, batch: object) -> None:
    with pytest.raises(ValueError, match="must be a whole number of 1 or more"):
        Deal(samples, batch)


def test_a_deal_takes_integers_of_numpy() -> None:
    place = Place(0, 0, (Change(0, 1),))
    assert len(Deal(np.int64(8), np.int32(2)).indices(place)) == 2


def test_a_permutation_is_drawn_once_for_all_batches_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []
    randperm = torch.randperm

    def counted(samples: int, **options: torch.Generator) -> torch.Tensor:
        drawn.append(samples)
        return randperm(samples, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    deal = Deal(samples=10, batch=4, seed=98765)
    taken = [deal.indices(Place(step, 0, (Change(0, 1),))) for step in range(5)]
    assert len(drawn) == 2  # 20 samples; the third batch is in both passes
    passes = torch.cat(taken).reshape(2, 10)
    assert passes.sort().values.tolist() == [list(range(10))] * 2
    seeds = [98765 * 1_000_003 + number for number in range(2)]
    expected = [randperm(10, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    assert torch.equal(passes, torch.stack(expected))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": "forward"}, "overlap='none'"),
        ({"processes_per_node": 2}, "processes_per_node=1"),
        ({"topology": decentlam.topology.ring(4)}, "a topology by name"),
        ({"topology": "auto"}, "a topology by name"),
        ({}, r"decentlam.init\(elastic=True\)"),
    ],
)
def test_what_elastic_does_not_do_is_refused(options: dict[str, object], words: str) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises((ValueError, RuntimeError), match=words):
        decentlam.DmSGD(model.parameters(), lr=0.1, elastic=True, **options)


@pytest.mark.parametrize("seconds", [0, -1, True, "2", float("nan"), float("inf")])
def test_a_heartbeat_that_cannot_be_is_refused(seconds: object) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="heartbeat_seconds must be"):
        decentlam.DmSGD(model.parameters(), lr=0.1, heartbeat_seconds=seconds)


@pytest.fixture
def run_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Membership]:
    """An elastic run whose only member is this process."""
    monkeypatch.setattr(generations, "_current", None)
    yield generations.begin(Membership(dist.HashStore(), 0, 1, timeout=60.0, wait=60.0))
    watch.stop()
    dist.destroy_process_group()


def test_a_newcomer_that_was_killed_while_it_asked_stops_nobody(run_of_one: Membership) -> None:
    """Its number is taken, and what belongs there was never written."""
    run_of_one._store.add("candidates", 1)
    run_of_one.renew(0, whole=True, everyone=False)
    assert run_of_one.generation.members == (0,)


def test_what_was_published_is_found_while_the_members_change(run_of_one: Membership) -> None:
    run_of_one.publish("facts", {"lr": "0.1"})
    run_of_one.report("a member died")
    while not run_of_one.troubled:
        time.sleep(0.01)
    assert run_of_one.read("facts") == {"lr": "0.1"}
    with pytest.raises(ExchangeError, match="secrets was not published"):
        run_of_one.read("secrets")


def test_a_newcomer_tries_again_until_it_has_settled(run_of_one: Membership) -> None:
    """It fails once before it has a runtime, and once with one that the others never used."""
    optimizer = decentlam.DmSGD(torch.nn.Linear(2, 1).parameters(), lr=0.1, elastic=True)
    attempts = 0

    def settle() -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            optimizer._settle()
        if attempts < 3:
            raise ExchangeError("a member died")

    elastic.renew(run_of_one, lambda: None if attempts < 2 else optimizer.runtime, settle)
    assert attempts == run_of_one.generation.number == 3
    assert optimizer.runtime.failure is None


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


@pytest.mark.parametrize("error", [ExchangeError("a member died"), LaunchError("not let in")])
def test_a_newcomer_that_did_not_get_in_does_not_end_the_run(error: Exception) -> None:
    failure = Failure(at=12.5, rank=1, text="failed", error=error)
    assert local.is_lost(failure, newcomer=True)
    assert not local.is_lost(failure, newcomer=False)
    assert not local.is_lost(replace(failure, error=ValueError("a mistake")), newcomer=True)


def test_a_process_that_is_killed_after_its_result_ends_nothing() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    Started(0, multiprocessing.current_process(), here).let_leave()


@pytest.mark.slow
def test_a_newcomer_that_fails_is_started_again_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_NOTE_SECONDS", 1.0)
    notes: list[str] = []
    collect = functools.partial(local.survivors, note=notes.append)
    results = local.run_here(runs_elastic.come_back, 2, (tmp_path,), elastic=collect)
    assert results == [0, 1]
    said = "\n".join(notes)
    assert said.count("node 1 was started again") == 2
    assert "was killed by SIGKILL" in said and "failed: a member died; the others go on" in said
    assert "did not end yet; others have" in said


@pytest.mark.system
def test_an_elastic_launch_refuses_another_backend_than_gloo() -> None:
    with pytest.raises(LaunchError, match=r"elastic runs need the gloo backend, got 'nccl'"):
        decentlam.launch(time.sleep, 1, (0.0,), backend="nccl", elastic=True)
