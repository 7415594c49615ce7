"""What the oracle says before training equals what matrices, closed forms and runs say."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

import decentlam
from decentlam import algorithms, growth, simulate
from decentlam.analysis import stability
from decentlam.analysis.stability import choose, growth_rate, largest_step, relative_bias
from decentlam.lab import theory
from decentlam.lab.theory import linear_regression
from decentlam.topology import (
    Topology,
    bipartite_random_match,
    complete,
    from_weights,
    mesh,
    one_peer_exponential,
    one_peer_hypercube,
    one_peer_symmetric_exponential,
    resolve,
    ring,
    symmetric_exponential,
)

# One for all tests: what is computed from its random weights is kept with it.
PAIRS = bipartite_random_match(8)


def steady_radius(topology: Topology, beta: float, mu: float, c: float) -> float:
    """(r-beta)(r-mu)(r-w) + beta (1-w) r (c (r-mu) + (1-c)(1-mu) r) = 0, for all w but the 1."""
    largest = 0.0
    for w in sorted(topology.eigenvalues(0).tolist())[:-1]:
        cubic = np.poly([beta, mu, w])
        cubic[1:3] += beta * (1 - w) * np.array([c + (1 - c) * (1 - mu), -c * mu])
        largest = max(largest, np.abs(np.roots(cubic)).max())
    return largest


@pytest.mark.parametrize("topology", [ring(8), mesh(12), symmetric_exponential(32)], ids=repr)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_steady_growth_is_the_largest_root_of_its_cubic(topology: Topology, beta: float) -> None:
    share = min(0.5, 2 * (1 - beta))
    b = beta * (1 - share)
    expected = steady_radius(topology, beta, 4 * b / (1 + b) ** 2, share)
    assert growth("decentlam-steady", topology, beta) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("topology", [mesh(8), ring(65), symmetric_exponential(16)], ids=repr)
def test_dsgd_growth_is_rho_and_dmsgd_growth_is_rho_or_momentum(topology: Topology) -> None:
    assert growth("dsgd", topology) == pytest.approx(topology.rho, rel=1e-9)
    expected = max(topology.rho, 0.9)
    assert growth("dmsgd", topology, 0.9) == pytest.approx(expected, rel=1e-6)


def test_a_network_of_1024_nodes_is_answered() -> None:
    assert growth_rate(algorithms.DecentLaM(0.9), one_peer_hypercube(1024)).value > 1
    form, network, _ = choose(algorithms.DecentLaM(0.9), one_peer_hypercube(1024), "auto")
    assert isinstance(form, algorithms.SteadyDecentLaM)
    assert form.at_once == pytest.approx(0.1)  # with 0.2 it would grow
    assert growth_rate(algorithms.SteadyDecentLaM(0.9), network).value > 1
    assert growth_rate(form, network).value < 0.98
    assert growth_rate(algorithms.DecentLaM(0.9), ring(1024)).value < 1


def test_the_bound_of_random_weights_holds_the_rate_of_a_longer_run() -> None:
    network = PAIRS
    short = growth_rate(algorithms.DecentLaM(0.9), network, batch_steps=30)
    long = growth_rate(algorithms.DecentLaM(0.9), network, batch_steps=300)
    assert not short.exact and short.low < long.value < short.high
    assert long.high - long.low < short.high - short.low
    assert long.low > 1.04 and long.high < 1.09


@pytest.mark.parametrize("n", [8, 128])
@pytest.mark.parametrize(
    "name", ["bipartite-random-match", "one-peer-hypercube", "one-peer-symmetric-exponential"]
)
def test_the_stable_form_of_decentlam_shrinks_disagreement_where_algorithm_2_may_not(
    name: str, n: int
) -> None:
    method, network, _ = choose(algorithms.DecentLaM(0.9), resolve(name, n), "auto")
    rate = growth_rate(method, network, batch_steps=30)
    assert rate.high < 0.98
    assert network.name == name  # no lazier than asked for


@pytest.mark.parametrize("name", ["dmsgd", "da-dmsgd", "awc-dmsgd", "qg-dmsgd", "decentlam"])
@pytest.mark.parametrize("network", [ring(8), mesh(8)], ids=repr)
def test_the_bias_on_static_weights_is_the_theory_of_small_steps(
    name: str, network: Topology
) -> None:
    """With equal Hessians the closed form's bias is disagreement alone; here x* = 0."""
    linear = torch.eye(8, dtype=torch.float64) - 1 / 8
    problem = theory.Quadratic(torch.eye(8).expand(8, 8, 8), linear)
    biases = [
        theory.fixed_point(m, network, problem, 1e-9, 0.9).square().sum().item()
        for m in (name, "dsgd")
    ]
    assert growth(name, network, 0.9).bias == pytest.approx(biases[0] / biases[1], rel=1e-6)


