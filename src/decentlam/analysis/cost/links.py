"""The links between the nodes of a run, measured for about a second before it starts."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from decentlam.analysis.cost.values import Link
from decentlam.exchange.base import exchange_errors
from decentlam.exchange.network import Network

_SMALL = 8  # bytes of a message that is all latency
_REPEATS = 10
_LARGEST = 32 * 2**20  # bytes
_FIRST = 1 << 14  # bytes of the first message that is timed
_CERTAIN = 4  # times a tiny message that the largest must take to tell the speed of a link
_TAG = 1 << 12  # far from the script's own messages (0) and below the optimizers'
_PLACE = "measuring the links"


def measure_links(network: Network, seconds: float = 1.0, timeout_seconds: float = 60.0) -> Link:
    """The slowest link of the network, the same answer on every node; all must call it together.

    All nodes exchange in pairs at once, as one-peer topologies do, with partners that change. The
    size doubles until the slowest pair has spent half of `seconds` on it, or 32 MiB: nobody goes on
    before all have agreed to, so that a slow link ends the measurement instead of prolonging it.
    Latency is half of what a tiny exchange takes. The speed is that of the second half of the
    largest message: a link may let the first bytes pass at once, before its limit holds. Where
    latency is so long that no such message fits into the time, the answer is not certain. One node
    alone has a perfect link.
    """
    if network.num_nodes == 1:
        return Link()
    device = network.device if network.is_nccl else torch.device("cpu")
    meter = _Meter(network, device, timedelta(seconds=timeout_seconds))
    for number in range(_REPEATS):  # connections are made at the first message
        meter.exchange(number, _SMALL)
    tiny = meter.agree(sorted(meter.exchange(k, _SMALL) for k in range(_REPEATS))[_REPEATS // 2])
    start, size, number, half = time.perf_counter(), _FIRST, 0, 0.0
    while True:
        took = meter.agree(min(meter.exchange(number, size), meter.exchange(number, size)))
        spent = meter.agree(time.perf_counter() - start)
        if 2 * size > _LARGEST or took > seconds / 8 or spent > seconds / 2:
            break
        size, number, half = 2 * size, number + 1, took
    last = [took]
    while spent + took < seconds and len(last) < 4:
        last.append(meter.agree(meter.exchange(number + len(last), size)))
        spent = meter.agree(time.perf_counter() - start)
    middle = sorted(last)[len(last) // 2]
    certain = middle > _CERTAIN * tiny and half > 0
    carried = 2 * (middle - half) if certain else middle - tiny
    carried = min(max(carried, middle / 2), 2 * middle)  # one of them may have been unlucky
    return Link(tiny / 2, size * network.processes_per_node / carried, certain)


def measure_memory(network: Network, timeout_seconds: float = 60.0) -> Link:
    """What stands for the link where neighbors read each other's messages in memory: how fast all
    processes read when they read at once. The same answer on every node; all call it together."""
    meter = _Meter(network, torch.device("cpu"), timedelta(seconds=timeout_seconds))
    message = torch.zeros(_LARGEST, dtype=torch.uint8)
    mixed = torch.zeros_like(message)
    took = []
    for _ in range(3):
        meter.agree(0.0)  # all begin together
        start = time.perf_counter()
        mixed.copy_(message)
        took.append(meter.agree(time.perf_counter() - start))
    return Link(0.0, network.processes_per_node * _LARGEST / min(took))


class _Meter:
    """Timed exchanges of this node with the partner of that number."""

    def __init__(self, network: Network, device: torch.device, timeout: timedelta) -> None:
        self.network, self.device, self.timeout = network, device, timeout

    def exchange(self, number: int, size: int) -> float:
        """Seconds until this node has sent and received `size` bytes; 0 if it rests."""
        n = self.network.num_nodes
        # Partners add up to this, modulo n; were it and n even, some nodes would rest.
        total = number if n % 2 else 2 * number + 1
        partner = (total - self.network.node) % n
        if partner == self.network.node:
            return 0.0
        message = torch.zeros(size, dtype=torch.uint8, device=self.device)
        buffer = torch.empty_like(message)
        peer, group = self.network.global_rank_of(partner), self.network.exact_group
        both = [  # as one batch, for NCCL, which knows no tags
            dist.P2POp(dist.irecv, buffer, peer, group, _TAG),
            dist.P2POp(dist.isend, message, peer, group, _TAG),
        ]
        start = time.perf_counter()
        with exchange_errors(_PLACE, f"node {partner}", self.timeout):
            for work in dist.batch_isend_irecv(both):
                self._wait(work)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def agree(self, value: float) -> float:
        """The largest value of all nodes."""
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        with exchange_errors(_PLACE, "everyone", self.timeout):
            work = dist.all_reduce(shared, dist.ReduceOp.MAX, self.network.group, async_op=True)
            assert work is not None
            self._wait(work)
        return float(shared.item())

    def _wait(self, work: dist.Work) -> None:
        """With a timeout NCCL looks once a millisecond, which is longer than what is measured."""
        work.wait() if self.network.is_nccl else work.wait(self.timeout)
