"""What there is to choose from, in words and numbers: methods, topologies, one topology."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

from decentlam import ALGORITHMS, TOPOLOGIES
from decentlam.algorithms import Algorithm, make
from decentlam.analysis.stability import growth, largest_step
from decentlam.lab.values import Record
from decentlam.topology import Topology
from decentlam.topology.check import check_num_nodes

_MATRIX_UP_TO = 64  # nodes; larger weight matrices are summarised
_ORACLE_UP_TO = 128  # nodes; for more, `decentlam.growth` answers for one method in seconds
_STEPS_UP_TO = 16  # nodes; of more, the largest lr takes long unless weights are static
_SPREAD = (0.01, 1.0)  # curvatures of nodes that differ, next to 1 for all


def algorithms() -> list[Record]:
    """Return name, recursion, a sentence and hyper-parameters of every method."""
    rows = []
    for name, constructor in ALGORITHMS.items():
        preset = getattr(constructor, "keywords", {})  # of a partial, as in pmsgd-lars
        cls: Any = getattr(constructor, "func", constructor)
        recursion = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        summary = (sys.modules[cls.__module__].__doc__ or "").split("\n")[0]
        recursion += "".join(f"  ({key} = {value})" for key, value in preset.items())
        hyper = {f.name: f.default for f in dataclasses.fields(cls)} | preset
        rows.append(
            {"name": name, "recursion": recursion, "summary": summary, "hyper_parameters": hyper}
        )
    return rows


def topologies(n: int) -> list[Record]:
    """Return name, a sentence, and rho and messages with n nodes; None where n does not fit."""
    check_num_nodes(n, "a list of topologies")
    rows = []
    for name, constructor in TOPOLOGIES.items():
        row: Record = {"name": name, "summary": (inspect.getdoc(constructor) or "").split("\n")[0]}
        try:
            network = constructor(n)
        except ValueError as error:
            row |= dict.fromkeys(("rho", "messages", "exact_after", "symmetric"))
            row |= {"note": str(error)}
        else:
            row |= {
                "rho": round(network.rho, 6),
                "messages": network.max_peers,
                "exact_after": network.exact_after,
                "symmetric": network.symmetric,
                "note": network.description,
            }
        rows.append(row)
    return rows


def topology(network: Topology, steps: int, message_bytes: int, momentum: float = 0.9) -> Record:
    """Return everything the library knows about a topology without training on it."""
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    return {
        "name": network.name,
        "description": network.description,
        "nodes": network.num_nodes,
        "period": network.period,
        "rho": network.rho,
        "exact_after": network.exact_after,
        "spectral_gap": network.spectral_gap,
        "symmetric": network.symmetric,
        "doubly_stochastic": network.doubly_stochastic,
        "positive_definite": network.positive_definite,
        "message_bytes": message_bytes,
        "steps": [_step(network, step, message_bytes) for step in range(steps)],
        "momentum": momentum,
        "methods": _methods(network, momentum) if network.num_nodes <= _ORACLE_UP_TO else [],
    }


def _methods(network: Topology, momentum: float) -> list[Record]:
    """Return what is known of every method on this network."""
    rows = []
    for name in ALGORITHMS:
        method = make(name, momentum)
        if name == "pmsgd-lars" or (method.needs_symmetric and not network.symmetric):
            continue
        found = growth(method, network)
        rows.append(
            {
                "method": name,
                "growth": round(found, 4),
                "bound": None if found.exact else [round(found.low, 4), round(found.high, 4)],
                "bias": found.bias,
                "gain": found.gain,
                "delay": found.delay,
                **_largest_steps(method, network),
            }
        )
    return rows


def _largest_steps(method: Algorithm, network: Topology) -> Record:
    """Return the largest stable lr h for equal curvatures, and for curvatures that differ."""
    small = network.num_nodes <= _STEPS_UP_TO
    alike = small or (network.static and network.symmetric and method.period == 1)
    apart = small and network.period is not None
    return {
        "largest_lr_h": largest_step(method, network) if alike else None,
        "largest_lr_h_spread": largest_step(method, network, curvature=_SPREAD) if apart else None,
    }


def _step(network: Topology, step: int, message_bytes: int) -> Record:
    sent = network.messages(step)
    total = network.bytes_sent(message_bytes, step)
    values = network.eigenvalues(step)
    w = network.sparse(step)
    small = network.num_nodes <= _MATRIX_UP_TO
    return {
        "step": step,
        "weights": network.weights(step).tolist() if small else None,
        "smallest_weight": float(w.values[w.values > 0].min()),
        "largest_weight": float(w.values.max()),
        "eigenvalues": values.abs().tolist() if values.is_complex() else values.tolist(),
        "eigenvalues_are": "moduli" if values.is_complex() else "real",
        "messages_per_node": {"fewest": sent.min().item(), "most": sent.max().item()},
        "bytes_per_node": {"fewest": total.min().item(), "most": total.max().item()},
    }


def describe(about: Record) -> str:
    """Return the description of one topology as text."""
    yes = {True: "yes", False: "no"}
    every = about["period"]
    change = {None: "random at every step", 1: "the same at every step"}
    exact = about["exact_after"]
    lines = [
        f"{about['name']}, {about['nodes']} nodes: {about['description']}",
        f"  weights            {change.get(every, f'repeat every {every} steps')}",
        f"  rho                {about['rho']:.6g}   spectral gap {about['spectral_gap']:.6g}",
        f"  exact average      {f'after {exact} steps' if exact else 'never'}",
        f"  symmetric          {yes[about['symmetric']]}",
        f"  doubly stochastic  {yes[about['doubly_stochastic']]}",
        f"  positive definite  {yes[about['positive_definite']]}",
    ]
    for step in about["steps"]:
        many = len(about["steps"]) > 1
        lines += ["", f"step {step['step']}"] if many else [""]
        lines += _step_lines(step, about["message_bytes"])
    if "drawing" in about:
        lines += ["", f"Wrote {about['drawing']}"]
    return "\n".join(lines)


METHODS_NOTE = (
    "growth: of the disagreement per step, above 1 diverges; bias: of DSGD's disagreement; gain, "
    "delay: how far the average moves per lr and gradient, and how many steps later; largest lr "
    "h: of lr times curvature; spread: with curvatures from h / 100 on node 0 to h on the last "
    "(-: not computed for random weights and for many nodes)."
)


def method_rows(rows: list[Record]) -> list[Record]:
    """Return the rows of the table of methods: bounds in words."""
    return [
        row
        | {
            "bound": "exact" if row["bound"] is None else "{:.4f} to {:.4f}".format(*row["bound"]),
            "bias": "diverges" if row["bias"] is None else f"{row['bias']:.3g}",
        }
        for row in rows
    ]


def _step_lines(step: Record, message_bytes: int) -> list[str]:
    few, many = step["messages_per_node"].values()
    low, high = (value / 1e6 for value in step["bytes_per_node"].values())
    values = [f"{value:.4g}" for value in step["eigenvalues"]]
    if len(values) > 12:
        values = [*values[:6], "...", *values[-3:]]
    kind = "|eigenvalues|" if step["eigenvalues_are"] == "moduli" else "eigenvalues"
    lines = [
        f"  messages per node  {few if few == many else f'{few} to {many}'}",
        f"  sent per node      {low:.6g}{'' if low == high else f' to {high:.6g}'} MB "
        f"with a model of {message_bytes / 1e6:.6g} MB",
        f"  {kind:<17}  {' '.join(values)}",
    ]
    matrix = step["weights"]
    if matrix is None or len(matrix) > 12:
        smallest, largest = step["smallest_weight"], step["largest_weight"]
        hint = " (--json has all)" if matrix else ""
        return [*lines, f"  weights            from {smallest:.4g} to {largest:.4g}{hint}"]
    rows = ["".join(f"{w:7.3f}" if w else "      ." for w in row) for row in matrix]
    return [*lines, "  W", *(f"  {row}" for row in rows)]
