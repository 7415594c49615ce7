"""Median iteration times of all contenders, interleaved in one run of real processes."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import decentlam
from decentlam.exchange.connections import of_this_process, restore
from decentlam.lab.emulation.contenders import Contender, choose
from decentlam.lab.emulation.facts import Record, explained
from decentlam.lab.emulation.hosts import INTERFACE, hosts, unavailable
from decentlam.lab.emulation.models import make_model, with_straggler
from decentlam.lab.emulation.notes import Notes, write
from decentlam.lab.emulation.processes import run_on
from decentlam.lab.emulation.setting import Setting

_QUIET_SECONDS, _QUIET_LOOKS = 0.05, 100


class MeasurementError(RuntimeError):
    """Some process failed; `records` are those of the rounds before."""

    def __init__(self, reason: str, records: list[Record]) -> None:
        super().__init__(reason)
        self.records = records


def unheard(record: Record) -> None:
    """For those who do not watch."""


def measure(
    setting: Setting,
    nodes: int,
    bandwidth: str | float | None,
    loopback: bool = False,
    timeout_seconds: float = 1800.0,
    heard: Callable[[Record], Any] = unheard,
    unsent_bytes: int | None = None,
) -> list[Record]:
    """A record per round and contender; on hosts with such links, or on this one's loopback.

    `heard` is told of each as it is timed. If a process fails, the error has what there was.
    """
    if nodes < 2:
        raise ValueError(f"run time is compared on 2 nodes or more, got {nodes}")
    reason = None if loopback else unavailable()
    if reason is not None:
        raise ValueError(
            f"no emulated network: {reason}. With --loopback the processes run on this machine "
            "as it is, where every byte costs the CPU time and no bandwidth can be set."
        )
    with Notes(heard) as notes:
        try:
            if loopback:
                args = (setting, "lo", nodes, notes.path)
                records = decentlam.launch(time_all, nodes, args, timeout_seconds=120.0)[0]
            else:
                with hosts(nodes, bandwidth, unsent_bytes) as made:
                    args = (setting, INTERFACE, 1, notes.path)
                    records = run_on(made, time_all, args, timeout_seconds)[0]
        except (RuntimeError, OSError) as error:
            kept = explained(notes.heard(), setting, nodes, bandwidth)
            raise MeasurementError(str(error), kept) from error
    return explained(records, setting, nodes, bandwidth)


def time_all(setting: Setting, interface: str, sharing: int, notes: str) -> list[Record]:
    """Runs on every node. `sharing` nodes have the interface, whose bytes are counted, together.

    Every contender is built, warmed up and timed in each round, in an order shuffled anew, so
    that a noisy machine hits all alike. Node 0 writes each record to the file `notes` at once.
    """
    torch.set_num_threads(1)
    table = choose(setting.only)
    shuffle = random.Random(setting.seed)
    records: list[Record] = []
    for number in range(setting.rounds):
        for name in shuffle.sample(list(table), len(table)):
            found = _time_one(setting, table[name], Path("/sys/class/net", interface), sharing)
            records.append({"round": number, "contender": name, **found})
            if dist.get_rank() == 0:
                write(notes, records[-1])
            if "left_out" in found:
                del table[name]
    gc.unfreeze()
    order = list(choose(setting.only))
    return sorted(records, key=lambda r: (r["round"], order.index(r["contender"])))


def _time_one(setting: Setting, contender: Contender, interface: Path, sharing: int) -> Record:
    model, loss = make_model(
        setting.model,
        setting.sleep_seconds,
        setting.parameters,
        setting.forward_share,
        setting.layers,
    )
    if setting.straggler_ms:
        loss = with_straggler(loss, setting.straggler_ms / 1e3, setting.seed)
    try:
        training = contender.build(model, loss, setting.bucket_bytes)
    except ValueError as error:  # on all nodes alike, before anything is sent
        return {"left_out": " ".join(str(error).split())}
    for _ in range(contender.warm_up):
        training()
    before = training.forward_seconds, training.step_seconds, training.wait_seconds
    dist.barrier()
    sent, cpu = _bytes_sent(interface), time.process_time()
    times = []
    for _ in range(setting.iterations):
        begun = time.perf_counter()
        training()
        times.append(time.perf_counter() - begun)
    cpu = time.process_time() - cpu  # of all threads, in the program and in the kernel
    dist.barrier()
    sent = _bytes_sent(interface) - sent
    after = training.forward_seconds, training.step_seconds, training.wait_seconds
    spent = [*(b - a for a, b in zip(before, after, strict=True)), cpu, float(sent)]
    buckets = training.buckets()
    training.close()
    restore(of_this_process().values())  # ours may have set them: the next has them as they come
    _until_quiet(interface)  # the next one must not share the wire with what is still under way
    del training, model, loss
    gc.collect()
    gc.freeze()  # what is left are modules: no need to search them again
    forward, step, wait, cpu, sent_each = _mean([s / setting.iterations for s in spent]).tolist()
    # A delay hits some iterations more than others: then only the mean counts all of it.
    middle = statistics.mean if setting.straggler_ms else statistics.median
    return {
        "seconds": middle(_mean(times).tolist()),
        "forward_seconds": forward,
        "step_seconds": step,
        "wait_seconds": wait,
        "cpu_seconds": cpu * dist.get_world_size(),  # of all nodes
        "bytes_sent": round(sent_each / sharing),
        "buckets": buckets,
    }


def _mean(values: list[float]) -> Tensor:
    """Over all nodes."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _bytes_sent(interface: Path) -> int:
    """What the interface counted; 0 where the system has no such counter."""
    counter = interface / "statistics" / "tx_bytes"
    return int(counter.read_text()) if counter.exists() else 0


def _until_quiet(interface: Path) -> None:
    for _ in range(_QUIET_LOOKS):
        before = _bytes_sent(interface)
        time.sleep(_QUIET_SECONDS)
        if _bytes_sent(interface) == before:
            break
    dist.barrier()
