"""Which runs belong together: runs that differ only in the seed make one row and one line."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decentlam.algorithms import ALGORITHMS
from decentlam.lab import formatting, plot_style
from decentlam.lab.report.runs import Run

# What makes a problem another one: such runs are put side by side, not into one picture.
_PROBLEM = {
    "data": "{}",
    "model": "{}",
    "shards": "{} shards",
    "topology": "{}",
    "nodes": "{} nodes",
    "batch": "batch {}",
    "epochs": "{} epochs",
}
_FORMS = _PROBLEM | {"hyper": "{}"}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    index: int
    method: str
    detail: str  # settings besides the method in which the groups differ, in words
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return plot_style.label(self.method)

    @property
    def averaged(self) -> tuple[Run, ...]:
        """The runs behind the means: those that finished, or if none did, those on their way."""
        finished = tuple(run for run in self.runs if run.status == "finished")
        return finished or tuple(run for run in self.runs if run.status != "diverged")

    @property
    def apart(self) -> tuple[Run, ...]:
        """The other runs: shown, never part of a mean."""
        return tuple(run for run in self.runs if run not in self.averaged)

    def status(self) -> str:
        """Return how the runs ended: finished, or 2 finished, 1 diverged at step 310."""
        ends = Counter(sorted((run.ended for run in self.runs), key="finished".__ne__))
        return ", ".join(
            f"{count} {ended}" if len(ends) > 1 else ended for ended, count in ends.items()
        )


@dataclass(frozen=True)
class Setting:
    """One problem, and the groups that worked on it."""

    label: str  # in what it differs from the other settings; empty if it is the only one
    groups: tuple[Group, ...]


def collect(runs: Sequence[Run]) -> list[Setting]:
    """Return the runs by problem and by group, in the order of the methods."""
    settings = _collect(runs, tuple(_PROBLEM))
    lonely = all(len(setting.groups) == 1 for setting in settings)
    return _collect(runs, ()) if lonely else settings  # one method on many problems: one picture


def _collect(runs: Sequence[Run], problem: tuple[str, ...]) -> list[Setting]:
    varying = _varying(runs)
    problems: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_order):
        problems.setdefault(_words(run, varying & set(problem)), []).append(run)
    settings, index = [], itertools.count()
    for label, members in problems.items():
        inside = _varying(members)
        grouped: dict[str, list[Run]] = {}
        for run in members:
            grouped.setdefault(_key({**_fields(run), "seed": None}), []).append(run)
        groups = (
            Group(next(index), str(of[0].recipe["method"]), _words(of[0], inside), tuple(of))
            for of in grouped.values()
        )
        settings.append(Setting(label, tuple(groups)))
    return settings


def _varying(runs: Sequence[Run]) -> set[str]:
    """Return the fields in which the runs differ, besides method and seed."""
    names = {field for run in runs for field in _fields(run)} - {"method", "seed"}
    return {field for field in names if len({_key(_fields(run).get(field)) for run in runs}) > 1}


def _fields(run: Run) -> dict[str, Any]:
    """Return what tells runs apart: the recipe, and whether the nodes were simulated."""
    return {**run.recipe, "simulated": bool(run.info.get("simulated"))}


def _words(run: Run, names: set[str]) -> str:
    """Return the given settings of a run in words."""
    parts = []
    for field, value in _fields(run).items():
        if field == "simulated":
            text = "simulated" if value else "real processes"
        else:
            form = _FORMS.get(field, f"{field.replace('_', ' ')} {{}}")
            text = form.format(formatting.value_text(value))
        parts += [text] if text and field in names else []
    return ", ".join(parts)


def _order(run: Run) -> tuple[Any, ...]:
    fields = _fields(run)
    method = str(fields.pop("method"))
    methods = list(ALGORITHMS)
    place = methods.index(method) if method in methods else len(methods)
    seed = fields.pop("seed", 0)
    problem = [sortable(fields.get(field)) for field in _PROBLEM]
    rest = [(field, sortable(fields[field])) for field in sorted(fields)]
    return problem, place, method, rest, sortable(seed), str(run.directory)


def sortable(value: Any) -> tuple[bool, float, str]:
    if isinstance(value, (int, float)):
        return False, float(value), ""
    return True, 0.0, _key(value)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
