"""Median iteration times of all contenders, interleaved in one run of real processes."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import decentlam
from decentlam.lab.network.contenders import INNER, Contender, choose
from decentlam.lab.network.hosts import INTERFACE, hosts, run_on, unavailable
from decentlam.lab.network.models import MODELS, make_model, with_straggler
from decentlam.lab.values import Record

_QUIET_SECONDS, _QUIET_CHECKS = 0.05, 100


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: what is trained, how often it is timed, and which contenders take part."""

    model: str = "transformer-9.5M"
    parameters: int | None = None  # of a sleeping model, instead of the named one's
    compute: str = "real"  # or "sleep:300", in milliseconds per iteration
    rounds: int = 3
    iterations: int = 8
    straggler_ms: float = 0.0  # delay of one node per step, drawn at random
    only: tuple[str, ...] = ()  # contenders; none are all
    optimizer: str = "sgd"  # what torch trains with; "adamw" has contenders of its own
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; choose from {', '.join(MODELS)}")
        asleep = self.sleep_seconds is not None  # or an error if compute cannot be read
        if self.parameters is not None and not asleep:
            raise ValueError("a number of parameters needs sleeping compute, such as sleep:300")
        if min(self.rounds, self.iterations) < 1:
            raise ValueError("rounds and iterations must be 1 or more")
        if self.straggler_ms < 0:
            raise ValueError(f"a straggler is late by 0 ms or more, got {self.straggler_ms:g}")
        if self.optimizer not in INNER:
            raise ValueError(
                f"unknown optimizer {self.optimizer!r}; choose from {', '.join(INNER)}"
            )
        choose(self.only, self.optimizer)

    @property
    def sleep_seconds(self) -> float | None:
        """The seconds of sleep that stand for compute; None where a model really computes."""
        if self.compute == "real":
            return None
        kind, _, milliseconds = self.compute.partition(":")
        try:
            seconds = float(milliseconds) / 1e3
        except ValueError:
            seconds = -1.0
        if kind != "sleep" or not 0 <= seconds < 3600:
            raise ValueError(f"compute is real or sleep:MILLISECONDS, got {self.compute!r}")
        return seconds

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.parameters or MODELS[self.model].parameters


def measure(
    benchmark: Benchmark,
    nodes: int,
    bandwidth: str | float | None,
    loopback: bool = False,
    timeout_seconds: float = 1800.0,
    on_round: Callable[[int], Any] | None = None,
) -> list[Record]:
    """Return a record per round and contender, timed on emulated hosts or on loopback.

    Every round has processes of its own. `on_round` is called with the number of those done.
    """
    if nodes < 2:
        raise ValueError(f"run time is compared on 2 nodes or more, got {nodes}")
    reason = None if loopback else unavailable()
    if reason is not None:
        raise ValueError(
            f"no emulated network: {reason}. With --loopback the processes run on this machine "
            "as it is, where every byte costs the CPU time and no bandwidth can be set."
        )
    records: list[Record] = []
    with contextlib.nullcontext() if loopback else hosts(nodes, bandwidth) as machines:
        for number in range(benchmark.rounds):
            if machines is None:
                work = (benchmark, number, "lo", nodes)
                records += decentlam.launch(time_round, nodes, work, timeout_seconds=120.0)[0]
            else:
                work = (benchmark, number, INTERFACE, 1)
                records += run_on(machines, time_round, work, timeout_seconds)[0]
            if on_round is not None:
                on_round(number + 1)
    return records


def time_round(benchmark: Benchmark, number: int, interface: str, sharing: int) -> list[Record]:
    """Time every contender once; runs on every node.

    The order is shuffled anew in each round, so that a noisy machine hits all alike. `sharing`
    nodes have the interface, whose bytes are counted, in common.
    """
    torch.set_num_threads(1)
    table = choose(benchmark.only, benchmark.optimizer)
    order = random.Random(f"{benchmark.seed} {number}").sample(list(table), len(table))
    link = Path("/sys/class/net", interface)
    # Where some iterations cost more than others only the mean counts all, so all are timed by it.
    alike = not benchmark.straggler_ms and all(c.every == 1 for c in table.values())
    middle = statistics.median if alike else statistics.mean
    found = {name: _time_one(benchmark, table[name], middle, link, sharing) for name in order}
    gc.unfreeze()
    return [{"round": number, "contender": name, **found[name]} for name in table]


def _time_one(
    benchmark: Benchmark,
    contender: Contender,
    middle: Callable[[list[float]], float],
    interface: Path,
    sharing: int,
) -> Record:
    model, loss = make_model(benchmark.model, benchmark.sleep_seconds, benchmark.parameters)
    if benchmark.straggler_ms:
        loss = with_straggler(loss, benchmark.straggler_ms / 1e3, benchmark.seed)
    try:
        training = contender.build(model, loss, INNER[benchmark.optimizer])
    except ValueError as error:  # on all nodes alike, before anything is sent
        return {"left_out": " ".join(str(error).split())}
    for _ in range(contender.warm_up):
        training()
    before = training.step_seconds, training.wait_seconds
    dist.barrier()
    sent, cpu = _bytes_sent(interface), time.process_time()
    times = []
    for _ in range(benchmark.iterations):
        begun = time.perf_counter()
        training()
        times.append(time.perf_counter() - begun)
    cpu = time.process_time() - cpu  # of all threads, in the program and in the kernel
    dist.barrier()
    sent = _bytes_sent(interface) - sent
    after = training.step_seconds, training.wait_seconds
    spent = [*(b - a for a, b in zip(before, after, strict=True)), cpu, float(sent)]
    _wait_until_quiet(interface)  # the next one must not share the wire with what is still sent
    del training, model, loss
    gc.collect()
    gc.freeze()  # what is left are modules, which need no further collection
    step, wait, cpu, sent_each = _mean([s / benchmark.iterations for s in spent]).tolist()
    return {
        "seconds": middle(_mean(times).tolist()),
        "step_seconds": step,
        "wait_seconds": wait,
        "cpu_seconds": cpu * dist.get_world_size(),  # of all nodes
        "bytes_sent": round(sent_each / sharing),
    }


def _mean(values: list[float]) -> Tensor:
    """Return the mean over all nodes."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _bytes_sent(interface: Path) -> int:
    """Return what the interface counted; 0 where the system has no such counter."""
    counter = interface / "statistics" / "tx_bytes"
    return int(counter.read_text()) if counter.exists() else 0


def _wait_until_quiet(interface: Path) -> None:
    for _ in range(_QUIET_CHECKS):
        before = _bytes_sent(interface)
        time.sleep(_QUIET_SECONDS)
        if _bytes_sent(interface) == before:
            break
    dist.barrier()
