"""`decentlam topology`: one of them in numbers, and as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decentlam.lab.names import TOPOLOGIES
from decentlam.lab.terminal import Json, Nodes, out_option, print_json, print_table
from decentlam.lab.values import show

if TYPE_CHECKING:
    from decentlam.topology import Topology

_SHOWN_UP_TO = 12  # nodes; larger matrices are for --json
_ORACLE_UP_TO = 128  # nodes; for more, `decentlam.growth` answers for one method in seconds
_STEPS_UP_TO = 16  # nodes; of more, the largest lr takes long
_MOMENTUM = 0.9
_SPREAD = (0.01, 1.0)  # curvatures of nodes that differ, next to 1 for all


def topology(
    name: Annotated[
        str, typer.Argument(metavar="TOPOLOGY", help=f"One of {', '.join(TOPOLOGIES)}.")
    ],
    nodes: Nodes = 8,
    steps: Annotated[int, typer.Option(help="Show this many steps; weights may change.")] = 1,
    lazy: Annotated[
        float | None, typer.Option(metavar="T", help="Mix at rate T: (1-T) I + T W.")
    ] = None,
    out: Annotated[str | None, out_option("Draw the graph to this PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Show a topology: weights, spectrum, messages; draw it with --out."""
    from decentlam.topology import resolve

    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    network = resolve(name, nodes)
    network = network if lazy is None else network.lazy(lazy)
    facts = {
        "name": network.name,
        "description": network.description,
        "nodes": network.num_nodes,
        "period": network.period,  # None: random at every step
        "rho": network.rho,
        "spectral_gap": 1.0 - network.rho,
        "exact_after": network.exact_after,  # steps; None: never
        "symmetric": network.symmetric,
        "doubly_stochastic": network.doubly_stochastic,
        "positive_definite": network.positive_definite,
    }
    shown = [_step(network, step) for step in range(steps)]
    methods = _methods(network) if nodes <= _ORACLE_UP_TO else []
    if out is not None:
        from decentlam.lab.plot_style import save
        from decentlam.lab.topology_drawing import draw

        facts["drawing"] = str(save(draw(network, steps if steps > 1 else None), Path(out)))
    if as_json:
        return print_json(facts | {"steps": shown, "methods": methods})
    typer.echo("\n".join(f"{key.replace('_', ' '):<18} {show(v)}" for key, v in facts.items()))
    for step in shown:
        values = " ".join(f"{value:.4g}" for value in step["eigenvalues"][:_SHOWN_UP_TO])
        more = " ..." if nodes > _SHOWN_UP_TO else ""
        typer.echo(f"\nstep {step['step']}: a node sends {step['messages']} messages")
        typer.echo(f"eigenvalues        {values}{more}")
        if nodes <= _SHOWN_UP_TO:
            for row in step["weights"]:
                typer.echo("".join(f"{w:7.3f}" if w else "      ." for w in row))
    if methods:
        typer.echo(f"\nMethods at momentum {_MOMENTUM:g}:")
        print_table(methods)
        typer.echo(
            "growth: of the disagreement per step, above 1 diverges; bias: of DSGD's disagreement; "
            "largest lr h: of lr times curvature; spread: with curvatures from h / 100 on node 0 "
            "to h on the last (-: not computed for random weights and for many nodes)."
        )


def _step(network: Topology, step: int) -> dict[str, Any]:
    """Return the weights of a step, its eigenvalues (moduli, if complex), the most messages."""
    values = network.eigenvalues(step)
    return {
        "step": step,
        "messages": int(network.messages(step).max()),
        "eigenvalues": (values.abs() if values.is_complex() else values).tolist(),
        "weights": network.weights(step).tolist(),
    }


def _methods(network: Topology) -> list[dict[str, Any]]:
    """Return what is known of every method on this network."""
    from decentlam.algorithms import ALGORITHMS, make
    from decentlam.analysis.stability import growth, largest_step

    rows = []
    for name in ALGORITHMS:
        method = make(name, _MOMENTUM)
        if name == "pmsgd-lars" or (method.needs_symmetric and not network.symmetric):
            continue
        found = growth(method, network)
        small = network.num_nodes <= _STEPS_UP_TO
        apart = small and network.period is not None
        rows.append(
            {
                "method": name,
                "growth": round(found, 4),
                "bias": found.bias,  # None where it diverges
                "largest_lr_h": largest_step(method, network) if small else None,
                "spread": largest_step(method, network, curvature=_SPREAD) if apart else None,
            }
        )
    return rows
