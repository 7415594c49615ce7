"""What the processes of the distributed tests run; importable, because they are spawned."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import forks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
import decentlam.runtime.bucket

CLASSES = {
    "pmsgd": decentlam.PmSGD,
    "pmsgd-lars": decentlam.PmSGD,
    "dsgd": decentlam.DSGD,
    "dmsgd": decentlam.DmSGD,
    "da-dmsgd": decentlam.DADmSGD,
    "awc-dmsgd": decentlam.AWCDmSGD,
    "slowmo": decentlam.SlowMo,
    "qg-dmsgd": decentlam.QGDmSGD,
    "d2-dmsgd": decentlam.D2DmSGD,
    "decentlam": decentlam.DecentLaM,
    "decentlam-steady": decentlam.SteadyDecentLaM,
    "gt-dmsgd": decentlam.GTDmSGD,
}


# Many scenarios in one group of processes -------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """What a scenario that raised leaves behind in one process."""

    text: str


# For a wait that ends long before, unless something hangs; shorter than pytest's own limit.
HANG_SECONDS = 500.0
HANG = timedelta(seconds=HANG_SECONDS)
Scenario = tuple[str, Callable[..., Any], dict[str, Any]]


def run_scenarios(scenarios: Sequence[Scenario], own_group: bool = False) -> dict[str, Any]:
    """Runs them one after the other in this process; {name: result or Failure}.

    With `own_group` each gets `process_group=`, a group of its own, so that what one leaves
    broken, as a test of an error does, cannot reach the next. Without, the first failure ends it.
    """
    results: dict[str, Any] = {}
    for name, function, arguments in scenarios:
        if own_group:
            arguments = {**arguments, "process_group": dist.new_group(timeout=HANG)}
        try:
            results[name] = function(**arguments)
        except Exception:
            results[name] = Failure(traceback.format_exc())
            if not own_group:
                break
        if own_group:
            dist.barrier()
            dist.destroy_process_group(arguments["process_group"])
    return results


class Scenarios:
    """What one group of processes runs, one after the other, once a result is asked for."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._listed: list[Scenario] = []
        self._slow: Scenarios | None = None

    def add(
        self, name: str, function: Callable[..., Any], slow: bool = False, **arguments: Any
    ) -> None:
        """A slow one is for tests with that mark, and run by other processes."""
        if slow:
            self._slow = self._slow or Scenarios(self.processes)
            self._slow.add(name, function, **arguments)
        else:
            self._listed.append((name, function, arguments))

    def outcomes(self, name: str) -> list[Any]:
        if self._slow is not None and all(name != listed for listed, _, _ in self._listed):
            return self._slow.outcomes(name)
        return outcomes(self._everyone, name)

    @cached_property
    def _everyone(self) -> list[Any]:
        return run_processes(run_scenarios, self.processes, (self._listed, True))


def slow_if(slow: bool, *values: Any) -> Any:
    """A case of a parametrized test, with the mark `slow` or without."""
    import pytest  # which processes need not import

    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


