"""Every method against an independent reference, by hand, and in the cases where it is another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from reference import Run, trajectory

import decentlam
from decentlam import topology
from decentlam.algorithms import ALGORITHMS, Algorithm, Reach, Step, lr_ratio, make
from decentlam.simulate import Nodes, column_blocks

STEPS = 200

METHODS: list[tuple[str, dict]] = [
    ("pmsgd", {}),
    ("pmsgd-lars", {"trust": 0.05}),
    ("dsgd", {}),
    ("dmsgd", {}),
    ("da-dmsgd", {}),
    ("awc-dmsgd", {}),
    ("awc-dmsgd", {"heavy_ball": True}),
    ("slowmo", {"tau": 6}),
    ("slowmo", {"tau": 1, "slow_beta": 0.3}),
    ("slowmo", {"tau": 5, "slow_beta": 0.6, "alpha": 0.7, "inner_momentum": "reset"}),
    ("slowmo", {"tau": 4, "inner_momentum": "average"}),
    ("slowmo", {"tau": 7, "base": "local"}),
    ("slowmo", {"tau": 3, "base": "local", "inner_momentum": "average"}),
    ("qg-dmsgd", {}),
    ("qg-dmsgd", {"mu": 0.3}),
    ("d2-dmsgd", {}),
    ("decentlam", {}),
    ("decentlam-steady", {}),
    ("decentlam-steady", {"mu": 0.5, "share": 0.25}),
    ("gt-dmsgd", {}),
]
# Momentum as large as it is stable on each network: over random pairs DecentLaM and the
# heavy-ball form grow without bound from about 0.5 on.
NETWORKS: dict[str, tuple[topology.Topology, float]] = {
    "mesh": (topology.mesh(8), 0.6),
    "star": (topology.star(8), 0.9),
    "ring": (topology.ring(5), 0.8),
    "random pairs": (topology.bipartite_random_match(8, seed=3), 0.3),
    "one peer": (topology.one_peer_exponential(8), 0.9),
}
MOMENTUM_METHODS = [name for name in ALGORITHMS if name != "dsgd"]


def constant(k: int) -> float:
    return 0.05


def with_zeros(k: int) -> float:
    """Zero at the first step, at one, at two in a row, and at the end; never the same twice."""
    if k in (60, 61, 100) or k >= STEPS - 2:
        return 0.0
    return 0.05 * min(1.0, k / 10) * (0.55 + 0.45 * math.cos(math.pi * k / STEPS))


def method_id(method: tuple[str, dict]) -> str:
    name, hyper = method
    return " ".join([name, *(f"{key}={value}" for key, value in hyper.items())])


class Problem:
    """n different functions of d variables, x'Ax/2 - b'x + 0.3 log cosh x, with noise."""

    def __init__(self, n: int, d: int = 3, common_curvature: bool = False) -> None:
        random = np.random.default_rng(n)
        A = random.normal(size=(1 if common_curvature else n, d, d))
        self.A = np.broadcast_to(A @ A.transpose(0, 2, 1) / d + 0.2 * np.eye(d), (n, d, d))
        self.bend = 0.0 if common_curvature else 0.3
        self.b = random.normal(size=(n, d))
        self.noise = 0.1 * random.normal(size=(STEPS, n, d))
        self.x0 = random.normal(size=(n, d))

    def gradient(self, x: np.ndarray, k: int) -> np.ndarray:
        slope = (self.A @ x[:, :, None])[:, :, 0] - self.b + self.bend * np.tanh(x)
        return slope + self.noise[k % STEPS]

    def torch_gradient(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.from_numpy(self.gradient(x.double().numpy(), k)).to(x.dtype)

    def start(self, equal: bool = False) -> torch.Tensor:
        x0 = np.broadcast_to(self.x0[:1], self.x0.shape) if equal else self.x0
        return torch.from_numpy(x0.copy())


def library_trajectory(
    name: str,
    network: str | topology.Topology,
    x0: torch.Tensor,
    gradient: Callable,
    lr: float | Callable,
    steps: int = STEPS,
    **kwargs: object,
) -> np.ndarray:
    seen: list[np.ndarray] = []
    decentlam.simulate(
        name,
        network,
        x0,
        gradient,
        lr,
        steps,
        callback=lambda _, x: seen.append(x.numpy().copy()),
        **kwargs,
    )
    return np.array(seen)


@cache
def dense_weights(network: str, k: int) -> np.ndarray:
    return NETWORKS[network][0].weights(k).numpy()


def reference_cases() -> Iterator[object]:
    """Every method on every network it runs on; the variants of SlowMo on two of them."""
    for name, hyper in METHODS:
        networks = ("mesh", "random pairs") if name == "slowmo" and len(hyper) > 1 else NETWORKS
        for network in networks:
            if make(name, **hyper).needs_symmetric and not NETWORKS[network][0].symmetric:
                continue
            for lr, nesterov in [(constant, False), (with_zeros, False), (with_zeros, True)]:
                if not (name == "dsgd" and nesterov):
                    label = f"{network}-{lr.__name__}{'-nesterov' if nesterov else ''}"
                    yield pytest.param(
                        name, hyper, network, nesterov, lr, id=f"{method_id((name, hyper))}-{label}"
                    )


# Against the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "hyper", "network", "nesterov", "lr"), list(reference_cases()))
def test_trajectory_is_that_of_the_reference(
    name: str, hyper: dict, network: str, nesterov: bool, lr: Callable[[int], float]
) -> None:
    net, beta = NETWORKS[network]
    problem = Problem(net.num_nodes)
    x0 = problem.start(equal=name == "pmsgd-lars")
    layers = [2, 1] if name == "pmsgd-lars" else None
    run = Run(
        W=lambda k: dense_weights(network, k),
        x0=x0.numpy(),
        gradient=problem.gradient,
        gamma=lr,
        steps=STEPS,
        beta=beta,
        nesterov=nesterov,
        weight_decay=0.02,
        layers=layers,
        hyper=hyper,
    )
    given = {**hyper, **({} if name == "dsgd" else {"nesterov": nesterov})}
    got = library_trajectory(
        name, net, x0, problem.torch_gradient, lr, momentum=beta, weight_decay=0.02,
        layers=layers, **given,
    )  # fmt: skip
    np.testing.assert_allclose(got, np.array(trajectory(name, run)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_step_with_lr_zero_moves_only_by_mixing(method: tuple[str, dict]) -> None:
    """The gradient must not matter, and the average must stay where it is."""
    name, hyper = method
    problem = Problem(8)
    nodes = Nodes(name, "mesh", problem.start(equal=name == "pmsgd-lars"), 0.9, **hyper)
    for k in range(11):
        nodes.step(problem.torch_gradient(nodes.x, k), 0.05)
    before = nodes.x.clone()
    nodes.step(torch.full_like(nodes.x, 1e6), 0.0)
    if name == "slowmo" and nodes.algorithm.reach(11) is Reach.EVERYONE:  # a round ends here
        np.testing.assert_allclose(nodes.x - nodes.x[:1], 0, atol=1e-12)
    else:
        np.testing.assert_allclose(nodes.x.mean(0), before.mean(0), rtol=0, atol=1e-12)
    if name not in ("pmsgd", "pmsgd-lars", "slowmo", "d2-dmsgd"):
        np.testing.assert_allclose(nodes.x, topology.mesh(8).weights() @ before, rtol=0, atol=1e-12)


# By hand -----------------------------------------------------------------------------------------

# Two nodes that keep 3/4 and take 1/4, gradients (4, 0) at every step, lr 1/2, momentum 1/2.
# Started at (0, 8) unless stated. All numbers below are exact in binary.
LOPSIDED = topology.from_weights([[0.75, 0.25], [0.25, 0.75]])


def by_hand(name: str, steps: int, start: tuple[float, float] = (0.0, 8.0), **hyper) -> list[float]:
    x0 = torch.tensor(start, dtype=torch.float64).reshape(2, 1)
    g = torch.tensor(hyper.pop("g", (4.0, 0.0)), dtype=torch.float64).reshape(2, 1)
    hyper = {"lr": 0.5, "momentum": 0.5, **hyper}
    x = decentlam.simulate(name, LOPSIDED, x0, lambda x, k: g, steps=steps, **hyper)
    return x.flatten().tolist()


def test_dsgd_by_hand() -> None:
    # x - lr g = (0 - 2, 8) = (-2, 8); W: (-1.5 + 2, -0.5 + 6)
    assert by_hand("dsgd", 1) == [0.5, 5.5]


def test_dmsgd_by_hand() -> None:
    # step 1: m = (4, 0), as DSGD: (0.5, 5.5)
    # step 2: m = (6, 0); x - lr m = (-2.5, 5.5); W: (-1.875 + 1.375, -0.625 + 4.125)
    assert by_hand("dmsgd", 1) == [0.5, 5.5]
    assert by_hand("dmsgd", 2) == [-0.5, 3.5]


def test_dmsgd_with_nesterov_by_hand() -> None:
    # m = (4, 0); direction g + m / 2 = (6, 0); x - lr (6, 0) = (-3, 8); W: (-2.25 + 2, -0.75 + 6)
    assert by_hand("dmsgd", 1, nesterov=True) == [-0.25, 5.25]


def test_weight_decay_by_hand() -> None:
    # g = (4, 0) + x / 4 = (4, 2); x - lr g = (-2, 7); W: (-1.5 + 1.75, -0.5 + 5.25)
    assert by_hand("dsgd", 1, weight_decay=0.25) == [0.25, 4.75]


def test_da_dmsgd_by_hand() -> None:
    # step 1: h = (4, 0), x = (0.5, 5.5) as DSGD; m = W h = (3, 1)
    # step 2: h = (1.5, 0.5) + (4, 0) = (5.5, 0.5); x - lr h = (-2.25, 5.25)
    #         W: (-1.6875 + 1.3125, -0.5625 + 3.9375)
    assert by_hand("da-dmsgd", 1) == [0.5, 5.5]
    assert by_hand("da-dmsgd", 2) == [-0.375, 3.375]


def test_awc_dmsgd_by_hand() -> None:
    # step 1: W x = (2, 6); m = (4, 0); x = (2 - 2, 6)
    # step 2: W x = (1.5, 4.5); m = (6, 0); x = (1.5 - 3, 4.5)
    assert by_hand("awc-dmsgd", 1) == [0.0, 6.0]
    assert by_hand("awc-dmsgd", 2) == [-1.5, 4.5]


def test_awc_dmsgd_heavy_ball_by_hand() -> None:
    # step 2: W x - lr g + (x - x-) / 2 = (1.5 - 2, 4.5) + ((0, 6) - (0, 8)) / 2
    assert by_hand("awc-dmsgd", 1, heavy_ball=True) == [0.0, 6.0]
    assert by_hand("awc-dmsgd", 2, heavy_ball=True) == [-0.5, 3.5]


def test_qg_dmsgd_by_hand() -> None:
    # step 1: (0.5, 5.5) as DSGD; q = ((0, 8) - (0.5, 5.5)) / lr / 2 = (-0.5, 2.5)
    # step 2: q / 2 + g = (3.75, 1.25); x - lr of it = (-1.375, 4.875)
    #         W: (-1.03125 + 1.21875, -0.34375 + 3.65625)
    assert by_hand("qg-dmsgd", 1) == [0.5, 5.5]
    assert by_hand("qg-dmsgd", 2) == [0.1875, 3.3125]


def test_qg_dmsgd_with_another_mu_by_hand() -> None:
    # mu = 1/4: q = 3/4 ((0, 8) - (0.5, 5.5)) / lr = (-0.75, 3.75)
    # q / 2 + g = (3.625, 1.875); x - lr of it = (-1.3125, 4.5625)
    # W: (-0.984375 + 1.140625, -0.328125 + 3.421875)
    assert by_hand("qg-dmsgd", 2, mu=0.25) == [0.15625, 3.09375]


def test_d2_dmsgd_by_hand() -> None:
    # (I + W) / 2 keeps 7/8 and takes 1/8.
    # step 1: p = (-2, 8); x = (-1.75 + 1, -0.25 + 7)
    # step 2: m = (6, 0); p+ = (-3.75, 6.75); p+ + x - p = (-3.75 + 1.25, 6.75 - 1.25) = (-2.5, 5.5)
    #         x = (-2.1875 + 0.6875, -0.3125 + 4.8125)
    assert by_hand("d2-dmsgd", 1) == [-0.75, 6.75]
    assert by_hand("d2-dmsgd", 2) == [-1.5, 4.5]


def test_decentlam_by_hand() -> None:
    # step 1: v = x - W(x - lr g) = (0, 8) - (0.5, 5.5) = (-0.5, 2.5); x = (0.5, 5.5)
    # step 2: x - lr g = (-1.5, 5.5), W of it (0.25, 3.75); x - that = (0.25, 1.75)
    #         v = (-0.25, 1.25) + (0.25, 1.75) = (0, 3); x = (0.5, 2.5)
    assert by_hand("decentlam", 1) == [0.5, 5.5]
    assert by_hand("decentlam", 2) == [0.5, 2.5]


def test_decentlam_rescales_its_velocity_when_lr_changes_by_hand() -> None:
    # Step 2 at lr 1/4 after 1/2: x - lr g = (-0.5, 5.5), W of it (1, 4); x - that = (-0.5, 1.5)
    # v = 1/2 * 1/2 * (-0.5, 2.5) + (-0.5, 1.5) = (-0.625, 2.125); x = (0.5, 5.5) - v
    assert by_hand("decentlam", 2, lr=lambda k: [0.5, 0.25][k]) == [1.125, 3.375]


def test_decentlam_around_lr_zero_by_hand() -> None:
    # step 1, lr 1/2: v = (-0.5, 2.5), x = (0.5, 5.5)
    # step 2, lr 0: plain gossip, x = W (0.5, 5.5) = (1.75, 4.25); v = (0.5, 5.5) - that
    # step 3, lr 1/2: x - lr g = (-0.25, 4.25), W of it (0.875, 3.125); x - that = (0.875, 1.125)
    #         v = (-0.625, 0.625) + (0.875, 1.125) = (0.25, 1.75); x = (1.5, 2.5)
    def lr(k: int) -> float:
        return [0.5, 0.0, 0.5][k]

    assert by_hand("decentlam", 2, lr=lr) == [1.75, 4.25]
    assert by_hand("decentlam", 3, lr=lr) == [1.5, 2.5]


def test_steady_decentlam_by_hand() -> None:
    # step 1: v = (2, 0), z = (-2, 8), x = W z = (0.5, 5.5) as DSGD, d = z - x = (-2.5, 2.5)
    #         s = d / 4 = (-0.625, 0.625); v + s / 2 + d / 2 = (0.4375, 1.5625)
    # step 2: v = (2.21875, 0.78125), z = (-1.71875, 4.71875); W: (-1.2890625 + 1.1796875, ...)
    #         d = (-1.609375, 1.609375), s = 3/4 s + d / 4 = (-0.87109375, 0.87109375)
    #         v + s / 2 + d / 2 = (0.978515625, 2.021484375)
    # step 3: v = (2.4892578125, 1.0107421875), z = (-2.5986328125, 2.0986328125)
    hyper = {"mu": 0.75, "share": 0.5}
    assert by_hand("decentlam-steady", 1, **hyper) == [0.5, 5.5]
    assert by_hand("decentlam-steady", 2, **hyper) == [-0.109375, 3.109375]
    assert by_hand("decentlam-steady", 3, **hyper) == [-1.42431640625, 0.92431640625]


def test_gt_dmsgd_by_hand() -> None:
    # step 1: y = m = (4, 0), x = W (-2, 8) = (0.5, 5.5), W y = (3, 1)
    # step 2: g did not change, y = (3, 1), m = (5, 1), x = W (0.5 - 2.5, 5.5 - 0.5)
    assert by_hand("gt-dmsgd", 1) == [0.5, 5.5]
    assert by_hand("gt-dmsgd", 2) == [-0.25, 3.25]


def test_decentlam_with_nesterov_at_lr_zero_is_plain_gossip_by_hand() -> None:
    # W (0, 8) = (2, 6), not (0, 8) - 1.5 ((0, 8) - (2, 6)) = (3, 5)
    assert by_hand("decentlam", 1, lr=0.0, nesterov=True) == [2.0, 6.0]
    assert by_hand("awc-dmsgd", 1, lr=0.0, nesterov=True, heavy_ball=True) == [2.0, 6.0]


def test_pmsgd_by_hand() -> None:
    # step 1: m = mean(4, 0) = 2, x = (-1, 7); step 2: m = 3, x = (-2.5, 5.5)
    assert by_hand("pmsgd", 1) == [-1.0, 7.0]
    assert by_hand("pmsgd", 2) == [-2.5, 5.5]


def test_pmsgd_lars_by_hand() -> None:
    # start (8, 8), trust 1/2: rate = 8 / 2 / |mean g| = 4 / 2 = 2; m = 4; x = 8 - 2 = 6
    # step 2: rate = 6 / 2 / 2 = 1.5; m = 2 + 3 = 5; x = 6 - 2.5
    assert by_hand("pmsgd-lars", 1, (8.0, 8.0), trust=0.5) == [6.0, 6.0]
    assert by_hand("pmsgd-lars", 2, (8.0, 8.0), trust=0.5) == [3.5, 3.5]
    # weight decay 1/4: rate = 4 / (2 + 2) = 1 on g + x / 4 = 2 + 2; x = 8 - 2
    assert by_hand("pmsgd-lars", 1, (8.0, 8.0), trust=0.5, weight_decay=0.25) == [6.0, 6.0]
    # a layer of zeros has no scale to go by and takes the plain step: x = 0 - 1
    assert by_hand("pmsgd-lars", 1, (0.0, 0.0), trust=0.5) == [-1.0, -1.0]
    # without a gradient there is no rate either (it would be 4 / 0), and nothing moves
    assert by_hand("pmsgd-lars", 1, (8.0, 8.0), trust=0.5, g=(0.0, 0.0)) == [8.0, 8.0]


def test_slowmo_by_hand() -> None:
    # start (4, 4), tau 1, slow momentum 1/2
    # step 1: (4 - 2, 4), average 3; u lr = 4 - 3 = 1; x = 4 - 1
    # step 2: m = (6, 0); (3 - 3, 3), average 1.5; u lr = 1/2 + 1.5 = 2; x = 3 - 2
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=1) == [3.0, 3.0]
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=1) == [1.0, 1.0]
    # alpha 1/2: step 1 x = 4 - 1/2
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=1, alpha=0.5) == [3.5, 3.5]
    # tau 2: DmSGD goes (4 - 2, 4) -> W (2.5, 3.5); m = (6, 0): (-0.5, 3.5), average 1.5
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=2) == [2.5, 3.5]
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=2) == [1.5, 1.5]
    # local SGD in between: (2, 4), then (2 - 3, 4), average 1.5
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=2, base="local") == [2.0, 4.0]
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=2, base="local") == [1.5, 1.5]


def test_slowmo_inner_momentum_by_hand() -> None:
    # After one step with tau 1: x = (3, 3), u lr = 1, and m is (4, 0), (0, 0) or the mean (2, 2).
    # reset: m = (4, 0), average 3 - 1 = 2, u lr = 1/2 + 1, x = 3 - 1.5
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=1, inner_momentum="reset") == [1.5, 1.5]
    # average: m = (1, 1) + (4, 0) = (5, 1), average 3 - 1.5, u lr = 1/2 + 1.5, x = 3 - 2
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=1, inner_momentum="average") == [1.0, 1.0]
    # That is where keep arrives too; m tells them apart: (2, 0) + (4, 0), or the mean of (5, 1).
    for inner, m in (("keep", [6.0, 0.0]), ("average", [3.0, 3.0])):
        nodes = Nodes("slowmo", LOPSIDED, torch.full((2, 1), 4.0), 0.5, tau=1, inner_momentum=inner)
        for _ in range(2):
            nodes.step(torch.tensor([[4.0], [0.0]]), 0.5)
        assert nodes.state_dict()["state"]["m"].flatten().tolist() == m


def test_consensus_distance_by_hand() -> None:
    # rows (0, 0) and (6, 8): 5 from their average (3, 4) each
    nodes = Nodes("dsgd", LOPSIDED, torch.tensor([[0.0, 0.0], [6.0, 8.0]]))
    assert nodes.consensus_distance() == 5.0


# Contract: every entry of ALGORITHMS -------------------------------------------------------------


def random_state(algorithm: Algorithm, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(buffer) for name, buffer in algorithm.init(x).items()}


@pytest.mark.parametrize("index", [0, 3, 47])
@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=["one node", "stacked"])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_message_writes_nothing(
    method: tuple[str, dict], shape: tuple[int, ...], index: int
) -> None:
    torch.manual_seed(0)
    algorithm = make(method[0], **method[1])
    x, g = torch.randn(shape), torch.randn(shape)
    state = random_state(algorithm, x)
    before = [tensor.clone() for tensor in (x, g, *state.values())]
    message = algorithm.message(x, g, state, Step(index, 0.1))
    for tensor, old in zip((x, g, *state.values()), before, strict=True):
        assert torch.equal(tensor, old)
    payloads = message if isinstance(message, tuple) else (message,)
    assert len(payloads) == algorithm.payloads(index)
    assert all(payload.shape == x.shape and payload.dtype == x.dtype for payload in payloads)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_update_reads_g_only(method: tuple[str, dict]) -> None:
    torch.manual_seed(0)
    algorithm = make(method[0], **method[1])
    x, g = torch.randn(4, 6), torch.randn(4, 6)
    state, step = random_state(algorithm, x), Step(3, 0.1)
    message = algorithm.message(x, g, state, step)
    mixed = (
        tuple(payload.clone() for payload in message)
        if isinstance(message, tuple)
        else message.clone()
    )
    before = g.clone()
    algorithm.update(x, g, mixed, state, step)
    assert torch.equal(g, before)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_stacked_run_is_the_row_by_row_run(method: tuple[str, dict]) -> None:
    """The two functions serve (n, d) and (d,) alike: here n nodes keep separate tensors."""
    name, hyper = method
    algorithm, net, problem = make(name, **hyper), topology.mesh(6), Problem(6)
    x0 = problem.start(equal=True)
    stacked = Nodes(algorithm, net, x0, weight_decay=0.1)
    rows = [row.clone() for row in x0]
    states = [algorithm.init(row) for row in rows]
    W = net.weights()
    previous_lr = sync_lr = None
    for k in range(13):
        lr = [0.05, 0.0, 0.02][k % 3]
        gradient = problem.torch_gradient(torch.stack(rows), k) + 0.1 * torch.stack(rows)
        step = Step(k, lr, lr_ratio(lr, previous_lr), lr_ratio(lr, sync_lr), 0.1)
        messages = [
            algorithm.message(x, g, state, step)
            for x, g, state in zip(rows, gradient, states, strict=True)
        ]
        reach = algorithm.reach(k)
        for i, (x, state) in enumerate(zip(rows, list(states), strict=True)):
            mixed = mix_for(i, messages, W, reach)
            rows[i] = x.clone()
            algorithm.update(rows[i], gradient[i], mixed, state, step)
        stacked.step(problem.torch_gradient(stacked.x, k), lr)
        previous_lr = lr
        sync_lr = lr if reach is Reach.EVERYONE else sync_lr
        np.testing.assert_allclose(stacked.x, torch.stack(rows), rtol=0, atol=1e-12)


def mix_for(node: int, messages: list, W: torch.Tensor, reach: Reach):
    if isinstance(messages[0], tuple):
        return tuple(
            mix_for(node, list(payloads), W, reach) for payloads in zip(*messages, strict=True)
        )
    if reach is Reach.NOBODY:
        return messages[node].clone()
    if reach is Reach.EVERYONE:
        return torch.stack(messages).mean(0)
    return torch.stack([w * message for w, message in zip(W[node], messages, strict=True)]).sum(0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state_has_the_declared_names_and_starts_at_zero(name: str) -> None:
    algorithm = make(name)
    x = torch.randn(3, 4, dtype=torch.float64)
    state = algorithm.init(x)
    assert tuple(state) == algorithm.buffers
    for buffer in state.values():
        assert buffer.shape == x.shape and buffer.dtype == x.dtype and not buffer.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_precisions_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    problem = Problem(8)
    x0 = problem.start(equal=True)
    exact = decentlam.simulate(name, "ring", x0, problem.torch_gradient, 0.05, 50)
    x = decentlam.simulate(name, "ring", x0.to(dtype), problem.torch_gradient, 0.05, 50)
    assert x.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    np.testing.assert_allclose(x.double(), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_repeat_to_the_bit_and_leave_x0_alone(name: str) -> None:
    problem = Problem(8)
    x0 = problem.start()
    before = x0.clone()

    def run() -> torch.Tensor:
        return decentlam.simulate(
            name, "bipartite-random-match", x0, problem.torch_gradient, 0.05, 30, momentum=0.3
        )

    assert torch.equal(run(), run())
    assert torch.equal(x0, before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resuming_from_a_saved_state_repeats_to_the_bit(name: str) -> None:
    problem = Problem(8)
    hyper = {"tau": 4} if name == "slowmo" else {}
    first = Nodes(name, "ring", problem.start(equal=True), 0.8, weight_decay=0.1, **hyper)
    for k in range(10):
        first.step(problem.torch_gradient(first.x, k), with_zeros(k))
    saved = first.state_dict()
    second = Nodes(name, "ring", torch.zeros(8, 3).double(), 0.8, weight_decay=0.1, **hyper)
    second.load_state_dict(saved)
    for k in range(10, 20):
        for nodes in (first, second):
            nodes.step(problem.torch_gradient(nodes.x, k), with_zeros(k))
    assert torch.equal(first.x, second.x)
    assert not torch.equal(first.x, saved["x"])  # what was saved is a copy


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not make(name).layerwise])
def test_blocks_of_columns_do_not_change_the_run(name: str) -> None:
    """Wide models are stepped block by block; the same columns alone must give the same."""
    torch.manual_seed(0)
    x0, target = torch.randn(4, 200_000), torch.randn(4, 200_000)
    assert len(column_blocks(x0)) > 2 and sum(column_blocks(x0)) == 200_000
    wide = decentlam.simulate(name, "ring", x0, lambda x, k: x - target, 0.1, 3)
    tail = decentlam.simulate(name, "ring", x0[:, -500:], lambda x, k: x - target[:, -500:], 0.1, 3)
    np.testing.assert_allclose(wide[:, -500:], tail, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MOMENTUM_METHODS)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, math.nan, math.inf, "0.9", None])
def test_momentum_outside_zero_to_one_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        make(name, beta=value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_hyper_parameters_are_fixed_once_set(name: str) -> None:
    algorithm = make(name)
    for entry in dataclasses.fields(algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, entry.name, 0.5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_awc_forms_its_message_without_the_gradient(name: str) -> None:
    algorithm, x = make(name), torch.randn(2, 3)
    state = random_state(algorithm, x)
    messages = [
        algorithm.message(x, torch.full_like(x, value), state, Step(0, 0.1)) for value in (0.0, 1.0)
    ]
    same = all(
        torch.equal(a, b)
        for a, b in zip(*(m if isinstance(m, tuple) else (m,) for m in messages), strict=True)
    )
    assert same == (not algorithm.needs_gradient) == (name == "awc-dmsgd")


# Reductions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dmsgd", "da-dmsgd", "qg-dmsgd", "decentlam"])
@pytest.mark.parametrize("network", ["mesh", "star", "bipartite-random-match"])
@pytest.mark.parametrize("lr", [constant, with_zeros])
def test_without_momentum_it_is_dsgd(name: str, network: str, lr: Callable) -> None:
    problem = Problem(8)
    plain = library_trajectory("dsgd", network, problem.start(), problem.torch_gradient, lr)
    other = library_trajectory(
        name, network, problem.start(), problem.torch_gradient, lr, momentum=0.0
    )
    np.testing.assert_allclose(other, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heavy_ball", [False, True])
def test_without_momentum_awc_is_awc_dsgd(heavy_ball: bool) -> None:
    """x+ = W x - lr g: AWC's own DSGD, which mixes before the gradient and not after."""
    problem, W = Problem(8), topology.mesh(8).weights().numpy()
    got = library_trajectory(
        "awc-dmsgd", "mesh", problem.start(), problem.torch_gradient, 0.05, momentum=0.0,
        heavy_ball=heavy_ball,
    )  # fmt: skip
    x = problem.x0
    for k in range(STEPS):
        x = W @ x - 0.05 * problem.gradient(x, k)
        np.testing.assert_allclose(got[k], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["dmsgd", "da-dmsgd", "decentlam"])
