"""What the processes of test_patience.py run, and the same run again on simulated nodes.

Who is late waits until it has heard that its neighbors went on, and a run ends when what it is for
has happened: how fast the machine is decides how many steps that takes, and nothing else.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import runs
import torch
import torch.distributed as dist
from torch import Tensor

import decentlam
from decentlam.algorithms import ALGORITHMS, Step
from decentlam.errors import ExchangeError
from decentlam.topology import resolve

LR = 0.05
PACE = 0.02  # seconds before each step
LATE = 4  # the number of steps after which node 1 is late
STOPPED = range(6, 14)  # the numbers of steps of node 0 while node 1 is stopped
COUNTED = 20


@dataclass
class Taken:
    """One step of one node."""

    step: int
    left_out: tuple[int, ...]
    used: int  # edges
    x: Tensor  # after it


class Node:
    """One node of a run, and what it tells the others beside the training, through the store."""

    def __init__(self, run: str, optimizer: Any) -> None:
        self.rank, self.optimizer = dist.get_rank(), optimizer
        self.taken: list[Taken] = []
        self._store = dist.PrefixStore(run, dist.distributed_c10d._get_default_store())

    @property
    def step(self) -> int:
        return self.optimizer.place.step

    def neighbors(self, step: int) -> list[int]:
        return self.optimizer.topology.neighbors(self.rank, step)

    def tell(self, what: str, number: int) -> None:
        self._store.set(what, str(number))

    def told(self, what: str) -> int | None:
        return int(self._store.get(what)) if self._store.check([what]) else None

    def ends(self, happened: bool) -> bool:
        """Whether it is over for this node: for all of them soon after it has happened to one."""
        if happened and self.told("end") is None:
            self.tell("end", self.step + 3)
        end = self.told("end")
        return end is not None and self.step >= end

    def known(self, node: int) -> int:
        """The step that the other one has begun, as far as this one has heard."""
        return self.optimizer.runtime.exchange._lines.by_node[node].at

    def fall_behind(self, begun: dict[int, int]) -> None:
        """Waits until it has heard that these nodes have begun these steps, unless one ended."""
        for node, step in begun.items():
            while self.known(node) < step and self.told(f"done {node}") is None:
                time.sleep(0.005)


# The course of a run: called before each step, it says whether there is none.


def twelve_steps(node: Node) -> bool:
    return node.step >= 12


def late_once(node: Node) -> bool:
    """Node 1 is late by two steps, and the run goes on until it has mixed again."""
    if node.rank == 1 and len(node.taken) == LATE:
        node.fall_behind(dict.fromkeys(node.neighbors(node.step), node.step + 2))
    return node.ends(node.rank == 1 and any(t.used for t in node.taken[LATE + 1 :]))


def always_slow(node: Node) -> bool:
    """While node 1 takes one step, its neighbors take three, until it has mixed twice again."""
    late = node.rank == 1 and len(node.taken) > LATE
    over = node.ends(late and sum(t.used > 0 for t in node.taken[LATE + 1 :]) >= 2)
    if late and node.told("end") is None:
        node.fall_behind({j: node.known(j) + 3 for j in node.neighbors(node.step)})
    return over


def stopped(node: Node) -> bool:
    """Node 1 gets a SIGSTOP, and later a SIGCONT, until node 0 has mixed with it again."""
    if node.rank == 0 and len(node.taken) == STOPPED.start:
        os.kill(node.told("pid 1"), signal.SIGSTOP)
    if node.rank == 0 and len(node.taken) == STOPPED.stop:
        os.kill(node.told("pid 1"), signal.SIGCONT)
    later = node.taken[STOPPED.stop :]
    return node.ends(node.rank == 0 and any(1 not in t.left_out for t in later))


def count(node: Node) -> bool:
    """Every node takes so many steps; the last three of node 1 after its neighbors have ended."""
    if node.rank == 1 and len(node.taken) == COUNTED - 3:
        node.fall_behind({0: sys.maxsize, 2: sys.maxsize})
    return len(node.taken) == COUNTED


def train(
    run: str,
    course: Callable[[Node], bool],
    method: str,
    topology: str,
    options: dict[str, Any],
    lr: float = LR,
    directory: str | None = None,
    grows: bool = False,
    process_group: Any = None,
) -> list[Taken]:
    """This node's steps; at the end all add a param group, or save a checkpoint, if told to."""
    model = runs.Quadratic()
    optimizer = runs.CLASSES[method](
        model.parameters(), lr=lr, topology=topology, process_group=process_group, **options
    )
    node = Node(run, optimizer)
    node.tell(f"pid {node.rank}", os.getpid())
    dist.barrier()  # all have told
    if lr == 0:  # then nodes must differ for anything to happen
        with torch.no_grad():
            for p, start in zip(model.parameters(), runs.targets_of(node.rank), strict=True):
                p.copy_(start)
    while not course(node):
        step = node.step
        optimizer.zero_grad()
        loss = model(runs.targets_of(node.rank), runs.SCALE)
        time.sleep(PACE)
        loss.backward()
        optimizer.step()
        assert optimizer.statistics.step == step
        left_out = optimizer.statistics.left_out
        used = len(node.neighbors(step)) - len(left_out)
        node.taken.append(Taken(step, left_out, used, runs.flat(model)))
    node.tell(f"done {node.rank}", node.step)
    if grows:
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
        steps = optimizer.network.gather([group["step"] for group in optimizer.param_groups])
        assert steps == [[max(map(max, steps))] * 2] * len(steps)
    if directory is not None:
        decentlam.save_checkpoint(directory, model=model, optimizer=optimizer)
        steps = optimizer.network.gather(node.step)
        assert steps == [max(steps)] * len(steps)  # who was behind goes on where the others are
    return node.taken


def flat_targets(node: int) -> Tensor:
    return torch.cat([t.reshape(-1) for t in runs.targets_of(node)])


def die(options: dict[str, Any]) -> str:
    """Node 1 is killed after its neighbors have left it out; what the others raise."""
    model = runs.Quadratic()
    optimizer = runs.CLASSES["dmsgd"](model.parameters(), lr=LR, topology="ring", **options)
    node = Node("die", optimizer)
    try:
        for taken in itertools.count():
            if node.rank == 1 and taken == LATE:
                node.fall_behind(dict.fromkeys(node.neighbors(node.step), node.step + 2))
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(runs.targets_of(node.rank), runs.SCALE).backward()
            time.sleep(PACE)
            optimizer.step()
    except ExchangeError as error:
        return str(error)
    raise AssertionError("no end")


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
