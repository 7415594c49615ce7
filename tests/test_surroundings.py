"""What is wrong around a run ends it in one line: disks, ports, interfaces, memory."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.lab.cli import app
from decentlam.lab.values import explained

PLAN = ["train", "--epochs", "2", "-n", "2", "--quiet"]


def ends(arguments: list[str], capfd: Any) -> tuple[int, str]:
    """The exit code and what was written to stderr, by threads and C++ as well."""
    with pytest.raises(SystemExit) as end:
        app(arguments, prog_name="decentlam")
    return int(end.value.code or 0), capfd.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few pages."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named(small_disk: Path, capfd: Any) -> None:
    code, text = ends([*PLAN, "--simulate", "--out", str(small_disk / "run")], capfd)
    assert code in (1, 2) and "No space left on device" in text
    assert "Traceback" not in text, text


def test_a_read_only_directory_is_named(small_disk: Path, capfd: Any) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, text = ends([*PLAN, "--simulate", "--out", str(small_disk / "run")], capfd)
    assert code in (1, 2) and text.count("\n") == 1 and "Read-only file system" in text


def launched(monkeypatch: Any, **changes: str) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**place, **changes}.items():
        monkeypatch.setenv(name, value)


def test_a_port_in_use_is_named(monkeypatch: Any, capfd: Any) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        launched(monkeypatch, MASTER_PORT=port)
        code, text = ends(PLAN, capfd)
    assert code == 1 and "Traceback" not in text
    assert f"could not join the others at 127.0.0.1:{port}" in text
    assert "EADDRINUSE" in text and "another MASTER_PORT" in text


def test_a_wrong_interface_is_named(monkeypatch: Any, capfd: Any) -> None:
    launched(monkeypatch, WORLD_SIZE="1", GLOO_SOCKET_IFNAME="wlan99")
    code, text = ends(PLAN, capfd)
    assert not dist.is_initialized()
    assert code == 1 and "Traceback" not in text and "wlan99" in text
    assert "GLOO_SOCKET_IFNAME" in text


def run_out_of_memory() -> None:
    decentlam.init()
    if dist.get_rank() == 1:
        torch.empty(1 << 50)
    dist.barrier()


@pytest.mark.system
def test_no_memory_on_one_node_is_named_and_ends_all() -> None:
    with pytest.raises(decentlam.LaunchError, match="node 1 failed") as caught:
        decentlam.launch(run_out_of_memory, 2)
    text = explained(caught.value.__cause__)
    assert text is not None and text.startswith("out of memory: ") and "--micro-batch" in text
