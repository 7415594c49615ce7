"""`python -m decentlam.launch -n 8 script.py`: a script on this machine, once per node.

Sets the variables torchrun sets. If one process fails the others are stopped, and its exit code
becomes this program's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import torch.distributed as dist

from decentlam.launch.place import LOOPBACK

_STOP_SECONDS = 5.0  # between asking a process to end and ending it
_TAIL_LINES = 40
# Becomes the script after asking the kernel (PR_SET_PDEATHSIG, which exec keeps) to end it with
# the launcher, even if that one is killed. A preexec_fn would do it in a fork of many threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class _Process:
    """One copy of the script, and the end of what it wrote to its stderr."""

    def __init__(self, command: list[str], environment: dict[str, str], lock: threading.Lock):
        self.popen = subprocess.Popen(
            [*_guard(), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which stops everyone
        )
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        assert self.popen.stdout is not None and self.popen.stderr is not None
        self.threads = [
            threading.Thread(target=_forward, args=arguments, daemon=True)
            for arguments in (
                (self.popen.stdout, sys.stdout.buffer, lock, None),
                (self.popen.stderr, sys.stderr.buffer, lock, self.tail),
            )
        ]
        for thread in self.threads:
            thread.start()

    def signal(self, number: int) -> None:
        """To the process and to those it started, such as the workers of a data loader."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decentlam.launch", description=__doc__)
    parser.add_argument("-n", "--nodes", type=int, required=True, help="how many processes")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the script")
    options = parser.parse_args(arguments)
    if options.nodes < 1:
        parser.error(f"--nodes must be 1 or more, got {options.nodes}")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no script {options.script!r}")
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.args]
    # The store lives here and takes a free port by itself: nobody can take it in between, and no
    # process has to outlive the others.
    store = dist.TCPStore(
        LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    with _signals_as_exits():
        return _run(command, options.nodes, store.port)


def _run(command: list[str], nodes: int, port: int) -> int:
    lock = threading.Lock()
    processes: list[_Process] = []
    try:
        for rank in range(nodes):
            processes.append(_Process(command, _environment(rank, nodes, port), lock))
        failed = _first_failure(processes)
    finally:
        _stop(processes)
    if failed is None:
        return 0
    code = processes[failed].popen.returncode
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    print(f"decentlam.launch: process {failed} of {nodes} {how}; all stopped", file=sys.stderr)
    for line in processes[failed].tail:
        print(f"[{failed}] {line}", file=sys.stderr)
    return code if code > 0 else 128 - code


def _environment(rank: int, nodes: int, port: int) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // nodes))
    return {
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": str(nodes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # process 0 connects to the store, as all do
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _first_failure(processes: list[_Process]) -> int | None:
    """The rank of the first process that fails, or None when all have ended well."""
    while True:
        codes = [process.popen.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)


def _stop(processes: list[_Process]) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.signal(signal.SIGKILL)
        process.popen.wait()
    for process in processes:
        for thread in process.threads:  # ends with the stream, unless someone else holds it
            thread.join(max(0.1, deadline - time.monotonic()))


def _forward(
    source: BinaryIO, target: BinaryIO, lock: threading.Lock, tail: collections.deque[str] | None
) -> None:
    """Passes on whole lines, so that those of different processes do not mix."""
    rest = b""
    with source:
        for chunk in iter(lambda: source.read1(1 << 16), b""):  # type: ignore[attr-defined]
            rest += chunk
            end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
            _write(rest[:end], target, lock, tail)
            rest = rest[end:]
    _write(rest, target, lock, tail)


def _write(
    text: bytes, target: BinaryIO, lock: threading.Lock, tail: collections.deque[str] | None
) -> None:
    if tail is not None:
        tail.extend(text.decode(errors="replace").splitlines())
    with lock, contextlib.suppress(BrokenPipeError):
        target.write(text)
        target.flush()


def _guard() -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP leave through the `finally` blocks, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
