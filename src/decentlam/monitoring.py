"""`monitor(optimizer, to)`: what each node does while it trains, as records every few seconds.

A record describes the steps of one process since its last one. Into a directory every process
writes a file of its own, which `decentlam watch` reads; a process on another machine, which does
not see the directory, hands its records to process 0 through the rendezvous store. Nothing is sent
otherwise, and an optimizer that nobody monitors does nothing of this.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import ALGORITHMS, Algorithm, Reach
from decentlam.elastic import membership
from decentlam.exchange.base import Exchange, Pending, combine
from decentlam.local_steps import LocalSteps
from decentlam.network.network import Network
from decentlam.network.store import ask
from decentlam.optimizer import DecentralizedOptimizer

NODES, RUN = "nodes", "run.json"  # in the directory: a file per process, and what the run is
RECORDS = "records.jsonl"  # of `decentlam train`, which has written run.json already
Record = dict[str, Any]  # plain values
Destination = Any  # a directory, a SummaryWriter, wandb.run, or a function of a record
T = TypeVar("T")

_WARNINGS = 5  # the last ones that a record has
_SAMPLE = 1 << 20  # elements of a model that are looked at


def monitor(
    optimizer: DecentralizedOptimizer | LocalSteps,
    to: Destination,
    *,
    every_seconds: float = 2.0,
    total_steps: int | None = None,
) -> Monitor:
    """Write a record of this process to `to` every few seconds while it trains.

    Call it on every process, after you built the optimizer.

    Args:
        optimizer: A decentlam optimizer.
        to: A directory (for `decentlam watch`), a TensorBoard `SummaryWriter`, `wandb.run`, or a
            function that takes a record, a dict of plain values.
        every_seconds: The least time between two records. The first step always writes one.
        total_steps: The number of steps of the whole run, to estimate the time left.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    >>> records = []
    >>> watch = decentlam.monitor(optimizer, records.append, every_seconds=0)
    >>> loss = model(torch.ones(2, 3)).mean()
    >>> loss.backward()
    >>> watch.log(loss=loss)
    >>> optimizer.step()
    >>> records[0]["step"], records[0]["loss"] == loss.item()
    (1, True)
    """
    if not isinstance(optimizer, DecentralizedOptimizer | LocalSteps):
        raise TypeError(f"monitor needs an optimizer of decentlam, got {type(optimizer).__name__}")
    if not 0 <= every_seconds < math.inf:
        raise ValueError(f"every_seconds must be 0 or more, got {every_seconds!r}")
    found = Monitor(optimizer, _writer(optimizer, to, total_steps), every_seconds, total_steps)
    optimizer.register_step_post_hook(lambda optimizer, *_: found._stepped(optimizer))
    return found


class Monitor:
    """Writes the records of one process; returned by `monitor`."""

    def __init__(
        self,
        optimizer: Any,
        write: Callable[[Record], None],
        every_seconds: float,
        total_steps: int | None,
    ) -> None:
        self._write, self._every, self._total = write, every_seconds, total_steps
        self._sums: dict[str, tuple[Any, int]] = {}  # of what was logged, and how often
        self._mixing = _around_exchange(optimizer.runtime)
        self._warnings = _Warnings()
        self._since, self._last = time.perf_counter(), -math.inf  # the first step has a record
        before, self._count = optimizer.statistics, 0  # of steps since the last record
        self._waited, self._sent = before.total_wait_seconds, before.total_bytes_sent
        self._latest: Record | None = None
        self._step = 0  # how many the run has taken
        atexit.register(self.close)

    def log(self, **values: float | Tensor) -> None:
        """Log numbers of this step, such as `loss`. A record has their mean since the last one."""
        for name, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value  # no wait for a GPU
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def loading(self, batches: Iterable[T]) -> Generator[T, None, None]:
        """Yield the batches, and measure the time to load them as `data_seconds`."""
        source = iter(batches)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.log(data_seconds=time.perf_counter() - begun)
            yield batch

    def close(self) -> None:
        """Write that this process has finished. Called automatically when Python exits."""
        atexit.unregister(self.close)
        latest, self._latest = self._latest, None
        self._warnings.close()
        if latest is not None:
            with contextlib.suppress(OSError):
                self._write({**latest, "time": time.time(), "step": self._step, "ended": True})

    def _stepped(self, optimizer: Any) -> None:
        """Runs after every step."""
        now, last = time.perf_counter(), optimizer.statistics
        self._count, self._step = self._count + 1, optimizer.steps
        if self._mixing.runtime is not optimizer.runtime:  # members of an elastic run get new ones
            self._mixing = _around_exchange(optimizer.runtime)
        if now - self._last < self._every:
            return
        self._last = now
        network, count, span = optimizer.network, self._count, now - self._since
        means = {name: float(total) / times for name, (total, times) in self._sums.items()}
        if "data_seconds" in means:
            means["data_seconds"] *= self._sums["data_seconds"][1] / count
        members = optimizer.members
        self._latest = {
            "time": time.time(),
            "pid": os.getpid(),
            "node": network.node,
            "member": members[network.rank],
            "members": list(members),
            "step": self._step,
            "total_steps": self._total,
            "lr": float(optimizer.param_groups[0]["lr"]),
            "step_seconds": span / count,
            "wait_seconds": (last.total_wait_seconds - self._waited) / count,
            "bytes_sent": (last.total_bytes_sent - self._sent) / count,
            "skipped_steps": last.skipped_steps,
            "peers": optimizer.topology.neighbors(network.node, optimizer.runtime.index),
            "disagreement": self._mixing.disagreement(),
            **means,
            "warnings": list(self._warnings.texts),
        }
        self._sums, self._since = {}, now
        self._count = 0
        self._waited, self._sent = last.total_wait_seconds, last.total_bytes_sent
        self._mixing.due = True
        self._write(self._latest)


class _Warnings(logging.Handler):
    """The last warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("decentlam").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts = [*self.texts, record.getMessage()[:500]][-_WARNINGS:]

    def close(self) -> None:
        logging.getLogger("decentlam").removeHandler(self)
        super().close()


