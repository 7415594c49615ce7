"""Median iteration times of all contenders, interleaved in one run of real processes."""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import decentlam
from decentlam.lab.network.contenders import BASE, LOCAL, Contender, choose
from decentlam.lab.network.hosts import INTERFACE, hosts, run_on, unavailable
from decentlam.lab.network.models import MODELS, make_model, with_straggler
from decentlam.lab.values import Record

_QUIET_SECONDS, _QUIET_CHECKS = 0.05, 100
_POLL_SECONDS = 0.3


class MeasurementError(RuntimeError):
    """Some process failed; `records` are those of the rounds before."""

    def __init__(self, reason: str, records: list[Record]) -> None:
        super().__init__(reason)
        self.records = records


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: what is trained, how often it is timed, and which contenders take part."""

    model: str = "transformer-9.5M"
    parameters: int | None = None  # of a sleeping model, instead of the named one's
    compute: str = "real"  # or "sleep:300", in milliseconds per iteration
    rounds: int = 3
    iterations: int = 8
    straggler_ms: float = 0.0  # one node per step, drawn at random, is late by so much
    only: tuple[str, ...] = ()  # contenders; none are all
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
        choose(self.only)

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


def ignore(record: Record) -> None:
    """Take no notice of a record."""


def measure(
    benchmark: Benchmark,
    nodes: int,
    bandwidth: str | float | None,
    loopback: bool = False,
    timeout_seconds: float = 1800.0,
    on_record: Callable[[Record], Any] = ignore,
) -> list[Record]:
    """Return a record per round and contender, timed on emulated hosts or on loopback.

    `on_record` is called with each as it is timed. If a process fails, the error has those before.
    Rounds that ended before local training and DDP were timed are left out.
    """
    if nodes < 2:
        raise ValueError(f"run time is compared on 2 nodes or more, got {nodes}")
    reason = None if loopback else unavailable()
    if reason is not None:
        raise ValueError(
            f"no emulated network: {reason}. With --loopback the processes run on this machine "
            "as it is, where every byte costs the CPU time and no bandwidth can be set."
        )
    with FollowedFile(on_record) as file:
        try:
            if loopback:
                args = (benchmark, "lo", nodes, file.path)
                return decentlam.launch(time_all, nodes, args, timeout_seconds=120.0)[0]
            with hosts(nodes, bandwidth) as machines:
                args = (benchmark, INTERFACE, 1, file.path)
                return run_on(machines, time_all, args, timeout_seconds)[0]
        except (RuntimeError, OSError) as error:
            raise MeasurementError(str(error), whole_rounds(file.records())) from error


def whole_rounds(records: list[Record]) -> list[Record]:
    """Return the records of the rounds in which local training and DDP were timed."""
    seen = {(r["round"], r["contender"]) for r in records if "left_out" not in r}
    return [
        r for r in records if "left_out" in r or {(r["round"], LOCAL), (r["round"], BASE)} <= seen
    ]


def time_all(benchmark: Benchmark, interface: str, sharing: int, path: str) -> list[Record]:
    """Time every contender in every round; runs on every node.

    The order is shuffled anew in each round, so that a noisy machine hits all alike. `sharing`
    nodes have the interface, whose bytes are counted, in common. Node 0 appends each record to the
    file at once.
    """
    torch.set_num_threads(1)
    table = choose(benchmark.only)
    shuffle = random.Random(benchmark.seed)
    records: list[Record] = []
    for number in range(benchmark.rounds):
        for name in shuffle.sample(list(table), len(table)):
            found = _time_one(benchmark, table[name], Path("/sys/class/net", interface), sharing)
            records.append({"round": number, "contender": name, **found})
            if dist.get_rank() == 0:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(records[-1]) + "\n")
            if "left_out" in found:
                del table[name]
    gc.unfreeze()
    order = list(choose(benchmark.only))
    return sorted(records, key=lambda r: (r["round"], order.index(r["contender"])))


def _time_one(benchmark: Benchmark, contender: Contender, interface: Path, sharing: int) -> Record:
    model, loss = make_model(benchmark.model, benchmark.sleep_seconds, benchmark.parameters)
    if benchmark.straggler_ms:
        loss = with_straggler(loss, benchmark.straggler_ms / 1e3, benchmark.seed)
    try:
        training = contender.build(model, loss)
    except ValueError as error:  # on all nodes alike, before anything is sent
        return {"left_out": " ".join(str(error).split())}
    for _ in range(contender.warm_up):
        training()
    before = training.forward_seconds, training.step_seconds, training.wait_seconds
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
    after = training.forward_seconds, training.step_seconds, training.wait_seconds
    spent = [*(b - a for a, b in zip(before, after, strict=True)), cpu, float(sent)]
    _wait_until_quiet(interface)  # the next one must not share the wire with what is still sent
    del training, model, loss
    gc.collect()
    gc.freeze()  # what is left are modules: no need to search them again
    forward, step, wait, cpu, sent_each = _mean([s / benchmark.iterations for s in spent]).tolist()
    # A delay hits some iterations more than others: then only the mean counts all of it.
    middle = statistics.mean if benchmark.straggler_ms else statistics.median
    return {
        "seconds": middle(_mean(times).tolist()),
        "forward_seconds": forward,
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


class FollowedFile:
    """A temporary file of JSON lines: calls `on_record` with each that others append to it."""

    def __init__(self, on_record: Callable[[Record], Any]) -> None:
        self._on_record = on_record
        self._reported = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> FollowedFile:
        self._directory = tempfile.TemporaryDirectory()
        self.path = str(Path(self._directory.name) / "records.jsonl")
        Path(self.path).touch()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        self._report()
        self._directory.cleanup()

    def records(self) -> list[Record]:
        """Return all records so far; a line that is still being written is not one yet."""
        lines = Path(self.path).read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _follow(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            self._report()

    def _report(self) -> None:
        for record in self.records()[self._reported :]:
            self._reported += 1
            self._on_record(record)
