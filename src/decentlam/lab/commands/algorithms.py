"""`decentlam algorithms`: the methods and their recursions."""

from __future__ import annotations

from typing import Any

from decentlam.lab.terminal import Json, console, print_json


def algorithms(as_json: Json = False) -> None:
    """List the methods and their recursions."""
    import dataclasses
    import inspect
    import sys

    from decentlam.algorithms import ALGORITHMS

    rows = []
    for name, constructor in ALGORITHMS.items():
        preset = getattr(constructor, "keywords", {})  # of a partial, as in pmsgd-lars
        cls: Any = getattr(constructor, "func", constructor)
        recursion = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        recursion += "".join(f"  ({key} = {value})" for key, value in preset.items())
        rows.append(
            {
                "name": name,
                "recursion": recursion,
                "summary": (sys.modules[cls.__module__].__doc__ or "").split("\n")[0],
                "hyper_parameters": {f.name: f.default for f in dataclasses.fields(cls)} | preset,
            }
        )
    if as_json:
        return print_json(rows)
    for row in rows:
        console().print(f"{row['name']:<12}{row['summary']}\n{'':<12}{row['recursion']}")
    console().print("\nx: model, g: gradient, W: weights of the topology, +: after the step")
