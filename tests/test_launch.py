"""Every way to start a run, for real: torchrun on several hosts, mpirun, srun, launch, by hand."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist

import decentlam
from decentlam.lab import emulation
from decentlam.launch.place import find_place, first_host, meeting_point

pytestmark = pytest.mark.timeout(240)  # starting a process takes seconds on a busy machine

STEPS = 6

# What a user would write. `init` comes first, or not at all.
TRAIN = """
import sys
import torch
import decentlam, runs

out, joins = sys.argv[1:]
if joins == "init":
    decentlam.init()
model = runs.Quadratic()
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.05, topology="ring")
rank = optimizer.network.rank
for step in range(6):
    optimizer.zero_grad()
    model(runs.targets_of(rank), runs.SCALE).backward()
    optimizer.step()
torch.save((optimizer.network.num_nodes, runs.flat(model)), f"{out}/{rank}.pt")
"""

# The same without training, which takes the processes another two seconds to import.
JOIN = """
import torch, decentlam
decentlam.init()
total = torch.ones(())
torch.distributed.all_reduce(total)
print(f"{torch.distributed.get_rank()}/{int(total)}")
"""


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[str]]:
    """The command of one process that trains and leaves its result in tmp_path."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return lambda joins: [str(script), str(tmp_path), joins]


def environment(**extra: str) -> dict[str, str]:
    """This one without what a launcher may have left in it, and with the tests importable."""
    left = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "OMPI_", "PMI", "MPI_", "SLURM_", "GLOO_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    paths = [str(Path(__file__).parent), str(Path(decentlam.__file__).parents[1])]
    env["PYTHONPATH"] = os.pathsep.join([*paths, env.get("PYTHONPATH", "")])
    return {**env, "OMP_NUM_THREADS": "1", **extra}