def test_complete_graph_from_equal_start_is_pmsgd(name: str, nesterov: bool) -> None:
    problem = Problem(8)
    pmsgd, other = (
        library_trajectory(
            method, "complete", problem.start(equal=True), problem.torch_gradient, 0.05,
            momentum=0.9, weight_decay=0.02, nesterov=nesterov,
        )
        for method in ("pmsgd", name)
    )  # fmt: skip
    np.testing.assert_allclose(other, pmsgd, rtol=0, atol=1e-11)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["awc-dmsgd", "d2-dmsgd"])
def test_complete_graph_with_one_curvature_has_the_average_of_pmsgd(
    name: str, nesterov: bool
) -> None:
    """AWC adds its own step after the average and D2 keeps half of its own model, so nodes differ
    even on a complete graph. Their average is PmSGD's when the average gradient is the gradient at
    the average: quadratics with one curvature matrix and different minima."""
    problem = Problem(8, common_curvature=True)
    pmsgd, other = (
        library_trajectory(
            method, "complete", problem.start(equal=True), problem.torch_gradient, 0.05,
            momentum=0.8, nesterov=nesterov,
        )
        for method in ("pmsgd", name)
    )  # fmt: skip
    assert np.ptp(other[-1], axis=0).max() > 1e-3
    np.testing.assert_allclose(other.mean(1), pmsgd.mean(1), rtol=0, atol=1e-11)


