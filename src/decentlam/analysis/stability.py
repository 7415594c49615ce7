"""Before training: does momentum get along with this network and this lr, and what is its bias?

Every method is a linear map of models and buffers, the same for every parameter: without gradients,
and with those of a quadratic, g_i = h_i x_i. How fast it shrinks what is in it, or lets it grow,
needs no training to be known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, get_args

import numpy as np
from torch import Tensor

from decentlam.algorithms import Algorithm, always_everyone, check_number, make
from decentlam.analysis.linear_map import LinearMap
from decentlam.options import Stable
from decentlam.topology import Topology, complete, resolve

log = logging.getLogger(__name__)

CHOICES = get_args(Stable)
Curvature = float | Sequence[float] | np.ndarray | Tensor
_LARGEST = 600  # rows of a matrix whose eigenvalues are computed; larger ones are followed
_LONGEST = 4000  # steps of a period, or of a run, that are followed
_RUNS = 20  # that are sampled where weights are random, for the confidence bound
_SETTLE = 80  # first steps of a run that are not counted
_BRIEF = 40  # steps of a run that tell stable from unstable
_STUDENT = 2.093  # the 97.5 % quantile of Student's t with 19 degrees of freedom
_AVERAGE = complete(1)  # the node average, as a network: mixing leaves it as it is
# A method's first form is taken if its growth is below the one, and a step leaves less than the
# other of the squared disagreement. One random pair leaves a half, two a third.
_CALM, _MIXED = 0.98, 0.333
_RATES = (0.75, 0.5, 0.3, 0.2, 0.1)  # of lazy weights, tried in this order


@dataclass(frozen=True)
class Rate:
    """The factor by which a step multiplies disagreement in the long run, with a 95 % bound."""

    value: float
    low: float
    high: float
    exact: bool

    @property
    def unstable(self) -> bool:
        return self.low > 1 + 1e-9


class Growth(float):
    """The result of `growth`: as a number the factor per step; above 1 training diverges."""

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
    lr: float | None = None,
    curvature: Curvature | None = None,
    num_nodes: int | None = None,
    stable: str = "ignore",
    **hyper: Any,
) -> Growth:
    """Return the factor by which a step multiplies the disagreement between nodes.

    Below 1 the nodes come together, above 1 they drift apart. For fixed and periodic weights it is
    the spectral radius over one period, for random weights the Lyapunov exponent of sampled runs,
    with 95 % bounds. `bias` is the mean squared disagreement for small lr, relative to DSGD.

    With `lr` and `curvature` it includes the node average, under the gradients g_i = h_i x_i of a
    quadratic.

    Args:
        curvature: h of all nodes, or one h per node, or a pair (low, high) between which the nodes
            are spread on a log scale, starting with node 0.
        stable: "auto" is about the form that the optimizers would choose.

    >>> from decentlam.topology import bipartite_random_match, ring
    >>> growth("decentlam", ring(8), momentum=0.9)
    Growth(0.9487, bias=1, gain=10, delay=9)
    >>> growth("decentlam", bipartite_random_match(8), momentum=0.9) > 1.04
    True
    >>> growth("decentlam", bipartite_random_match(8), momentum=0.9, stable="auto") < 0.96
    True
    >>> [growth("decentlam", ring(8), momentum=0.9, lr=lr, curvature=(0.01, 1)) > 1
    ...  for lr in (1.0, 1.5)]
    [False, True]
    """
    network = resolve(topology, num_nodes)
    method, network, _ = choose(make(algorithm, momentum, **hyper), network, stable)
    if (lr is None) != (curvature is None):
        given, missing = ("lr", "curvature") if curvature is None else ("curvature", "lr")
        raise ValueError(
            f"{given} was given without {missing}; a gradient is h x and moves x by lr h x, so "
            "pass both, or neither to ask about the network alone"
        )
    if lr is None or curvature is None:
        rate = growth_rate(method, network)
    else:
        steps = check_number("lr", lr) * _per_node(curvature, network, method)
        rate = _rates(method, network, steps[:, None])[0]
    found = Growth(rate.value)
    found.low, found.high, found.exact = rate.low, rate.high, rate.exact
    found.algorithm, found.topology = method, network
    found.bias = None if rate.value >= 1 else relative_bias(method, network)
    found.gain, found.delay = response(method)
    return found


def largest_step(
    algorithm: str | Algorithm,
    topology: str | Topology,
    momentum: float | None = None,
    *,
    curvature: Curvature = 1.0,
    num_nodes: int | None = None,
    stable: str = "ignore",
    **hyper: Any,
) -> float:
    """The least lr at which `growth` with this curvature is above 1: of h = 1, the largest lr h.

    Beyond it there may be an lr that converges again: momentum on weights that repeat can have a
    window that does not, and is found if it is wider than a 16th of what is returned. 0 where every
    lr diverges. The arguments are those of `growth`.

    >>> from decentlam.topology import ring
    >>> round(largest_step("pmsgd", ring(8), momentum=0.9), 4)  # 2 (1 + beta)
    3.8
    >>> round(largest_step("dmsgd", ring(8), momentum=0.9), 4)  # (1 - beta) (1 - w) / |w|, w = -1/3
    0.4
    """
    network = resolve(topology, num_nodes)
    method, network, _ = choose(make(algorithm, momentum, **hyper), network, stable)
    h = _per_node(curvature, network, method)
    if not h.any():
        return math.inf
    # The first of many lr that surely diverges, from far below the usual limits to beyond them,
    # and the last before it that does not seem to; then again up to there, ever closer.
    tried = np.geomspace(1e-4, 1, 24) * 8 / h.mean()
    rates = _rates(method, network, h[:, None] * tried)
    least = 1 + (1e-9 if rates[0].exact else 1e-3)  # what a sample of this length resolves
    surely = next((i for i, rate in enumerate(rates) if rate.low > least), None)
    if surely is None:
        return math.inf
    calm = [i for i, rate in enumerate(rates[:surely]) if rate.value <= least]
    if not calm:
        return 0.0
    low, high = tried[calm[-1]], tried[calm[-1] + 1]
    if rates[0].exact:
        low = tried[calm[0]]  # in between there may be a window that diverges
    while high - low > (1e-6 if rates[0].exact else 0.03) * high:
        tried = np.linspace(low, high, 17)
        rates = _rates(method, network, h[:, None] * tried[1:])
        crossed = next((i for i, rate in enumerate(rates) if rate.value > least), len(rates) - 1)
        low, high = tried[crossed : crossed + 2]
    return float(low + high) / 2


@lru_cache(maxsize=64)  # a bias asks for it, too
def growth_rate(algorithm: Algorithm, topology: Topology, batch_steps: int = 100) -> Rate:
    """The factor alone, without gradients; random weights are followed in 20 runs of
    `batch_steps`."""
    return _rates(algorithm, topology, None, batch_steps)[0]


def _rates(
    algorithm: Algorithm, topology: Topology, curvature: np.ndarray | None, batch_steps: int = 100
) -> list[Rate]:
    """One rate per column of `curvature`, lr h, (nodes, variants)."""
    everyone = topology.num_nodes == 1 or always_everyone(algorithm)
    if curvature is None and everyone:
        return _exact(np.zeros(1))  # nodes that average exactly at every step never differ
    if curvature is None:
        return _rates_of_nodes(algorithm, topology, None, True, batch_steps)
    # What averages exactly sees the mean curvature. Where all nodes have the same one, and mixing
    # keeps the average, average and disagreement do not meet.
    apart = not everyone and bool(np.ptp(curvature, axis=0).any())
    if apart or not topology.doubly_stochastic:
        return _rates_of_nodes(algorithm, topology, curvature, False, batch_steps)
    average = LinearMap(algorithm, _AVERAGE, curvature=curvature.mean(0, keepdims=True))
    found = _exact(average.radii(algorithm.period), algorithm.period)
    if everyone:
        return found
    others = _rates_of_nodes(algorithm, topology, curvature, True, batch_steps)
    return [max(pair, key=lambda rate: rate.value) for pair in zip(found, others, strict=True)]


def _rates_of_nodes(
    algorithm: Algorithm,
    topology: Topology,
    curvature: np.ndarray | None,
    center: bool,
    batch_steps: int,
) -> list[Rate]:
    """Return the rates of the disagreement alone if `center`, else of all that gradients reach."""
    period = _period(algorithm, topology)
    if period is not None:
        steps = LinearMap.of(algorithm, topology, curvature, center)
        if steps.rows <= _LARGEST:
            return _exact(steps.radii(period), period)
    # Runs side by side whose counted steps are one after the other in the weights' run.
    delay = response(algorithm)[1]  # much momentum takes long to settle, and swings slowly
    settle = _whole(algorithm, max(_SETTLE, 3 * delay))
    counted = _whole(algorithm, max(batch_steps, 4 * delay))
    runs = LinearMap.side_by_side(
        algorithm, topology, _RUNS, counted, algorithm.period, curvature, center
    )
    return [_sampled(logs) for logs in runs.log_growth(settle, counted).T]


def choose(
    algorithm: Algorithm, topology: Topology, stable: str
) -> tuple[Algorithm, Topology, str | None]:
    """A method and weights that are stable together, and what to tell the user if they changed.

    "auto" cures: by the method's steady form if it has one, else by lazy weights; "refuse" raises;
    "ignore" leaves everything as it is.
    """
    if stable not in CHOICES:
        raise ValueError(f"unknown stable={stable!r}; choose from {', '.join(CHOICES)}")
    if stable == "ignore" or topology.num_nodes == 1:
        return algorithm, topology, None
    if not LinearMap(algorithm, topology, center=True).feeds_back():
        return algorithm, topology, None  # no disagreement in the momentum: mixing only shrinks it
    rate = growth_rate(algorithm, topology, batch_steps=_BRIEF)
    cured = _cure(algorithm, topology, rate, stable)
    if cured == (algorithm, topology):
        return algorithm, topology, None
    if cured is None or stable == "refuse":
        method, network = cured or (algorithm, topology)
        cures = [repr(method)] if method != algorithm else []
        cures += [repr(network)] if network is not topology else []
        raise ValueError(
            f"{algorithm!r} on {topology!r} multiplies the disagreement between nodes by "
            f"{rate.value:.3f} at every step and would diverge. Try "
            f"{' on '.join(cures) or 'a smaller lr'}, a static topology, less momentum, or DmSGD; "
            "stable='auto' cures what it can, stable='ignore' runs it as it is."
        )
    method, network = cured
    note = (
        f"{type(algorithm).__name__} runs as {method!r} on {network!r}, which is calmer or less "
        f"biased; as asked for, a step multiplies the disagreement by {rate.value:.3f}"
    )
    return method, network, note


def _cure(
    algorithm: Algorithm, topology: Topology, rate: Rate, stable: str
) -> tuple[Algorithm, Topology] | None:
    """A stable pair: what was asked for, if it is; else the first form where that is calm and nodes
    mix well, or the calmest, on lazier weights if need be. On weights that change "auto" prefers a
    calmer or less biased form to one that would do."""
    if not rate.unstable and (stable == "refuse" or topology.static):
        return algorithm, topology
    forms = algorithm.steady()
    rates = {form: growth_rate(form, topology, batch_steps=_BRIEF) for form in forms}
    best = min(forms, key=lambda form: rates[form].value, default=algorithm)
    if forms and not topology.static:
        first = forms[0]
        best = first if rates[first].high < _CALM and _left(topology) < _MIXED else best
    calm = not forms or rate.value <= rates[best].value
    if not rate.unstable and calm:
        # Less biased, by more than the numbers are known: nesterov's DecentLaM on pairs of 4 nodes
        # forgets every disagreement within some steps, and yet makes 20 times as much of it anew.
        if not forms or rates[best].high >= 1:
            return algorithm, topology
        if relative_bias(best, topology) >= 0.5 * relative_bias(algorithm, topology):
            return algorithm, topology
    for network in (topology, *(topology.lazy(rate) for rate in _RATES)):
        if growth_rate(best, network, batch_steps=_BRIEF).high < 1:
            return best, network
    return None


def _left(topology: Topology) -> float:
    """Return how much of the squared disagreement a step leaves, in the mean over directions."""
    squares = [
        float(np.square(topology.sparse(k).values).sum()) for k in range(topology.period or _BRIEF)
    ]
    return (float(np.mean(squares)) - 1) / (topology.num_nodes - 1)


def relative_bias(algorithm: Algorithm, topology: Topology) -> float:
    """Mean squared disagreement under constant gradients that differ by node, over DSGD's."""
    if topology.num_nodes == 1 or always_everyone(algorithm):
        return 0.0
    ours, theirs = (_disagreement(a, topology) for a in (algorithm, make("dsgd")))
    ratio = ours / theirs if theirs else 0.0
    return ratio if ratio > 1e-12 else 0.0  # the rest is rounding