@pytest.mark.parametrize("name", ["dmsgd", "decentlam-steady", "qg-dmsgd", "gt-dmsgd"])
def test_the_bias_on_periodic_weights_is_that_of_a_long_run(name: str) -> None:
    network = one_peer_hypercube(8)
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(8, 4000, dtype=torch.float64, generator=generator)
    g -= g.mean(0)
    squares: dict[str, list[float]] = {name: [], "dsgd": []}
    for method, seen in squares.items():
        simulate(
            method,
            network,
            torch.zeros_like(g),
            lambda x, k: g,
            1.0,
            400,
            momentum=0.9,
            callback=lambda k, x, seen=seen: seen.append(x.sub(x.mean(0)).square().sum().item()),
        )
    measured = np.mean(squares[name][-60:]) / np.mean(squares["dsgd"][-60:])
    assert growth(name, network, 0.9).bias == pytest.approx(measured, rel=0.05, abs=1e-12)


def test_gain_and_delay_are_those_of_momentum() -> None:
    for name in ("dmsgd", "decentlam", "decentlam-steady", "gt-dmsgd"):
        found = growth(name, ring(4), 0.8)
        assert found.gain == pytest.approx(5.0) and found.delay == pytest.approx(4.0)
    assert (growth("dsgd", ring(4)).gain, growth("dsgd", ring(4)).delay) == (1.0, 0.0)
    slow = growth("qg-dmsgd", ring(4), 0.8)  # mu = 0.8: 1 / (1 - mu) slower
    assert slow.gain == pytest.approx(5.0) and slow.delay == pytest.approx(20.0)


SPREAD = np.geomspace(0.01, 1.0, 8)


def by_hand(method: str, w: np.ndarray, lr: float, h: np.ndarray, beta: float) -> np.ndarray:
    """The recursion under g = h x as a matrix on (x, buffer), written down from the paper."""
    eye, scaled = np.eye(len(w)), lr * np.diag(h)
    local = w @ (eye - scaled)
    if method == "dsgd":
        return local
    if method == "dmsgd":  # lr m+ = beta lr m + lr h x;  x+ = W (x - lr m+)
        return np.block([[local, -beta * w], [scaled, beta * eye]])
    if method == "awc-dmsgd":  # x+ = W x - lr m+
        return np.block([[w - scaled, -beta * eye], [scaled, beta * eye]])
    if method == "decentlam":  # v+ = beta v + x - W (x - lr h x);  x+ = x - v+
        return np.block([[local, -beta * eye], [eye - local, beta * eye]])
    assert method == "qg-dmsgd"  # x+ = W (x - lr h x - beta v);  v+ = beta v + (1-beta)(x - x+)
    keep = (1 - beta) * (eye - local)
    return np.block([[local, -beta * w], [keep, beta * eye + (1 - beta) * beta * w]])


@pytest.mark.parametrize("method", ["dsgd", "dmsgd", "awc-dmsgd", "decentlam", "qg-dmsgd"])
@pytest.mark.parametrize("topology", [ring(8), mesh(8), one_peer_hypercube(8)], ids=repr)
@pytest.mark.parametrize("h", [0.7, SPREAD], ids=["alike", "spread"])
def test_growth_with_gradients_is_the_spectral_radius_of_the_recursion_by_hand(
    method: str, topology: Topology, h: float | np.ndarray
) -> None:
    assert topology.period is not None
    product = np.eye(1)
    for k in range(topology.period):
        w = topology.weights(k).numpy()
        step = by_hand(method, w, 1.3, np.broadcast_to(h, 8), 0.8)
        product = step @ (product if k else np.eye(len(step)))
    expected = np.abs(np.linalg.eigvals(product)).max() ** (1 / topology.period)
    found = growth(method, topology, None if method == "dsgd" else 0.8, lr=1.3, curvature=h)
    assert found.exact and found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "method", [n for n in algorithms.ALGORITHMS if n not in ("pmsgd-lars", "adamw", "pmadamw")]
)
def test_growth_with_gradients_is_that_of_a_simulated_run(method: str) -> None:
    """Also of methods whose buffers keep a sum at zero, and of those that average exactly."""
    hyper = {"tau": 6} if method == "slowmo" else {}
    seen: list[float] = []
    x0 = torch.ones(8, 1, dtype=torch.float64)
    h = torch.from_numpy(SPREAD)[:, None]
    simulate(
        method, ring(8), x0, lambda x, k: h * x, 0.9, 720, momentum=0.9,
        callback=lambda k, x: seen.append(x.norm().item()), **hyper,
    )  # fmt: skip
    # The envelope: what swings is compared by its largest value in a window.
    early, late = max(seen[300:360]), max(seen[660:720])
    found = growth(method, ring(8), 0.9, lr=0.9, curvature=(0.01, 1.0), **hyper)
    assert found == pytest.approx((late / early) ** (1 / 360), abs=4e-3)


