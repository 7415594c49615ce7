"""elastic=True: the process of the store may die, too; and no two parts of a run ever go on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import launching
import pytest
import runs
import runs_elastic
import torch.distributed as dist

from decentlam.launch.processes import variables
from decentlam.membership import spare, watch
from decentlam.membership.generations import Membership
from decentlam.membership.record import Change, Generation, are_enough

# Seeds of chaos.py in which process 0 has the store: it is killed, or two that have it one after
# the other, or it is stopped for so long that the others move, and then goes on.
KILLED, TWICE, STOPPED = ("1", "1"), ("13", "2"), ("43", "1")


def chaos(directory: Path, seed: str, faults: str, *more: str) -> None:
    size = ("--nodes", "4", "--steps", "140", "--loopback", "--seed", seed, "--faults", faults)
    process = launching.fork(runs_elastic.chaos, directory / "out", *size, *more)
    process.join(runs.HANG_SECONDS)
    process.kill()
    assert process.exitcode == 0, (directory / "out").read_text()


def test_a_run_survives_the_process_of_the_store(tmp_path: Path) -> None:
    """All others go on and compute what the simulator does, and it comes back as another."""
    chaos(tmp_path, *KILLED)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "faults"), [TWICE, STOPPED])
def test_a_run_survives_whatever_happens_to_the_store(
    seed: str, faults: str, tmp_path: Path
) -> None:
    chaos(tmp_path, seed, faults)


def port_of_nobody() -> str:
    """One that is free, and that the system gives to nobody who asks for any: those are above."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def start_three(course: Callable[..., None], directory: Path, *more: object) -> list[BaseProcess]:
    """Processes of an elastic run whose store is in process 0."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port_of_nobody()}
    return [
        launching.fork(
            course,
            directory / f"{rank}",
            str(directory),
            *more,
            **variables(rank, 3, local=True),
            **meeting,
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_who_is_cut_off_from_most_others_stops_with_an_error(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Also if it sees that they have ended: they may have gone on without it before they did."""
    processes = start_three(runs_elastic.part_of_three, tmp_path, number)
    processes[2].join(runs.HANG_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    said = (tmp_path / "2").read_text()
    assert processes[2].exitcode == 3, said
    assert "process 2 stops after" in said
    assert "too few to go on: the others (process 0, 1) may be cut off" in said


def test_who_comes_back_after_the_run_has_ended_does_not_go_on_alone(tmp_path: Path) -> None:
    processes = start_three(runs_elastic.outlive, tmp_path)
    for process in processes[:2]:
        process.join(runs.HANG_SECONDS)
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
    processes[2].join(runs.HANG_SECONDS)
    processes[2].kill()
    assert "process 0 went on with (0, 1)" in (tmp_path / "0").read_text()
    said = (tmp_path / "2").read_text()
    assert processes[2].exitcode == 3, said


def test_never_are_two_parts_of_the_members_enough() -> None:
    for size in range(1, 8):
        members = range(size)
        for sides in itertools.product(("stay", "move", "elsewhere"), repeat=size):
            stay, move = ([m for m in members if sides[m] == side] for side in ("stay", "move"))
            assert not (are_enough(members, stay, False) and are_enough(members, move, True))


def in_use(generation: int, run: str = "ours") -> dist.TCPStore:
    store = spare.open_store("127.0.0.1")
    inner = dist.PrefixStore(spare.PREFIX, store)
    its = Generation(generation, (0,), 0, 0, (), (Change(0, 1),), ("",), 1, run=run)
    inner.set(f"generation/{generation}", its.as_json())
    inner.set("latest", str(generation))
    return store


def address(store: dist.Store) -> str:
    found = spare.address_of(store)
    assert found is not None
    return found


def test_the_run_is_in_the_store_with_the_latest_generation() -> None:
    unused, before, now = spare.open_store("127.0.0.1"), in_use(3), in_use(5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    places = [nobody, "no such host:1", address(unused), address(before), address(now)]
    found = spare.find((), places, None, 20.0)
    assert found is not None and found[:2] == (5, address(now))
    found = spare.find([nobody], [address(unused)], "ours", 20.0)
    assert found is not None and found[:2] == (-1, address(unused))
    assert spare.find([], [nobody], None, 20.0) is None
    assert spare.find_run([nobody], 20.0) is None
    run = spare.find_run([address(unused), address(before)], 20.0)
    assert run is not None and address(run) == address(before)


def test_a_store_of_another_run_is_not_found() -> None:
    """Where a store of this run was somebody may have started another run, or is about to."""
    unused, ours, theirs = spare.open_store("127.0.0.1"), in_use(3), in_use(5, "theirs")
    places = [address(unused), address(theirs), address(ours)]
    found = spare.find(places, [], "ours", 20.0)
    assert found is not None and found[:2] == (3, address(ours))
    assert spare.find(places[:2], [], "ours", 20.0) is None
    assert spare.find_run([address(theirs)], 20.0, "ours") is None
    run = spare.find_run([address(theirs)], 20.0)
    assert run is not None and address(run) == address(theirs)


def test_stores_are_named_in_the_variable_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spare.read_addresses("") == ([], None)
    assert spare.read_addresses("a:1, b:2") == (["a:1", "b:2"], None)
    file = tmp_path / "run.stores"
    assert spare.read_addresses(str(file)) == ([], None)
    spare.write_addresses(file, ["a:1", "::1:2"], "f00d")
    assert spare.read_addresses(str(file)) == (["a:1", "::1:2"], "f00d")
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.chdir(tmp_path)
    assert spare.read_addresses("run.stores") == (["a:1", "::1:2"], "f00d")


def test_a_generation_that_was_decided_for_nobody_gives_way_to_the_one_of_the_others() -> None:
    """The store was cut off when it had decided; the others have decided otherwise, elsewhere."""
    run = Membership(dist.HashStore(), rank=0, num_processes=1, timeout=20.0, wait=20.0)
    first = Generation(0, (0, 1, 2), 0, 0, (), (Change(0, 3),), ("", "", ""), 3)
    ours, theirs = (
        dataclasses.replace(first, number=1, members=members, history=(Change(0, 3), Change(5, 2)))
        for members in ((0, 2), (1, 2))
    )
    for generation in (first, ours):
        run._adopt(generation)
    store = dist.HashStore()
    store.set("generation/1", theirs.as_json())
    store.set("latest", "1")
    run._carry(store)
    assert run.generation == theirs
    assert run.generation_at(7) == first  # in which this process took its steps
    watch.stop()
