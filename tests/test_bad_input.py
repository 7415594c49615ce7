"""What the user may get wrong: each error names what was given and what to do instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import decentlam
from decentlam import NonFiniteError, topology
from decentlam.algorithms import make
from decentlam.simulation.simulate import Nodes
from decentlam.topology import from_edges, from_weights

X0 = torch.zeros(4, 3, dtype=torch.float64)
HALF = [[0.5, 0.5], [0.5, 0.5]]


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


def optimizer(group: dict | None = None, **changes: Any) -> decentlam.DecentLaM:
    params = [{"params": [torch.nn.Parameter(torch.zeros(2))], **(group or {})}]
    return decentlam.DecentLaM(params, **{"lr": 0.1, **changes})


def bad_gradient(value: float, node: int, step: int) -> Callable:
    def gradient(x: torch.Tensor, k: int) -> torch.Tensor:
        g = torch.zeros_like(x)
        if k == step:
            g[node, 1] = value
        return g

    return gradient


def path(n: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(n - 1)]


# (what is wrong, the call, the exception, words that the message must contain: the thing given,
# and the cure)
CASES: list[tuple[str, Callable[[], object], type[Exception], list[str]]] = [
    # The number of nodes
    ("no nodes", lambda: topology.ring(0), ValueError, ["ring", "at least 1", "got 0"]),
    ("fewer", lambda: topology.star(-3), ValueError, ["star", "at least 1", "got -3"]),
    ("n a float", lambda: topology.mesh(8.0), TypeError, ["mesh", "whole number", "got 8.0"]),
    ("n a bool", lambda: topology.complete(True), TypeError, ["complete", "whole number", "True"]),
    ("n without end", lambda: topology.base_3(10**400), ValueError, ["at most 1,000,000 nodes"]),
    ("too many edges", lambda: topology.complete(200_000), ValueError, ["at most 5,000 nodes"]),
    ("n a name", lambda: topology.ring("8"), TypeError, ["ring", "whole number", "'8'"]),
    ("hypercube of 6", lambda: topology.hypercube(6), ValueError,
     ["power of two", "got 6", "4 or 8", "symmetric-exponential"]),
    ("pairs across bits of 6", lambda: topology.one_peer_hypercube(6), ValueError,
     ["one_peer_hypercube", "got 6", "4 or 8"]),
    ("topology for another n", lambda: run(topology=topology.ring(5)), ValueError,
     ["ring(5)", "5 nodes", "there are 4", "n = 4"]),
    # The user's weights
    ("asymmetric", lambda: from_weights([[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0.25, 0, 0.75]]),
     ValueError,
     ["not symmetric", "w[0, 1] = 0.5", "w[1, 0] = 0.25", "from_edges", "directed=True"]),
    ("rows", lambda: from_weights([[0.5, 0.4], [0.4, 0.5]]), ValueError,
     ["row 0", "sums to 0.9", "must sum to 1", "from_edges"]),
    ("float32 thirds", lambda: from_weights(topology.ring(5).weights().float()), ValueError,
     ["row", "1.00000003", "float64"]),
    ("columns", lambda: from_weights([[0.5, 0.5], [0.25, 0.75]], directed=True), ValueError,
     ["column", "0.75", "must sum to 1", "from_edges"]),
    ("negative", lambda: from_weights([[1.5, -0.5], [-0.5, 1.5]]), ValueError,
     ["weight [0, 1]", "-0.5", "negative", "from_edges"]),
    ("NaN weight", lambda: from_weights([[math.nan, 1], [1, 0]]), ValueError,
     ["NaN", "must be finite"]),
    ("infinite weight", lambda: from_weights([[math.inf, 1], [1, 0]]), ValueError,
     ["infinity", "must be finite"]),
    ("not square", lambda: from_weights(np.ones((2, 3)) / 3), ValueError,
     ["(2, 3)", "square (n, n)"]),
    ("a vector", lambda: from_weights([0.5, 0.5]), ValueError, ["(2,)", "square (n, n)"]),
    ("ragged", lambda: from_weights([[1.0], [0.5, 0.5]]), ValueError, ["square matrix of numbers"]),
    ("words", lambda: from_weights([["a"]]), ValueError, ["'a'", "square matrix of numbers"]),
    ("empty", lambda: from_weights(np.empty((0, 0))), ValueError, ["(0, 0)", "square (n, n)"]),
    ("disconnected weights", lambda: from_weights(np.kron(np.eye(2), HALF)), ValueError,
     ["disconnected", "node 0 never reaches 2, 3", "Add edges", "ring"]),
    ("swapping for ever", lambda: from_weights([[0, 1], [1, 0]]), ValueError,
     ["own model", "multiple of 2", "(W + I) / 2"]),
    ("going round for ever", lambda: from_weights(np.eye(3)[[1, 2, 0]], directed=True), ValueError,
     ["own model", "multiple of 3", "(W + I) / 2"]),
    ("matrix as topology", lambda: run(topology=torch.eye(4)), TypeError,
     ["Tensor", "from_weights"]),
    ("complex", lambda: from_weights(np.eye(2) * 1j), ValueError, ["real numbers", "complex"]),
    ("directed a word", lambda: from_weights(HALF, directed="no"), TypeError,
     ["directed", "True or False", "'no'"]),
    # The user's edges
    ("disconnected edges", lambda: from_edges(12, path(3)), ValueError,
     ["disconnected", "3, 4, 5, 6, 7, 8, 9, 10, ...", "Add edges"]),
    ("edge out of range", lambda: from_edges(3, [*path(3), (2, 3)]), ValueError,
     ["(2, 3)", "0 to 2", "raise n or drop"]),
    ("negative edge", lambda: from_edges(3, [*path(3), (-1, 0)]), ValueError,
     ["(-1, 0)", "0 to 2"]),
    ("self loop", lambda: from_edges(3, [*path(3), (1, 1)]), ValueError,
     ["(1, 1)", "itself", "leave it out"]),
    ("three ends", lambda: from_edges(3, [(0, 1, 2)]), ValueError, ["(0, 1, 2)", "pair"]),
    ("edge of floats", lambda: from_edges(3, [(0, 1.5)]), ValueError, ["(0, 1.5)", "pair of node"]),
    ("unknown rule", lambda: from_edges(3, path(3), weights="laplacian"), ValueError,
     ["'laplacian'", "metropolis-hastings", "uniform"]),
    ("uniform on a path", lambda: from_edges(3, path(3), weights="uniform"), ValueError,
     ["from 1 to 2", "same degree", "'metropolis-hastings'"]),
    # Asking a topology
    ("rank out of range", lambda: topology.ring(4).row(4), ValueError,
     ["ring(4)", "0 to 3", "no 4"]),
    ("negative rank", lambda: topology.ring(4).neighbors(-1), ValueError, ["0 to 3", "no -1"]),
    ("nobody to hear", lambda: topology.ring(4).listeners(9), ValueError, ["0 to 3", "no 9"]),
    ("negative step", lambda: topology.ring(4).weights(-1), ValueError,
     ["step", "0 or more", "got -1"]),
    ("step a vector", lambda: topology.ring(4).weights(torch.tensor([1.0, 2.0])), TypeError,
     ["step", "whole number", "tensor([1., 2.])"]),
    ("step a float", lambda: topology.one_peer_exponential(4).weights(0.5), TypeError,
     ["step", "whole number", "0.5"]),
    ("negative seed", lambda: topology.bipartite_random_match(4, seed=-1), ValueError,
     ["seed", "0 or more", "got -1"]),
    ("seed a float", lambda: topology.bipartite_random_match(4, seed=0.5), ValueError,
     ["seed", "whole number", "got 0.5"]),
    ("no rate", lambda: topology.ring(4).lazy(0), ValueError, ["rate", "(0, 1]", "got 0"]),
    ("too quick", lambda: topology.ring(4).lazy(1.5), ValueError, ["rate", "(0, 1]", "got 1.5"]),
    # Names
    ("unknown topology", lambda: run(topology="rings"), ValueError,
     ["'rings'", "choose from", "ring", "symmetric-exponential"]),
    ("unknown algorithm", lambda: run(algorithm="decentlamb"), ValueError,
     ["'decentlamb'", "choose from", "decentlam", "qg-dmsgd"]),
    ("algorithm a class", lambda: run(algorithm=decentlam.algorithms.DSGD), TypeError,
     ["name or an Algorithm", "got the class DSGD", "DSGD()", "dsgd"]),
    # Hyper-parameters
    ("unknown hyper-parameter", lambda: run(mu=0.5), ValueError,
     ["decentlam has no", "'mu'", "takes nesterov"]),
    ("nothing to set", lambda: run(algorithm="dsgd", nesterov=True), ValueError,
     ["dsgd has no", "'nesterov'", "takes none"]),
    ("momentum 1", lambda: run(momentum=1.0), ValueError, ["momentum", "[0, 1)", "got 1.0", "0.9"]),
    ("negative momentum", lambda: run(momentum=-0.1), ValueError,
     ["momentum", "[0, 1)", "got -0.1"]),
    ("momentum NaN", lambda: run(momentum=math.nan), ValueError, ["momentum", "[0, 1)", "nan"]),
    ("mu 1", lambda: make("qg-dmsgd", mu=1.0), ValueError, ["QGDmSGD", "mu", "[0, 1)", "got 1.0"]),
    ("momentum twice", lambda: run(momentum=0.9, beta=0.8), ValueError,
     ["momentum=0.9", "beta=0.8", "momentum only"]),
    ("set already", lambda: run(algorithm=make("dmsgd"), momentum=0.5), ValueError,
     ["DmSGD(", "already", "momentum", "constructor"]),
    ("set already too", lambda: make(make("dmsgd"), nesterov=True), ValueError,
     ["DmSGD(", "already", "nesterov", "constructor"]),
    ("tau 0", lambda: make("slowmo", tau=0), ValueError, ["SlowMo", "tau", ">= 1", "got 0"]),
    ("tau a float", lambda: make("slowmo", tau=2.0), ValueError, ["tau", "whole number", "2.0"]),
    ("slow momentum 1", lambda: make("slowmo", slow_beta=1), ValueError,
     ["slow_beta", "[0, 1)", "got 1"]),
    ("alpha 0", lambda: make("slowmo", alpha=0.0), ValueError, ["alpha", "above 0", "0.0", "1 is"]),
    ("unknown base", lambda: make("slowmo", base="adam"), ValueError,
     ["base", "'adam'", "dmsgd, local"]),
    ("unknown inner momentum", lambda: make("slowmo", inner_momentum="drop"), ValueError,
     ["inner_momentum", "'drop'", "keep, reset, average"]),
    ("trust 0", lambda: make("pmsgd-lars", trust=0), ValueError, ["trust", "above 0", "got 0"]),
    ("negative weight decay", lambda: run(weight_decay=-1e-4), ValueError,
     ["weight_decay", "0 or more", "-0.0001"]),
    ("weight decay NaN", lambda: run(weight_decay=math.nan), ValueError, ["weight_decay", "nan"]),
    ("weight decay infinite", lambda: optimizer(weight_decay=math.inf), ValueError,
     ["weight_decay", "finite", "inf"]),
    ("weight decay a bool", lambda: optimizer(weight_decay=True), ValueError,
     ["weight_decay", "number", "True"]),
    ("weight decay beyond float32", lambda: optimizer(weight_decay=1e308), ValueError,
     ["weight_decay", "at most 1e+18", "1e+308"]),
    ("clipping at a vector", lambda: optimizer(max_grad_norm=torch.ones(2)), ValueError,
     ["max_grad_norm", "above 0", "tensor([1., 1.])"]),
    ("message dtype a list", lambda: optimizer(message_dtype=[]), ValueError,
     ["message_dtype", "torch.bfloat16", "[]"]),
    ("weight decay of a group NaN", lambda: optimizer({"weight_decay": math.nan}), ValueError,
     ["weight_decay", "finite", "nan"]),
    ("weight decay of a group negative", lambda: optimizer({"weight_decay": -1}), ValueError,
     ["weight_decay", "0 or more", "-1"]),
    ("lr of a group", lambda: optimizer({"lr": -1}), ValueError, ["lr", "0 or more", "-1"]),
    ("trust infinite", lambda: make("pmsgd-lars", trust=math.inf), ValueError, ["trust", "inf"]),
    ("tau a bool", lambda: make("slowmo", tau=True), ValueError, ["tau", "whole number", "True"]),
    ("nesterov a word", lambda: optimizer(nesterov="no"), ValueError,
     ["DecentLaM", "nesterov", "True or False", "'no'"]),
    ("nesterov of a group", lambda: optimizer({"nesterov": "no"}), ValueError,
     ["nesterov", "True or False", "'no'"]),
    ("lars a number", lambda: make("pmsgd-lars", lars=1), ValueError, ["lars", "True or False"]),
    ("momentum a bool", lambda: run(momentum=False), ValueError, ["momentum", "[0, 1)", "False"]),
    # How it runs
    ("timeout a bool", lambda: optimizer(timeout_seconds=True), ValueError,
     ["timeout_seconds", "number above 0", "True"]),
    ("timeout infinite", lambda: optimizer(timeout_seconds=math.inf), ValueError,
     ["timeout_seconds", "at most 1e+08", "inf"]),
    ("clipping at True", lambda: optimizer(max_grad_norm=True), ValueError,
     ["max_grad_norm", "number above 0", "True"]),
    ("group a word", lambda: optimizer(process_group="x"), TypeError,
     ["process_group", "torch.distributed.ProcessGroup", "'x'"]),
    ("lr without end", lambda: optimizer(lr=10**400), ValueError, ["lr", "finite", "1000000"]),
    ("lr beyond writing", lambda: optimizer(lr=10**9999), ValueError, ["lr", "thousands of dig"]),
    # What does not go together
    ("directed decentlam", lambda: run(topology="one-peer-exponential"), ValueError,
     ["DecentLaM", "symmetric", "one-peer-exponential(4)", 'Try topology="symmetric-exponential"']),
    ("directed d2", lambda: run(algorithm="d2-dmsgd", topology="exponential"), ValueError,
     ["D2DmSGD", "symmetric", "exponential(4)", 'Try topology="symmetric-exponential"']),
    ("directed heavy ball",
     lambda: run(algorithm="awc-dmsgd", heavy_ball=True, topology="exponential"), ValueError,
     ["AWCDmSGD", "symmetric", "exponential(4)", 'Try topology="symmetric-exponential"']),
    # The run
    ("negative lr", lambda: run(lr=-0.1), ValueError, ["lr", "0 or more", "-0.1"]),
    ("lr NaN", lambda: run(lr=math.nan), ValueError, ["lr", "finite", "nan"]),
    ("lr infinite", lambda: run(lr=lambda k: math.inf), ValueError, ["lr", "finite", "inf"]),
    ("lr a word", lambda: run(lr="0.1"), ValueError, ["lr", "number", "'0.1'"]),
    ("negative steps", lambda: run(steps=-1), ValueError, ["steps", "0 or more", "-1"]),
    ("steps a float", lambda: run(steps=10.0), ValueError, ["steps", "whole number", "10.0"]),
    ("x0 of one node", lambda: run(x0=torch.zeros(4)), ValueError, ["x0", "(n, d)", "(4,)"]),
    ("x0 a list", lambda: run(x0=[[0.0]] * 4), ValueError, ["x0", "tensor", "list"]),
    ("x0 empty", lambda: run(x0=torch.zeros(4, 0)), ValueError, ["x0", "(n, d)", "(4, 0)"]),
    ("x0 of integers", lambda: run(x0=torch.zeros(4, 3, dtype=torch.int64)), ValueError,
     ["x0", "float32 or float64", "torch.int64", "x0.double()"]),
    ("x0 half", lambda: run(x0=torch.zeros(4, 3).half()), ValueError,
     ["torch.float16", "x0.double"]),
    ("gradient of one node", lambda: run(gradient=lambda x, k: x[0]), ValueError,
     ["gradient", "shape of x, (4, 3)", "got (3,)"]),
    ("gradient an array", lambda: run(gradient=lambda x, k: x.numpy()), ValueError,
     ["gradient", "(4, 3)", "got ndarray"]),
    ("gradient in float32", lambda: run(gradient=lambda x, k: x.float()), ValueError,
     ["gradient", "torch.float32", "torch.float64", "one precision"]),
    ("gradient NaN", lambda: run(gradient=bad_gradient(math.nan, node=2, step=1)), NonFiniteError,
     ["step 1", "node(s) [2]", "lower lr or momentum"]),
    ("gradient infinite", lambda: run(gradient=bad_gradient(-math.inf, node=3, step=0)),
     NonFiniteError, ["step 0", "node(s) [3]", "check the gradient function"]),
    ("layers too short", lambda: run(algorithm="pmsgd-lars", layers=[1, 1]), ValueError,
     ["layers [1, 1]", "add up to 2", "3 columns"]),
    ("layers too short, unused", lambda: run(layers=[1, 1]), ValueError,
     ["layers [1, 1]", "3 columns"]),
    ("layer of nothing", lambda: run(algorithm="pmsgd-lars", layers=[3, 0]), ValueError,
     ["layers [3, 0]", "at least one"]),
    ("adaptive too short",
     lambda: Nodes("pmsgd-lars", "ring", X0, layers=[1, 2], adaptive=[True]), ValueError,
     ["adaptive has 1", "2 layers", "one per layer"]),
    ("state of another method", lambda: Nodes("decentlam", "ring", X0).load_state_dict(
        Nodes("dmsgd", "ring", X0).state_dict()), ValueError,
     ["['m']", "DecentLaM", "['v']", "same model, algorithm"]),
    ("state of other nodes", lambda: Nodes("dmsgd", "ring", X0).load_state_dict(
        Nodes("dmsgd", "ring", X0[:3]).state_dict()), ValueError,
     ["(3, 3)", "(4, 3)", "same model, algorithm"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_refuses_with_what_was_given_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    for word in words:
        assert word in str(caught.value)


def test_the_run_that_the_cases_change_works() -> None:
    assert torch.equal(run(), X0)


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
