"""Before training: does momentum get along with this network, and what will its bias be?

Without gradients every method is a linear map of models and buffers, the same for every parameter.
How fast it shrinks the disagreement between nodes, or lets it grow, needs no training to be known.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from decentlam.algorithms import Algorithm, Reach, make
from decentlam.linear_map import LinearMap, dominant_eigenvalue
from decentlam.topology import Topology, resolve

log = logging.getLogger(__name__)

CHOICES = ("auto", "refuse", "ignore")
_LARGEST = 600  # rows of a matrix whose eigenvalues are computed one and all
_LONGEST = 4000  # steps of a period, or of a run, that are followed
_BATCHES = 20  # into which a random run is cut, for the confidence bound
_BRIEF = 20  # steps of a batch that tell stable from unstable
_STUDENT = 2.093  # the 97.5 % quantile of Student's t with 19 degrees of freedom
_PACES = (0.75, 0.5, 0.3, 0.2, 0.1)  # of lazy weights, tried in this order


@dataclass(frozen=True)
class Rate:
    """By what one step multiplies the disagreement in the long run, with a 95 % bound."""

    value: float
    low: float
    high: float
    exact: bool

    @property
    def unstable(self) -> bool:
        return self.low > 1 + 1e-9


class Growth(float):
    """What `growth` found; as a number it is the factor per step, and above 1 training diverges."""

    low: float  # the factor's 95 % confidence bound; both are the factor where it is exact
    high: float
    exact: bool  # a spectral radius, rather than sampled
    bias: float | None  # mean squared disagreement, over DSGD's on the same weights; None: grows
    gain: float  # how far the node average moves in all, per lr and unit of gradient
    delay: float  # after how many steps it does, on average
    algorithm: Algorithm
    topology: Topology

    def __repr__(self) -> str:
        bound = "" if self.exact else f" [{self.low:.4f}, {self.high:.4f}]"
        bias = "none" if self.bias is None else f"{self.bias:.4g}"
        return (
            f"Growth({float(self):.4f}{bound}, bias={bias}, gain={self.gain:.4g}, "
            f"delay={self.delay:.4g})"
        )


def growth(
    algorithm: str | Algorithm,
    topology: str | Topology,
    momentum: float | None = None,
    *,
    num_nodes: int | None = None,
    stable: str = "ignore",
    seed: int = 0,
    **hyper: Any,
) -> Growth:
    """The factor by which a step multiplies the disagreement between nodes, and what it leads to.

    For static and periodic weights it is the spectral radius over one period; for random ones the
    Lyapunov exponent of a long run, with its 95 % confidence bound. `bias` is the mean squared
    disagreement in the limit of small lr, relative to DSGD's on the same weights. With
    `stable="auto"` it is about the form that the optimizers would choose.

    >>> from decentlam.topology import bipartite_random_match, ring
    >>> growth("decentlam", ring(8), momentum=0.9)
    Growth(0.9487, bias=1, gain=10, delay=9)
    >>> growth("decentlam", bipartite_random_match(8), momentum=0.9) > 1.04
    True
    >>> growth("decentlam", bipartite_random_match(8), momentum=0.9, stable="auto") < 0.96
    True
    """
    if isinstance(topology, str) and num_nodes is None:
        raise ValueError(f"how many nodes has {topology!r}? Pass num_nodes, or a Topology")
    network = resolve(
        topology, topology.num_nodes if isinstance(topology, Topology) else num_nodes or 0
    )
    method = make(algorithm, momentum, **hyper)
    method, network, _ = choose(method, network, stable)
    rate = growth_rate(method, network, seed)
    found = Growth(rate.value)
    found.low, found.high, found.exact = rate.low, rate.high, rate.exact
    found.algorithm, found.topology = method, network
    found.bias = None if rate.value >= 1 else relative_bias(method, network, seed)
    found.gain, found.delay = response(method)
    return found


def growth_rate(
    algorithm: Algorithm, topology: Topology, seed: int = 0, batch_steps: int = 100
) -> Rate:
    """The factor alone; random weights are followed for 20 batches of so many steps."""
    n = topology.num_nodes
    if n == 1 or all(algorithm.reach(k) is Reach.EVERYONE for k in range(2)):
        return Rate(0.0, 0.0, 0.0, True)  # nodes that average exactly at every step never differ
    period = _period(algorithm, topology)
    if topology.static and topology.symmetric and period == 1:
        blocks = LinearMap.by_mode(algorithm, _modes(topology)).matrices()
        return _exact(float(np.abs(np.linalg.eigvals(blocks)).max()))
    steps = LinearMap.of(algorithm, topology)
    if period is None:
        return _sampled(steps, seed, batch_steps)
    if steps.rows <= _LARGEST:
        radius = float(np.abs(np.linalg.eigvals(steps.matrix(period))).max())
    else:
        radius = dominant_eigenvalue(steps, period, seed)
    return _exact(radius ** (1 / period))


def choose(
    algorithm: Algorithm, topology: Topology, stable: str
) -> tuple[Algorithm, Topology, str | None]:
    """A method and weights that are stable together, and what to tell the user if they changed.

    "auto" cures: by the method's steady form if it has one, else by lazy weights; "refuse" raises;
    "ignore" leaves everything as it is.
    """
    if stable not in CHOICES:
        raise ValueError(f"unknown stable={stable!r}; choose from {', '.join(CHOICES)}")
    if stable == "ignore" or topology.num_nodes == 1 or not _feeds_back(algorithm, topology):
        return algorithm, topology, None
    rate = growth_rate(algorithm, topology, batch_steps=_BRIEF)
    cured = _cure(algorithm, topology, rate, stable)
    if cured == (algorithm, topology):
        return algorithm, topology, None
    problem = (
        f"{algorithm!r} on {topology!r} multiplies the disagreement between nodes by "
        f"{rate.value:.3f} at every step"
    )
    if cured is None or stable == "refuse":
        method, network = cured or (algorithm, topology)
        cures = [repr(method)] if method != algorithm else []
        cures += [repr(network)] if network is not topology else []
        raise ValueError(
            f"{problem} and would diverge. Try {' on '.join(cures) or 'a smaller lr'}, a static "
            "topology, less momentum, or DmSGD; stable='auto' cures what it can, stable='ignore' "
            "runs it as it is."
        )
    method, network = cured
    calmer = growth_rate(method, network, batch_steps=_BRIEF).value
    return method, network, f"{problem}; {method!r} on {network!r} runs instead ({calmer:.3f})"


def _cure(
    algorithm: Algorithm, topology: Topology, rate: Rate, stable: str
) -> tuple[Algorithm, Topology] | None:
    """A stable pair: what was asked for, if it is; else the calmest form, on lazier weights if
    need be. On weights that change "auto" prefers a calmer form to one that would do."""
    if not rate.unstable and (stable == "refuse" or topology.static):
        return algorithm, topology
    forms = algorithm.steady()
    rates = {form: growth_rate(form, topology, batch_steps=_BRIEF) for form in forms}
    calmest = min(forms, key=lambda form: rates[form].value, default=algorithm)
    if not rate.unstable and (not forms or rate.value <= rates[calmest].value):
        return algorithm, topology
    for network in (topology, *(topology.lazy(pace) for pace in _PACES)):
        if growth_rate(calmest, network, batch_steps=_BRIEF).high < 1:
            return calmest, network
    return None


def relative_bias(algorithm: Algorithm, topology: Topology, seed: int = 0) -> float:
    """Mean squared disagreement under constant gradients that differ by node, over DSGD's."""
    if topology.num_nodes == 1 or all(algorithm.reach(k) is Reach.EVERYONE for k in range(2)):
        return 0.0
    ours, theirs = (_disagreement(a, topology, seed) for a in (algorithm, make("dsgd")))
    ratio = ours / theirs if theirs else 0.0
    return ratio if ratio > 1e-12 else 0.0  # the rest is rounding


