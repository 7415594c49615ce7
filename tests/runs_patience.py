"""What the processes of test_patience.py run, and the same run again on simulated nodes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import runs
import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import ALGORITHMS, Step
from decentlam.errors import ExchangeError
from decentlam.topology import resolve

LR = 0.05


@dataclass
class Taken:
    """One step of one node."""

    step: int
    left_out: tuple[int, ...]
    x: Tensor  # after it


def train(
    method: str,
    topology: str,
    steps: int,
    options: dict[str, Any],
    naps: dict[tuple[int, int], float] | None = None,
    pace: float = 0.0,
    counts: bool = False,
    lr: float = LR,
    stops: bool = False,
    process_group: Any = None,
) -> list[Taken]:
    """This node's steps. `naps` are seconds by node and by how many steps it has taken, `pace` is
    that of every step; the end is at a step's number, or with `counts` after so many steps. With
    `stops` node 0 sends SIGSTOP to node 1 after 5 of its steps, and SIGCONT after 25."""
    rank = dist.get_rank()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]), group=process_group)
    model = runs.Quadratic()
    optimizer = runs.CLASSES[method](
        model.parameters(), lr=lr, topology=topology, process_group=process_group, **options
    )
    if lr == 0:  # then nodes must differ for anything to happen
        with torch.no_grad():
            for p, start in zip(model.parameters(), runs.targets_of(rank), strict=True):
                p.copy_(start)
    taken: list[Taken] = []
    while (len(taken) if counts else optimizer.place.step) < steps:
        step = optimizer.place.step
        optimizer.zero_grad()
        loss = model(runs.targets_of(rank), runs.SCALE)
        time.sleep(pace + (naps or {}).get((rank, len(taken)), 0.0))
        loss.backward()
        optimizer.step()
        assert optimizer.statistics.step == step
        if stops and rank == 0 and len(taken) in (5, 25):
            os.kill(int(pids[1]), signal.SIGSTOP if len(taken) == 5 else signal.SIGCONT)
        taken.append(Taken(step, optimizer.statistics.left_out, runs.flat(model)))
    return taken


def flat_targets(node: int) -> Tensor:
    return torch.cat([t.reshape(-1) for t in runs.targets_of(node)])


def die(at: int, options: dict[str, Any]) -> str:
    """Node 1 is killed in step `at`, after node 0 has left it out; what the others raise."""
    rank = dist.get_rank()
    model = runs.Quadratic()
    optimizer = runs.CLASSES["dmsgd"](model.parameters(), lr=LR, topology="ring", **options)
    try:
        for step in range(1000):
            optimizer.zero_grad()
            model(runs.targets_of(rank), runs.SCALE).backward()
            if rank == 1 and step == at:
                time.sleep(3 * options["patience_seconds"])
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)
            optimizer.step()
    except ExchangeError as error:
        return str(error)
    return "no error"


def grow(options: dict[str, Any], process_group: Any = None) -> Tensor:
    """A param group is added between steps: the exchange is built anew."""
    rank = dist.get_rank()
    model, more = runs.Quadratic(), runs.Quadratic(seed=1)
    optimizer = runs.CLASSES["dmsgd"](
        model.parameters(), lr=LR, topology="ring", process_group=process_group, **options
    )
    for step in range(8):
        if step == 4:
            optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        for part in (model, more):
            part(runs.targets_of(rank), runs.SCALE).backward()
        optimizer.step()
    assert optimizer.statistics.total_left_out == 0
    return torch.cat([runs.flat(model), runs.flat(more)])


def replay(method: str, topology: str, everyone: list[list[Taken]], lr: float = LR) -> Tensor:
    """The last x of every node, (n, d), from the edges that were left out alone. Weights of an
    edge that one end left out and the other did not would not be symmetric, which is an error."""
    n = len(everyone)
    net, algorithm = resolve(topology, n), ALGORITHMS[method]()
    x = runs.flat(runs.Quadratic()).expand(n, -1).clone()
    targets = torch.stack(
        [torch.cat([t.reshape(-1) for t in runs.targets_of(i)]) for i in range(n)]
    )
    if lr == 0:
        x = targets.clone()
    sizes = torch.tensor([torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES])
    scale = runs.SCALE.repeat_interleave(sizes)
    state = algorithm.init(x)
    at = {(i, t.step): t for i, taken in enumerate(everyone) for t in taken}
    for k in range(1 + max(step for _, step in at)):
        here = [i for i in range(n) if (i, k) in at]
        w = net.weights(k).clone()
        for i in range(n):
            out = at[i, k].left_out if i in here else net.neighbors(i, k)
            assert set(out) <= set(net.neighbors(i, k))
            for j in out:
                w[i, i] += w[i, j].item()
                w[i, j] = 0.0
        assert torch.equal(w != 0, (w != 0).T), f"step {k}: the two ends of an edge do not agree"
        torch.testing.assert_close(w.sum(0), torch.ones(n, dtype=torch.float64))
        before, state_before = x.clone(), {name: t.clone() for name, t in state.items()}
        g = scale * (x - targets)
        step = Step(k, lr)
        message = algorithm.message(x, g, state, step)
        rows = message if isinstance(message, tuple) else (message,)
        mixed = tuple(w @ row for row in rows)
        algorithm.update(x, g, mixed if len(mixed) > 1 else mixed[0], state, step)
        for i in set(range(n)) - set(here):  # it took another step instead, or none
            x[i] = before[i]
            for name in state:
                state[name][i] = state_before[name][i]
        for i in here:
            assert (at[i, k].x - x[i]).abs().max() < 1e-12, f"node {i}, step {k}"
    return x