def test_algorithm_2_diverges_on_negative_eigenvalues_where_curvatures_differ() -> None:
    """From lr 1.13 on, where the largest curvature is 1; equal ones stand 2 (1 + beta)."""
    assert largest_step("decentlam", ring(8), 0.9, curvature=(0.01, 1)) == pytest.approx(
        1.1308, abs=1e-4
    )
    for lr, unstable in ((1.1, False), (1.2, True), (1.5, True), (3.5, True)):
        assert (growth("decentlam", ring(8), 0.9, lr=lr, curvature=SPREAD) > 1) is unstable
        lazy = growth("decentlam", ring(8).lazy(0.5), 0.9, lr=lr, curvature=SPREAD)
        assert lazy == pytest.approx(0.9**0.5, rel=1e-6)
    for name in ("pmsgd", "dsgd", "dmsgd", "qg-dmsgd"):
        assert growth(name, ring(8), 0.9, lr=1.5, curvature=SPREAD) < 1
    for name in ("pmsgd", "dsgd", "qg-dmsgd"):
        assert growth(name, ring(8), 0.9, lr=3.5, curvature=SPREAD) < 1
    assert growth("dmsgd", ring(8), 0.9, lr=3.5, curvature=SPREAD) > 1.09
    assert largest_step("decentlam", ring(8), 0.9) == pytest.approx(3.8, rel=1e-5)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("topology", [ring(8), mesh(8), ring(5)], ids=repr)
def test_the_largest_step_of_dmsgd_is_a_closed_form(topology: Topology, beta: float) -> None:
    """r^2 - (w + b - w lr h) r + w b = 0 has a root of 1 at lr h = (1 - b)(1 - w) / |w|, w < 0,
    and of -1 at (1 + b)(1 + w) / w, w > 0: at w = 1 momentum SGD's own 2 (1 + b)."""
    limits = [
        (1 - beta) * (1 - w) / -w if w < 0 else (1 + beta) * (1 + w) / w
        for w in topology.eigenvalues(0).tolist()
        if abs(w) > 1e-9
    ]
    assert largest_step("dmsgd", topology, beta) == pytest.approx(min(limits), rel=1e-5)


def test_the_largest_step_is_below_a_window_that_diverges() -> None:
    """On weights that repeat, DmSGD may converge again beyond lr that do not: here from 1.6 to 2.1.

    With equal curvatures every mode of the hypercube sees, step by step, w = 0 or w = 1.
    """

    def radius(lr: float, ws: tuple[int, ...]) -> float:
        steps = [np.array([[w * (1 - lr), -w * lr * 0.9], [1, 0.9]]) for w in ws]
        return max(abs(np.linalg.eigvals(steps[2] @ steps[1] @ steps[0])))

    modes = list(itertools.product((0, 1), repeat=3))
    rates = np.arange(0.5, 2.0, 0.001)
    diverges = [max(radius(lr, ws) for ws in modes) > 1 + 1e-9 for lr in rates]
    found = largest_step("dmsgd", one_peer_hypercube(8), 0.9)
    assert found == pytest.approx(rates[diverges.index(True)], abs=0.001)
    assert not diverges[-1] and growth("dmsgd", one_peer_hypercube(8), 0.9, lr=2, curvature=1) < 1


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.99])
def test_the_largest_step_of_an_exact_average_is_that_of_momentum_sgd(beta: float) -> None:
    assert largest_step("pmsgd", ring(8), beta) == pytest.approx(2 * (1 + beta), rel=1e-5)
    apart = largest_step("pmsgd", ring(8), beta, curvature=SPREAD)
    assert apart == pytest.approx(2 * (1 + beta) / SPREAD.mean(), rel=1e-5)
    one = largest_step("dmsgd", ring(1), beta)
    assert one == pytest.approx(2 * (1 + beta), rel=1e-5)


@pytest.mark.parametrize(
    ("method", "beta", "low", "high"),
    [
        ("decentlam-steady", 0.9, 2.7, 3.0),
        ("decentlam-steady", 0.99, 1.95, 2.25),
        ("dmsgd", 0.9, 2.35, 2.6),
        ("gt-dmsgd", 0.9, 0.6, 0.8),
        ("decentlam", 0.9, 0.0, 0.0),
    ],
)
def test_the_largest_step_on_random_pairs(method: str, beta: float, low: float, high: float):
    assert low <= largest_step(method, PAIRS, beta) <= high