# With one node there is nothing to mix, and a method is torch.optim.SGD whenever its momentum is
# a plain sum of past gradients. Left out, with the reason:
# - qg-dmsgd with mu > 0 weighs old gradients by (mu, 1 - mu) twice: a quasi-hyperbolic momentum;
#   mu = 0 with Nesterov averages over the step taken, which already looked ahead;
# - slowmo with slow_beta > 0 (or alpha != 1) is SGD inside a second, slower momentum: a lookahead;
# - pmsgd-lars scales the step of every layer.
SGD_AT_ONE_NODE: list[tuple[str, dict]] = [
    ("pmsgd", {}),
    ("dmsgd", {}),
    ("da-dmsgd", {}),
    ("awc-dmsgd", {}),
    ("awc-dmsgd", {"heavy_ball": True}),
    ("d2-dmsgd", {}),
    ("decentlam", {}),
    ("decentlam-steady", {}),
    ("gt-dmsgd", {}),
    ("qg-dmsgd", {"mu": 0.0}),
    ("slowmo", {"slow_beta": 0.0, "tau": 1}),
    ("slowmo", {"slow_beta": 0.0, "tau": 7}),
    ("slowmo", {"slow_beta": 0.0, "tau": 5, "base": "local", "inner_momentum": "average"}),
]


