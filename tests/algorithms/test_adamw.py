"""AdamW and PmAdamW: by hand, beside float64 loops of their own, and beside torch.optim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import decentlam
from decentlam import topology
from decentlam.algorithms.turns import TURNS, parts
from tests.helpers.trajectories import constant, library_trajectory, with_zeros

LAYERS = [20, 3, 17]


class Noisy:
    """Gradients of n nodes that point elsewhere, with noise, in d variables."""

    def __init__(self, n: int, d: int = sum(LAYERS)) -> None:
        random = np.random.default_rng(n)
        self.h, self.b = random.uniform(0.2, 2.0, (n, d)), random.normal(size=(n, d))
        self.noise = 0.3 * random.normal(size=(60, n, d))
        self.x0 = np.tile(random.normal(size=d), (n, 1))

    def __call__(self, x: np.ndarray, k: int) -> np.ndarray:
        return self.h * x - self.b + self.noise[k % 60]


def by_the_equations(
    problem: Noisy,
    network: topology.Topology,
    lr,
    steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    shared: bool = True,
) -> np.ndarray:
    """Return x after every step, (steps, n, d), with nothing of the library but the weights."""
    b1, b2 = betas
    c = min(2 * (1 - b1), 0.5)
    mu = 4 * b1 * (1 - c) / (1 + b1 * (1 - c)) ** 2
    x = problem.x0.copy()
    v, s, V = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    before, seen = 0.0, []
    for k in range(steps):
        t, rate, W = k + 1, lr(k), network.weights(k).numpy()
        g = problem(x, k)
        r = 0.0 if rate == 0 else (rate / before if before else 1.0)
        V = b2 * V + (1 - b2) * g**2
        kept = b1 * (1 - b1 ** (t - 1)) / (1 - b1**t)
        u = r * kept * v + rate * (1 - kept) * g / (np.sqrt(V / (1 - b2**t)) + eps)
        z = x - rate * decay * x - u
        x = W @ z
        s = r * mu * s + (1 - mu) * (z - x)
        v = u + c * (z - x) + (1 - c) * s
        if shared:
            first = 0
            for size in LAYERS:
                turn = k % 17
                part = slice(first + turn * size // 17, first + (turn + 1) * size // 17)
                V[:, part] = W @ V[:, part]
                first += size
        before = rate
        seen.append(x.copy())
    return np.array(seen)


@pytest.mark.parametrize("lr", [constant, with_zeros], ids=["constant", "with zeros"])
@pytest.mark.parametrize("name", ["ring", "bipartite-random-match"])
def test_the_simulator_follows_the_equations(name: str, lr) -> None:
    problem, network = Noisy(6), topology.resolve(name, 6)
    more = {"beta2": 0.95, "eps": 1e-3}
    found = library_trajectory(
        "adamw", network, torch.from_numpy(problem.x0), _gradient(problem), lr, 60,
        momentum=0.8, weight_decay=0.1, layers=LAYERS, **more,
    )  # fmt: skip
    expected = by_the_equations(problem, network, lr, 60, (0.8, 0.95), 1e-3, decay=0.1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_second_moments_of_its_own() -> None:
    problem, network = Noisy(4), topology.ring(4)
    found = library_trajectory(
        "adamw", network, torch.from_numpy(problem.x0), _gradient(problem), constant, 40,
        layers=LAYERS, second_moment="local",
    )  # fmt: skip
    expected = by_the_equations(problem, network, constant, 40, shared=False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_one_node_runs_laprop() -> None:
    model = nn.Linear(5, 3).double()
    x = [p.detach().numpy().copy() for p in model.parameters()]
    m, V = [np.zeros_like(p) for p in x], [np.zeros_like(p) for p in x]
    optimizer = decentlam.AdamW(
        model.parameters(), lr=0.05, betas=(0.7, 0.9), eps=1e-4, weight_decay=0.3
    )
    for t in range(1, 31):
        lr = optimizer.param_groups[0]["lr"] = 0.05 / t
        optimizer.zero_grad()
        model(torch.full((2, 5), 0.1 * t).double()).square().sum().backward()
        for k, p in enumerate(model.parameters()):
            g = p.grad.numpy()
            V[k] = 0.9 * V[k] + 0.1 * g**2
            m[k] = 0.7 * m[k] + 0.3 * g / (np.sqrt(V[k] / (1 - 0.9**t)) + 1e-4)
            x[k] = x[k] - lr * 0.3 * x[k] - lr * m[k] / (1 - 0.7**t)
        optimizer.step()
        for p, expected in zip(model.parameters(), x, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("lr", [lambda k: 0.05, lambda k: 0.05 * 0.97**k])
def test_equal_second_moments_make_the_average_follow_the_all_reduce(lr) -> None:
    """Gradients that differ in sign alone have equal squares."""
    n, d, steps = 8, 12, 50
    random = np.random.default_rng(0)
    size, sign = random.normal(size=(steps, 1, d)), random.choice([-1, 1], (steps, n, d))
    g = torch.from_numpy(size * sign)
    x = decentlam.simulate(
        "adamw", "bipartite-random-match", torch.ones(n, d).double(), lambda x, k: g[k], lr, steps,
        weight_decay=0.2,
    )  # fmt: skip
    mean, m, V = np.ones(d), np.zeros(d), np.zeros(d)
    for k in range(steps):
        t = k + 1
        V = 0.999 * V + 0.001 * size[k, 0] ** 2
        p = g[k].numpy().mean(0) / (np.sqrt(V / (1 - 0.999**t)) + 1e-8)
        m = 0.9 * m + 0.1 * p
        mean = mean * (1 - 0.2 * lr(k)) - lr(k) * m / (1 - 0.9**t)
    np.testing.assert_allclose(x.mean(0).numpy(), mean, rtol=0, atol=1e-12)
    assert x.std(0).max() > 1e-3  # the nodes did differ


def test_pmadamw_is_torchs_adamw_on_the_mean_gradient() -> None:
    problem, lr = Noisy(5), with_zeros
    found = library_trajectory(
        "pmadamw", topology.ring(5), torch.from_numpy(problem.x0), _gradient(problem), lr, 60,
        weight_decay=0.1, beta2=0.95, eps=1e-6,
    )  # fmt: skip
    p = nn.Parameter(torch.from_numpy(problem.x0[0].copy()))
    reference = torch.optim.AdamW([p], lr=1.0, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for k in range(60):
        reference.param_groups[0]["lr"] = lr(k)
        x = np.tile(p.detach().numpy(), (5, 1))
        p.grad = torch.from_numpy(problem(x, k).mean(0))
        reference.step()
        np.testing.assert_allclose(found[k], np.tile(p.detach().numpy(), (5, 1)), atol=1e-12)


def test_param_groups_have_betas_eps_and_decay_of_their_own() -> None:
    ours, theirs = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    theirs.load_state_dict(ours.state_dict())

    def groups(model: nn.Linear) -> list[dict]:
        return [
            {"params": [model.weight], "betas": (0.5, 0.9), "weight_decay": 0.4},
            {"params": [model.bias], "eps": 1e-2, "lr": 0.02, "weight_decay": 0.0},
        ]

    pair = (
        (ours, decentlam.PmAdamW(groups(ours), lr=0.1)),
        (theirs, torch.optim.AdamW(groups(theirs), lr=0.1)),
    )
    for _ in range(20):
        for model, optimizer in pair:
            optimizer.zero_grad()
            model(torch.ones(3, 4).double()).pow(2).sum().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_gradients_that_are_left_out_do_not_count() -> None:
    """A GradScaler leaves out the first ones as a rule: Adam's corrections must not see them."""
    runs = []
    for skipped in (0, 3):
        p = nn.Parameter(torch.ones(4).double())
        optimizer = decentlam.AdamW([p], lr=0.1, nonfinite="skip", weight_decay=0.1)
        for k in range(skipped):
            p.grad = torch.full_like(p, math.inf)
            optimizer.step()
            assert torch.equal(p, torch.ones(4).double()), k
        for k in range(5):
            p.grad = p.detach() * (k + 1)
            optimizer.step()
        runs.append(p.detach().clone())
    assert torch.equal(*runs)


