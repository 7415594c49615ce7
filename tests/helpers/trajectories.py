"""A noisy problem, the methods and networks it is solved with, and the library's trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.algorithms import ALGORITHMS, make

STEPS = 120

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
    ("decentlam-exact", {}),
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
ADAM_METHODS = ("adamw", "pmadamw")  # tests/algorithms/test_adamw.py has theirs
MOMENTUM_METHODS = [name for name in ALGORITHMS if name not in ("dsgd", *ADAM_METHODS)]


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
                        name,
                        hyper,
                        network,
                        nesterov,
                        lr,
                        id=f"{method_id((name, hyper))}-{label}",
                        # Between its zeros the other rate is constant, too.
                        marks=[pytest.mark.slow] if lr is constant and network != "mesh" else [],
                    )
