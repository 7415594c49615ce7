"""Emulated networks: links as slow as asked for, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from emulated import left_of
from launching import alive, fork
from torch import nn

import decentlam
from decentlam.exchange.connections import between_processes
from decentlam.lab.emulation import bits_per_second, hosts, run_on, unavailable
from decentlam.lab.emulation.contenders import BASE, CONTENDERS, LOCAL
from decentlam.lab.emulation.facts import explained
from decentlam.lab.emulation.models import with_straggler
from decentlam.lab.emulation.results import BARE, FRAME, summary
from decentlam.lab.emulation.setting import Setting
from decentlam.lab.emulation.timing import measure

pytestmark = pytest.mark.system

RATE = 100e6


@pytest.fixture
def network() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no emulated network: {reason}")


# Hosts and links -----------------------------------------------------------------------------


def _ahead_of(file: int) -> int:
    with socket.socket(fileno=os.dup(file)) as connection:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


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
    ahead = [_ahead_of(file) for file in between_processes(optimizer.network)]
    automatic = decentlam.DecentLaM(nn.Linear(2, 2).parameters(), lr=0.1, topology="auto")
    return {
        "rank": rank,
        "rates": rates,
        "counted": counted,
        "on_wire": on_wire,
        "late": late,
        "exchange": exchange,
        "ahead": ahead,
        "message_dtype": automatic.runtime.options.message_dtype,
    }


@pytest.fixture(scope="module")
def observed() -> list[dict[str, Any]]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no emulated network: {reason}")
    with hosts(2, bandwidth=RATE) as made:
        return run_on(made, observe, (5,), timeout_seconds=runs.HANG_SECONDS)


@pytest.mark.netns
def test_a_link_carries_its_bandwidth_in_both_directions_at_once(observed: Any) -> None:
    for report in observed:
        assert max(report["rates"]) > 0.7 * RATE and min(report["rates"]) < 1.05 * RATE


@pytest.mark.netns
def test_the_interface_counts_what_was_sent(observed: Any) -> None:
    for report in observed:
        assert all(5e6 <= count < 1.1 * 5e6 for count in report["counted"])


@pytest.mark.netns
def test_the_link_is_charged_for_the_headers_of_every_packet(observed: Any) -> None:
    """Which the least time that bytes can take must know; acknowledgements come on top."""
    for report in observed:
        assert report["on_wire"] > FRAME * 5e6 * len(report["rates"])


@pytest.mark.netns
def test_hosts_share_no_memory(observed: Any) -> None:
    """They could, being on one machine, and no byte would pass the link."""
    assert {report["exchange"] for report in observed} == {"Neighbors"}


@pytest.mark.netns
def test_connections_take_as_much_ahead_as_fits_a_slow_wire(observed: Any) -> None:
    """10 ms' worth and 128 KiB at least, where they could take 4 MB; twice as much if the link was
    measured while the machine was busy."""
    for report in observed:
        assert report["ahead"] and all(1 << 17 <= size <= 5e5 for size in report["ahead"])


@pytest.mark.netns
def test_auto_sends_16_bits_over_a_slow_wire(observed: Any) -> None:
    assert {report["message_dtype"] for report in observed} == {torch.float16}


@pytest.mark.netns
@pytest.mark.usefixtures("observed")  # or there are no hosts here
def test_a_connection_takes_only_so_much_ahead_of_the_wire() -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_notsent_lowat")
    before = setting.read_text()
    with hosts(1, unsent_bytes=262_144) as (host,):
        found = host.start(["cat", str(setting)], stdout=subprocess.PIPE)
        assert found.communicate(timeout=runs.HANG_SECONDS)[0].strip() == "262144"
    assert setting.read_text() == before
    with pytest.raises(ValueError, match=r"4,096 or more.*got 7"), hosts(1, unsent_bytes=7):
        pass


@pytest.mark.netns
def test_results_come_in_the_order_of_hosts_and_one_node_is_late_per_step(observed: Any) -> None:
    assert [report["rank"] for report in observed] == [0, 1]
    late = [report["late"] for report in observed]
    assert sum(late[0]) and sum(late[1])
    # A busy machine may make someone else late too, but nobody early.
    assert all(a or b for a, b in zip(*late, strict=True))


def test_bandwidths_are_read_as_tc_spells_them() -> None:
    assert bits_per_second("100Mbit") == bits_per_second("0.1Gbit/s") == bits_per_second(1e8) == 1e8
    for wrong in ("fast", "10", "-1Gbit", "1..2Gbit", "100MB"):
        with pytest.raises(ValueError, match=f"{wrong}.*100Mbit"):
            bits_per_second(wrong)


# What the timings say ------------------------------------------------------------------------


def timed(contender: str, number: int, cpu_seconds: float) -> dict[str, Any]:
    spent = {"seconds": 1.0, "step_seconds": 0.1, "forward_seconds": 0.3, "wait_seconds": 0.0}
    spent |= {"cpu_seconds": cpu_seconds, "bytes_sent": 0, "buckets": [4]}
    return {"round": number, "contender": contender, **spent}


def test_cpu_time_has_its_spread_and_is_compared_with_bare_buckets_of_the_same_round() -> None:
    assert BARE in CONTENDERS
    ours = "DecentLaM one-peer, overlap"
    used = {LOCAL: (0.1, 0.1, 0.1), BASE: (0.5, 0.5, 0.5), BARE: (0.2, 0.4, 0.3), ours: (0.3, 0.4)}
    records = [timed(name, k, s) for name, each in used.items() for k, s in enumerate(each)]
    found = explained(records, Setting(compute="sleep:300"), 4, "1Gbit")
    row = {row["contender"]: row for row in summary(found)}[ours]
    ms = row["cpu_ms"], row["cpu_lowest_ms"], row["cpu_highest_ms"]
    assert ms == pytest.approx((350, 300, 400))
    assert row["cpu_of_bare"] == pytest.approx((1.25, 1.0, 1.5))
    without = [record for record in found if record["contender"] != BARE]
    assert [row["cpu_of_bare"] for row in summary(without)] == [None] * 3


def test_a_late_node_raises_the_bound_by_what_it_is_late_itself() -> None:
    records = [timed(name, 0, 0.1) for name in (LOCAL, BASE, BARE)]
    rows = {}
    for late in (0.0, 80.0):
        found = explained(records, Setting(compute="sleep:300", straggler_ms=late), 8, "1Gbit")
        rows[late] = {row["contender"]: row["bound_of_DDP"] for row in summary(found)}
    # Local training took as long in both, of which 10 ms are now its being late.
    for name in (LOCAL, BARE):
        assert rows[80.0][name] == pytest.approx(rows[0.0][name], abs=1e-3)


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
        run_on(made, fail, timeout_seconds=runs.HANG_SECONDS)
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
    process = fork(stay_on_hosts, tmp_path / "output", str(inside), number)
    assert process.pid is not None
    try:
        eventually(lambda: len(written(inside)) == 2 or not process.is_alive())
        assert process.is_alive(), (tmp_path / "output").read_text()
        pids = [int(text) for text in written(inside)]
        os.kill(process.pid, number)
        process.join(runs.HANG_SECONDS)
    finally:
        process.kill()
        process.join()
    eventually(lambda: not any(alive(pid) for pid in pids))
    if number == signal.SIGKILL:
        with hosts(1):
            pass
    assert left_of(process.pid) == []


def written(directory: Path) -> list[str]:
    return [text for path in directory.iterdir() if (text := path.read_text())]


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + runs.HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def refusal_of_nobody() -> str:
    if os.geteuid() == 0:
        os.setuid(65534)
    with pytest.raises(ValueError) as refused:
        measure(Setting(), 2, "1Gbit")
    return str(refused.value)


def test_without_root_the_reason_and_the_way_out_are_named() -> None:
    (err,) = runs.run_processes(refusal_of_nobody, 1, ())
    assert "no emulated network: " in err and "--loopback" in err
    if sys.platform.startswith("linux") and shutil.which("ip") and shutil.which("tc"):
        assert "network namespaces need root" in err
