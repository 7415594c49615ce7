"""`decentlam simulate`: one method on the paper's linear regression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from decentlam.lab.names import ALGORITHMS, TOPOLOGIES
from decentlam.lab.terminal import (
    Json,
    Nodes,
    Seed,
    out_option,
    print_json,
    print_table,
)


def simulate(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(ALGORITHMS)}.")],
    network: Annotated[
        str, typer.Argument(metavar="TOPOLOGY", help=f"One of {', '.join(TOPOLOGIES)}.")
    ],
    nodes: Nodes = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.001,
    momentum: Annotated[float, typer.Option(help="beta of the method.")] = 0.8,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 600,
    seed: Seed = 0,
    out: Annotated[str | None, out_option("Plot the error to this PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Run one method on the paper's linear regression, with your own numbers."""
    from decentlam.analysis.stability import growth
    from decentlam.lab.studies.regression import (
        TARGET,
        closed_form_error,
        convergence,
        steps_to,
        trace,
    )
    from decentlam.lab.theory import linear_regression
    from decentlam.topology import resolve

    problem = linear_regression(nodes, seed=seed)
    topology = resolve(network, nodes)
    errors, x = trace(problem, method, topology, lr, momentum, steps)
    facts: dict[str, Any] = {
        "method": method,
        "topology": topology.name,
        "final_error": errors[-1],
        "closed_form": closed_form_error(problem, method, topology, lr, momentum),
        f"steps_to_{TARGET:g}": steps_to(errors, TARGET),
        "disagreement": (x - x.mean(0)).square().sum(1).mean().sqrt().item(),
    }
    warning = None
    rate = 0.0 if topology.static else growth(method, topology, momentum)
    if rate > 1:
        warning = (
            f"{method} with momentum {momentum:g} multiplies the disagreement by {rate:.3f} per "
            "step on these changing weights. Try less momentum, a static topology, or qg-dmsgd."
        )
    elif not errors[-1] <= errors[0]:
        warning = "The error grew. Try a smaller --lr or --momentum."
    if out is not None:
        from decentlam.lab.plot_style import save

        curve = [
            {"kind": "curve", "method": method, "step": step, "error": error}
            for step, error in enumerate(errors)
        ]
        save(convergence(curve, f"{topology!r}, lr {lr:g}, momentum {momentum:g}"), Path(out))
    if as_json:
        return print_json(facts | {"plot": out, "warning": warning})
    print_table([facts])
    if warning:
        typer.echo(f"\n{warning}")
    if out is not None:
        typer.echo(f"\nWrote {out}")
