"""elastic=True: the run goes on without who is lost, and with who comes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.elastic import membership
from decentlam.elastic.membership import Membership
from decentlam.errors import ExchangeError, MinorityError, RunOverError
from decentlam.launch import local
from decentlam.launch.processes import variables
from decentlam.network import heartbeat as watch
from tests.helpers.processes import HANG_SECONDS
from tests.helpers.scripts import fork, free_port

# Seeds of chaos.py, and its number of faults. One process is killed, messages are read in memory
# or sent; process 0 has the store and is killed; two that have it, one after the other; or it is
# stopped for so long that the others move, and then goes on.
SEEDS = {
    "killed, shared memory": ("8", "1"),
    "killed, sent": ("2", "1"),
    "killed while optimizers are built, too": ("9", "1"),
    "the store is killed": ("1", "1"),
    "two stores are killed": ("13", "2"),
    "the store is stopped": ("43", "1"),
}
USUAL = ("killed, sent", "the store is killed")
CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def chaos(*arguments: str) -> int:
    spec = importlib.util.spec_from_file_location("chaos", CHAOS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos"] = module
    spec.loader.exec_module(module)
    code: int = module.main([*arguments])
    return code


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.system) for n in SEEDS]
)
def test_survivors_and_newcomers_compute_what_the_simulator_does(name: str, tmp_path: Path) -> None:
    """chaos.py checks parameters, samples, exit codes and memory that is left."""
    seed, faults = SEEDS[name]
    size = ("--nodes", "4", "--steps", "140", "--loopback", "--seed", seed, "--faults", faults)
    # A kill is seen at once; on a busy machine others may be silent for long.
    patient = ("--heartbeat", "20") if name.startswith("killed") else ()
    process = fork(chaos, tmp_path / "out", *size, *patient)
    process.join(HANG_SECONDS)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "out").read_text()


# Three processes, of which 0 has the store -------------------------------------------------------


def joined() -> Membership:
    decentlam.init(elastic=True)
    run = membership.current()
    assert run is not None
    return run


def renewed(run: Membership) -> None:
    """Go on without who is lost, or end with the exit code 3."""
    time.sleep(0.01)
    if run.interrupted:
        try:
            run.renew(0, whole=True, everyone=False)
        except (MinorityError, RunOverError) as error:
            print(error, flush=True)
            os._exit(3)


def trained(
    run: Membership,
    steps: int,
    each: Callable[[decentlam.DecentralizedOptimizer, int], None] = lambda optimizer, step: None,
    **options: Any,
) -> None:
    """Train until this step of the run, with `each` after every step; say with whom at its end, and
    whether no step took two heartbeats: far more than it takes, and less than a stall."""
    model = torch.nn.Linear(3, 1)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, elastic=True, **options)
    pause, last = 0.0, time.monotonic()
    while (step := optimizer.place.step) < steps:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        each(optimizer, step)
        pause, last = max(pause, time.monotonic() - last), time.monotonic()
    verdict = "soon" if pause < 2 * watch.USUAL_SECONDS else f"after {pause:.0f} s"
    print(f"process {run.me} went on {verdict} with {optimizer.members}", flush=True)


def start_three(
    course: Callable[..., None], directory: Path, *more: object, ranks: Sequence[int] = (0, 1, 2)
) -> list[BaseProcess]:
    """Processes of an elastic run whose store is in process 0; those after the first three are
    started when the first of their rank has ended."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = list[BaseProcess]()
    for number, rank in enumerate(ranks):
        if number != rank:
            processes[rank].join(HANG_SECONDS)
        place = variables(rank, 3, local=True) | meeting
        processes.append(fork(course, directory / f"{number}", str(directory), *more, **place))
    return processes


def assert_go_on(
    members: tuple[int, ...],
    course: Callable[..., None],
    directory: Path,
    *more: Any,
    **options: Any,
) -> None:
    processes = start_three(course, directory, *more, **options)
    for process in processes:
        process.join(HANG_SECONDS)
    for rank in members:
        said = (directory / f"{rank}").read_text()
        assert f"process {rank} went on soon with {members}" in said, said


