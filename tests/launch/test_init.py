"""`init`: who is met where, with which backend and GPU, and how the group is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
from decentlam.network import groups, network
from decentlam.network import heartbeat as watch
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


def die(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def join_and_die(victim: bool) -> None:
    """The victim dies when it forms the group, which all others do, too."""
    if victim:
        dist.init_process_group = die  # type: ignore[assignment]
    decentlam.init()


def start_some(
    function: Callable[..., None], ranks: dict[int, tuple[Any, ...]], directory: Path
) -> dict[int, Any]:
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {
        rank: fork(function, directory / str(rank), *arguments, RANK=str(rank), **place)
        for rank, arguments in ranks.items()
    }


def end(process: Any, out: Path, seconds: float) -> str:
    process.join(seconds)
    text = out.read_text()
    assert process.exitcode == 1, f"exit code {process.exitcode}: {text}"
    return text


SOON = 40.0  # seconds; much less than the waits of init, 60 and 300


def test_a_death_while_the_group_is_formed_is_named_soon(tmp_path: Path) -> None:
    """The store goes with process 0."""
    processes = start_some(join_and_die, {rank: (rank == 0,) for rank in range(3)}, tmp_path)
    try:
        for rank in (1, 2):
            text = end(processes[rank], tmp_path / str(rank), SOON)
            assert f"process 0 (pid {processes[0].pid} on " in text, text
            assert "LaunchError" in text
        assert processes[0].exitcode == -signal.SIGKILL
    finally:
        for process in processes.values():
            process.kill()


def test_a_death_while_another_has_not_come_is_named_soon(tmp_path: Path) -> None:
    """Process 1 never comes; the two others wait for it."""
    victim, survivor = 2, 0
    processes = start_some(wait_for_the_last, {victim: (), survivor: ()}, tmp_path)
    try:
        outs = [tmp_path / str(rank) for rank in processes]
        assert wait_for(lambda: all(o.exists() and "waits" in o.read_text() for o in outs))
        processes[victim].kill()
        text = end(processes[survivor], tmp_path / str(survivor), SOON)
        assert f"process {victim} (pid {processes[victim].pid} on " in text, text
    finally:
        for process in processes.values():
            process.kill()


def wait_for_the_last() -> None:
    """Says so when it knows of another process."""

    def look() -> None:
        while watch._current is None or not watch._current._seen:
            time.sleep(0.05)
        print("waits", flush=True)

    threading.Thread(target=look, daemon=True).start()
    decentlam.init()


# GPUs that are not there ------------------------------------------------------------------------


BOTH = "cpu:gloo,cuda:nccl"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"}
Join = Callable[..., dict[str, Any]]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Joins as one process of those that a launcher started, with the GPUs that it sees, beside
    others that have said which GPU is theirs; what torch was asked for."""

    def run(
        environment: dict[str, str],
        gpus: list[str],
        others: dict[int, str],
        do: Callable[[], None] = decentlam.init,
    ) -> dict[str, Any]:
        for name in [name for name in group.os.environ if name.startswith(("SLURM", "OMPI"))]:
            monkeypatch.delenv(name)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for name, value in {**environment, **place}.items():
            monkeypatch.setenv(name, value)
        store, asked = dist.HashStore(), {}
        for rank, gpu in others.items():
            dist.PrefixStore("decentlam gpu", store).set(str(rank), gpu)

        def form(backend: str, **options: Any) -> None:
            asked.update(options, backend=backend)
            del options["device_id"], options["timeout"]
            before("fake", **{**options, "store": FakeStore()})

        def properties(device: torch.device) -> Any:
            return SimpleNamespace(uuid=gpus[device.index])

        before = dist.init_process_group
        monkeypatch.setattr(group, "_store", lambda place, wait: store)
        monkeypatch.setattr(group.atexit, "register", lambda function: None)
        monkeypatch.setattr(dist, "init_process_group", form)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(used=device))
        monkeypatch.setattr(groups, "set_timeout", lambda *arguments: None)
        monkeypatch.setattr(watch, "watches_default_group", lambda watching: None)
        quiet = SimpleNamespace(
            wait_until_all_are_seen=lambda seconds: None, group_store=lambda prefix: store
        )
        monkeypatch.setattr(watch, "start", lambda *arguments: quiet)
        do()
        return asked

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("environment", "gpus", "others", "index"),
    [
        (TORCHRUN, ["a", "b"], {0: "a"}, 1),
        (SRUN, ["b"], {0: "a"}, 0),  # --gpus-per-task=1: each sees its own as the only one
    ],
    ids=["torchrun", "srun"],
)
def test_every_process_with_a_gpu_of_its_own_uses_nccl_there(
    join: Join, environment: Any, gpus: Any, others: Any, index: int
) -> None:
    device = torch.device("cuda", index)
    asked = join(environment, gpus, others)
    assert (asked["backend"], asked["device_id"], asked["used"]) == (BOTH, device, device)


@pytest.mark.parametrize(
    ("gpus", "others"),
    [([], {0: "a"}), (["a"], {0: "a"}), (["a", "b"], {0: "none"})],
    ids=["none here", "shared", "none on another host"],
)
def test_all_use_gloo_where_one_has_no_gpu_of_its_own(join: Join, gpus: Any, others: Any) -> None:
    asked = join(TORCHRUN, gpus, others)
    assert asked["backend"] == "gloo" and asked["device_id"] is None and "used" not in asked


def test_nccl_by_name_without_a_gpu_is_refused(join: Join) -> None:
    with pytest.raises(RuntimeError, match="the nccl backend needs a GPU"):
        join(TORCHRUN, [], {}, lambda: decentlam.init("nccl"))


def test_an_elastic_run_is_on_gloo_whatever_there_is(join: Join, monkeypatch: Any) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(group, "_enter", lambda *arguments: entered.append(arguments))
    assert join(TORCHRUN, ["a", "b"], {}, lambda: decentlam.init(elastic=True)) == {}
    assert len(entered) == 1
    with pytest.raises(ValueError, match="elastic runs need the gloo backend, got 'nccl'"):
        decentlam.init("nccl", elastic=True)


def test_an_optimizer_joins_with_the_gpu_of_its_parameters(join: Join) -> None:
    device = torch.device("cuda", 0)  # not the one that a launcher's numbers would give
    asked = join(TORCHRUN, ["a", "b"], {}, lambda: group.init_if_launched(device))
    assert (asked["backend"], asked["device_id"], asked["used"]) == (BOTH, device, device)


def test_groups_of_nccl_are_not_split_from_the_first_one(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split would wait for processes that are in none of the new groups."""
    join(TORCHRUN, ["a", "b"], {0: "a"})
    formed: list[Any] = []

    def new_group(ranks: Any, timeout: Any, backend: str, **options: Any) -> Any:
        formed.append((ranks, backend, options["pg_options"].lazy_init))
        return dist.group.WORLD

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: BOTH)
    network.connect(exact=True)
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
