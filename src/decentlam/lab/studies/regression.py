"""Figures 2 and 3: twelve methods on the paper's linear regression with full gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
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
    """Draw `methods`, all of them, and `figure3`, the paper's three with their closed forms."""
    figure, panels = plot_style.axes(2, (10.4, 4.8))
    for ax, title in zip(panels, ("The first 300 steps", "To the end"), strict=True):
        _draw_curves(ax, records)
        ax.set_title(title)
    panels[0].set(xlim=(0, 300), ylim=(3e-9, 2))
    panels[1].set_ylabel("")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    figures = {"methods": figure}
    paper = [r for r in records if r["method"] in ("dsgd", "dmsgd", "decentlam")]
    if paper:
        figures["figure3"] = convergence(paper, "DecentLaM: the speed of DmSGD, the bias of DSGD")
        figures["figure3"].axes[0].set_xlim(0, 400)
        _draw_limits(figures["figure3"].axes[0], paper)
    return figures


def convergence(records: Sequence[Record], title: str) -> Figure:
    """Draw one curve per method: relative error against steps."""
    figure, (ax,) = plot_style.axes(1, (6.4, 4.4))
    _draw_curves(ax, records)
    ax.set_title(title)
    ax.legend(fontsize=9, frameon=False)
    return figure


def _draw_curves(ax: Axes, records: Sequence[Record]) -> None:
    for method in dict.fromkeys(r["method"] for r in records):
        curve = [r for r in records if r["kind"] == "curve" and r["method"] == method]
        errors = [max(r["error"], _FLOOR) for r in curve]
        steps = [r["step"] for r in curve]
        ax.semilogy(steps, errors, label=plot_style.label(method), **plot_style.line(method))
    ax.set(xlabel="step", ylabel=_ERROR, xlim=(0, None))


def _draw_limits(ax: Axes, records: Sequence[Record]) -> None:
    """Draw a dotted line and its value at every fixed point; equal ones share a text."""
    limits = {r["method"]: r["closed_form"] for r in records if r["kind"] == "limit"}
    for value in dict.fromkeys(f"{limit:.6g}" for limit in limits.values() if limit):
        methods = [method for method, limit in limits.items() if limit and f"{limit:.6g}" == value]
        ax.axhline(float(value), color=plot_style.color(methods[-1]), linewidth=1, linestyle=":")
        ax.annotate(
            f"closed form of {' and '.join(map(plot_style.label, methods))}: {float(value):.4g}",
            (0.99, float(value)),
            xycoords=("axes fraction", "data"),
            xytext=(0, -10),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=8,
        )


_SUMMARY = "convergence and final bias of twelve methods on linear regression (Figures 2 and 3)"
STUDY = Study("regression", _SUMMARY, recipe, run, table, notes, figures)
