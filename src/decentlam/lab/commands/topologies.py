"""`decentlam topologies`: who can talk to whom, and how fast they agree."""

from __future__ import annotations

from decentlam.lab.terminal import Json, Nodes, console, print_json, print_table


def topologies(nodes: Nodes = 8, as_json: Json = False) -> None:
    """List the topologies, with rho and messages for so many nodes."""
    from decentlam.lab.commands import catalogue

    rows = catalogue.topologies(nodes)
    if as_json:
        return print_json(rows)
    keys = ("name", "rho", "messages", "symmetric", "summary")
    print_table([{key: row[key] for key in keys} for row in rows])
    console().print(
        f"\nWith {nodes} nodes. rho: the share of the disagreement that a step keeps, smaller is "
        "faster; messages: the most that a node sends in a step."
    )