@cache
def response(algorithm: Algorithm) -> tuple[float, float]:
    """(gain, delay) of the node average to a gradient of one step: lr moves it lr * gain."""
    moved = LinearMap(algorithm, _AVERAGE).impulse(_LONGEST)
    gain = float(moved.sum())
    return gain, float((moved * np.arange(len(moved))).sum()) / gain


@lru_cache(maxsize=64)  # DSGD's is asked for with every method's
def _disagreement(algorithm: Algorithm, topology: Topology) -> float:
    period = _period(algorithm, topology)
    steps = LinearMap.of(algorithm, topology)
    if period is not None and steps.rows <= _LARGEST:
        return steps.mean_square_cycle(period)
    # Until 1e-8 is left of how it began; and all methods on the weights of the same steps.
    rate = min(growth_rate(algorithm, topology).value, 0.98)
    settle = math.ceil(math.log(1e-8) / math.log(max(rate, 0.5)))
    settle, counted = _whole(algorithm, settle), _whole(algorithm, 100)
    runs = LinearMap.side_by_side(algorithm, topology, _RUNS, counted, _LONGEST - settle)
    return runs.mean_square_run(settle, counted)


def _exact(radii: np.ndarray, period: int = 1) -> list[Rate]:
    return [Rate(value, value, value, True) for value in (radii ** (1 / period)).tolist()]