def part_of_three(directory: str, number: signal.Signals) -> None:
    """Processes 0 and 1 get a signal when 2 has met them; that one cannot go on."""
    run, met = joined(), Path(directory) / "met"
    watch.use_limit(1.0)
    if run.me == 2:
        met.touch()
    while True:
        renewed(run)
        if met.exists() and run.me != 2:
            os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.system), signal.SIGKILL]
)
def test_who_is_cut_off_from_most_others_stops_with_an_error(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Also if it sees that they have ended: they may have gone on without it before they did."""
    processes = start_three(part_of_three, tmp_path, number)
    processes[2].join(HANG_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    said = (tmp_path / "2").read_text()
    assert processes[2].exitcode == 3, said
    assert "process 2 stops after" in said
    assert "too few to go on: the others (process 0, 1) may be cut off" in said


def outlive(directory: str) -> None:
    """Process 2 stops itself; 0 and 1 go on without it and end. When it goes on it must not take
    the run for its own."""
    run = joined()
    watch.use_limit(1.0)
    if run.me == 2:
        (Path(directory) / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    while len(run.generation.members) == 3:
        renewed(run)
    print(f"process {run.me} went on with {run.generation.members}", flush=True)


def test_who_comes_back_after_the_run_has_ended_does_not_go_on_alone(tmp_path: Path) -> None:
    processes = start_three(outlive, tmp_path)
    for process in processes[:2]:
        process.join(HANG_SECONDS)
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
    processes[2].join(HANG_SECONDS)
    processes[2].kill()
    assert "process 0 went on with (0, 1)" in (tmp_path / "0").read_text()
    assert processes[2].exitcode == 3, (tmp_path / "2").read_text()


def die_while_built(directory: str, moment: str) -> None:
    """Process 1 dies before it builds its optimizer, or in the last collective of that."""
    run, gathered, left = joined(), dist.all_gather, 3

    def all_gather(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return gathered(*arguments, **options)

    if run.me == 1:
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_gather = all_gather
    trained(run, 5)


@pytest.mark.parametrize("moment", ["before", "last collective"])
def test_the_others_go_on_when_one_dies_while_optimizers_are_built(
    moment: str, tmp_path: Path
) -> None:
    assert_go_on((0, 2), die_while_built, tmp_path, moment)


def join_while_built(directory: str) -> None:
    """Process 1 dies before anything is built. The others wait until another one wants to join, so
    that it is a member of the first group in which they build their optimizers."""
    run = joined()
    if run.me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not run.joins and not run._call(lambda store: store.add("candidates", 0)):
        time.sleep(0.05)
    trained(run, 5)


def test_one_that_comes_while_optimizers_are_built_is_taken_in(tmp_path: Path) -> None:
    """It waited for what the others publish, and they for it in what all do together before."""
    assert_go_on((0, 2, 3), join_while_built, tmp_path, ranks=(0, 1, 2, 1))


def measure_while_one_dies(directory: str) -> None:
    """All measure their distance at every fifth step of the run; process 0 dies. Whoever was behind
    then must not wait alone in a measurement that the others have done."""
    run = joined()

    def each(optimizer: decentlam.DecentralizedOptimizer, step: int) -> None:
        if step % 5 == 4:
            with contextlib.suppress(ExchangeError):  # a member was lost meanwhile
                optimizer.consensus_distance()
        if (run.me, step) == (0, 50):
            os.kill(os.getpid(), signal.SIGKILL)

    trained(run, 100, each)


def test_collectives_stall_nobody_when_a_member_dies(tmp_path: Path) -> None:
    assert_go_on((1, 2), measure_while_one_dies, tmp_path)


def measure_without_one(directory: str) -> None:
    """Process 2 does not take part in a measurement, as one that has skipped this step, or has just
    joined, would not."""
    run = joined()

    def each(optimizer: decentlam.DecentralizedOptimizer, step: int) -> None:
        if step == 20 and run.me != 2:
            try:
                optimizer.consensus_distance()
            except ExchangeError as error:
                print(error)

    trained(run, 40, each, topology="ring")


def test_a_call_that_a_member_has_skipped_stalls_nobody(tmp_path: Path) -> None:
    """The others waited for it until the end of their patience."""
    assert_go_on((0, 1, 2), measure_without_one, tmp_path)
    assert "has gone on without this call" in (tmp_path / "0").read_text()


# By launch ---------------------------------------------------------------------------------------


def come_back(directory: Path) -> int:
    """Node 1 is killed, fails when it comes back, comes back again, and ends later than node 0."""
    run = membership.current()
    assert run is not None
    done = directory / "done"
    if run.joins:
        failed = directory / "failed"
        if not failed.exists():
            failed.touch()
            raise ExchangeError("a member died")
        done.touch()
        time.sleep(3.0)
        return 1
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while not done.exists():
        time.sleep(0.01)
        if run.interrupted:
            with contextlib.suppress(ExchangeError):
                run.renew(0, whole=True, everyone=False)
    return 0


@pytest.mark.system
def test_a_newcomer_that_fails_is_started_again_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_NOTE_SECONDS", 1.0)
    notes: list[str] = []
    collect = functools.partial(local.survivors, note=notes.append)
    results = local.run_here(come_back, 2, (tmp_path,), elastic=collect)
    assert results == [0, 1]
    said = "\n".join(notes)
    assert said.count("node 1 was started again") == 2
    assert "was killed by SIGKILL" in said and "failed: a member died; the others go on" in said
    assert "did not end yet; others have" in said
