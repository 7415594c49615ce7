"""What the page says, as plain values that its script draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decentlam.lab import plot_style
from decentlam.lab.formatting import (
    Spread,
    counted,
    duration,
    listed,
    percent,
    quantity,
    spread,
    value_text,
)
from decentlam.lab.report import curves, nodes
from decentlam.lab.report.nodes import Process
from decentlam.lab.report.run_groups import Group, Setting, collect, sortable
from decentlam.lab.report.runs import Run, number
from decentlam.lab.values import Record

_DASHES = ("", "6 3", "2 2", "8 2 2 2", "4 4", "1 2")  # of one method's lines


def content(runs: Sequence[Run], processes: Sequence[Process] = ()) -> Record:
    """Return everything that the page shows of these runs, and of the processes of one."""
    processes = nodes.of_this_run(processes, runs[0].info)
    scripted = bool(processes) and not runs[0].steps
    settings = collect(runs)
    diverged = [run for run in runs if run.status == "diverged"]
    notes = [f"{run.directory.name}: {note}." for run in runs for note in run.notes]
    if diverged:
        count = counted(len(runs), "run")
        notes.insert(0, f"{len(diverged)} of {count} diverged: shown, but in no average.")
    charts = curves.charts(settings)
    if processes:
        per_epoch = 1.0 if scripted else number(runs[0].info.get("steps_per_epoch")) or 1.0
        charts = curves.with_nodes(charts, nodes.curves(processes, per_epoch))
    trained = f"{_either(runs, 'model')} on {_either(runs, 'data')}"
    count = _either(runs, "nodes")
    return {
        "title": f"{runs[0].directory.resolve().name if scripted else trained}, "
        + ("one node" if count == "1" else f"{count} nodes"),
        "now": nodes.now(processes, runs[0].info),
        "axis": "step" if scripted else "epoch",
        "scripted": scripted,  # nothing is known but what `decentlam.monitor` wrote
        "lead": _lead(runs, settings),
        "notes": notes,
        "settings": [setting.label for setting in settings],
        "columns": [[column.head, column.unit] for column in COLUMNS],
        "groups": [
            _group(group, at, setting)
            for at, setting in enumerate(settings)
            for group in setting.groups
        ],
        "charts": charts,
        "facts": {
            "Machine and versions": _common([_environment(run) for run in runs]),
            "Settings of all runs": {
                key.replace("_", " "): value_text(value) or "none"
                for key, value in _common([run.recipe for run in runs]).items()
            },
        },
    }


# Words -------------------------------------------------------------------------------------------


def _lead(runs: Sequence[Run], settings: Sequence[Setting]) -> str:
    methods = list(dict.fromkeys(g.label for setting in settings for g in setting.groups))
    where = f"{_either(runs, 'topology')}, {_either(runs, 'shards')} shards"
    sentences = [f"{listed(methods)} on {where.replace(', ? shards', '')}."]
    if all(run.info.get("simulated") for run in runs):
        sentences.append("All nodes were simulated in one process: no time is that of a network.")
    return " ".join(sentences)


def _either(runs: Sequence[Run], field: str) -> str:
    """Return the values of a field: 8, or 8 or 16."""
    values = {str(value): value for value in (run.recipe.get(field, "?") for run in runs)}
    return " or ".join(value_text(value) for value in sorted(values.values(), key=sortable))


# A row of the table, and all else about a group --------------------------------------------------


@dataclass(frozen=True)
class Column:
    head: str
    unit: str
    value: Callable[[Group], Spread | None]
    show: Callable[[Spread | None], str]
    below: Callable[[Group], str] = lambda group: ""  # a second, smaller line


def _over_runs(value: Callable[[Run], float | None]) -> Callable[[Group], Spread | None]:
    return lambda group: spread([value(run) for run in group.averaged])


def _last(key: str) -> Callable[[Group], Spread | None]:
    return _over_runs(lambda run: run.last(key))


def _wait(run: Run) -> float | None:
    """Return the waiting share of the time of all steps; simulated nodes do not wait."""
    seconds, wait = run.mean("step_seconds"), run.mean("wait_seconds")
    simulated = run.info.get("simulated")
    return wait / seconds if seconds and wait is not None and not simulated else None


def _worst_to_best(group: Group) -> str:
    ends = [[run.last(f"nodes_{end}") for run in group.averaged] for end in ("min", "max")]
    low, high = ([value for value in end if value is not None] for end in ends)
    if not low or len(low) + len(high) < 2 * len(group.averaged):
        return ""
    worst, best = percent((min(low), None)), percent((max(high), None))
    return f"{worst} to {best}" if worst != best else ""


def _progress(group: Group) -> str:
    """Say which runs the means are of, where that is not all of them at their end."""
    if group.averaged and group.averaged[0].status != "finished":
        epoch = min(run.last("epoch") or 0.0 for run in group.averaged)
        return f"at epoch {epoch:.3g} of {value_text(group.runs[0].recipe.get('epochs', '?'))}"
    if 0 < len(group.averaged) < len(group.runs):
        return f"{len(group.averaged)} of {counted(len(group.runs), 'run')}"
    return ""


COLUMNS = (
    Column("averaged model", "%", _last("averaged"), percent, _progress),
    Column("node mean", "%", _last("nodes"), percent, _worst_to_best),
    Column("consensus distance", "", _last("consensus_distance"), quantity),
    Column(
        "images",
        "per s",
        lambda g: spread([r.mean("images_per_second") for r in g.averaged]),
        quantity,
    ),
    Column(
        "wait",
        "% of time",
        lambda g: spread([_wait(r) for r in g.averaged]),
        lambda value: percent(value, digits=1),
    ),
)


def _group(group: Group, at: int, setting: Setting) -> Record:
    alike = [g for g in setting.groups if g.method == group.method].index(group)
    line = plot_style.line(group.method)
    dash = (
        ""
        if line["linestyle"] == "-"
        else " ".join(f"{line['linewidth'] * part:g}" for part in line["linestyle"][1])
    )
    return {
        "index": group.index,
        "setting": at,
        "label": group.label,
        "detail": group.detail,
        "color": line["color"],
        "dash": _DASHES[alike % len(_DASHES)] if alike else dash,
        "width": line["linewidth"],
        "status": group.status(),
        "bad": any(run.status == "diverged" for run in group.runs),
        "seeds": ", ".join(value_text(run.recipe.get("seed", "?")) for run in group.runs),
        "cells": [_cell(group, column) for column in COLUMNS],
        "runs": [_run(run) for run in group.runs],
    }


def _cell(group: Group, column: Column) -> list[str]:
    """Return the text of a cell, and a smaller line below it."""
    lost = not group.averaged and column is COLUMNS[0]
    return ["diverged" if lost else column.show(column.value(group)), column.below(group)]


def _run(run: Run) -> Record:
    """Return how a run can be repeated: its command, and what is particular to it."""
    words = [f"seed {value_text(run.recipe.get('seed', '?'))}", run.status]
    words += [duration(run.seconds)] if run.seconds is not None else []
    words += [f"started {run.info['started']}"] if run.info.get("started") else []
    command = run.info.get("command")
    return {
        "words": ", ".join([*words, f"in {run.directory.name}"]),
        "command": str(command) if command else None,
    }


def _environment(run: Run) -> dict[str, str]:
    """Return versions and machine of a run, flat."""
    facts: dict[str, str] = {}
    for part in ("versions", "machine"):
        values = run.info.get(part)
        if isinstance(values, dict):
            facts |= {key.replace("_", " "): value_text(value) for key, value in values.items()}
    return facts


def _common(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: value for key, value in facts[0].items() if all(of.get(key) == value for of in facts)
    }
