"""Simulated nodes: runs repeat, resume, and refuse what makes no sense."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import decentlam
from decentlam import NonFiniteError, topology
from decentlam.algorithms import ALGORITHMS, make
from decentlam.simulation.simulate import Nodes, column_blocks
from tests.helpers.refusals import Refusal, assert_refused, each_refused
from tests.helpers.trajectories import Problem

X0 = torch.zeros(4, 3, dtype=torch.float64)


def run(**changes: object) -> torch.Tensor:
    """A run that works, with one thing changed."""
    given: dict = {
        "algorithm": "decentlam",
        "topology": "ring",
        "x0": X0,
        "gradient": lambda x, k: x,
        "lr": 0.1,
        "steps": 3,
        **changes,
    }
    return decentlam.simulate(**given)


def bad_gradient(value: float, node: int, step: int) -> Callable:
    def gradient(x: torch.Tensor, k: int) -> torch.Tensor:
        g = torch.zeros_like(x)
        if k == step:
            g[node, 1] = value
        return g

    return gradient


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_precisions_stay_what_they_are_and_agree(name: str) -> None:
    problem = Problem(8)
    x0 = problem.start(equal=True)
    double, single = (
        decentlam.simulate(name, "ring", x0.to(dtype), problem.torch_gradient, 0.05, 50)
        for dtype in (torch.float64, torch.float32)
    )
    assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
    np.testing.assert_allclose(single.double(), double, rtol=0, atol=1e-4)


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


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ALGORITHMS
        if not make(name).layerwise and make(name).averaged_state is None  # which knows layers
    ],
)
def test_blocks_of_columns_do_not_change_the_run(name: str) -> None:
    """Wide models are stepped block by block; the same columns alone must give the same."""
    torch.manual_seed(0)
    x0, target = torch.randn(4, 200_000), torch.randn(4, 200_000)
    assert len(column_blocks(x0)) > 2 and sum(column_blocks(x0)) == 200_000
    wide = decentlam.simulate(name, "ring", x0, lambda x, k: x - target, 0.1, 3)
    tail = decentlam.simulate(name, "ring", x0[:, -500:], lambda x, k: x - target[:, -500:], 0.1, 3)
    np.testing.assert_allclose(wide[:, -500:], tail, rtol=0, atol=1e-6)


def test_a_refused_gradient_leaves_the_models_as_they_were() -> None:
    nodes = Nodes("decentlam", "ring", torch.randn(4, 3))
    nodes.step(torch.ones(4, 3), 0.1)
    before = nodes.state_dict()
    with pytest.raises(NonFiniteError):
        nodes.step(torch.full((4, 3), math.nan), 0.1)
    after = nodes.state_dict()
    assert torch.equal(after["x"], before["x"]) and after["step"] == before["step"]
    assert torch.equal(after["state"]["v"], before["state"]["v"])


def test_large_finite_gradients_pass_though_their_sum_overflows() -> None:
    nodes = Nodes("dsgd", "ring", torch.zeros(4, 3))
    nodes.step(torch.full((4, 3), 3e38), 1e-38)
    assert torch.isfinite(nodes.x).all()


REFUSALS: list[Refusal] = [
    ("topology for another n", lambda: run(topology=topology.ring(5)), ValueError,
     ["ring(5)", "5 nodes", "there are 4", "n = 4"]),
    ("matrix as topology", lambda: run(topology=torch.eye(4)), TypeError,
     ["Tensor", "from_weights"]),
    ("unknown topology", lambda: run(topology="rings"), ValueError,
     ["'rings'", "choose from", "ring", "symmetric-exponential"]),
    ("unknown algorithm", lambda: run(algorithm="decentlamb"), ValueError,
     ["'decentlamb'", "choose from", "decentlam", "qg-dmsgd"]),
    ("algorithm a class", lambda: run(algorithm=decentlam.algorithms.DSGD), TypeError,
     ["an Algorithm or one of", "DSGD'>: call it", "dsgd"]),
    ("unknown hyper-parameter", lambda: run(mu=0.5), ValueError,
     ["decentlam has no", "'mu'", "takes nesterov"]),
    ("nothing to set", lambda: run(algorithm="dsgd", nesterov=True), ValueError,
     ["dsgd has no", "'nesterov'", "takes none"]),
    ("momentum twice", lambda: run(momentum=0.9, beta=0.8), ValueError, ["no hyper", "'beta'"]),
    ("set already", lambda: run(algorithm=make("dmsgd"), momentum=0.5), ValueError,
     ["DmSGD(", "already", "momentum", "constructor"]),
    ("negative weight decay", lambda: run(weight_decay=-1e-4), ValueError,
     ["weight_decay", "0 or more", "-0.0001"]),
    ("directed decentlam", lambda: run(topology="one-peer-exponential"), ValueError,
     ["DecentLaM", "symmetric", "one-peer-exponential(4)", 'Try topology="symmetric-exponential"']),
    ("directed heavy ball",
     lambda: run(algorithm="awc-dmsgd", heavy_ball=True, topology="exponential"), ValueError,
     ["AWCDmSGD", "symmetric", "exponential(4)", 'Try topology="symmetric-exponential"']),
    ("negative lr", lambda: run(lr=-0.1), ValueError, ["lr", "0 or more", "-0.1"]),
    ("negative steps", lambda: run(steps=-1), ValueError, ["steps", "0 or more", "-1"]),
    ("steps a float", lambda: run(steps=10.0), ValueError, ["steps", "whole number", "10.0"]),
    ("x0 of one node", lambda: run(x0=torch.zeros(4)), ValueError, ["x0", "(n, d)", "(4,)"]),
    ("x0 a list", lambda: run(x0=[[0.0]] * 4), ValueError, ["x0", "tensor", "list"]),
    ("x0 of integers", lambda: run(x0=torch.zeros(4, 3, dtype=torch.int64)), ValueError,
     ["x0", "float32 or float64", "torch.int64", "x0.double()"]),
    ("gradient of one node", lambda: run(gradient=lambda x, k: x[0]), ValueError,
     ["gradient", "shape of x, (4, 3)", "got (3,)"]),
    ("gradient in float32", lambda: run(gradient=lambda x, k: x.float()), ValueError,
     ["gradient", "torch.float32", "torch.float64", "one precision"]),
    ("gradient NaN", lambda: run(gradient=bad_gradient(math.nan, node=2, step=1)), NonFiniteError,
     ["step 1", "node(s) [2]", "lower lr or momentum"]),
    ("layers too short", lambda: run(algorithm="pmsgd-lars", layers=[1, 1]), ValueError,
     ["layers [1, 1]", "add up to 2", "3 columns"]),
    ("layer of nothing", lambda: run(algorithm="pmsgd-lars", layers=[3, 0]), ValueError,
     ["layers [3, 0]", "at least one"]),
    ("state of another method", lambda: Nodes("decentlam", "ring", X0).load_state_dict(
        Nodes("dmsgd", "ring", X0).state_dict()), ValueError,
     ["['m']", "DecentLaM", "['v']", "same model, algorithm"]),
]  # fmt: skip


@each_refused(REFUSALS)
def test_refuses_with_what_was_given_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: list[str]
) -> None:
    assert_refused(call, kind, words)
