"""Propositions 2 and 3, Table 2: how the inconsistency bias grows with beta, lr, rho and b^2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decentlam import Nodes
from decentlam.lab.studies.common import where
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.theory import Quadratic, fixed_point, linear_regression
from decentlam.topology import Topology, resolve

# Each sweep's x-axis, and the power of it in the paper's orders. That of 1/(1-beta) depends on the
# method: Propositions 2 and 3, Table 2.
AXES = {"beta": "1/(1-beta)", "lr": "lr", "rho": "1/(1-rho)", "b2": "b^2"}
POWERS = {"lr": 2.0, "rho": 2.0, "b2": 1.0}
MOMENTUM_POWERS = {"dsgd": 0.0, "qg-dmsgd": 0.0, "decentlam": 0.0}  # of all others 2
FITTED_LRS = 3  # the slope in lr is fitted to this many of the smallest


@dataclass(frozen=True)
class Point:
    """One limit to measure."""

    sweep: str
    method: str
    topology: Topology
    lr: float
    beta: float
    factor: float = 1.0  # times b


@dataclass(frozen=True)
class Bias:
    """The paper's regression at learning rates small enough for the laws, which hold as lr -> 0."""

    methods: tuple[str, ...] = ("dmsgd", "awc-dmsgd", "da-dmsgd", "decentlam", "qg-dmsgd")
    nodes: int = 8
    topology: str = "mesh"
    momentum: float = 0.8
    betas: tuple[float, ...] = (0.6, 0.8, 0.9, 0.95)
    beta_lr: float = 1e-5
    lrs: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    rates: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)  # (1-t) I + t W: rho -> 1, the same graph
    rho_lr: float = 3e-5
    factors: tuple[float, ...] = (0.1, 1.0, 10.0)  # times b
    factor_lr: float = 1e-4
    tolerance: float = 1e-4  # a limit is reached when it moves less in one time constant
    seed: int = 0


def recipe(nodes: int = 8, seed: int = 0, quick: bool = False) -> Bias:
    if nodes < 4:
        raise ValueError(f"bias needs 4 nodes or more, got {nodes}: fewer form a complete graph")
    if not quick:
        return Bias(nodes=nodes, seed=seed)
    return Bias(
        methods=("dmsgd", "decentlam"),
        nodes=nodes,
        betas=(0.8, 0.9, 0.95),
        beta_lr=3e-5,
        lrs=(3e-5, 1e-4, 3e-4),
        rates=(1.0, 0.5, 0.25),
        rho_lr=1e-4,
        tolerance=1e-3,
        seed=seed,
    )


def points(setting: Bias) -> list[Point]:
    """Return all that the study measures. DSGD has no momentum: one point is the reference."""
    W = resolve(setting.topology, setting.nodes)
    lazier = [W.lazy(rate) if rate < 1 else W for rate in setting.rates]
    beta = setting.momentum
    found = [Point("beta", "dsgd", W, setting.beta_lr, 0.0)]
    for method in setting.methods:
        found += [Point("beta", method, W, setting.beta_lr, b) for b in setting.betas]
        found += [Point("lr", method, W, lr, beta) for lr in setting.lrs]
        found += [Point("rho", method, network, setting.rho_lr, beta) for network in lazier]
        found += [Point("b2", method, W, setting.factor_lr, beta, f) for f in setting.factors]
    return found


def run(setting: Bias, tick: Tick = silent) -> list[Record]:
    problem = linear_regression(setting.nodes, seed=setting.seed)
    todo = points(setting)
    records = []
    for done, point in enumerate(todo):
        tick(done, len(todo), f"{point.sweep}: {point.method} on {point.topology!r}")
        scaled = problem.with_heterogeneity(point.factor)
        records.append(record(scaled, point, *limit(scaled, point, setting.tolerance)))
    return records


