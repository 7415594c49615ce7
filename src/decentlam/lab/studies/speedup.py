"""Corollaries 1 and 2: with noisy gradients, n nodes get n times the progress per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from decentlam import Nodes
from decentlam.lab import plot_style
from decentlam.lab.studies.study import Record, Study, Tick, fitted_slope, silent
from decentlam.lab.theory import largest_momentum, lr_nonconvex, lr_strongly_convex
from decentlam.topology import resolve

# What each corollary bounds, and the slope of the bound in n; corollary 2's has a factor
# ln(n T^2) on top, which flattens it a little.
CRITERIA = {
    "corollary 1": ("mean of |grad f|² over steps", -0.5),
    "corollary 2": ("weighted mean of f - f* over steps", -1.0),
}


@dataclass(frozen=True)
class Speedup:
    """Diagonal quadratics, different on every node, on the graph that mixes most slowly."""

    methods: tuple[str, ...] = ("pmsgd", "dmsgd", "decentlam")
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    topology: str = "ring"
    momentum: float = 0.8
    steps: int = 4000
    runs: int = 16  # problems and noise of their own, side by side in the parameter dimension
    dim: int = 10
    sigma: float = 1.0
    b: float = 1.0
    seed: int = 0


def recipe(nodes: int | None = None, seed: int = 0, quick: bool = False) -> Speedup:
    """Return the study's values, with every power of two up to `nodes`."""
    largest = 32 if nodes is None else nodes
    if largest < 2:
        raise ValueError(f"speedup compares 1, 2, 4, ... nodes up to the given {largest}; try 32")
    counts = tuple(2**k for k in range(largest.bit_length()))
    return Speedup(nodes=counts, seed=seed, steps=1000 if quick else 4000)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """grad f_i(x) = H_i (x - x*) + pull_i for many problems side by side; curvatures in [mu, L]."""

    H: Tensor  # (n, runs * dim), like pull
    pull: Tensor
    x_star: Tensor  # (runs * dim,), like curvature
    curvature: Tensor  # of the nodes' average
    L: float = 2.5
    mu: float = 0.75


