"""`init`: who is met where, with which backend and GPU, and how the group is left."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import decentlam
from decentlam.lab import network as emulation
from decentlam.launch import init as group
from decentlam.launch import launched_process
from decentlam.network import heartbeat as watch
from decentlam.network import network
from tests.helpers.processes import HANG_SECONDS, wait_for
from tests.helpers.quadratic import Quadratic
from tests.helpers.scripts import (
    JOIN,
    assert_trained,
    environment,
    finish,
    fork,
    free_port,
    start,
    three_processes,
    training,
)

# By any launcher --------------------------------------------------------------------------------


def join_group() -> None:
    exec(JOIN)


def test_variables_of_another_launcher_are_enough(tmp_path: Path) -> None:
    """Those that srun sets; tests/launch/test_environment.py has the other launchers' names."""
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": f"{free_port()}",  # which the port is made from
        "SLURM_STEP_ID": "0",
    }
    processes = [
        fork(join_group, tmp_path / rank, **job, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        for rank in ("0", "1")
    ]
    for rank, process in enumerate(processes):
        process.join(HANG_SECONDS)
        assert process.exitcode == 0
        assert (tmp_path / str(rank)).read_text() == f"{rank}/2\n"


def test_mpirun_for_real() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, "-c", JOIN]
    ((out, _),) = finish(start(command))
    assert "0/2" in out and "1/2" in out  # mpirun may run lines together


