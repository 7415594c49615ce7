"""`decentlam topology`: one of them in numbers, and as a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decentlam.lab.names import TOPOLOGIES
from decentlam.lab.terminal import Json, Nodes, console, one_of, out_option, print_json, print_table


def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TOPOLOGY", help="One of `decentlam topologies`.", callback=one_of(TOPOLOGIES)
        ),
    ],
    nodes: Nodes = 8,
    steps: Annotated[int, typer.Option(help="Show this many steps; weights may change.")] = 1,
    lazy: Annotated[
        float | None, typer.Option(metavar="T", help="Mix at rate T: (1-T) I + T W.")
    ] = None,
    message_bytes: Annotated[int, typer.Option(help="Size of the model.")] = 100_000_000,
    out: Annotated[str | None, out_option("Draw the graph to this PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Show a topology: weights, spectrum, messages; draw it with --out."""
    from decentlam.lab.commands import catalogue
    from decentlam.topology import resolve

    network = resolve(name, nodes)
    network = network if lazy is None else network.lazy(lazy)
    facts = catalogue.topology(network, steps, message_bytes)
    if out is not None:
        from decentlam.lab.plot_style import save
        from decentlam.lab.topology_drawing import draw

        facts["drawing"] = str(save(draw(network, steps if steps > 1 else None), Path(out)))
    if as_json:
        return print_json(facts)
    console().print(catalogue.describe(facts))
    if facts["methods"]:
        console().print(f"\nMethods at momentum {facts['momentum']:g}:")
        print_table(catalogue.method_rows(facts["methods"]))
        console().print(catalogue.METHODS_NOTE)
