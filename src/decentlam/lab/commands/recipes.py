"""`decentlam recipes`: what `decentlam train` can train."""

from __future__ import annotations

import inspect

from decentlam.lab.terminal import Json, console, print_json, print_table


def recipes(as_json: Json = False) -> None:
    """List the recipes of `decentlam train`."""
    from decentlam.lab.recipes import RECIPES as MAKERS

    if as_json:
        return print_json({name: maker().as_json() for name, maker in MAKERS.items()})
    keys = ("data", "model", "nodes", "topology", "batch", "lr", "epochs", "schedule", "shards")
    rows = []
    for name, maker in MAKERS.items():
        values = maker().as_json()
        rows.append({"recipe": name, **{key: values[key] for key in keys}})
    print_table(rows)
    about = {name: (inspect.getdoc(maker) or "").split("\n")[0] for name, maker in MAKERS.items()}
    console().print("\n" + "\n".join(f"{name:<22}{text}" for name, text in about.items()))
