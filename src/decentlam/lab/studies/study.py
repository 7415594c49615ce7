"""A study: recipe -> records -> table and figures, written to a run directory anyone can read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from decentlam.lab.plot_style import save
from decentlam.lab.values import Record as Record
from decentlam.lab.values import Tick as Tick
from decentlam.lab.values import plain, table_text
from decentlam.lab.versions import versions


@dataclass(frozen=True)
class Study:
    """A study as `decentlam reproduce` knows it; the functions after `run` are pure."""

    name: str
    summary: str
    recipe: Callable[..., Any]  # of the options of `reproduce`: a frozen value
    run: Callable[..., list[Record]]  # (recipe, tick), and directory where it is resumable
    table: Callable[[Sequence[Record]], list[Record]]
    notes: Callable[[Any, Sequence[Record]], list[str]]
    figures: Callable[[Sequence[Record]], Mapping[str, Figure]] = lambda records: {}
    resumable: bool = False  # keeps finished runs in the directory, and continues from there


@dataclass(frozen=True)
class Result:
    """The findings of a study, and the files they were written to."""

    recipe: Any
    table: list[Record]
    notes: list[str]
    files: list[Path]


def silent(done: int, total: int, what: str) -> None:
    """Ignore progress."""


def perform(study: Study, recipe: Any, directory: Path, tick: Tick = silent) -> Result:
    """Run the study and write recipe.json, records.jsonl, table.md and the figures."""
    directory.mkdir(parents=True, exist_ok=True)  # an error here costs no run
    try:
        where = {"directory": directory} if study.resumable else {}
        records = study.run(recipe, tick, **where)
    except BaseException:
        with suppress(OSError):  # not empty
            directory.rmdir()
        raise
    table, notes = study.table(records), study.notes(recipe, records)
    described = {
        "study": study.name,
        "recipe": plain(dataclasses.asdict(recipe)),
        "versions": versions(matplotlib=matplotlib.__version__),
    }
    files = {
        "recipe.json": json.dumps(described, indent=2) + "\n",
        "records.jsonl": "".join(json.dumps(plain(r), allow_nan=False) + "\n" for r in records),
        "table.md": table_text(table) + "".join(f"\n{note}\n" for note in notes),
    }
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    figures = [
        save(figure, directory / f"{name}.{kind}")
        for name, figure in study.figures(records).items()
        for kind in ("png", "svg")
    ]
    return Result(recipe, table, notes, [*(directory / name for name in files), *figures])
