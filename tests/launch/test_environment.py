"""A process finds its rank in the environment, or says what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from decentlam.launch.environment import first_host, launched_process, meeting_point


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
    place = launched_process(environment)
    found = place and (
        place.launcher, place.rank, place.num_processes, place.local_rank, place.one_host
    )  # fmt: skip
    assert found == expected


def test_the_script_of_sbatch_is_one_process_and_srun_inside_is_not() -> None:
    batch = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert launched_process(batch) is None
    inside = launched_process({**batch, "SLURM_STEP_ID": "0"})
    assert inside is not None and inside.num_processes == 4


def test_process_0_is_found_without_master_addr_where_that_can_be_known() -> None:
    def point(env: dict[str, str]) -> tuple[str, int]:
        place = launched_process(env)
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
        launched_process({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK=2 and WORLD_SIZE=2"):
        launched_process({"RANK": "2", "WORLD_SIZE": "2"})