def one_node_distance_to_sgd(
    name: str, hyper: dict, nesterov: bool, lr: Callable[[int], float]
) -> float:
    problem = Problem(1, d=4)
    x = problem.start()[0].requires_grad_()
    sgd = torch.optim.SGD([x], lr=1.0, momentum=0.9, weight_decay=0.05, nesterov=nesterov)
    expected = []
    for k in range(STEPS):
        sgd.param_groups[0]["lr"] = lr(k)
        x.grad = problem.torch_gradient(x.detach()[None], k)[0]
        sgd.step()
        expected.append(x.detach().numpy().copy())
    got = library_trajectory(
        name, "ring", problem.start(), problem.torch_gradient, lr, momentum=0.9,
        weight_decay=0.05, nesterov=nesterov, **hyper,
    )  # fmt: skip
    return float(np.abs(got[:, 0] - np.array(expected)).max())


def decaying(k: int) -> float:
    return 0.05 / (1 + k / 50)


@pytest.mark.parametrize("lr", [constant, decaying])
@pytest.mark.parametrize("method", SGD_AT_ONE_NODE, ids=method_id)
def test_one_node_is_torch_sgd(method: tuple[str, dict], lr: Callable) -> None:
    assert one_node_distance_to_sgd(*method, False, lr) < 1e-12


