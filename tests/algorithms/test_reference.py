"""Every method against an independent reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from decentlam import topology
from decentlam.algorithms import Reach
from decentlam.simulation.simulate import Nodes
from tests.helpers.reference import Run, trajectory
from tests.helpers.trajectories import (
    METHODS,
    NETWORKS,
    STEPS,
    Problem,
    dense_weights,
    library_trajectory,
    method_id,
    reference_cases,
)


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