def outcomes(everyone: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """The results of one scenario in all processes; an error there is an error here."""
    for rank, results in enumerate(everyone):
        if not isinstance(results, dict):
            raise AssertionError(f"process {rank} did not come to an end: {results!r}")
        result = results.get(name, Failure("not reached, because a scenario before it failed"))
        if isinstance(result, Failure):
            raise AssertionError(f"process {rank}, {name}: {result.text}")
    return [results[name] for results in everyone]


def assert_equal(trajectories: list[list[Tensor]], expected: list[Tensor]) -> None:
    """One trajectory per node is the simulator's, (n, d) at every step."""
    for step, x in enumerate(expected):
        real = torch.stack([trajectory[step] for trajectory in trajectories])
        assert (real - x).abs().max() < 1e-12, f"step {step}"


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Processes that may die -------------------------------------------------------------------------


def run_processes(
    function: Callable[..., Any], n: int, args: tuple[Any, ...], seconds: float = HANG_SECONDS
) -> list[Any]:
    """function(*args) in n processes of one group: results, or exit codes of those that died.

    Unlike decentlam.launch it leaves the survivors of a death alone; only who is still there
    after `seconds` is killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(n):
        here, there = forks.context.Pipe(duplex=False)
        arguments = (there, function, args, rank, n, store.port)
        process = forks.context.Process(target=_child, args=arguments)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    deadline = time.monotonic() + seconds
    results: list[Any] = []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            arrived = pipe.poll(max(0.0, deadline - time.monotonic()))
            results.append(pickle.loads(pipe.recv_bytes()) if arrived else "killed: too slow")
        except EOFError:
            process.join(HANG_SECONDS)
            results.append(process.exitcode)
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return results


def _child(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    n: int,
    port: int,
) -> None:
    forks.as_in_an_interpreter()
    torch.set_num_threads(1)
    decentlam.runtime.bucket._LARGE = 10  # so that small models have gradients of both kinds
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=HANG)
    pipe.send_bytes(pickle.dumps(function(*args)))


# The quadratic on which trajectories are compared with the simulator ----------------------------


class Quadratic(nn.Module):
    """f_i(w) = 1/2 |w - t_i|^2_H over several parameters of different shapes; float64."""

    SHAPES = ((3, 4), (5,), (2, 3, 2), (7, 2), (1,))

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(_randn(shape, generator)) for shape in self.SHAPES]
        )

    def forward(self, targets: list[Tensor], scale: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for w, t, s in zip(self.weights, targets, scale, strict=True):
            total = total + 0.5 * s * (w - t).square().sum()
        return total


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def targets_of(node: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + node)
    return [3 * _randn(shape, generator) for shape in Quadratic.SHAPES]


SCALE = torch.tensor([0.5, 1.0, 1.5, 0.7, 2.0], dtype=torch.float64)


# Warm-up from zero, two zeros in a row, a jump, a decay to zero, and on from there.
RATES = (0.0, 0.025, 0.05, 0.05, 0.05, 0.0, 0.0, 0.05, 0.015, 0.0, 0.015)
STEPS = len(RATES)


def lr_at(step: int) -> float:
    return RATES[min(step, STEPS - 1)]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_quadratic(method: str, steps: int, options: dict[str, Any]) -> list[Tensor]:
    """Trajectory of this node, (steps, d)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    model = Quadratic(seed=rank)  # different on purpose: the optimizer must make them equal
    optimizer = CLASSES[method](model.parameters(), lr=0.0, **options)
    trajectory = []
    targets = targets_of(rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        loss = model(targets, SCALE)
        if step > 0:
            trajectory.append(flat(model))  # only now: a look before could hide a late parameter
        loss.backward()
        optimizer.step()
    return [*trajectory, flat(model)]


def simulate_quadratic(
    method: str, topology: Any, n: int, steps: int, **options: Any
) -> list[Tensor]:
    """The same run on simulated nodes: a list of (n, d)."""
    x0 = flat(Quadratic(seed=0)).expand(n, -1)
    targets = torch.stack([torch.cat([t.reshape(-1) for t in targets_of(i)]) for i in range(n)])
    sizes = [torch.Size(shape).numel() for shape in Quadratic.SHAPES]
    scale = SCALE.repeat_interleave(torch.tensor(sizes))
    trajectory: list[Tensor] = []
    hyper = {k: v for k, v in options.items() if k not in ("lars",)}
    nodes = decentlam.Nodes(
        method,
        topology,
        x0,
        layers=sizes,
        adaptive=[len(shape) > 1 for shape in Quadratic.SHAPES],
        **hyper,
    )
    for step in range(steps):
        nodes.step(scale * (nodes.x - targets), lr_at(step))
        trajectory.append(nodes.x.clone())
    return trajectory