@pytest.mark.parametrize("lr", [constant, decaying])
@pytest.mark.parametrize(
    "method", [method for method in SGD_AT_ONE_NODE if method[0] != "qg-dmsgd"], ids=method_id
)
def test_one_node_with_nesterov_is_torch_sgd(method: tuple[str, dict], lr: Callable) -> None:
    assert one_node_distance_to_sgd(*method, True, lr) < 1e-12


@pytest.mark.parametrize(
    "method", [("qg-dmsgd", {}), ("slowmo", {"tau": 5}), ("pmsgd-lars", {})], ids=method_id
)
def test_one_node_is_not_sgd_where_the_method_is_another(method: tuple[str, dict]) -> None:
    assert one_node_distance_to_sgd(*method, False, constant) > 1e-3


def test_decentlam_is_algorithm_2_as_printed() -> None:
    """Node by node, with m and the corrected gradient (17), for a constant learning rate."""
    net, problem, gamma, beta = topology.mesh(8), Problem(8), 0.05, 0.9
    got = library_trajectory(
        "decentlam", net, problem.start(), problem.torch_gradient, gamma, momentum=beta
    )
    x, m = [row.copy() for row in problem.x0], [np.zeros(3) for _ in range(8)]
    for k in range(STEPS):
        gradient = problem.gradient(np.array(x), k)
        corrected = [
            x[i] / gamma
            - sum(w * (x[j] - gamma * gradient[j]) for j, w in net.row(i).items()) / gamma
            for i in range(8)
        ]
        m = [beta * m[i] + corrected[i] for i in range(8)]
        x = [x[i] - gamma * m[i] for i in range(8)]
        np.testing.assert_allclose(got[k], np.array(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("beta", [0.5, 0.9])
@pytest.mark.parametrize("name", ["mesh", "hypercube", "torus", "ring", "star", "complete"])
def test_decentlam_reaches_consensus_on_every_static_network(name: str, beta: float) -> None:
    """Without gradients an eigenvalue w of W gives z^2 - (w + beta) z + beta = 0, stable for every
    w in (-1, 1). Looking ahead with Nesterov is stable for w > -1 / (1 + 2 beta) only."""
    net = topology.TOPOLOGIES[name](16)
    smallest = net.eigenvalues()[-1].item()
    for nesterov in (False, True) if smallest > -1 / (1 + 2 * beta) else (False,):
        nodes = Nodes("decentlam", net, Problem(16).start(), beta, nesterov=nesterov)
        for _ in range(600):
            nodes.step(torch.zeros_like(nodes.x), 0.1)
        assert nodes.consensus_distance() < 1e-8


def test_biases_on_quadratics_are_the_closed_forms() -> None:
    """Fixed points: (I - W) x = -lr W grad(x) for DSGD and DecentLaM, (1 - beta)(I - W) x = the
    same for DmSGD: momentum multiplies DmSGD's bias and leaves DecentLaM's alone."""
    net, problem, lr, beta = topology.ring(5), Problem(5, common_curvature=True), 0.05, 0.8
    W, A, d = net.weights().numpy(), problem.A[0], problem.A.shape[1]
    problem.noise[:] = 0

    def fixed_point(shrink: float) -> np.ndarray:
        # vec by rows: (shrink (I - W) (x) I + lr W (x) A) x = lr (W (x) I) b
        left = shrink * np.kron(np.eye(5) - W, np.eye(d)) + lr * np.kron(W, A)
        return np.linalg.solve(left, lr * (W @ problem.b).reshape(-1)).reshape(5, d)

    for name, shrink in (("dsgd", 1.0), ("decentlam", 1.0), ("dmsgd", 1 - beta)):
        x = decentlam.simulate(
            name, net, problem.start(), problem.torch_gradient, lr, 3000, momentum=beta
        )
        np.testing.assert_allclose(x, fixed_point(shrink), rtol=0, atol=1e-9)