def test_a_turn_is_the_same_however_parameters_are_cut() -> None:
    spans = [slice(0, 40), slice(40, 43), slice(43, 100)]
    for index in range(2 * TURNS):
        whole = _elements(parts(spans, slice(0, 100), index), 0)
        cut = [_elements(parts(spans, slice(a, a + 9), index), a) for a in range(0, 100, 9)]
        assert sorted(whole) == sorted(e for elements in cut for e in elements if e < 100)
    seen = [e for index in range(TURNS) for e in _elements(parts(spans, slice(0, 100), index), 0)]
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("n", [4, 8, 16])
def test_second_moments_become_equal_on_weights_that_repeat(n: int) -> None:
    """With 16 turns and a period of 2 or 4, an element would meet the same peer for ever."""
    network = topology.resolve("one-peer-hypercube", n)
    nodes = decentlam.Nodes("adamw", network, torch.zeros(n, 34).double())
    gradient = torch.arange(1.0, n + 1).double()[:, None].repeat(1, 34)
    for _ in range(1 + network.period * TURNS):
        nodes.step(gradient, 0.0)
        gradient = torch.zeros_like(gradient)
    second = nodes.state_dict()["state"]["exp_avg_sq"]
    assert second.min() > 0 and (second.std(0) / second.mean(0)).max() < 1e-14


def test_growth_is_that_of_the_momentum() -> None:
    for name in ("ring", "bipartite-random-match"):
        steady = decentlam.growth("decentlam-steady", name, 0.8, num_nodes=8)
        assert decentlam.growth("adamw", name, 0.8, num_nodes=8) == steady
    for lr in (0.5, 1.5):
        ours = decentlam.growth("adamw", "ring", 0.8, num_nodes=8, lr=lr, curvature=(0.1, 2.0))
        theirs = decentlam.growth(
            "decentlam-steady", "ring", 0.8, num_nodes=8, lr=0.2 * lr, curvature=(0.1, 2.0)
        )
        assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"betas": 0.9}, "betas must be a pair"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\)"),
        ({"eps": -1}, "eps .* must be a finite number"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number"),
        ({"second_moment": "factored"}, "second_moment must be 'slices' or 'local'"),
        ({"momentum": 0.9}, "first beta"),
        ({"amsgrad": True}, "amsgrad"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict, expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=expected):
        decentlam.AdamW([nn.Parameter(torch.zeros(2))], **{"lr": 0.1, **options})


def _gradient(problem: Noisy):
    return lambda x, k: torch.from_numpy(problem(x.numpy(), k))


def _elements(slices: list[slice], first: int) -> list[int]:
    return [first + k for s in slices for k in range(s.start, s.stop)]
