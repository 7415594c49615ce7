"""`decentlam algorithms`, `topologies` and `recipes`: what there is to choose from."""

from __future__ import annotations

from typing import Any

import typer

from decentlam.lab.terminal import Json, Nodes, print_json, print_table


def algorithms(as_json: Json = False) -> None:
    """List the methods and their recursions."""
    import dataclasses
    import sys

    from decentlam.algorithms import ALGORITHMS

    rows = []
    for name, constructor in ALGORITHMS.items():
        preset = getattr(constructor, "keywords", {})  # of a partial, as in pmsgd-lars
        cls: Any = getattr(constructor, "func", constructor)
        recursion = cls.__doc__.split("\n\n")[0].replace("\n", " ")
        rows.append(
            {
                "name": name,
                "recursion": recursion + "".join(f"  ({k} = {v})" for k, v in preset.items()),
                "summary": _first_line(sys.modules[cls.__module__]),
                "hyper_parameters": {f.name: f.default for f in dataclasses.fields(cls)} | preset,
            }
        )
    if as_json:
        return print_json(rows)
    for row in rows:
        typer.echo(f"{row['name']:<12}{row['summary']}\n{'':<12}{row['recursion']}")
    typer.echo("\nx: model, g: gradient, W: weights of the topology, +: after the step")


def topologies(nodes: Nodes = 8, as_json: Json = False) -> None:
    """List the topologies, with rho and messages for so many nodes."""
    from decentlam.topology import TOPOLOGIES
    from decentlam.topology.base import check_num_nodes

    check_num_nodes(nodes, "a list of topologies")
    rows = []
    for name, constructor in TOPOLOGIES.items():
        row: dict[str, Any] = dict.fromkeys(("name", "rho", "messages", "symmetric"))
        row |= {"name": name, "summary": _first_line(constructor)}
        try:
            network = constructor(nodes)
        except ValueError as error:  # so many nodes do not fit
            rows.append(row | {"note": str(error)})
            continue
        row |= {"rho": round(network.rho, 6), "messages": network.max_peers}
        rows.append(row | {"symmetric": network.symmetric, "note": network.description})
    if as_json:
        return print_json(rows)
    print_table([{key: row[key] for key in row if key != "note"} for row in rows])
    typer.echo(
        f"\nWith {nodes} nodes. rho: the share of the disagreement that a step keeps, smaller is "
        "faster; messages: the most that a node sends in a step."
    )


def recipes(as_json: Json = False) -> None:
    """List the recipes of `decentlam train`."""
    from decentlam.lab.recipes import RECIPES

    if as_json:
        return print_json({name: maker().as_json() for name, maker in RECIPES.items()})
    keys = ("data", "model", "nodes", "topology", "batch", "lr", "epochs", "schedule", "shards")
    print_table(
        [
            {"recipe": name, **{key: getattr(maker(), key) for key in keys}}
            for name, maker in RECIPES.items()
        ]
    )
    lines = [f"{name:<22}{_first_line(maker)}" for name, maker in RECIPES.items()]
    typer.echo("\n" + "\n".join(lines))


def _first_line(documented: Any) -> str:
    return str(documented.__doc__).strip().split("\n")[0]