def _sampled(logs: np.ndarray) -> Rate:
    """From the logarithms of the growth in several runs."""
    if not np.isfinite(logs).all():  # averaged exactly on the way
        return Rate(0.0, 0.0, 0.0, False)
    spread = _STUDENT * logs.std(ddof=1) / math.sqrt(len(logs))
    low, middle, high = np.exp(logs.mean() + spread * np.array([-1, 0, 1])).tolist()
    return Rate(middle, low, high, False)


def _whole(algorithm: Algorithm, steps: float) -> int:
    """Return that many steps, or as many more as the method takes to repeat, if feasible."""
    period = algorithm.period if algorithm.period <= _LONGEST else 1
    return period * math.ceil(steps / period)


def _per_node(curvature: Curvature, topology: Topology, algorithm: Algorithm) -> np.ndarray:
    """h of each node, (n,)."""
    if algorithm.layerwise:
        raise ValueError(
            f"{algorithm!r} scales each layer by its norm and is no linear map of its gradients, "
            "so curvature does not tell its growth; try lars=False"
        )
    n = topology.num_nodes
    try:
        h = np.atleast_1d(np.asarray(curvature, dtype=np.float64))
    except (TypeError, ValueError):
        h = np.full(1, np.nan)
    is_range = h.shape == (2,) != (n,)
    good = (h.shape in ((1,), (n,)) and bool((h >= 0).all())) or (is_range and 0 < h[0] <= h[1])
    if not good or not np.isfinite(h).all():
        raise ValueError(
            f"curvature must be a finite number of 0 or more, one per node of {topology!r}, or a "
            f"range (low, high) with 0 < low <= high, got {curvature!r}"
        )
    return np.geomspace(h[0], h[1], n) if is_range else np.broadcast_to(h, n).copy()


def _period(algorithm: Algorithm, topology: Topology) -> int | None:
    """Return after how many steps method and weights repeat; None if never, or too late."""
    if topology.period is None:
        return None
    both = math.lcm(topology.period, algorithm.period)
    return both if both <= _LONGEST else None
