"""`decentlam topologies`: who can talk to whom, and how fast they agree."""

from __future__ import annotations

from typing import Any

from decentlam.lab.terminal import Json, Nodes, console, print_json, print_table


def topologies(nodes: Nodes = 8, as_json: Json = False) -> None:
    """List the topologies, with rho and messages for so many nodes."""
    import inspect

    from decentlam.topology import TOPOLOGIES
    from decentlam.topology.base import check_num_nodes

    check_num_nodes(nodes, "a list of topologies")
    rows = []
    for name, constructor in TOPOLOGIES.items():
        row: dict[str, Any] = dict.fromkeys(("name", "rho", "messages", "symmetric"))
        row |= {"name": name, "summary": (inspect.getdoc(constructor) or "").split("\n")[0]}
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
    console().print(
        f"\nWith {nodes} nodes. rho: the share of the disagreement that a step keeps, smaller is "
        "faster; messages: the most that a node sends in a step."
    )
