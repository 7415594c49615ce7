"""Which backend and which GPU a process gets, on GPUs that are not there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import decentlam
from decentlam.analysis.cost import links
from decentlam.exchange import network
from decentlam.launch import group
from decentlam.membership import watch
from decentlam.options import Options
from decentlam.runtime import build

BOTH = "cpu:gloo,cuda:nccl"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
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
        for name in ("set_timeout", "watches_default_group"):
            monkeypatch.setattr(watch, name, lambda *arguments: None)
        quiet = SimpleNamespace(wait_until_all_are_seen=lambda seconds: None)
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
        (OPEN_MPI, ["a", "b"], {0: "c", 1: "d", 2: "a"}, 1),  # of the host, not of all
        (SRUN, ["b"], {0: "a"}, 0),  # --gpus-per-task=1: each sees its own as the only one
    ],
    ids=["torchrun", "mpirun", "srun"],
)
def test_every_process_with_a_gpu_of_its_own_uses_nccl_there(
    join: Join, environment: Any, gpus: Any, others: Any, index: int
) -> None:
    device = torch.device("cuda", index)
    asked = join(environment, gpus, others)
    assert (asked["backend"], asked["device_id"], asked["used"]) == (BOTH, device, device)


@pytest.mark.parametrize(
    ("gpus", "others", "why"),
    [
        ([], {0: "a"}, None),  # it needs to ask nobody
        (["a"], {0: "a"}, "sharing one: 0, 1"),
        (["a", "b"], {0: "none"}, "without one: 0"),  # another host
    ],
)
def test_all_use_gloo_where_one_has_no_gpu_of_its_own(
    join: Join, gpus: Any, others: Any, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=group.__name__):
        asked = join(TORCHRUN, gpus, others)
    assert asked["backend"] == "gloo" and asked["device_id"] is None and "used" not in asked
    assert [why in line for line in caplog.messages] == ([True] if why else [])


def test_what_the_user_asks_for_is_not_looked_up(join: Join) -> None:
    assert join(TORCHRUN, ["a", "b"], {}, lambda: decentlam.init("gloo"))["backend"] == "gloo"


def test_nccl_by_name_takes_the_gpu_of_the_process(join: Join) -> None:
    asked = join(TORCHRUN, ["a", "b"], {}, lambda: decentlam.init("nccl"))
    assert (asked["backend"], asked["device_id"]) == ("nccl", torch.device("cuda", 1))


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


def test_torch_that_would_split_the_group_is_not_told_the_gpu(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "can_form_lazily", lambda: False)
    asked = join(TORCHRUN, ["a", "b"], {0: "a"})
    assert asked["device_id"] is None and asked["used"] == torch.device("cuda", 1)


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


# Refused ----------------------------------------------------------------------------------------


def network_of(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> network.Network:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    return network.Network(object(), 0, 2, device=torch.device(device))  # type: ignore[arg-type]


def test_messages_from_a_gpu_by_gloo_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = "cpu:gloo,cuda:gloo"
    with pytest.raises(ValueError, match=r"on cuda:1, but .* gloo.*init\('nccl'\).*model\.cpu"):
        build.check_device(network_of(gloo, "cuda:1", monkeypatch))
    build.check_device(network_of(gloo, "cpu", monkeypatch))
    build.check_device(network_of(BOTH, "cuda:1", monkeypatch))


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", BOTH])
def test_elastic_runs_on_gpus_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gloo backend and parameters on the CPU.*cuda:0"):
        build.check_elastic(network_of(backend, "cuda:0", monkeypatch), None)


# Measured ---------------------------------------------------------------------------------------


def test_links_are_measured_between_the_gpus_that_send(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Meter:
        def __init__(self, network: Any, device: torch.device, timeout: Any) -> None:
            asked.append(device)
            raise InterruptedError

    monkeypatch.setattr(links, "_Meter", Meter)
    options, method = Options(topology="auto"), decentlam.algorithms.DmSGD()
    with pytest.raises(InterruptedError):
        network = network_of(BOTH, "cuda:1", monkeypatch)
        build._chosen([], method, options, network, shares=False, link=None)
    assert asked == [torch.device("cuda:1")]


# Leaving ----------------------------------------------------------------------------------------

LEAVING = """
import sys, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from decentlam.launch import group
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
dist.get_backend_config = lambda group: sys.argv[1]
dist.destroy_process_group = lambda: print("destroyed")
group.atexit.register(group.leave)
"""


@pytest.mark.parametrize(
    ("backend", "end", "said", "launched"),
    [
        ("cuda:nccl", "", "destroyed", False),
        ("cuda:nccl", "raise ValueError", "", False),
        ("cuda:nccl", "raise ValueError", "", True),
        ("cpu:gloo,cuda:gloo", "raise ValueError", "destroyed", False),
    ],
)
def test_after_an_error_nobody_waits_until_all_leave_nccl(
    backend: str, end: str, said: str, launched: bool, tmp_path: Path
) -> None:
    """NCCL's destructor would, for as long as the others wait for this process."""
    script = tmp_path / "script.py"
    script.write_text(LEAVING + end)
    ours = ["-m", "decentlam.launch.script", str(os.getpid()), "file"] if launched else []
    command = [sys.executable, *ours, str(script), backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=runs.HANG_SECONDS)
    assert done.stdout.strip() == said, done.stderr


def test_a_group_that_was_given_up_is_not_destroyed_later(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(TORCHRUN, [], {})
    closed: list[Any] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: BOTH)
    monkeypatch.setattr(watch, "close_connections", closed.append)
    watch.destroy_group(alone=True)
    watch.destroy_group()
    assert closed == [dist.group.WORLD] and dist.is_initialized()