def record(problem: Quadratic, point: Point, measured: float, steps: int) -> Record:
    """Return the measured limit beside the closed form and the paper's order and power."""
    closed = fixed_point(point.method, point.topology, problem, point.lr, point.beta)
    rho = point.topology.rho
    x = {"beta": 1 / (1 - point.beta), "lr": point.lr, "rho": 1 / (1 - rho), "b2": problem.b2}
    return {
        "sweep": point.sweep,
        "x": x[point.sweep],
        "power": POWERS.get(point.sweep, MOMENTUM_POWERS.get(point.method, 2.0)),
        "method": point.method,
        "topology": point.topology.name,
        "lr": point.lr,
        "beta": point.beta,
        "rho": rho,
        "b2": problem.b2,
        "measured": measured,
        "closed_form": problem.bias(closed),
        "steps": steps,
    }


def limit(problem: Quadratic, point: Point, tolerance: float) -> tuple[float, int]:
    """Return the bias, and the steps, when one more time constant moves the models no more."""
    start = problem.x_star.expand_as(problem.start)
    nodes = Nodes(point.method, point.topology, start, point.beta)
    # The slowest mode is the common one: the average moves by lr * curvature / (1-beta) per step.
    slowest = torch.linalg.eigvalsh(problem.hessians.mean(0))[0].item()
    chunk = int((1 - point.beta) / (point.lr * slowest) + 10 / (1 - point.beta))
    for _ in range(100):
        before = nodes.x.clone()
        for _ in range(chunk):
            nodes.step(problem.gradient(nodes.x), point.lr)
        moved, offset = (nodes.x - before).norm(), (nodes.x - problem.x_star).norm()
        if moved <= tolerance * offset:
            return problem.bias(nodes.x), nodes.index
    raise ValueError(f"{point} has not settled after {nodes.index} steps; try a smaller lr")


def table(records: Sequence[Record]) -> list[Record]:
    rows = []
    for sweep, axis in AXES.items():
        for method in dict.fromkeys(r["method"] for r in records if r["method"] != "dsgd"):
            mine = sorted(where(records, sweep=sweep, method=method), key=lambda r: r["x"])
            mine = mine[:FITTED_LRS] if sweep == "lr" else mine
            gaps = [abs(r["measured"] / r["closed_form"] - 1) for r in mine]
            x, y = ([r[key] for r in mine] for key in ("x", "measured"))
            rows.append(
                {
                    "bias_against": axis,
                    "method": method,
                    "measured_slope": float(np.polyfit(np.log(x), np.log(y), 1)[0]),
                    "order_in_the_paper": mine[0]["power"],
                    "largest_gap_to_closed_form": max(gaps),
                }
            )
    return rows


def notes(setting: Bias, records: Sequence[Record]) -> list[str]:
    def ratio(**values: object) -> float:
        closed = {r["method"]: r["closed_form"] for r in where(records, **values)}
        return float(closed["dmsgd"] / closed["decentlam"])

    beta = setting.betas[-1]
    law = 1 / (1 - setting.momentum) ** 2
    return [
        "The bias is (1/n) sum |x_i - x*|^2 in the limit of full gradients, reached by simulation "
        f"from x*, on the regression with n = {setting.nodes}, {setting.topology}, seed "
        f"{setting.seed}. The closed form solves the fixed point's linear system.",
        f"The laws hold as lr -> 0. DmSGD's bias over DecentLaM's, momentum {setting.momentum:g}: "
        + ", ".join(f"{ratio(sweep='lr', lr=lr):.3g} at lr {lr:g}" for lr in setting.lrs)
        + f"; 1/(1-beta)^2 is {law:.3g}. At momentum {beta:g} and lr {setting.beta_lr:g} it is "
        f"{ratio(sweep='beta', beta=beta):.3g}; 1/(1-beta)^2 is {1 / (1 - beta) ** 2:.3g}.",
        "The paper's orders are upper bounds. da-dmsgd stays below its own: an eigenvalue z of W "
        "contributes 1/(1 - beta z), which is 1/(1-beta) only for z near 1. In rho the slope is "
        "that of one graph at several rates; other graphs spread their eigenvalues differently.",
    ]


_SUMMARY = "how the inconsistency bias grows with momentum, lr, rho and b^2 (Propositions 2, 3)"
STUDY = Study("bias", _SUMMARY, recipe, run, table, notes)
