"""`decentlam algorithms`: the methods and their recursions."""

from __future__ import annotations

from decentlam.lab.terminal import Json, console, print_json


def algorithms(as_json: Json = False) -> None:
    """List the methods and their recursions."""
    from decentlam.lab.commands import catalogue

    rows = catalogue.algorithms()
    if as_json:
        return print_json(rows)
    for row in rows:
        console().print(f"{row['name']:<12}{row['summary']}\n{'':<12}{row['recursion']}")
    console().print("\nx: model, g: gradient, W: weights of the topology, +: after the step")
