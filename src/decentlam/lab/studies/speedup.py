"""Corollaries 1 and 2: with noisy gradients, n nodes get n times the progress per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decentlam import Nodes
from decentlam.lab import plots
from decentlam.lab.study import Record, Study, Tick, fitted_slope, silent
from decentlam.theory import lr_nonconvex, lr_strongly_convex
from decentlam.topology import resolve

# What each corollary bounds, and the slope of the bound in n. Corollary 2's has a factor
# ln(n T^2) on top, which flattens the slope a little.
CRITERIA = {
    "corollary 1": ("mean over steps of |grad f|^2", -0.5),
    "corollary 2": ("weighted mean over steps of f - f*", -1.0),
}


@dataclass(frozen=True)
class Speedup:
    """Diagonal quadratics with slightly different Hessians and optima on every node."""

    methods: tuple[str, ...] = ("pmsgd", "dmsgd", "decentlam")
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    topology: str = "symmetric-exponential"
    momentum: float = 0.8
    steps: int = 4000
    runs: int = 16  # independent noise, side by side in the parameter dimension
    dim: int = 10
    sigma: float = 1.0
    b: float = 1.0
    seed: int = 0


def recipe(nodes: int | None = None, seed: int = 0, quick: bool = False) -> Speedup:
    largest = nodes or 32
    counts = tuple(2**k for k in range(largest.bit_length()) if 2**k <= largest)
    if len(counts) < 2:
        raise ValueError(f"speedup compares numbers of nodes up to --nodes, got {largest}; try 32")
    return Speedup(nodes=counts, seed=seed, steps=1000 if quick else 4000)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """grad f_i(x) = H_i (x - x*) + pull_i, all (n, d); mean H and x* are the same for every n."""

    H: Tensor
    pull: Tensor
    x_star: Tensor

    @property
    def L(self) -> float:  # noqa: N802 (the paper's letter)
        return self.H.max().item()

    @property
    def mu(self) -> float:
        return self.H.min().item()


def diagonal(n: int, dim: int, b: float, seed: int) -> Diagonal:
    """Curvatures from 1 to 2, up to a quarter more or less on each node; |pull_i|^2 averages b^2."""
    draw = np.random.default_rng(seed)
    x_star = draw.standard_normal(dim) / np.sqrt(dim)
    spread, pull = draw.uniform(-0.25, 0.25, (n, dim)), draw.standard_normal((n, dim))
    spread, pull = spread - spread.mean(0), pull - pull.mean(0)
    if n > 1:
        pull *= b / np.sqrt((pull**2).sum(1).mean())
    H = np.linspace(1, 2, dim) * (1 + spread)
    return Diagonal(*(torch.from_numpy(a) for a in (H, pull, x_star)))


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
    """All methods side by side on the same noise, with the corollary's learning rate."""
    problem = diagonal(n, setting.dim, setting.b, setting.seed)
    T, beta = setting.steps, setting.momentum
    if corollary == "corollary 1":
        lr = lr_nonconvex(n, T, setting.sigma, beta)
        decay = 1.0
    else:
        lr = lr_strongly_convex(n, T, problem.L, problem.mu, beta)
        decay = 1 - lr * problem.L * problem.mu / (2 * (1 - beta) * (problem.L + problem.mu))
    H, pull, x_star = (t.tile(setting.runs) for t in (problem.H, problem.pull, problem.x_star))
    network = resolve(setting.topology, n)
    start = torch.zeros_like(H)
    nodes = {method: Nodes(method, network, start, beta) for method in setting.methods}
    sums = {method: torch.zeros(setting.runs, dtype=torch.float64) for method in nodes}
    curvature = problem.H.mean(0).tile(setting.runs)
    scale = curvature.square() if corollary == "corollary 1" else curvature / 2
    for step in range(T):
        noise = np.random.default_rng([setting.seed, n, step]).standard_normal(H.shape)
        noisy_pull = pull.add(torch.from_numpy(noise), alpha=setting.sigma / setting.dim**0.5)
        for method, node in nodes.items():
            error = scale * (node.x.mean(0) - x_star).square()
            # The weights h_k = decay^-k of Theorem 2, relative to the last one: no overflow.
            sums[method].mul_(decay).add_(error.view(setting.runs, -1).sum(1))
            node.step(torch.addcmul(noisy_pull, H, node.x - x_star), lr)
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
                    "fitted slope in n": fitted_slope([r["nodes"] for r in mine], means),
                    "slope of the bound": mine[0]["bound_slope"],
                    f"error at n = {mine[0]['nodes']}": means[0],
                    f"error at n = {mine[-1]['nodes']}": means[-1],
                    "spread over runs": float(np.std(mine[-1]["errors"]) / means[-1]),
                }
            )
    return rows


def notes(setting: Speedup, records: Sequence[Record]) -> list[str]:
    first, last = setting.nodes[0], setting.nodes[-1]
    log_slope = np.log(np.log(last * setting.steps**2) / np.log(first * setting.steps**2))
    log_slope /= np.log(last / first)
    return [
        f"{setting.runs} runs of {setting.steps} steps, {setting.topology}, momentum "
        f"{setting.momentum:g}, sigma {setting.sigma:g}, b {setting.b:g}, seed {setting.seed}; the "
        "error is that of the nodes' average. Corollary 1 bounds the "
        f"{CRITERIA['corollary 1'][0]}, corollary 2 the {CRITERIA['corollary 2'][0]}.",
        f"Corollary 2's bound is ln(n T^2) / (n T): with its logarithm the slope is "
        f"{-1 + log_slope:.3f}.",
        "The learning rates are the corollaries'. Their theorems also ask for a momentum far below "
        f"{setting.momentum:g} and a larger number of steps (see decentlam.theory); the paper's "
        "experiments do not respect that either.",
    ]


STUDY = Study(
    name="speedup",
    summary="how the error at a fixed number of steps falls with the number of nodes",
    recipe=recipe,
    run=run,
    table=table,
    notes=notes,
    figures=plots.speedup,
)