def diagonal(setting: Speedup, n: int) -> Diagonal:
    """Return curvatures from 1 to 2, a quarter more or less on a node; |pull_i|^2 averages b^2.

    Nodes i and i + n/2 deviate in opposite directions: their average has the same curvature for
    every n, and x* is its optimum.
    """
    draw = np.random.default_rng(setting.seed)
    size = setting.runs * setting.dim
    x_star = 0.3 * draw.standard_normal(size) / np.sqrt(setting.dim)
    spread, pull = np.zeros((n, size)), np.zeros((n, size))
    if n > 1:
        spread[: n // 2] = draw.uniform(-0.25, 0.25, (n // 2, size))
        pull[: n // 2] = draw.standard_normal((n // 2, size))
        spread[n // 2 :], pull[n // 2 :] = -spread[: n // 2], -pull[: n // 2]
        pull *= setting.b / np.sqrt(setting.dim * (pull**2).mean())
    curvature = np.tile(np.linspace(1, 2, setting.dim), setting.runs)
    tensor = torch.from_numpy
    return Diagonal(
        tensor(curvature * (1 + spread)), tensor(pull), tensor(x_star), tensor(curvature)
    )


def run(setting: Speedup, tick: Tick = silent) -> list[Record]:
    records: list[Record] = []
    total = len(setting.nodes) * len(CRITERIA)
    for n in setting.nodes:
        for corollary in CRITERIA:
            tick(len(records) // len(setting.methods), total, f"{corollary}, n = {n}")
            records += measure(setting, corollary, n)
    tick(total, total, "done")
    return records


def measure(setting: Speedup, corollary: str, n: int) -> list[Record]:
    """Run all methods side by side on the same noise, with the corollary's learning rate."""
    problem = diagonal(setting, n)
    T, beta = setting.steps, setting.momentum
    if corollary == "corollary 1":
        lr, decay = lr_nonconvex(n, T, setting.sigma, beta), 1.0
        scale = problem.curvature.square()
    else:
        lr = lr_strongly_convex(n, T, problem.L, problem.mu, beta)
        decay = 1 - lr * problem.L * problem.mu / (2 * (1 - beta) * (problem.L + problem.mu))
        scale = problem.curvature / 2
    network = resolve(setting.topology, n)
    start = torch.zeros_like(problem.H)
    nodes = {method: Nodes(method, network, start, beta) for method in setting.methods}
    sums = {method: torch.zeros(setting.runs, dtype=torch.float64) for method in nodes}
    for step in range(T):
        noise = np.random.default_rng([setting.seed, n, step]).standard_normal(start.shape)
        pull = problem.pull.add(torch.from_numpy(noise), alpha=setting.sigma / setting.dim**0.5)
        for method, node in nodes.items():
            error = scale * (node.x.mean(0) - problem.x_star).square()
            # The weights h_k = decay^-k of Theorem 2, relative to the last one: no overflow.
            sums[method].mul_(decay).add_(error.view(setting.runs, -1).sum(1))
            node.step(torch.addcmul(pull, problem.H, node.x - problem.x_star), lr)
    weight = T if decay == 1 else (1 - decay**T) / (1 - decay)
    return [
        {
            "corollary": corollary,
            "method": method,
            "nodes": n,
            "lr": lr,
            "rho": network.rho,
            "criterion": CRITERIA[corollary][0],
            "bound_slope": CRITERIA[corollary][1],
            "errors": (sums[method] / weight).tolist(),
        }
        for method in setting.methods
    ]


def table(records: Sequence[Record]) -> list[Record]:
    rows = []
    for corollary in dict.fromkeys(r["corollary"] for r in records):
        for method in dict.fromkeys(r["method"] for r in records):
            mine = [r for r in records if (r["corollary"], r["method"]) == (corollary, method)]
            means = [float(np.mean(r["errors"])) for r in mine]
            rows.append(
                {
                    "corollary": corollary,
                    "method": method,
                    "fitted_slope": fitted_slope([r["nodes"] for r in mine], means),
                    "slope_of_the_bound": mine[0]["bound_slope"],
                    f"error_with_{mine[0]['nodes']}": means[0],
                    f"error_with_{mine[-1]['nodes']}": means[-1],
                    "relative_spread": float(np.std(mine[-1]["errors"]) / means[-1]),
                }
            )
    return rows


def notes(setting: Speedup, records: Sequence[Record]) -> list[str]:
    first, last = setting.nodes[0], setting.nodes[-1]
    log_slope = np.log(np.log(last * setting.steps**2) / np.log(first * setting.steps**2))
    log_slope /= np.log(last / first)
    momentum = largest_momentum(records[-1]["rho"])
    return [
        f"{setting.runs} runs of {setting.steps} steps, {setting.topology}, momentum "
        f"{setting.momentum:g}, sigma {setting.sigma:g}, b {setting.b:g}, seed {setting.seed}; the "
        "error is that of the nodes' average. Corollary 1 bounds the "
        f"{CRITERIA['corollary 1'][0]}, corollary 2 the {CRITERIA['corollary 2'][0]}.",
        f"Corollary 2's bound is ln(n T^2) / (n T): with its logarithm the slope is "
        f"{-1 + log_slope:.3f}.",
        "The learning rates are the corollaries'. Their theorems also ask for W positive definite "
        f"and, with {last} nodes, a momentum of at most {momentum:.2g}, which the paper's own "
        "experiments do not respect either.",
    ]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw a panel per corollary: the error against n, mean and spread over runs, and the bound."""
    corollaries = list(dict.fromkeys(r["corollary"] for r in records))
    figure, panels = plot_style.axes(len(corollaries), (9.6, 4.2))
    for ax, corollary in zip(panels, corollaries, strict=True):
        here = [r for r in records if r["corollary"] == corollary]
        methods = list(dict.fromkeys(r["method"] for r in here))
        for place, method in enumerate(methods):
            mine = [r for r in here if r["method"] == method]
            shift = 1.05 ** (place - (len(methods) - 1) / 2)  # side by side, not on one another
            n = [r["nodes"] * shift for r in mine]
            means, spread = ([f(r["errors"]) for r in mine] for f in (np.mean, np.std))
            ax.plot(n, means, **plot_style.line(method))
            ax.errorbar(
                n,
                means,
                spread,
                capsize=2,
                label=plot_style.label(method),
                **plot_style.points(method),
            )
        counts = sorted({r["nodes"] for r in here})
        slope, first = here[0]["bound_slope"], float(np.mean(here[0]["errors"]))
        bound = [first * (n / counts[0]) ** slope for n in counts]
        ax.plot(counts, bound, color=plot_style.GREY, label=f"slope {slope:g}", **plot_style.GUIDE)
        ax.set(xscale="log", yscale="log", xlabel="nodes", ylabel=here[0]["criterion"])
        ax.set_title(f"{corollary.capitalize()}: error of the nodes' average")
        plot_style.plain_ticks(ax, counts)
        ax.legend(fontsize=9, frameon=False)
    return {"speedup": figure}


_SUMMARY = "how the error at a fixed number of steps falls with the number of nodes"
STUDY = Study("speedup", _SUMMARY, recipe, run, table, notes, figures)
