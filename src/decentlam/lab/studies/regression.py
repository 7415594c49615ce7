"""Figures 2 and 3: the ten methods on the paper's linear regression with full gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decentlam import ALGORITHMS, simulate
from decentlam.lab import plots
from decentlam.lab.problems import LinearRegression, linear_regression
from decentlam.lab.study import Record, Study, Tick, silent
from decentlam.lab.theory import fixed_point
from decentlam.topology import Topology, resolve

TARGET = 1e-4  # the relative error that "steps to" counts


@dataclass(frozen=True)
class Regression:
    """The setting of the paper's appendix; steps are whole windows of SlowMo (48)."""

    methods: tuple[str, ...] = tuple(ALGORITHMS)
    nodes: int = 8
    topology: str = "mesh"
    lr: float = 0.001
    momentum: float = 0.8
    steps: int = 1920
    rows: int = 50
    dim: int = 30
    noise: float = 0.01
    seed: int = 0
    # LARS makes every step lr * trust * |x| long, whatever the gradient. 2 moves x by 0.2 % per
    # step, 1 % with momentum; the usual 0.001 goes with learning rates of 1 and more.
    lars_trust: float = 2.0


def recipe(nodes: int | None = None, seed: int = 0, quick: bool = False) -> Regression:
    return Regression(nodes=8 if nodes is None else nodes, seed=seed, steps=480 if quick else 1920)


def run(setting: Regression, tick: Tick = silent) -> list[Record]:
    """A curve and a limit per method."""
    problem = linear_regression(
        setting.nodes, setting.rows, setting.dim, setting.noise, setting.seed
    )
    topology = resolve(setting.topology, setting.nodes)
    records: list[Record] = []
    for done, method in enumerate(setting.methods):
        tick(done, len(setting.methods), method)
        hyper = {"trust": setting.lars_trust} if method == "pmsgd-lars" else {}
        errors, _ = trace(
            problem, method, topology, setting.lr, setting.momentum, setting.steps, **hyper
        )
        records += [
            {"kind": "curve", "method": method, "step": step, "error": error}
            for step, error in enumerate(errors)
            if step <= 400 or step % 12 == 0
        ]
        limit = closed_form_error(problem, method, topology, setting.lr, setting.momentum)
        records.append(
            {
                "kind": "limit",
                "method": method,
                "final": errors[-1],
                "closed_form": limit,
                "steps_to_target": steps_to(errors, TARGET),
            }
        )
    tick(len(setting.methods), len(setting.methods), "done")
    return records


def trace(
    problem: LinearRegression,
    method: str,
    topology: Topology,
    lr: float,
    momentum: float,
    steps: int,
    gradient: Any = None,
    **hyper: Any,
) -> tuple[list[float], Tensor]:
    """The relative error before and after every step, steps + 1 numbers, and the last models."""
    errors = [problem.relative_error(problem.start)]
    x = simulate(
        method,
        topology,
        problem.start,
        gradient or problem.gradient,
        lr,
        steps,
        momentum,
        callback=lambda step, x: errors.append(problem.relative_error(x)),
        **hyper,
    )
    return errors, x


def closed_form_error(
    problem: LinearRegression, method: str, topology: Topology, lr: float, momentum: float
) -> float | None:
    """The relative error of the method's fixed point; None where it has none."""
    if method == "pmsgd-lars" or not topology.static:
        return None
    q = problem.quadratic
    x = fixed_point(method, topology, q.hessians, q.linear, lr, momentum)
    return problem.relative_error(x)


def steps_to(errors: Sequence[float], target: float) -> int | None:
    """The first step after which the error stays below `target`; errors[0] is the start."""
    above = [step for step, error in enumerate(errors) if not error < target]
    first = above[-1] + 1 if above else 0
    return first if first < len(errors) else None


def table(records: Sequence[Record]) -> list[Record]:
    return [
        {
            "method": r["method"],
            "final_error": r["final"],
            "closed_form": r["closed_form"],
            f"steps_to_{TARGET:g}": r["steps_to_target"],
        }
        for r in records
        if r["kind"] == "limit"
    ]


def notes(setting: Regression, records: Sequence[Record]) -> list[str]:
    return [
        f"Relative error (1/n) sum |x_i - x*|^2 / |x*|^2 after {setting.steps} steps, n = "
        f"{setting.nodes}, {setting.topology}, lr {setting.lr:g}, momentum {setting.momentum:g}, "
        f"seed {setting.seed}, all nodes start at 0.",
        "The closed form solves the linear system of the method's fixed point; slowmo's is that of "
        "a whole window. d2-dmsgd and pmsgd have no bias: their final error is round-off.",
        f"pmsgd-lars has no fixed point. It runs with trust {setting.lars_trust:g}, so that a step "
        f"is {setting.lr * setting.lars_trust:.2%} of |x| long, and ends within such steps of x*.",
    ]


STUDY = Study(
    name="regression",
    summary="convergence and final bias of the ten methods on linear regression (Figures 2 and 3)",
    recipe=recipe,
    run=run,
    table=table,
    notes=notes,
    figures=plots.regression,
)
