"""The cost of one iteration: alpha-beta messages through the pipeline, and slow nodes on top."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decentlam.algorithms import Algorithm, Reach, make
from decentlam.analysis.cost.pipeline import Timeline, timeline
from decentlam.analysis.cost.values import (
    OVERLAPS,
    Compute,
    Delays,
    Iteration,
    Job,
    Link,
    check_seconds,
)
from decentlam.topology import Topology

_TOPOLOGY_STEPS = 64  # over which changing topologies are averaged


@dataclass(frozen=True)
class Calibration:
    """What measurement adds to nominal figures; see `fit`. The defaults add nothing.

    All-reduce has constants of its own: it adds numbers up as it goes, in step with all nodes.
    """

    latency_seconds: float = 0.0  # beyond the link's, per message and way
    wire: float = 1.0  # the time on the wire, as a multiple of bytes / nominal bandwidth
    all_reduce_wire: float = 1.0
    copy_seconds_per_byte: float = 0.0  # of a core, per byte sent and as much received
    all_reduce_copy_seconds_per_byte: float = 0.0
    overhead_seconds: float = 0.0  # per iteration that exchanges anything

    def __post_init__(self) -> None:
        check_seconds(**vars(self))


NOMINAL = Calibration()


@dataclass(frozen=True)
class Exchange:
    """What every node sends in a step: `peers` messages, or its share of an all-reduce."""

    reach: Reach
    num_nodes: int
    peers: int = 1
    payloads: int = 1
    message_fraction: float = 1.0  # of the parameters' bytes; a half where messages have 16 bits

    def bytes_sent(self, model_bytes: float, processes_per_node: int = 1) -> float:
        """p M to p peers; 2 (N - 1) / N M in a ring all-reduce of N processes."""
        if self.num_nodes == 1:
            return 0.0
        fraction = self.message_fraction if self.reach is Reach.NEIGHBORS else 1.0
        messages = self.reach.messages_sent(self.num_nodes * processes_per_node, self.peers)
        return model_bytes * fraction * self.payloads * messages


def step_timeline(
    exchange: Exchange,
    link: Link,
    compute: Compute,
    job: Job,
    overlap: str,
    calibration: Calibration = NOMINAL,
    crowding: float = 1.0,
) -> Timeline:
    """One kind of step. `crowding`: nodes per core, where several share a machine.

    Each of p messages occupies the link for its latency and its bytes; one more latency, and they
    have arrived: a round trip. An all-reduce occupies it for 2 (N - 1) rounds of one latency each
    (by halving: 2 log2 N), and the next bucket's begins after it.
    """
    sent = exchange.bytes_sent(job.model_bytes, job.processes_per_node)
    update = compute.update_seconds_per_byte * job.model_bytes
    if sent == 0:
        return timeline(compute.forward_seconds, compute.backward_seconds, update, [])
    everyone = exchange.reach is Reach.EVERYONE
    if everyone:
        stretch, copy = calibration.all_reduce_wire, calibration.all_reduce_copy_seconds_per_byte
        n = exchange.num_nodes * job.processes_per_node
        rounds = 2 * (n - 1 if job.all_reduce == "ring" else math.ceil(math.log2(n)))
    else:
        stretch, copy = calibration.wire, calibration.copy_seconds_per_byte
        rounds = exchange.peers * exchange.payloads
    copy *= crowding
    latency = link.latency_seconds + calibration.latency_seconds
    per_byte = stretch / link.bytes_per_second
    per_byte = per_byte if compute.shares_cpu else max(per_byte, copy)
    shares = job.bucket_shares
    found = timeline(
        compute.forward_seconds,
        compute.backward_seconds,
        update,
        [share * sent * per_byte + rounds * latency for share in shares],
        0.0 if everyone else latency,
        overlap,
        shares,
    )
    extra = calibration.overhead_seconds + (sent * copy if compute.shares_cpu else 0.0)
    return Timeline(found.seconds + extra, found.slack)


def predict(
    algorithm: str | Algorithm,
    topology: Topology,
    link: Link,
    compute: Compute,
    job: Job,
    overlap: str | bool = "backward",
    calibration: Calibration = NOMINAL,
) -> Iteration:
    """What one iteration of a method on a topology is expected to take, on average over steps.

    >>> from decentlam.topology import one_peer_hypercube
    >>> wire, gpu, job = Link(bytes_per_second=1e9), Compute(0.1, 0.2), Job(10**9)
    >>> ours = predict("decentlam", one_peer_hypercube(8), wire, gpu, job, overlap="none")
    >>> ddp = predict("pmsgd", one_peer_hypercube(8), wire, gpu, job, overlap="none")
    >>> round(ours.exposed, 6), round(ddp.exposed, 6)
    (1.0, 1.75)
    """
    method = make(algorithm)
    mode = overlap_of(method, overlap)
    compute_seconds = compute.forward_seconds + compute.backward_seconds
    update = compute.update_seconds_per_byte * job.model_bytes
    seconds = sent = 0.0
    slack = math.inf
    for exchange, share in exchanges(method, topology).items():
        found = step_timeline(exchange, link, compute, job, mode, calibration)
        seconds += share * found.seconds
        sent += share * exchange.bytes_sent(job.model_bytes, job.processes_per_node)
        slack = min(slack, found.slack)
    waiting = straggler_wait(
        topology,
        compute.delays,
        slack if math.isfinite(slack) else 0.0,
        reach=lambda k: method.reach(method.warm_up + k),
        early=mode == "iteration",
    )
    return Iteration(compute_seconds, seconds - compute_seconds - update, update, waiting, sent)


def exchanges(algorithm: Algorithm, topology: Topology) -> dict[Exchange, float]:
    """The kinds of steps that the method takes once warmed up, and how often, summing to 1."""
    n = topology.num_nodes
    varied = min(topology.period or _TOPOLOGY_STEPS, _TOPOLOGY_STEPS)
    peers = [busiest(topology, k) for k in range(varied)]
    # A step of the method meets every step of the weights that is the same modulo this.
    together = math.gcd(varied, algorithm.period)
    counts: Counter[Exchange] = Counter()
    for k in range(algorithm.warm_up, algorithm.warm_up + algorithm.period):
        reach, payloads = algorithm.reach(k), algorithm.payloads(k)
        for most in peers[k % together :: together]:
            counts[Exchange(reach, n, most if reach is Reach.NEIGHBORS else 1, payloads)] += 1
    return {exchange: count / counts.total() for exchange, count in counts.items()}


def busiest(topology: Topology, step: int) -> int:
    """The most messages that a node sends or receives: the slowest link decides."""
    w = topology.sparse(step)
    apart = w.rows != w.columns
    n = topology.num_nodes
    heard, sent = (np.bincount(side[apart], minlength=n) for side in (w.rows, w.columns))
    return int(max(heard.max(), sent.max()))


def overlap_of(algorithm: Algorithm, overlap: str | bool) -> str:
    """The pipeline of an optimizer's `overlap=`; a message without a gradient leaves earlier.

    "auto" chooses between "none" and "backward", which is never the slower in this model.
    """
    mode = {True: "backward", False: "none", "auto": "backward"}.get(overlap, str(overlap))
    if mode not in OVERLAPS:
        raise ValueError(f"unknown overlap {overlap!r}; choose from {', '.join(OVERLAPS)}, auto")
    if mode == "iteration" and algorithm.needs_gradient:
        raise ValueError(
            f"{type(algorithm).__name__} sends what it makes of the gradient, so that it cannot "
            "leave an iteration earlier; only AWC-DmSGD can. Try overlap='forward'."
        )
    return "iteration" if mode != "none" and not algorithm.needs_gradient else mode


def straggler_wait(
    topology: Topology,
    delays: Delays,
    slack: float = 0.0,
    *,
    reach: Callable[[int], Reach] = lambda index: Reach.NEIGHBORS,
    early: bool = False,
    seed: int = 0,
    settle: int = 200,
    steps: int = 800,
) -> float:
    """Mean seconds per step that delays cost, after `settle` steps in which nodes drift apart.

    An all-reduce waits for the slowest of all, a neighborhood only for its own. The times at which
    nodes finish their steps obey a max-plus recursion,

        t_i+ = max(t_i + d_i, max over neighbors j of (t_j + d_j) - slack) + c,

    c being the time of a step without the delays d. It has no closed form on a general topology, so
    it is simulated; for an all-reduce at every step it is c + E[max d].

    `slack` is by how much a message may be delayed without harm. `early` messages (AWC) leave
    before the delay of their own step, which then reaches the neighbors one step later.

    >>> from decentlam.topology import complete, one_peer_hypercube
    >>> straggler_wait(complete(8), Delays(1.0))
    1.0
    >>> straggler_wait(one_peer_hypercube(8), Delays(1.0)) < 0.6
    True
    """
    n = topology.num_nodes
    if delays.seconds == 0:
        return 0.0
    if all(reach(k) is Reach.EVERYONE for k in range(settle + steps)):
        return delays.mean_of_slowest(n)
    generator = np.random.default_rng(seed)
    t, start = np.zeros(n), 0.0
    for k in range(settle + steps):
        if k == settle:
            start = float(t.mean())
        own = t + delays.draw(generator, n)
        if reach(k) is Reach.EVERYONE:
            t = np.full(n, own.max())
        elif reach(k) is Reach.NOBODY:
            t = own
        else:
            told = (t if early else own) - slack
            w = topology.sparse(k)
            t = np.maximum(own, np.maximum.reduceat(told[w.columns], w.starts[:-1]))
    return (float(t.mean()) - start) / steps
