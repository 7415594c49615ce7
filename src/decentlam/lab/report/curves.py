"""The curves of the page as plain numbers: means over seeds, their spread, and the runs apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from decentlam.lab.formatting import short
from decentlam.lab.report.run_groups import Group, Setting
from decentlam.lab.report.runs import Run
from decentlam.lab.values import Record

_MOST_POINTS = 400  # per line; longer ones are thinned, since a screen has no more columns


class Chart(NamedTuple):
    """A field of the records against the epoch."""

    key: str
    title: str  # {} stands for the score of the runs
    note: str
    unit: str = ""
    scale: str = ""  # "linear" or "log" to start with, if the reader may choose
    bounds: tuple[str, str] | None = None  # fields; otherwise the spread is that of key over seeds


OF_EVALUATIONS = (
    Chart(
        "averaged",
        "{} of the averaged model",
        "The parameters of all nodes averaged, then tested.",
        "%",
    ),
    Chart(
        *("nodes", "{} of the nodes", "Each node’s own model: mean, worst and best.", "%"),
        bounds=("nodes_min", "nodes_max"),
    ),
    Chart(
        *("consensus_distance", "Consensus distance"),
        *("Root mean square distance from the average.", "", "log"),
    ),
)
OF_STEPS = (
    Chart("loss", "Training loss", "The mean over the batches of all nodes.", "", "linear"),
    Chart("lr", "Learning rate", "As scheduled, for the whole batch."),
)


def charts(settings: Sequence[Setting]) -> list[Record]:
    """Return what the script of the page draws curves from."""
    groups = [group for setting in settings for group in setting.groups]
    scores = {run.score for group in groups for run in group.runs}
    score = scores.pop() if len(scores) == 1 else "score"
    score = score[0].upper() + score[1:]
    return [
        {
            "name": chart.key,
            "title": chart.title.format(score),
            "note": chart.note,
            "unit": chart.unit,
            "scale": chart.scale,
            "lines": [line for group in groups for line in _lines(chart, group)],
        }
        for chart in (*OF_EVALUATIONS, *OF_STEPS)
    ]


def with_nodes(charts: list[Record], bands: dict[str, Record]) -> list[Record]:
    """Return the charts of one run with what its processes wrote: bands over the nodes."""
    notes = {
        "loss": ("Training loss", "Of each node: mean, lowest and highest.", "linear"),
        "disagreement": (
            "Disagreement",
            "Distance of the nodes from their average, estimated from what mixing moves.",
            "log",
        ),
        "lr": ("Learning rate", "Of the nodes.", ""),
    }
    drawn: list[Record] = []
    for name, band in bands.items():
        title, note, scale = notes[name]
        line = {**band, "name": "", "diverged": False, "group": 0}
        chart = {"name": name, "title": title, "note": note, "unit": "", "scale": scale}
        drawn.append(chart | {"lines": [line]})
    known = [chart for chart in charts if chart["lines"] and chart["name"] not in bands]
    scores = [chart for chart in known if chart["unit"] == "%"]
    return [*scores, *drawn, *(chart for chart in known if chart not in scores)]


def _lines(chart: Chart, group: Group) -> list[Record]:
    """Return the mean of the group with its spread, then each run that is not part of it."""
    lines = [_line(chart, group.averaged) | {"name": "", "diverged": False}]
    for run in group.apart:
        name = f"seed {run.recipe.get('seed', '?')}, {run.status}"
        lines.append(_line(chart, [run]) | {"name": name, "diverged": run.status == "diverged"})
    return [
        line | {"group": group.index} for line in lines if any(v is not None for v in line["y"])
    ]


def _line(chart: Chart, runs: Sequence[Run]) -> Record:
    """Return mean, lowest and highest at the steps that all runs have."""
    records = [run.steps if chart in OF_STEPS else run.evaluations for run in runs]
    size = max((-(-len(of_run) // _MOST_POINTS) for of_run in records), default=1)
    by_step = [{r["step"]: r for r in _thinned(of_run, chart.key, size)} for of_run in records]
    line: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    scale = 100.0 if chart.unit == "%" else 1.0
    lowest, highest = chart.bounds or (chart.key, chart.key)
    for step in by_step[0] if by_step else ():
        if any(step not in of_run for of_run in by_step):
            continue
        here = [of_run[step] for of_run in by_step]
        line["x"].append(short(here[0]["epoch"]))
        how: dict[str, tuple[str, Callable[[list[float]], float]]]
        how = {"y": (chart.key, fmean), "low": (lowest, min), "high": (highest, max)}
        for name, (key, over) in how.items():
            values = _values(here, key)
            line[name].append(short(scale * over(values)) if values else None)
    alike = line["low"] == line["y"] == line["high"]
    return {"x": line["x"], "y": line["y"]} if alike else line


def _thinned(records: Sequence[Record], key: str, size: int) -> list[Record]:
    """Return one record for each `size` neighbors: the last of them, with their mean."""
    thinned = []
    for at in range(0, len(records), max(1, size)):
        members = records[at : at + max(1, size)]
        values = _values(members, key)
        thinned.append({**members[-1], key: fmean(values) if values else None})
    return thinned


def _values(records: Sequence[Record], key: str) -> list[float]:
    """Return the field of all records, or of none if one lacks it."""
    values = [record[key] for record in records if record.get(key) is not None]
    return values if len(values) == len(records) else []
