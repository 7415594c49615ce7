"""Which runs belong together: runs that differ only in the seed make one row and one line."""

from __future__ import annotations

import json
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

    @property
    def finished(self) -> bool:
        return any(run.status == "finished" for run in self.runs)

    def status(self) -> str:
        """Return how the runs ended: finished, or 2 finished, 1 diverged at step 310."""
        ends = [_end_of(run) for run in self.runs]
        kinds = {kind: [where for k, where in ends if k == kind] for kind, _ in ends}
        order = sorted(kinds, key=lambda kind: (kind != "finished", kind))
        parts = []
        for kind in order:
            count = f"{len(kinds[kind])} " if len(order) > 1 else ""
            parts.append(
                f"{count}{kind}{' ' + formatting.listed(kinds[kind]) if all(kinds[kind]) else ''}"
            )
        return ", ".join(parts)


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
    settings: list[Setting] = []
    for label, members in problems.items():
        inside = _varying(members)
        grouped: dict[str, list[Run]] = {}
        for run in members:
            grouped.setdefault(_key({**_fields(run), "seed": None}), []).append(run)
        first = sum(len(setting.groups) for setting in settings)
        groups = tuple(
            Group(index, str(alike[0].recipe["method"]), _words(alike[0], inside), tuple(alike))
            for index, alike in enumerate(grouped.values(), start=first)
        )
        settings.append(Setting(label, groups))
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
    fields = _fields(run)
    parts = [
        w.format(formatting.value_text(fields.get(f))) for f, w in _PROBLEM.items() if f in names
    ]
    for field, value in fields.items():
        if field not in names or field in _PROBLEM:
            continue
        if field == "simulated":
            parts.append("simulated" if value else "real processes")
        elif field == "hyper":
            parts += [formatting.value_text(value)] if value else []
        else:
            parts.append(f"{field.replace('_', ' ')} {formatting.value_text(value)}")
    return ", ".join(parts)


def _order(run: Run) -> tuple[Any, ...]:
    fields = _fields(run)
    method = str(fields.pop("method"))
    methods = list(ALGORITHMS)
    place = methods.index(method) if method in methods else len(methods)
    seed = fields.pop("seed", 0)
    problem = [_sortable(fields.get(field)) for field in _PROBLEM]
    rest = [(field, _sortable(fields[field])) for field in sorted(fields)]
    return problem, place, method, rest, _sortable(seed), str(run.directory)


def _sortable(value: Any) -> tuple[bool, float, str]:
    if isinstance(value, (int, float)):
        return False, float(value), ""
    return True, 0.0, _key(value)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _end_of(run: Run) -> tuple[str, str]:
    """Return how a run ended, and where if that was not the end of the recipe."""
    if run.status == "finished":
        return run.status, ""
    if run.end is not None and run.end.get("step") is not None:
        return run.status, f"at step {formatting.value_text(run.end['step'])}"
    return run.status, f"at epoch {run.last_epoch:.3g}"
