"""The examples run as their first lines say, and mean what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import decentlam
from tests.helpers.processes import run_processes
from tests.helpers.quadratic import SCALE, Quadratic, flat, quadratic_gradient, targets_of
from tests.helpers.scripts import finish, run_script, start

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.system
def test_the_torchrun_script_trains() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    ((text, _),) = finish(start([*torchrun, str(EXAMPLES / "train.py")]))
    assert float(text.split("averaged model ")[1].split(",")[0]) > 0.9


@pytest.mark.system
def test_a_sharded_gpt_learns_and_goes_on_with_another_number_of_shards(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    script = [str(EXAMPLES / "sharded_gpt.py"), "--out", str(tmp_path / "run")]
    ((first, _),) = finish(start([*torchrun, "4", *script, "--steps", "40"]))
    assert float(re.search(r"averaged model: loss ([\d.]+)", first)[1]) < 3.7  # untrained: 5.5
    ((then, _),) = finish(start([*torchrun, "2", *script, "--shards", "1", "--steps", "42"]))
    assert "step 40: loss" in then and "step 30" not in then


def test_own_algorithm_agrees_on_the_mean(tmp_path: Path) -> None:
    text = run_script(EXAMPLES / "own_algorithm.py", tmp_path, nodes=3)
    assert "the nodes agree on 1.000" in text


def test_own_algorithm_runs_in_the_simulator(tmp_path: Path) -> None:
    text = run_script(EXAMPLES / "own_algorithm.py", tmp_path)
    assert "8 simulated nodes agree on 3.500" in text


def train_with_hook(steps: int) -> list[torch.Tensor]:
    sys.path.insert(0, str(EXAMPLES))
    from ddp_hook import DecentLaMHook, decentlam_hook
    from torch.nn.parallel import DistributedDataParallel

    node = torch.distributed.get_rank()
    model = Quadratic(seed=0)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped.register_comm_hook(DecentLaMHook(optimizer, "ring", weight_decay=0.01), decentlam_hook)
    trajectory = []
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(targets_of(node), SCALE).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


@pytest.mark.filterwarnings("default")
def test_the_ddp_hook_with_sgd_is_decentlam() -> None:
    n, steps = 3, 20
    real = run_processes(train_with_hook, n, (steps,))

    def check(k: int, x: torch.Tensor) -> None:
        models = torch.stack([trajectory[k] for trajectory in real])
        assert torch.allclose(models, x, rtol=0, atol=1e-12)

    decentlam.simulate(
        "decentlam",
        "ring",
        flat(Quadratic(seed=0)).expand(n, -1),
        quadratic_gradient(n),
        lr=0.05,
        steps=steps,
        callback=check,
        weight_decay=0.01,
    )
