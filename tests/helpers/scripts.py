"""Scripts that join a group, how they are started, and what they must have computed.

`start` starts a command, in an interpreter of its own. `run_script` and `fork` make do with
processes of the fork server, which have torch already: seconds less for each.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

import decentlam
from decentlam.launch.processes import variables
from tests.helpers.processes import HANG_SECONDS, context, leave_fork_server
from tests.helpers.quadratic import Quadratic, flat, quadratic_gradient

_STEPS = 6

# What a user would write. `init` comes first, or not at all.
TRAIN = """
import sys
import torch
import decentlam
from tests.helpers.quadratic import SCALE, Quadratic, flat, targets_of

out, joins = sys.argv[1:]
if joins == "init":
    decentlam.init()
model = Quadratic()
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.05, topology="ring")
rank = optimizer.network.rank
for step in range(6):
    optimizer.zero_grad()
    model(targets_of(rank), SCALE).backward()
    optimizer.step()
torch.save((optimizer.network.num_nodes, flat(model)), f"{out}/{rank}.pt")
"""

# The same without training, which takes the processes another two seconds to import.
JOIN = """
import torch, decentlam
decentlam.init()
total = torch.ones(())
torch.distributed.all_reduce(total)
print(f"{torch.distributed.get_rank()}/{int(total)}")
"""


def fork(function: Callable[..., object], out: Path, *args: object, **extra: str) -> BaseProcess:
    """A process that calls the function; what it and its own write is in `out`."""
    arguments = (function, str(out), args, environment(**extra))
    process = context.Process(target=_forked, args=arguments)
    process.start()
    return process


@contextlib.contextmanager
def three_processes(
    function: Callable[..., object], directory: Path, *args: object, ranks: Sequence[int] = range(3)
) -> Iterator[dict[int, BaseProcess]]:
    """Processes of a run of three, by rank, which is also the name of the file they write to."""
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = {
        rank: fork(function, directory / f"{rank}", *args, RANK=f"{rank}", **place)
        for rank in ranks
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _forked(
    function: Callable[..., object], out: str, args: tuple[object, ...], env: dict[str, str]
) -> None:
    leave_fork_server()
    os.environ.clear()
    os.environ.update(env)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(function(*args))


def run_script(
    script: Path, directory: Path, nodes: int | None = None, seconds: float = HANG_SECONDS
) -> str:
    """What the script prints in `nodes` processes, or in one that no launcher started."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, as torchrun's is in its agent
    }
    places = [{}] if nodes is None else [variables(k, nodes, True) | meeting for k in range(nodes)]
    out = directory / "output"
    processes = [fork(run_as_main, out, str(script), **place) for place in places]
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    text = out.read_text()
    assert [process.exitcode for process in processes] == [0] * len(processes), text
    return text


def run_as_main(script: str, *arguments: str) -> None:
    """To be forked: what `python script arguments` does in an interpreter of its own."""
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    atexit._run_exitfuncs()  # which multiprocessing leaves out


def training(directory: Path, joins: str) -> list[str]:
    """The script, with its arguments, of a process that trains and leaves its result there."""
    script = directory / "train.py"
    script.write_text(TRAIN)
    return [str(script), str(directory), joins]


def environment(**extra: str) -> dict[str, str]:
    """This one without what a launcher may have left in it, and with the tests importable."""
    left = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "OMPI_", "PMI", "MPI_", "SLURM_", "GLOO_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    paths = [str(Path(__file__).parents[2]), str(Path(decentlam.__file__).parents[1])]
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


def finish(
    *processes: subprocess.Popen[str], seconds: float = HANG_SECONDS
) -> list[tuple[str, str]]:
    """Output and errors of processes that must all end well."""
    deadline = time.monotonic() + seconds
    try:
        texts = [p.communicate(timeout=deadline - time.monotonic()) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (out, err) in zip(processes, texts, strict=True):
        assert process.returncode == 0, f"{out}{err or ''}"
    return texts


def assert_trained(directory: Path, nodes: int) -> None:
    """The processes left what the simulator computes for `nodes` nodes."""
    x0 = flat(Quadratic()).expand(nodes, -1)
    expected = decentlam.simulate(
        "decentlam", "ring", x0, quadratic_gradient(nodes), lr=0.05, steps=_STEPS
    )
    assert len(list(directory.glob("*.pt"))) == nodes
    for rank in range(nodes):
        count, x = torch.load(directory / f"{rank}.pt", weights_only=True)
        assert count == nodes
        torch.testing.assert_close(x, expected[rank], rtol=0, atol=1e-12)


def free_port() -> int:
    """Below those that the system gives to whoever connects: nobody takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def alive(pid: int | str) -> bool:
    """Whether the process runs; one that has ended and waits to be read by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
