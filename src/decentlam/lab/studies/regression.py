"""Figures 2 and 3: twelve methods on the paper's linear regression with full gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from decentlam import simulate
from decentlam.lab import plot_style
from decentlam.lab.studies.common import METHODS
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.theory import COUPLINGS, Quadratic, fixed_point, linear_regression
from decentlam.topology import Topology, resolve

TARGET = 1e-4  # the relative error that "steps to" counts
_ERROR = r"relative error: node mean of $\|x_i - x^*\|^2 \,/\, \|x^*\|^2$"
_FLOOR = 1e-32  # below round-off; a logarithmic axis has no zero


@dataclass(frozen=True)
class Regression:
    """The setting of the paper's appendix; steps are whole windows of SlowMo (48)."""

    methods: tuple[str, ...] = (*METHODS, "decentlam-steady", "gt-dmsgd")
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


def recipe(nodes: int = 8, seed: int = 0, quick: bool = False) -> Regression:
    return Regression(nodes=nodes, seed=seed, steps=480 if quick else 1920)


def run(setting: Regression, tick: Tick = silent) -> list[Record]:
    """Return a curve and a limit per method."""
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
    return records


def trace(
    problem: Quadratic,
    method: str,
    topology: Topology,
    lr: float,
    momentum: float,
    steps: int,
    **hyper: Any,
) -> tuple[list[float], Tensor]:
    """Return the relative error before and after every step, and the last models."""
    errors = [problem.relative_error(problem.start)]
    x = simulate(
        method,
        topology,
        problem.start,
        problem.gradient,
        lr,
        steps,
        momentum,
        callback=lambda step, x: errors.append(problem.relative_error(x)),
        **hyper,
    )
    return errors, x


def closed_form_error(
    problem: Quadratic, method: str, topology: Topology, lr: float, momentum: float
) -> float | None:
    """Return the relative error of the method's fixed point; None where it has none."""
    if method not in COUPLINGS or not topology.static:
        return None
    return problem.relative_error(fixed_point(method, topology, problem, lr, momentum))


def steps_to(errors: Sequence[float], target: float) -> int | None:
    """Return the first step after which the error stays below `target`; errors[0] is the start."""
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
        "The closed form solves the linear system of the method's fixed point. d2-dmsgd and pmsgd "
        "have no bias: their final error is round-off.",
        f"pmsgd-lars has no fixed point. It runs with trust {setting.lars_trust:g}, so that a step "
        f"is {setting.lr * setting.lars_trust:.2%} of |x| long, and ends within such steps of x*.",
    ]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw `methods`, all of them, and `figure3`, the paper's three."""
    paper = [r for r in records if r["method"] in ("dsgd", "dmsgd", "decentlam")]
    title = "DecentLaM: the speed of DmSGD, the bias of DSGD"
    return {
        "methods": convergence(records, "All methods"),
        "figure3": convergence(paper, title, 400),
    }


def convergence(records: Sequence[Record], title: str, steps: int | None = None) -> Figure:
    """Draw one curve per method: relative error against steps."""
    figure, (ax,) = plot_style.axes(1, (6.4, 4.4))
    for method in dict.fromkeys(r["method"] for r in records):
        curve = [r for r in records if r["kind"] == "curve" and r["method"] == method]
        errors = [max(r["error"], _FLOOR) for r in curve]
        x = [r["step"] for r in curve]
        ax.semilogy(x, errors, label=plot_style.label(method), **plot_style.line(method))
    ax.set(xlabel="step", ylabel=_ERROR, xlim=(0, steps), title=title)
    ax.legend(fontsize=9, frameon=False)
    return figure


_SUMMARY = "convergence and final bias of twelve methods on linear regression (Figures 2 and 3)"
STUDY = Study("regression", _SUMMARY, recipe, run, table, notes, figures)
