"""Emulated networks: links as slow as asked for, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import decentlam
from decentlam.lab.network import hosts, run_on, unavailable
from decentlam.lab.network.models import with_straggler
from decentlam.lab.network.prediction import FRAME
from tests.lab.network.namespaces import left_of

pytestmark = pytest.mark.system

RATE = 100e6
HANG_SECONDS = 500.0


@pytest.fixture
def network() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no emulated network: {reason}")


# Hosts and links -----------------------------------------------------------------------------


def _on_wire() -> int:
    """Bytes that the token bucket has let pass."""
    command = ["tc", "-s", "qdisc", "show", "dev", "net0"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(told.split("Sent ")[1].split()[0])


def observe(megabytes: int) -> dict[str, Any]:
    """Bits per second of transfers in both directions at once, bytes counted, who was late."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    message, inbox = torch.zeros(megabytes * 250_000), torch.empty(megabytes * 250_000)
    counter = Path("/sys/class/net/net0/statistics/tx_bytes")
    rates, counted, full, on_wire = [], [], torch.zeros(()), _on_wire()
    while len(rates) < 3 or not full:  # a busy machine may not fill the link at once
        dist.barrier()
        before, begun = int(counter.read_text()), time.perf_counter()
        works = [dist.irecv(inbox, peer), dist.isend(message, peer)]
        for work in works:
            assert work is not None
            work.wait()
        rates.append(megabytes * 8e6 / (time.perf_counter() - begun))
        dist.barrier()  # a send is over when the kernel has the bytes, not when the wire has
        counted.append(int(counter.read_text()) - before)
        full = torch.tensor(float(max(rates) > 0.7 * RATE))
        dist.all_reduce(full, dist.ReduceOp.MIN)
    on_wire = _on_wire() - on_wire
    loss = with_straggler(lambda model: torch.zeros(()), seconds=0.02, seed=3)
    late = []
    for _ in range(12):
        begun = time.perf_counter()
        loss(nn.Identity())
        late.append(time.perf_counter() - begun > 0.02)
    optimizer = decentlam.DecentLaM(nn.Linear(2, 2).parameters(), lr=0.1, topology="ring")
    exchange = type(optimizer.runtime.exchange).__name__
    return {
        "rank": rank,
        "rates": rates,
        "counted": counted,
        "on_wire": on_wire,
        "late": late,
        "exchange": exchange,
    }


@pytest.fixture(scope="module")
def observed() -> list[dict[str, Any]]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no emulated network: {reason}")
    with hosts(2, bandwidth=RATE) as made:
        return run_on(made, observe, (5,), timeout_seconds=HANG_SECONDS)


@pytest.mark.netns
def test_a_link_carries_its_bandwidth_both_ways_and_counts_all_it_carries(observed: Any) -> None:
    assert [report["rank"] for report in observed] == [0, 1]
    for report in observed:
        assert max(report["rates"]) > 0.7 * RATE and min(report["rates"]) < 1.05 * RATE
        assert all(5e6 <= count < 1.1 * 5e6 for count in report["counted"])
        # The link is charged for the headers of every packet, and acknowledgements come on top.
        assert report["on_wire"] > FRAME * 5e6 * len(report["rates"])
        # They could share memory, being on one machine, and no byte would pass the link.
        assert report["exchange"] == "Neighbors"


@pytest.mark.netns
def test_one_node_is_late_per_step(observed: Any) -> None:
    late = [report["late"] for report in observed]
    assert sum(late[0]) and sum(late[1])
    # A busy machine may make someone else late too, but nobody early.
    assert all(a or b for a, b in zip(*late, strict=True))


# Ends, good and bad --------------------------------------------------------------------------


@pytest.mark.netns
def test_an_exception_leaves_nothing(network: None) -> None:
    with pytest.raises(ValueError, match="of mine"), hosts(1), hosts(1, "1Gbit"):
        assert len(left_of(os.getpid())) == 6  # twice a host, its files, a switch
        raise ValueError("of mine")
    assert left_of(os.getpid()) == []


def fail() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("no luck on host one")
    time.sleep(600)


def stay(path: str) -> None:
    dist.barrier()
    Path(path, f"{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.netns
def test_the_host_that_failed_is_named_and_all_are_stopped(network: None) -> None:
    message = r"(?s)host 1 failed:.*in fail.*ValueError: no luck on host one"
    with hosts(2) as made, pytest.raises(RuntimeError, match=message):
        run_on(made, fail, timeout_seconds=HANG_SECONDS)
    assert left_of(os.getpid()) == []


@pytest.mark.netns
def test_nothing_lasts_longer_than_its_timeout(network: None, tmp_path: Path) -> None:
    with (
        hosts(2) as made,
        pytest.raises(RuntimeError, match=r"no result after 2 s from host 0, host 1"),
    ):
        run_on(made, stay, (str(tmp_path),), timeout_seconds=2)


def test_what_others_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        run_on([], lambda: None)


def stay_on_hosts(directory: str, number: int) -> None:
    """Processes of our own end with us, however we end; others are ended with their host."""
    with hosts(2, "1Gbit") as made:
        if number == signal.SIGKILL:
            run_on(made, stay, (directory,))
        for rank, host in enumerate(made):
            started = host.start(["sleep", "600"])
            Path(directory, f"{rank}").write_text(str(started.pid))
        started.wait()


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing_and_what_a_kill_leaves_the_next_one_clears(
    network: None, tmp_path: Path, number: signal.Signals
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=stay_on_hosts, args=(str(inside), number))
    process.start()
    assert process.pid is not None
    try:
        eventually(lambda: len(written(inside)) == 2 or not process.is_alive())
        assert process.is_alive()
        pids = [int(text) for text in written(inside)]
        os.kill(process.pid, number)
        process.join(HANG_SECONDS)
    finally:
        process.kill()
        process.join()
    eventually(lambda: not any(alive(pid) for pid in pids))
    if number == signal.SIGKILL:
        with hosts(1):
            pass
    assert left_of(process.pid) == []


def alive(pid: int) -> bool:
    """Return True unless the process is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def written(directory: Path) -> list[str]:
    return [text for path in directory.iterdir() if (text := path.read_text())]


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
