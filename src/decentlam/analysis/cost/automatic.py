"""`topology="auto"`: the network on which training is expected to take the least time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decentlam.algorithms import Algorithm, always_everyone, check_compatible, make
from decentlam.analysis.cost.model import NOMINAL, Calibration, predict
from decentlam.analysis.cost.values import Compute, Job, Link
from decentlam.analysis.stability import choose
from decentlam.exchange.network import Network
from decentlam.topology import TOPOLOGIES, Topology

DISAGREEMENT_WEIGHT = 0.1  # (lr L)^2, for a learning rate of about a third of 1 / L
_CLOSE = 0.01  # scores nearer than this are equal, and fewer bytes win
_LARGEST_ORACLE = 256  # nodes up to which the growth rate is computed
_PROBES = 8


@dataclass(frozen=True)
class Criteria:
    """What a topology is judged by, beside the wire and the work."""

    overlap: str | bool = "backward"
    calibration: Calibration = NOMINAL
    weight: float = DISAGREEMENT_WEIGHT  # of disagreement in the score
    heterogeneous: bool = False  # gradients differ by node, as when nodes hold different classes
    stable: str = "auto"  # the optimizer's: what it would refuse is left out
    symmetric: bool = False  # messages in fewer bits need weights that are


USUAL = Criteria()


@dataclass(frozen=True)
class Candidate:
    """A topology, what an iteration on it takes, and how far its nodes are kept apart."""

    name: str
    seconds: float
    bytes_sent: float
    disagreement: float
    score: float  # seconds per iteration times the iterations that disagreement adds


def candidates(
    num_nodes: int,
    link: Link,
    job: Job,
    algorithm: str | Algorithm,
    compute: Compute | None = None,
    criteria: Criteria = USUAL,
) -> list[Candidate]:
    """Every topology that fits the nodes and suits the method, best first.

    What the optimizer would refuse is left out, what it would cure (by a steady form or lazy
    weights) is judged as cured; only those that could come first are looked at so.
    At most 2 log2(n) peers: each takes memory.
    """
    method, work = make(algorithm), compute or Compute(0.0, 0.0)

    def judged(network: Topology, weights: Topology) -> Candidate:
        """The network, with the weights that would run on it."""
        cost = predict(method, network, link, work, job, criteria.overlap, criteria.calibration)
        apart = disagreement(weights, criteria.heterogeneous)
        score = cost.seconds * (1 + criteria.weight * apart)
        return Candidate(network.name, cost.seconds, cost.bytes_sent, apart, score)

    found = {net: judged(net, net) for net in _fitting(num_nodes, method, criteria.symmetric)}
    asked: set[Topology] = set()
    while found and (first := _winner(found)) not in asked:
        asked.add(first)
        try:
            cured = _stable_form(method, first, criteria.stable)
        except ValueError:
            del found[first]
            continue
        if cured is not first:  # a cure only adds disagreement: another may be first now
            found[first] = judged(first, cured)
    if not found:
        raise ValueError(f"no topology of {num_nodes} nodes suits {method!r}; name one yourself")
    best = found.pop(first)
    return [best, *sorted(found.values(), key=lambda c: c.score)]


def _winner(found: dict[Topology, Candidate]) -> Topology:
    """The best score; of those within 1 %, the fewest bytes."""
    best = min(c.score for c in found.values())
    close = {network: c for network, c in found.items() if c.score <= best * (1 + _CLOSE)}
    return min(close, key=lambda network: (close[network].bytes_sent, close[network].score))


def _fitting(num_nodes: int, method: Algorithm, symmetric: bool) -> list[Topology]:
    """Topologies that exist for n nodes, with weights that the method may use and few peers."""
    most = max(2, 2 * math.ceil(math.log2(num_nodes)))  # each peer takes a buffer of the model
    found = []
    for build in TOPOLOGIES.values():
        try:
            network = build(num_nodes)
            check_compatible(method, network)
        except ValueError:  # n does not fit, or the weights are directed
            continue
        if network.max_peers <= most and (network.symmetric or not symmetric):
            found.append(network)
    return found


def choose_topology(
    num_nodes: int,
    link: Link,
    job: Job,
    algorithm: str | Algorithm,
    compute: Compute | None = None,
    criteria: Criteria = USUAL,
) -> tuple[str, str]:
    """The name of the topology to train on, and the reason in one line.

    It minimises seconds per iteration * (1 + weight * disagreement), where disagreement is that of
    `disagreement` and the weight of `criteria` is (lr L)^2 for gradients that change by L per unit
    of distance. Without `compute` nothing is known to hide the messages, so that bytes count in
    full.

    >>> choose_topology(64, Link(1e-4, 1.25e8), Job(100_000_000), "decentlam", Compute(0.1, 0.2))[0]
    'one-peer-hypercube'
    """
    method = make(algorithm)
    if num_nodes == 1 or always_everyone(method):
        why = "one node" if num_nodes == 1 else "the method averages over everyone anyway"
        return "complete", f"complete: {why}"
    best, *others = candidates(num_nodes, link, job, method, compute, criteria)
    return best.name, _reason(best, others[:1], link, compute)


def automatic(
    network: Network,
    algorithm: str | Algorithm,
    model_bytes: int,
    link: Link,
    *,
    overlap: str | bool = "backward",
    bucket_bytes: int = 0,
    stable: str = "auto",
    shared_memory: bool = False,
    symmetric: bool = False,
) -> tuple[str, str]:
    """Chooses for the measured link of a running network; the same answer on every node.

    All processes call it together. Process 0 decides and tells the others, so that no difference
    in rounding or in `link` can part them. With `shared_memory` the link is that of
    `measure_memory`, and the reason says so.
    """
    answer = ("", "")
    if network.rank == 0:
        job = Job(model_bytes, bucket_bytes, processes_per_node=network.processes_per_node)
        try:
            criteria = Criteria(overlap=overlap, stable=stable, symmetric=symmetric)
            answer = choose_topology(network.num_nodes, link, job, algorithm, criteria=criteria)
        except Exception as error:  # the others wait for an answer
            answer = "", str(error) or repr(error)
    name, reason = network.gather(answer)[0]
    if not name:
        raise ValueError(reason)
    return name, f"{reason} (shared memory)" if shared_memory else reason


def disagreement(topology: Topology, heterogeneous: bool = False, steps: int = 400) -> float:
    """Mean squared distance from the average that plain mixing sustains, per lr^2 and |g_i|^2.

    x+ = W (x - lr g) with gradients independent by node and step; `heterogeneous`: by node only,
    as when nodes hold different classes. Static symmetric weights with eigenvalues l off the
    average give the mean of l^2 / (1 - l^2), or of (l / (1 - l))^2.

    >>> from decentlam.topology import complete, ring
    >>> disagreement(complete(8)) < 1e-20
    True
    >>> disagreement(ring(8)) < disagreement(ring(32)) < disagreement(ring(32), heterogeneous=True)
    True
    """
    n = topology.num_nodes
    if topology.static and topology.symmetric:
        values = np.sort(topology.eigenvalues(0).numpy())[:-1]
        ratio = values / (1 - values) if heterogeneous else values / np.sqrt(1 - values**2)
        return float(np.square(ratio).sum() / n)
    generator = np.random.default_rng(0)
    x, total = np.zeros((n, _PROBES)), 0.0
    g = _apart(generator, n)
    for k in range(2 * steps):
        x = topology.sparse(k).apply(x - (g if heterogeneous else _apart(generator, n)))
        total += float(np.square(x).mean()) if k >= steps else 0.0
    return total / steps


def _apart(generator: np.random.Generator, n: int) -> np.ndarray:
    """Random gradients without their average."""
    g = generator.standard_normal((n, _PROBES))
    return g - g.mean(0)


def _stable_form(method: Algorithm, network: Topology, stable: str) -> Topology:
    """The weights that would run; of more nodes than can be asked in time, fewer are asked."""
    asked = network
    if network.num_nodes > _LARGEST_ORACLE:
        asked = TOPOLOGIES[network.name](_LARGEST_ORACLE)
    cured = choose(method, asked, stable)[1]
    if cured is asked:
        return network
    return cured if asked is network else network.lazy(float(cured.name.split(", ")[1].rstrip(")")))


def _reason(best: Candidate, others: list[Candidate], link: Link, compute: Compute | None) -> str:
    def describe(c: Candidate) -> str:
        return (
            f"{c.name}: {1e3 * c.seconds:.3g} ms per iteration, {c.bytes_sent / 1e6:.3g} MB sent, "
            f"disagreement {c.disagreement:.2g}"
        )

    speed = 8e-9 * link.bytes_per_second
    wire = "no limit" if math.isinf(speed) else f"{speed:.3g} Gbit/s"
    note = "" if compute else ", compute unknown"
    rest = "".join(f"; next {describe(c)}" for c in others)
    return f"{describe(best)} at {wire}, {1e6 * link.latency_seconds:.0f} us{note}{rest}"
