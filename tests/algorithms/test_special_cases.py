"""The cases in which a method is another one, or ends where a closed form says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import decentlam
from decentlam import topology
from decentlam.algorithms import Step
from decentlam.algorithms.steady import SteadyDecentLaM
from tests.helpers.trajectories import STEPS, Problem, constant, library_trajectory, with_zeros


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


@pytest.mark.parametrize("lr_ratio", [1.0, 0.5])
def test_the_steady_forms_update_is_the_same_in_both_precisions(lr_ratio: float) -> None:
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(10_000, generator=draw) * scale for scale in (1, 9, 1, 0.1, 0.1)]
    method, step = SteadyDecentLaM(0.9), Step(3, lr=1e-3, lr_ratio=lr_ratio)
    results = []
    for dtype in (torch.float32, torch.float64):
        x, g, mixed, v, s = (t.to(dtype, copy=True) for t in tensors)
        method.update(x, g, mixed, {"v": v, "s": s}, step)
        results.append((x, v, s))
    largest = max(t.abs().max().item() for t in tensors[::2])  # x, mixed, s
    for single, double in zip(*results, strict=True):
        assert (single - double).abs().max() < 4 * torch.finfo(torch.float32).eps * largest
