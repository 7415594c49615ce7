"""Several hosts on one machine: network namespaces, each with its own address, on one bridge.

    with hosts(2, bandwidth="100Mbit") as machines:
        process = machines[1].start(["torchrun", ...])
        results = run_on(machines, function)

Needs Linux, root and the `ip` and `tc` tools. Everything is called dlam-<pid>-...; the namespaces,
their links and the processes inside are gone when the block is left, also by Ctrl-C and SIGTERM.
Those of a process that was killed are cleared away by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from decentlam.lab.network.bandwidth import parse_bandwidth
from decentlam.lab.signals import handled_by
from decentlam.launch.processes import pickled, run_processes, variables

INTERFACE = "net0"  # what a host calls its link
_PORT = "29500"  # every group of hosts is a network of its own
_GROUP_TIMEOUT_SECONDS = 120.0
_FILES = Path("/etc/netns")  # `ip netns exec` puts what is in here over /etc
_blocks = itertools.count()  # a process may have several groups of hosts
# A bucket that holds two packets of 64 KB, as TCP hands them to a virtual link: with less, tbf
# cuts them up and the CPU binds. Beyond 1 Gbit/s, one millisecond's worth, or the timer binds.
_LEAST_BURST_BYTES = 128 * 1024
_BURST_SECONDS = 1e-3
_QUEUE_SECONDS = 0.05  # so that two senders to one host wait instead of losing packets
_LEAST_QUEUE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Host:
    """A namespace that stands for a machine."""

    namespace: str
    address: str
    name: str  # resolves to the address on the other hosts, and to 127.0.1.1 on this one

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "text": True, **options}
        return subprocess.Popen(self.command(command), **options)

    def command(self, command: list[str]) -> list[str]:
        """Return the command line that runs the command on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


def unavailable() -> str | None:
    """Return why there can be no namespaces here, or None."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the `{tool}` tool (iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dlam-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "probe", "type", "bridge")
        _run("tc", "-n", name, *_limit("probe", 1e9))
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    finally:
        _remove([name])
    return None


@contextlib.contextmanager
def hosts(count: int, bandwidth: str | float | None = None) -> Iterator[list[Host]]:
    """Yield hosts 10.77.0.1, 10.77.0.2, ... whose own names stand for 127.0.1.1, as in Debian.

    `bandwidth` holds for each direction of each host's link by itself; None is no limit.
    """
    if not 1 <= count <= 250:
        raise ValueError(f"there can be 1 to 250 hosts, got {count}")
    rate = None if bandwidth is None else parse_bandwidth(bandwidth)
    if rate is not None and not 1e4 <= rate < 1e12:
        raise ValueError(
            f"links have 10 Kbit/s or more, below 1 Tbit/s; got {bandwidth!r}, which is {rate:g} "
            "bits per second. Write it as 100Mbit, 1Gbit or 2.5Gbit"
        )
    _remove_stale()
    prefix = f"dlam-{os.getpid()}-{next(_blocks)}"
    switch = f"{prefix}.switch"
    made = [Host(f"{prefix}.{i}", f"10.77.0.{i + 1}", f"dlam-host{i}.test") for i in range(count)]
    with handled_by(_leave, signal.SIGTERM, signal.SIGHUP):
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for host in made:
                _connect(host, switch, made, rate)
            yield made
        finally:
            _remove([switch, *(host.namespace for host in made)])


def run_on(
    hosts: list[Host],
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """Run fn(*args) in one process per host, which form a gloo group; return their results.

    As `decentlam.launch` does on one machine, and with its errors; beyond `timeout_seconds` all
    are stopped, too.
    """
    work = pickled(fn, args)
    environments = [
        variables(rank, len(hosts), local=False)
        | {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": _PORT,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # the store is process 0's
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        for rank in range(len(hosts))
    ]
    with tempfile.TemporaryDirectory() as directory:
        return run_processes(
            work,
            environments,
            "gloo",
            _GROUP_TIMEOUT_SECONDS,
            who="host",
            executables=[_python(host, Path(directory)) for host in hosts],
            deadline_seconds=timeout_seconds,
        )


def _python(host: Host, directory: Path) -> str:
    """Write a program that runs this Python on the host; return its path."""
    path = directory / host.namespace
    # Hides torch's warning that there is no name server, which nothing here needs.
    command = ["env", "TORCH_CPP_LOG_LEVEL=ERROR", *host.command([sys.executable])]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return str(path)


def _connect(host: Host, switch: str, everyone: list[Host], rate: float | None) -> None:
    inside, port = host.namespace, f"port{everyone.index(host)}"
    veth = ("type", "veth", "peer", port, "netns", switch)
    _run("ip", "netns", "add", inside)
    _run("ip", "link", "add", INTERFACE, "netns", inside, *veth)
    if rate is not None:  # a queue limits what leaves: one at each end makes both directions
        _run("tc", "-n", inside, *_limit(INTERFACE, rate))
        _run("tc", "-n", switch, *_limit(port, rate))
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", inside, "link", "set", "lo", "up")
    _run("ip", "-n", inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", inside, "link", "set", INTERFACE, "up")
    _run("ip", "-n", inside, "route", "add", "default", "dev", INTERFACE)
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name} {socket.gethostname()}"]
    for other in everyone:
        lines.append(f"{other.address} {other.name if other != host else 'self.test'}")
    files = _FILES / inside
    files.mkdir(parents=True, exist_ok=True)
    (files / "hosts").write_text("\n".join(lines) + "\n")
    # There is no name server: asking must fail at once and not after a timeout.
    (files / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def _limit(device: str, rate: float) -> tuple[str, ...]:
    """Return the arguments of `tc` for a token bucket on what leaves through the device."""
    burst = max(_LEAST_BURST_BYTES, int(rate / 8 * _BURST_SECONDS))
    queue = max(_LEAST_QUEUE_BYTES, int(rate / 8 * _QUEUE_SECONDS))
    size = ("rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{queue}b")
    return ("qdisc", "add", "dev", device, "root", "tbf", *size)


def _remove(namespaces: list[str]) -> None:
    """End the processes of the namespaces and delete them; they need not exist."""
    with _signals_blocked():
        for name in namespaces:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(_FILES / name, ignore_errors=True)


def _remove_stale() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = {line.split()[0] for line in listed.splitlines()}
    for name in names | {path.name for path in _FILES.glob("dlam-*")}:
        parts = name.split("-")
        ours = len(parts) == 3 and parts[0] == "dlam" and parts[1].isdigit()
        if ours and not Path(f"/proc/{parts[1]}").exists():
            _remove([name])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Delay a second Ctrl-C until everything has been removed."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave through the `finally` blocks on SIGTERM and SIGHUP, as Ctrl-C does."""
    raise SystemExit(128 + number)