def start(command: list[str], **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str], seconds: float = 200.0) -> list[tuple[str, str]]:
    """Output and errors of processes that must all end well."""
    deadline = time.monotonic() + seconds
    try:
        texts = [p.communicate(timeout=deadline - time.monotonic()) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (out, err) in zip(processes, texts, strict=True):
        assert process.returncode == 0, out + err
    return texts


def assert_trained(directory: Path, nodes: int) -> None:
    """The processes left what the simulator computes for `nodes` nodes."""
    targets = torch.stack(
        [torch.cat([t.reshape(-1) for t in runs.targets_of(i)]) for i in range(nodes)]
    )
    sizes = torch.tensor([torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES])
    scale = runs.SCALE.repeat_interleave(sizes)
    x0 = runs.flat(runs.Quadratic()).expand(nodes, -1)
    expected = decentlam.simulate(
        "decentlam", "ring", x0, lambda x, step: scale * (x - targets), lr=0.05, steps=STEPS
    )
    assert len(list(directory.glob("*.pt"))) == nodes
    for rank in range(nodes):
        count, x = torch.load(directory / f"{rank}.pt", weights_only=True)
        assert count == nodes
        torch.testing.assert_close(x, expected[rank], rtol=0, atol=1e-12)


# Reading the environment ---------------------------------------------------------------------


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


# torchrun, mpirun, srun, and nothing ---------------------------------------------------------


def test_plain_python_is_one_node(no_launcher: None) -> None:
    optimizer = decentlam.DecentLaM(runs.Quadratic().parameters(), lr=0.05)
    assert not dist.is_initialized()
    assert optimizer.network.num_nodes == 1


def test_torchrun_without_init_joins_when_the_optimizer_is_built(
    train: Any, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finish(start([*torchrun, "--nproc-per-node=2", *train("never")]))
    assert_trained(tmp_path, 2)


BY_HAND = {
    "openmpi": lambda rank, port: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"{port}",  # the job's number, which the port is made from
    },
    "mpich": lambda rank, port: {
        "PMI_RANK": rank,
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": rank,
        "MPI_LOCALNRANKS": "2",
        "MASTER_PORT": f"{port}",
    },
    "slurm": lambda rank, port: {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": rank,
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": f"{port}",
        "SLURM_STEP_ID": "0",
    },
}


@pytest.mark.parametrize("launcher", BY_HAND)
def test_variables_of_other_launchers_are_enough(launcher: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    processes = [
        start([sys.executable, "-c", JOIN], **BY_HAND[launcher](str(rank), port))
        for rank in range(2)
    ]
    assert finish(*processes) == [("0/2\n", ""), ("1/2\n", "")]


def test_mpirun_for_real() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, "-c", JOIN]
    ((out, _),) = finish(start(command))
    assert "0/2" in out and "1/2" in out  # mpirun may run lines together


@pytest.mark.netns
@pytest.mark.parametrize("meets_at", ["name", pytest.param("address", marks=pytest.mark.slow)])
def test_torchrun_on_two_hosts(meets_at: str, train: Any, tmp_path: Path) -> None:
    """By name is the hard case: on its own host the name of process 0's host is 127.0.1.1."""
    reason = emulation.unavailable()
    if reason is not None:
        pytest.skip(f"no second host: {reason}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    with emulation.hosts(2) as hosts:
        there = getattr(hosts[0], meets_at)
        agents = [
            host.start(
                [*torchrun, f"--node-rank={i}", f"--master-addr={there}", *train("init")],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for i, host in enumerate(hosts)
        ]
        finish(*agents)
    assert_trained(tmp_path, 4)


@pytest.mark.netns
def test_namespaces_are_removed_after_a_failure_and_with_the_processes_inside() -> None:
    reason = emulation.unavailable()
    if reason is not None:
        pytest.skip(f"no second host: {reason}")
    with pytest.raises(KeyboardInterrupt), emulation.hosts(2) as hosts:
        sleeper = hosts[1].start(["sleep", "600"])
        raise KeyboardInterrupt
    assert sleeper.wait(10) == -signal.SIGKILL
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"dlam-{os.getpid()}" not in listed
    assert not list(Path("/etc/netns").glob(f"dlam-{os.getpid()}*"))


# decentlam.launch(fn, nodes) -----------------------------------------------------------------


def describe(scale: float, mine: torch.Tensor) -> tuple[int, float, list[float], bool]:
    """Rank, an all-reduce, an argument that only this node changed, room for data loaders."""
    rank = dist.get_rank()
    total = torch.tensor([scale * rank])
    dist.all_reduce(total)
    mine += rank
    dist.barrier()
    may_have_workers = not multiprocessing.current_process().daemon
    return rank, total.item(), mine.tolist(), may_have_workers


LAUNCHES = """
import torch, decentlam, test_launch
if __name__ == "__main__":
    print(decentlam.launch(test_launch.describe, nodes=2, args=(2.0, torch.zeros(2))))
"""


def test_launch_returns_results_in_rank_order_and_leaves_no_warning(tmp_path: Path) -> None:
    script = tmp_path / "launches.py"
    script.write_text(LAUNCHES)
    ((out, err),) = finish(start([sys.executable, "-W", "error", str(script)]))
    assert out.strip() == str([(r, 2.0, [float(r)] * 2, True) for r in range(2)])
    assert err == ""


def fail(how: str) -> None:
    """Node 1 fails; node 0 does not notice, or fails in its turn a moment later."""
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("no luck on node one")
        if os.fork() == 0:  # a data loader's worker, which keeps the pipe open
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        dist.all_reduce(torch.zeros(1))
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"(?s)node 1 failed:.*in fail.*ValueError: no luck on node one"),
        ("kill", r"node 1 was killed by SIGKILL \(exit code -9\)"),
    ],
)
def test_the_node_that_failed_first_is_named_and_all_are_stopped(how: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        decentlam.launch(fail, nodes=2, args=(how,))
    assert _children() == []


def _children() -> list[str]:
    """Processes started by this one that still run, other than multiprocessing's own helpers."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in found]
    helpers = ("resource_tracker", "forkserver")  # the second is left by other test files
    return [c for c in commands if c.strip() and not any(name in c for name in helpers)]


def test_what_cannot_be_sent_to_a_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)lambda.*top level of a module"):
        decentlam.launch(lambda: None, nodes=2)
    with pytest.raises(ValueError, match="arguments that pickle can copy"):
        decentlam.launch(describe, nodes=2, args=((x for x in ()),))
    for wrong in (0, -1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="nodes must be a whole number"):
            decentlam.launch(describe, nodes=wrong)  # type: ignore[arg-type]


# python -m decentlam.launch ------------------------------------------------------------------

COMMAND = [sys.executable, "-W", "error", "-m", "decentlam.launch"]


def test_command_trains_without_init(train: Any, tmp_path: Path) -> None:
    ((out, err),) = finish(start([*COMMAND, "-n", "2", *train("never")]))
    assert_trained(tmp_path, 2)
    assert out == err == ""


PROCESSES = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[2]
print(f"hello from {rank} of {os.environ['WORLD_SIZE']}")
open(f"{sys.argv[1]}/{rank}.tmp", "w").write(str(os.getpid()))
os.rename(f"{sys.argv[1]}/{rank}.tmp", f"{sys.argv[1]}/{rank}.pid")
if rank == 1 and what == "exit":
    print("going down", file=sys.stderr)
    sys.exit(3)
if rank == 1 and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stubborn one
time.sleep(600)
"""

SLEEPERS = """
import sys, decentlam, test_launch
if __name__ == "__main__":
    decentlam.launch(test_launch.sleep, nodes=2, args=(sys.argv[1],))
"""


def sleep(directory: str) -> None:
    target = Path(directory) / f"{dist.get_rank()}.pid"
    target.with_suffix(".tmp").write_text(str(os.getpid()))
    target.with_suffix(".tmp").rename(target)
    time.sleep(600)


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit", 3, ["process 1 of 3 exited with code 3", "[1] going down"]),
        ("kill", 128 + 9, ["process 1 of 3 was killed by SIGKILL"]),
    ],
)
def test_command_stops_all_and_passes_the_exit_code_on(
    what: str, code: int, words: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    process = start([*COMMAND, "-n", "3", str(script), str(tmp_path), what])
    out, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert "hello from 1 of 3\n" in out and "[1]" not in out
    for text in words:
        assert text in err
    _assert_gone(tmp_path)


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("command", signal.SIGINT),
        pytest.param("command", signal.SIGTERM, marks=pytest.mark.slow),
        ("command", signal.SIGKILL),
        ("function", signal.SIGINT),
        ("function", signal.SIGKILL),
    ],
)
def test_nothing_outlives_the_launcher(way: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESSES if way == "command" else SLEEPERS)
    command = [*COMMAND, "-n", "2"] if way == "command" else [sys.executable]
    process = start([*command, str(script), str(tmp_path), "sleep"])
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    _assert_gone(tmp_path)
    if way == "command" and number != signal.SIGKILL:
        assert process.returncode == 128 + number


def _assert_gone(directory: Path) -> None:
    pids = [path.read_text() for path in directory.glob("*.pid")]
    assert pids
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if _runs(p)]}"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", __file__], "must be 1 or more"),
        (["-n", "2", "absent.py"], "there is no script"),
    ],
)
def test_command_refuses_what_cannot_run(arguments: list[str], message: str, capsys: Any) -> None:
    from decentlam.launch.__main__ import main

    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
