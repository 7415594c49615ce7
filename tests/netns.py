"""Several hosts on one machine: network namespaces, each with its own address, on one bridge.

    with hosts(2) as (first, second):
        process = second.start(["torchrun", ...])

Needs root and the `ip` tool. Everything is called dlam-<pid>-...; the namespaces, their links and
the processes inside are gone when the block is left, and those of a process that was killed are
cleared away by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = Path("/etc/netns")  # `ip netns exec` puts what is in here over /etc


@dataclass(frozen=True)
class Host:
    """A namespace that stands for a machine."""

    namespace: str
    address: str
    name: str  # resolves to the address on the other hosts, and to 127.0.1.1 on this one

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            stdin=subprocess.DEVNULL,
            text=True,
            **options,
        )


def unavailable() -> str | None:
    """Why there can be no namespaces here, or None."""
    if shutil.which("ip") is None:
        return "the `ip` tool (iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dlam-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "probe", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    finally:
        _remove(name)
    return None


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts 10.77.0.1, 10.77.0.2, ... whose own names stand for 127.0.1.1, as Debian does it."""
    _remove_stale()
    prefix = f"dlam-{os.getpid()}"
    switch = f"{prefix}-switch"
    made = [Host(f"{prefix}-{i}", f"10.77.0.{i + 1}", f"dlam-host{i}.test") for i in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            _connect(host, switch, made)
        yield made
    finally:
        for name in [switch, *(host.namespace for host in made)]:
            _remove(name)


def _connect(host: Host, switch: str, everyone: list[Host]) -> None:
    inside, port = host.namespace, f"port{everyone.index(host)}"
    _ip("netns", "add", inside)
    _ip("link", "add", "net0", "netns", inside, "type", "veth", "peer", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", inside, "link", "set", "lo", "up")
    _ip("-n", inside, "addr", "add", f"{host.address}/24", "dev", "net0")
    _ip("-n", inside, "link", "set", "net0", "up")
    _ip("-n", inside, "route", "add", "default", "dev", "net0")
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name} {socket.gethostname()}"]
    for other in everyone:
        lines.append(f"{other.address} {other.name if other != host else 'self.test'}")
    files = _FILES / inside
    files.mkdir(parents=True)
    (files / "hosts").write_text("\n".join(lines) + "\n")
    # There is no name server: asking must fail at once and not after a timeout.
    (files / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def _remove(namespace: str) -> None:
    """Ends the processes of a namespace and deletes it; fine if it does not exist."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(_FILES / namespace, ignore_errors=True)


def _remove_stale() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        parts = name.split("-")
        ours = len(parts) == 3 and parts[0] == "dlam" and parts[1].isdigit()
        if ours and not Path(f"/proc/{parts[1]}").exists():
            _remove(name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