@pytest.mark.system
@pytest.mark.netns
@pytest.mark.parametrize("meets_at", ["name", pytest.param("address", marks=pytest.mark.slow)])
def test_torchrun_on_two_hosts(meets_at: str, tmp_path: Path) -> None:
    """By name is the hard case: on its own host the name of process 0's host is 127.0.1.1."""
    reason = emulation.unavailable()
    if reason is not None:
        pytest.skip(f"no second host: {reason}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    with emulation.hosts(2) as hosts:
        there = getattr(hosts[0], meets_at)
        agents = [
            host.start(
                [
                    *torchrun,
                    f"--node-rank={i}",
                    f"--master-addr={there}",
                    *training(tmp_path, "never"),
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for i, host in enumerate(hosts)
        ]
        finish(*agents)
    assert_trained(tmp_path, 4)


RESTARTED = """
import os, signal, sys
import torch, decentlam

decentlam.init()
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
model = torch.nn.Linear(3, 1)
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, topology="ring")
for step in range(4):
    if attempt == "0" and rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
open(os.path.join(sys.argv[1], f"{rank} {attempt}"), "w").close()
"""


@pytest.mark.system
def test_processes_that_torchrun_starts_again_find_each_other(tmp_path: Path) -> None:
    """Its store still has the addresses of those that are gone."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    finish(start([*torchrun, "--nproc-per-node=2", str(script), str(tmp_path)]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0 1", "1 1", "script.py"]


# Nobody is met ----------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)


def test_init_without_a_launcher_says_how_to_start(no_launcher: None) -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        decentlam.init()


def test_init_that_finds_nobody_says_where_it_looked(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**place, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"process 1 of 2.*could not join.*127\.0\.0\.1:1 "):
        decentlam.init(timeout_seconds=1)
    assert not dist.is_initialized()


def test_init_gives_up_on_who_takes_its_connection_and_never_answers(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the link goes down, or the launcher is stopped, just then."""
    monkeypatch.setattr(group, "_GRACE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in {**place, "GLOO_SOCKET_IFNAME": "lo"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(decentlam.LaunchError, match=r"could not join.*did not answer within"):
            decentlam.init(join_seconds=1)


def test_plain_python_is_one_node(no_launcher: None) -> None:
    optimizer = decentlam.DecentLaM(Quadratic().parameters(), lr=0.05)
    assert not dist.is_initialized()
    assert optimizer.network.num_nodes == 1


def launched(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**place, **changes}.items():
        monkeypatch.setenv(name, value)


def test_a_port_in_use_is_named(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        launched(monkeypatch, MASTER_PORT=port)
        with pytest.raises(decentlam.LaunchError) as caught:
            decentlam.init()
    text = str(caught.value)
    assert f"could not join the others at 127.0.0.1:{port}" in text
    assert "EADDRINUSE" in text and "another MASTER_PORT" in text


def test_a_wrong_interface_is_named(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, WORLD_SIZE="1", GLOO_SOCKET_IFNAME="wlan99")
    with pytest.raises(RuntimeError, match=r"(?s)GLOO_SOCKET_IFNAME.*wlan99|wlan99.*SOCKET_IFNAME"):
        decentlam.init()
    assert not dist.is_initialized()


def test_the_store_of_process_0_listens_at_master_addr_only(tmp_path: Path) -> None:
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    process = fork(join_group, tmp_path / "0", **place)
    try:
        assert wait_for(lambda: bool(listeners(port)) or not process.is_alive())
        assert listeners(port) == ["0100007F"], (tmp_path / "0").read_text()  # 127.0.0.1
    finally:
        process.kill()
        process.join()


def listeners(port: int) -> list[str]:
    """The addresses, as Linux writes them, at which this machine listens on a port."""
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1][:-5] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]


# Somebody dies meanwhile ------------------------------------------------------------------------


SOON = 40.0  # seconds; much less than the waits of init, 60 and 300


def assert_named(process: BaseProcess, lost: BaseProcess, rank: int, out: Path) -> None:
    process.join(SOON)
    text = out.read_text()
    assert process.exitcode == 1, f"exit code {process.exitcode}: {text}"
    assert f"process {rank} (pid {lost.pid} on " in text and "LaunchError" in text, text


def join_and_die() -> None:
    """Process 0, which has the store, dies when it forms the group, which all others do, too."""
    if os.environ["RANK"] == "0":
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        dist.init_process_group = lambda *arguments, **options: kill()
    decentlam.init()


def test_a_death_while_the_group_is_formed_is_named_soon(tmp_path: Path) -> None:
    with three_processes(join_and_die, tmp_path) as processes:
        for rank in (1, 2):
            assert_named(processes[rank], processes[0], 0, tmp_path / f"{rank}")


def wait_for_the_last() -> None:
    """Says so when it knows of another process."""

    def look() -> None:
        while watch._current is None or not watch._current._seen:
            time.sleep(0.05)
        print("waits", flush=True)

    threading.Thread(target=look, daemon=True).start()
    decentlam.init()


def test_a_death_while_another_has_not_come_is_named_soon(tmp_path: Path) -> None:
    """Process 1 never comes; the two others wait for it."""
    with three_processes(wait_for_the_last, tmp_path, ranks=(0, 2)) as processes:
        outs = [tmp_path / "0", tmp_path / "2"]
        assert wait_for(lambda: all(o.exists() and "waits" in o.read_text() for o in outs))
        processes[2].kill()
        assert_named(processes[0], processes[2], 2, outs[0])


# GPUs that are not there ------------------------------------------------------------------------


BOTH = "cpu:gloo,cuda:nccl"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"}


@pytest.mark.parametrize(
    ("environment", "gpus", "other", "index", "backend"),
    [
        (TORCHRUN, ["a", "b"], "a", 1, BOTH),
        (SRUN, ["b"], "a", 0, BOTH),  # --gpus-per-task=1: each sees its own as the only one
        (TORCHRUN, ["a"], "a", 0, "gloo"),
        (TORCHRUN, ["a", "b"], "none", 1, "gloo"),  # of another host
        (TORCHRUN, [], "a", None, "gloo"),
    ],
    ids=["torchrun", "srun", "shared", "none on another host", "none here"],
)
def test_nccl_is_used_if_every_process_has_a_gpu_of_its_own(
    environment: Any, gpus: Any, other: str, index: int | None, backend: str, monkeypatch: Any
) -> None:
    """Process 1 of 2, with the GPUs that it sees; process 0 has said which one is its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=gpus[gpu.index])
    )
    store, process = dist.HashStore(), launched_process(environment)
    dist.PrefixStore("decentlam gpu", store).set("0", other)
    assert process is not None
    device = group._own_device(process)
    assert device == (None if index is None else torch.device("cuda", index))
    assert group._usual_backend(store, device, process) == backend


def test_a_group_of_nccl_is_bound_to_the_gpu_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    device, process = torch.device("cuda", 1), launched_process(TORCHRUN)
    all_there = SimpleNamespace(wait_until_all_are_seen=lambda seconds: None)
    monkeypatch.setattr(group, "_store", lambda process, wait: dist.HashStore())
    monkeypatch.setattr(watch, "start", lambda *arguments: all_there)
    monkeypatch.setattr(watch, "watches_default_group", lambda watching: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: asked.update(used=gpu))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **o: asked.update(o, name=name))
    assert process is not None
    group._form(BOTH, device, process, 9.0, 9.0)
    assert (asked["name"], asked["device_id"], asked["used"]) == (BOTH, device, device)


def test_nccl_is_refused_without_a_gpu_and_in_elastic_runs(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="the nccl backend needs a GPU"):
        decentlam.init("nccl")
    with pytest.raises(ValueError, match="elastic runs need the gloo backend, got 'nccl'"):
        decentlam.init("nccl", elastic=True)


def test_an_optimizer_joins_with_the_gpu_of_its_parameters(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(group, "_join", lambda *place, **options: asked.append(place))
    for name in ("cuda:1", "cpu"):
        group.init_if_launched(torch.device(name))
    assert asked == [(BOTH, torch.device("cuda", 1)), ("gloo", None)]


def test_groups_of_nccl_are_not_split_from_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split would wait for processes that are in none of the new groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    formed: list[Any] = []

    def new_group(ranks: Any, timeout: Any, backend: str, **options: Any) -> Any:
        formed.append((ranks, backend, options["pg_options"].lazy_init))
        return dist.group.WORLD

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: BOTH)
    network.connect(exact=True)
    dist.destroy_process_group()
    assert formed == [([0, 1], BOTH, True)]


# Leaving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "destroyed"), [("cuda:nccl", 0), ("cpu:gloo,cuda:gloo", 1)])
def test_after_an_error_nobody_waits_until_all_leave_nccl(
    backend: str, destroyed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's destructor would, for as long as the others wait for this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    calls: list[None] = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "last_value", ValueError(), raising=False)  # what ended the script
        patched.setattr(dist, "get_backend_config", lambda group: backend)
        patched.setattr(dist, "destroy_process_group", lambda: calls.append(None))
        decentlam.leave()
    dist.destroy_process_group()
    assert len(calls) == destroyed