# Disagreement ------------------------------------------------------------------------------------


def _around_exchange(runtime: Any) -> _Mixing:
    """Measure what mixing moves, in this runtime."""
    mixing = _Mixing([bucket.shard_x.numel() for bucket in runtime.buckets], runtime)
    runtime.wrap_exchange(mixing.around)
    return mixing


class _Mixing(Exchange):
    """Around the exchange with neighbors: how far a mix moved this node's own message, when asked.

    If the models were independent, at distance s from their average, a mix with weights w would
    move a node by s sqrt(n / (n - 1) ((1 - w_i)^2 + sum of the other w_j^2)). That says s. On a
    sparse graph neighbors are more alike than the rest, and s comes out too small.
    """

    def __init__(self, sizes: Sequence[int], runtime: Any) -> None:
        self.runtime = runtime
        self.due = True
        self._sizes, self._pending = sizes, list[tuple[int, Pending]]()
        self._moved = 0.0  # squared, at `_step`
        self._step: int | None = None

    def around(self, inner: Exchange) -> Exchange:
        self._inner = inner
        self.silent = inner.silent
        return self

    def begin(self, step: int, sizes: Sequence[int]) -> None:
        self._inner.begin(step, sizes)

    def message(self, bucket: int, size: int) -> Tensor:
        return self._inner.message(bucket, size)

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        pending = self._inner.send(bucket, message, step)
        if self.due:
            self._pending.append((bucket, pending))
        return pending

    def end(self) -> None:
        if self._pending:
            self._step = self._pending[0][1].step
            every = max(1, sum(self._sizes) // _SAMPLE)
            self._moved = sum(_moved(p, self._sizes[b], every) for b, p in self._pending)
            self._pending, self.due = [], False
        self._inner.end()

    def disagreement(self) -> float | None:
        """Return the estimated distance of the models from their average; None if not known."""
        if self._step is None:
            return None
        network, topology = self.runtime.network, self.runtime.topology
        row, n = topology.row(network.node, self._step), network.num_nodes
        own = (1 - row.pop(network.node, 0.0)) ** 2
        scale = (own + sum(w**2 for w in row.values())) * n / (n - 1)
        self._step = None
        moved = self._moved * network.processes_per_node  # the others have other shards
        return math.sqrt(moved / scale) if scale > 0 and math.isfinite(moved) else None


def _moved(pending: Pending, size: int, every: int) -> float:
    """Return the square of what the mix moved the message, whose first term is the message itself;
    from one element in `every`."""
    terms = [(weight, term[:size:every]) for weight, term in pending.terms]
    return size * (combine(terms) - terms[0][1]).square_().mean().item() if size else 0.0


# Where records go --------------------------------------------------------------------------------


def _writer(optimizer: Any, to: Destination, total: int | None) -> Callable[[Record], None]:
    if isinstance(to, str | os.PathLike):
        return _Directory(Path(to), optimizer, total).write
    if hasattr(to, "add_scalar"):

        def add_scalars(record: Record) -> None:
            for name, value in numbers(record).items():
                to.add_scalar(name, value, record["step"])

        return add_scalars
    if hasattr(to, "log"):

        def log(record: Record) -> None:
            if values := numbers(record):
                to.log(values)

        return log
    if callable(to):
        return to
    raise TypeError(
        "monitor writes into a directory, a SummaryWriter, wandb.run or a function of a record; "
        f"got {type(to).__name__}"
    )


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record that loggers take, under names like `decentlam/wait_seconds`;
    none of the last record, which only says that it is the last."""
    if record.get("ended"):
        return {}
    left_out = ("time", "pid", "node", "member", "step", "total_steps", "ended")
    return {
        f"decentlam/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and name not in left_out
    }


class _Directory:
    """A directory that process 0 can write to, and others perhaps: see the head of this file."""

    def __init__(self, directory: Path, optimizer: Any, total: int | None) -> None:
        network: Network = optimizer.network
        elastic = membership.current() is not None
        self._nodes, self._store = directory / NODES, None
        self._sending: Future[Any] | None = None
        self._from: list[int] = []  # ranks whose records come through the store
        alone = elastic or network.group is None
        # Of sharded nodes each set of shards is a group of its own: the first one speaks.
        group = None if alone else network.group
        self._silent = group is not None and dist.get_global_rank(group, 0) > 0
        if self._silent:
            return
        if network.rank == 0 or alone:
            self._nodes.mkdir(parents=True, exist_ok=True)
            if network.node == 0 and not (directory / RECORDS).exists():
                _describe(directory / RUN, optimizer, total)
        if alone:  # processes of an elastic run come and go: each needs the directory
            return
        mark = f".{secrets.token_hex(8)}"
        if network.rank == 0:
            (self._nodes / mark).touch()
        sees = (self._nodes / network.gather(mark)[0]).exists()
        seen = network.gather(sees)
        if network.rank == 0:
            (self._nodes / mark).unlink()
        self._from = [rank for rank, there in enumerate(seen) if not there]
        if self._from and (network.rank == 0 or not sees):
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore("decentlam watch", store)
        self._sends = not sees

    def write(self, record: Record) -> None:
        if self._silent:
            return
        line = json.dumps(record, allow_nan=True)
        if self._store is None:
            self._append(record["member"], line)
            return
        if self._sending is not None and not self._sending.done():
            return  # the store is slow, or gone; training is not
        if self._sends:
            store = self._store
            self._sending = ask(lambda: store.set(str(record["member"]), line))
            return
        self._append(record["member"], line)
        if self._sending is not None:
            with contextlib.suppress(RuntimeError):  # no store, no records
                for member, text in self._sending.result():
                    self._append(member, text)
        self._sending = ask(self._received)

    def _received(self) -> list[tuple[int, str]]:
        """Return the records that others have left in the store, and take them out of it."""
        assert self._store is not None
        there = [rank for rank in self._from if self._store.check([str(rank)])]
        texts = [(rank, self._store.get(str(rank)).decode()) for rank in there]
        for rank in there:
            self._store.delete_key(str(rank))
        return texts

    def _append(self, member: int, line: str) -> None:
        with (self._nodes / f"{member}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _describe(file: Path, optimizer: Any, total: int | None) -> None:
    """Write what the run is, as `decentlam train` does."""
    network, topology, method = optimizer.network, optimizer.topology, optimizer.method
    size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    recipe = {
        "method": _name(method),
        "topology": topology.name,
        "nodes": network.num_nodes,
        "model": "a script's own model",
        "data": "its own data",
        "lr": float(optimizer.param_groups[0]["lr"]),
    }
    info = {
        "recipe": recipe,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": size,
        "steps": total,
        "simulated": False,
        "rho": None if optimizer.algorithm.reach(0) is Reach.EVERYONE else topology.rho,
    }
    draft = file.with_name(f".{file.name}.new")
    draft.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    draft.replace(file)


def _name(method: Algorithm) -> str:
    kinds = {getattr(kind, "func", kind): name for name, kind in reversed(ALGORITHMS.items())}
    return kinds.get(type(method), type(method).__name__)
