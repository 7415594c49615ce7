"""Scripts that join a group, how they are started, and what they must have computed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import runs
import torch

import decentlam

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


def training(directory: Path, joins: str) -> list[str]:
    """The script, with its arguments, of a process that trains and leaves its result there."""
    script = directory / "train.py"
    script.write_text(TRAIN)
    return [str(script), str(directory), joins]


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