def test_gradient_tracking_diverges_where_only_gradients_show_it() -> None:
    """Gradients close a loop through y that a map without them lacks."""
    problem, network = linear_regression(8, seed=0), one_peer_symmetric_exponential(8)
    assert growth_rate(algorithms.GTDmSGD(0.9), network).value < 0.91
    x = simulate("gt-dmsgd", network, problem.start, problem.gradient, 5e-4, 600, momentum=0.9)
    assert problem.relative_error(x) > 1
    limit = largest_step("gt-dmsgd", network, 0.9)
    assert limit == pytest.approx(0.0340, abs=1e-4)
    curvature = torch.linalg.eigvalsh(problem.hessians.mean(0))[-1].item()
    assert limit < 5e-4 * curvature


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"lr": 0.1}, "lr was given without curvature"),
        ({"curvature": 1.0}, "curvature was given without lr"),
        ({"lr": -1.0, "curvature": 1.0}, "lr must be"),
        ({"lr": 0.1, "curvature": -1.0}, "0 or more"),
        ({"lr": 0.1, "curvature": math.nan}, "finite"),
        ({"lr": 0.1, "curvature": "steep"}, "one per node"),
        ({"lr": 0.1, "curvature": [1.0, 2.0, 3.0]}, r"one per node of ring\(8\)"),
        ({"lr": 0.1, "curvature": (0.0, 1.0)}, "0 < low <= high"),
    ],
    ids=str,
)
def test_lr_and_curvature_out_of_range_are_refused(given: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        growth("decentlam", ring(8), **given)


def test_layerwise_rates_are_no_linear_map() -> None:
    with pytest.raises(ValueError, match="no linear map"):
        growth("pmsgd-lars", ring(8), lr=0.1, curvature=1.0)


def test_a_flat_loss_neither_grows_nor_shrinks() -> None:
    for name in ("dmsgd", "decentlam", "gt-dmsgd", "d2-dmsgd"):
        assert growth(name, ring(8), 0.9, lr=0.1, curvature=0.0) == pytest.approx(1.0, abs=1e-6)
    assert largest_step("dmsgd", ring(8), 0.9, curvature=0.0) == math.inf


def test_auto_keeps_algorithm_2_on_static_weights_and_steadies_it_on_random_pairs() -> None:
    method = algorithms.DecentLaM(0.9)
    static = ring(8)
    assert choose(method, static, "auto") == (method, static, None)
    chosen, _, note = choose(method, PAIRS, "auto")
    assert chosen == algorithms.SteadyDecentLaM(0.9)
    assert note is not None and "SteadyDecentLaM" in note and "1.0" in note
    calm = algorithms.DecentLaM(0.3)  # would do, but not as well
    assert growth_rate(calm, PAIRS).high < 1
    assert choose(calm, PAIRS, "refuse")[0] is calm
    assert choose(calm, PAIRS, "auto")[0] in calm.steady()


def test_auto_takes_the_steady_form_where_the_asked_one_is_calm_but_biased() -> None:
    """Nesterov on random pairs of 4 nodes: its disagreement ends at once, and begins anew."""
    method = algorithms.DecentLaM(0.9, nesterov=True)
    pairs = bipartite_random_match(4)
    assert growth_rate(method, pairs).value < growth_rate(method.steady()[0], pairs).value
    exact, steady = method.steady()[:2]
    assert relative_bias(method, pairs) > 20 > 2 > relative_bias(steady, pairs) > 1
    assert relative_bias(exact, pairs) < 1e-9
    chosen, _, note = choose(method, pairs, "auto")
    assert chosen == steady
    assert note is not None and "less biased" in note
    two = bipartite_random_match(2)
    assert choose(method, two, "auto") == (method, two, None)


def test_refuse_names_the_rate_and_the_cure_and_ignore_goes_on() -> None:
    method, network = algorithms.DecentLaM(0.9), PAIRS
    with pytest.raises(ValueError, match=r"1\.0\d+ at every step.*SteadyDecentLaM.*stable='auto'"):
        choose(method, network, "refuse")
    assert choose(method, network, "ignore") == (method, network, None)
    with pytest.raises(ValueError, match="auto, refuse, ignore"):
        choose(method, network, "maybe")


def test_nesterov_on_negative_eigenvalues_is_cured() -> None:
    method = algorithms.DecentLaM(0.9, nesterov=True)
    assert growth_rate(method, mesh(8)).unstable
    chosen, network, _ = choose(method, mesh(8), "auto")
    assert chosen in method.steady()
    assert growth_rate(chosen, network).value < 1


@pytest.mark.parametrize("n", [8, 64])
def test_auto_takes_the_exact_form_where_nodes_average_with_two_others(n: int) -> None:
    for name, kind in (
        ("two-random-matches", algorithms.ExactDecentLaM),
        ("bipartite-random-match", algorithms.SteadyDecentLaM),
        ("one-peer-hypercube", algorithms.SteadyDecentLaM),
    ):
        form, network, _ = choose(algorithms.DecentLaM(0.9), resolve(name, n), "auto")
        assert isinstance(form, kind) and network.name == name
    assert growth("decentlam-exact", one_peer_hypercube(64), 0.9) > 1.1


@pytest.mark.parametrize("topology", [ring(8), mesh(12), complete(4)], ids=repr)
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_exact_growth_is_the_radius_of_its_matrix(topology: Topology, beta: float) -> None:
    largest = 0.0
    for w in sorted(topology.eigenvalues(0).tolist())[:-1]:
        # (x, v, y) to (x, v, y) with z = x - beta v + y, t = (1 - w) z
        z = np.array([1.0, -beta, 1.0])
        t = (1 - w) * z
        rows = [w * z, np.array([0, beta, -1.0]) + t / 2, np.array([0, 0, 1.0]) - t / 20]
        largest = max(largest, np.abs(np.linalg.eigvals(np.stack(rows))).max())
    assert growth("decentlam-exact", topology, beta) == pytest.approx(largest, rel=1e-6)


def test_d2_becomes_the_exact_form_on_random_pairs_where_that_is_calmer() -> None:
    chosen = choose(algorithms.D2DmSGD(0.9), bipartite_random_match(16), "auto")[0]
    assert chosen == algorithms.ExactDecentLaM(0.9)


def test_a_method_without_steady_form_is_cured_by_lazy_weights() -> None:
    # QG with mu = 0 is momentum inside the average: it needs eigenvalues of at least zero.
    method = algorithms.QGDmSGD(0.9, mu=0.0)
    swap = from_weights([[0.2, 0.8], [0.8, 0.2]])
    assert growth_rate(method, swap).unstable
    with pytest.raises(ValueError, match="lazy"):
        choose(method, swap, "refuse")
    chosen, network, note = choose(method, swap, "auto")
    assert chosen is method and network.name.startswith("lazy(") and note is not None
    assert growth_rate(chosen, network).value < 1


@pytest.mark.parametrize("name", list(algorithms.ALGORITHMS))
@pytest.mark.parametrize(
    "network", [ring(5), mesh(8), one_peer_exponential(8), bipartite_random_match(6)], ids=repr
)
def test_every_method_gets_an_answer_that_is_a_number(name: str, network: Topology) -> None:
    method = algorithms.make(name)
    if method.needs_symmetric and not network.symmetric:
        return
    rate = growth_rate(method, network, batch_steps=10)
    assert 0 <= rate.low <= rate.value <= rate.high < 2 and math.isfinite(rate.high)


def test_simulated_nodes_consult_the_oracle_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    x0 = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.DEBUG):
        nodes = decentlam.Nodes("decentlam", "bipartite-random-match", x0, 0.9, stable="auto")
    assert isinstance(nodes.algorithm, algorithms.SteadyDecentLaM)
    assert "DecentLaM runs as SteadyDecentLaM" in caplog.text
    with pytest.raises(ValueError, match="would diverge"):
        decentlam.Nodes("decentlam", "bipartite-random-match", x0, 0.9, stable="refuse")
    literal = decentlam.Nodes("decentlam", "bipartite-random-match", x0, 0.9)
    assert isinstance(literal.algorithm, algorithms.DecentLaM)


def test_one_node_needs_no_oracle() -> None:
    optimizer = decentlam.DecentLaM(nn.Linear(2, 1).parameters(), lr=0.1, topology="ring")
    assert optimizer.algorithm == algorithms.PmSGD(0.9)


def test_bias_is_the_same_by_matrices_by_runs_and_by_one_of_each(monkeypatch):
    """Large networks have matrices for DSGD, which has one row a node, and runs for DecentLaM."""
    network, method = resolve("base-2", 16), algorithms.SteadyDecentLaM(0.9)
    found = []
    for largest in (600, 8, 30):
        monkeypatch.setattr(stability, "_LARGEST", largest)
        stability._disagreement.cache_clear()
        found.append(stability.relative_bias(method, network))
    stability._disagreement.cache_clear()
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[2] == pytest.approx(found[0], rel=0.05)
