"""A process finds its place in the run in the environment, or says what is missing."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import runs
import torch.distributed as dist
from launching import environment

import decentlam
from decentlam.launch import group
from decentlam.launch.place import find_place, first_host, meeting_point


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "3"}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ("torchrun", 3, 4, 1, False),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, ("torchrun", 3, 4, 3, None)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SLURM_PROCID": "0",  # mpirun inside a SLURM job: its own rank counts
                "SLURM_NTASKS": "2",
            },
            ("mpirun (Open MPI)", 1, 2, 1, True),
        ),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
            ("mpirun (MPICH)", 5, 8, 1, False),
        ),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_LOCALID": "1"},  # srun --mpi=pmi2
            ("mpirun (MPICH)", 5, 8, 1, None),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"},
            ("srun", 2, 4, 0, None),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "1"},
            ("srun", 2, 4, 2, True),
        ),
    ],
)  # fmt: skip
def test_launchers_are_recognised(
    environment: dict[str, str], expected: tuple[Any, ...] | None
) -> None:
    place = find_place(environment)
    found = place and (
        place.launcher, place.rank, place.num_processes, place.local_rank, place.one_host
    )  # fmt: skip
    assert found == expected


def test_the_script_of_sbatch_is_one_process_and_srun_inside_is_not() -> None:
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_place(batch) is None
    inside = find_place({**batch, "SLURM_STEP_ID": "0"})
    assert inside is not None and inside.num_processes == 4


def test_process_0_is_found_without_master_addr_where_that_can_be_known() -> None:
    def point(env: dict[str, str]) -> tuple[str, int]:
        place = find_place(env)
        assert place is not None
        return meeting_point(place, env)

    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert point(mpich) == ("127.0.0.1", 29500)
    assert point({**mpich, "MASTER_PORT": "1234"}) == ("127.0.0.1", 1234)
    assert point({**mpich, "MASTER_ADDR": "there"}) == ("there", 29500)
    slurm = {
        "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "a,b[03-05]", "SLURM_STEP_NODELIST": "b[03-05]",
    }  # fmt: skip
    host, port = point(slurm)
    assert host == "b03" and 20000 <= port < 32000
    assert point({**slurm, "SLURM_STEP_ID": "1"})[1] != port, "two steps of a job, two ports"
    several = {**mpich, "MPI_LOCALNRANKS": "1"}
    with pytest.raises(RuntimeError, match="set MASTER_ADDR"):
        point(several)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],login1", "gpu03"),
        ("a,b", "a"),
        ("rack1-n[7]", "rack1-n7"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_an_environment_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ValueError, match="RANK='one', which is not a whole number"):
        find_place({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK=2 and WORLD_SIZE=2"):
        find_place({"RANK": "2", "WORLD_SIZE": "2"})


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)


def test_init_without_a_launcher_says_how_to_start(no_launcher: None) -> None:
    with pytest.raises(RuntimeError, match=r"python -m decentlam\.launch -n 4 script\.py"):
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
    optimizer = decentlam.DecentLaM(runs.Quadratic().parameters(), lr=0.05)
    assert not dist.is_initialized()
    assert optimizer.network.num_nodes == 1