def response(algorithm: Algorithm) -> tuple[float, float]:
    """(gain, delay) of the node average to a gradient of one step: lr moves it lr * gain."""
    alone = LinearMap.by_mode(algorithm, np.ones(1))
    moved = alone.impulse(_LONGEST)
    gain = float(moved.sum())
    return gain, float((moved * np.arange(len(moved))).sum()) / gain


def _disagreement(algorithm: Algorithm, topology: Topology, seed: int) -> float:
    period = _period(algorithm, topology)
    if topology.static and topology.symmetric and period == 1:
        return float(np.square(LinearMap.by_mode(algorithm, _modes(topology)).fixed_points()).sum())
    steps = LinearMap.of(algorithm, topology)
    if period is not None and steps.rows <= _LARGEST:
        return steps.mean_square_cycle(period)
    return steps.mean_square_run(_LONGEST // 4, _LONGEST // 2, seed)


def _feeds_back(algorithm: Algorithm, topology: Topology) -> bool:
    """Whether disagreement reaches the momentum. Where it does not, mixing only shrinks it."""
    return LinearMap.of(algorithm, topology).feeds_back()


def _exact(value: float) -> Rate:
    return Rate(value, value, value, True)


def _sampled(steps: LinearMap, seed: int, batch_steps: int) -> Rate:
    logs = steps.log_growth(_BATCHES, batch_steps, seed)
    if not np.isfinite(logs).all():
        return Rate(0.0, 0.0, 0.0, False)  # averaged exactly on the way
    middle = float(logs.mean())
    spread = _STUDENT * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Rate(math.exp(middle), math.exp(middle - spread), math.exp(middle + spread), False)


def _modes(topology: Topology) -> np.ndarray:
    """The eigenvalues of the weights, without the average's."""
    values = np.sort(topology.eigenvalues(0).numpy())
    return np.delete(values, -1)


def _period(algorithm: Algorithm, topology: Topology) -> int | None:
    """After how many steps method and weights repeat; None: never, or too late to follow."""
    if topology.period is None:
        return None
    both = math.lcm(topology.period, getattr(algorithm, "tau", 1))
    return both if both <= _LONGEST else None
