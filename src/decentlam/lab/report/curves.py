"""The curves of the page as plain numbers: means over seeds, their spread, and the runs apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decentlam.lab.report.run_groups import Group, Setting
from decentlam.lab.report.runs import Run, field, number, score_name
from decentlam.lab.values import Record

_MOST_POINTS = 400  # per line; longer ones are thinned, since a screen has no more columns


@dataclass(frozen=True)
class Chart:
    """A field of the records against the epoch; {} stands for the score of the runs."""

    name: str
    title: str
    note: str
    key: str
    low: str = ""  # the fields that bound the spread; otherwise it is that of the key over seeds
    high: str = ""
    of_steps: bool = False  # of step records, otherwise of evaluations
    percent: bool = False
    scale: str = ""  # "linear" or "log" to start with, if the reader may choose


CHARTS = (
    Chart(
        "averaged",
        "{} of the averaged model",
        "The parameters of all nodes averaged, then tested.",
        "averaged_{}",
        percent=True,
    ),
    Chart(
        "nodes",
        "{} of the nodes",
        "Each node’s own model: mean, worst and best.",
        "nodes_{}",
        "nodes_{}_min",
        "nodes_{}_max",
        percent=True,
    ),
    Chart(
        "consensus",
        "Consensus distance",
        "Root mean square distance from the average.",
        "consensus_distance",
        scale="log",
    ),
    Chart(
        "loss",
        "Training loss",
        "The mean over the batches of all nodes.",
        "loss",
        of_steps=True,
        scale="linear",
    ),
    Chart(
        "lr",
        "Learning rate",
        "As scheduled, for the whole batch.",
        "lr",
        of_steps=True,
    ),
)


def charts(settings: Sequence[Setting]) -> list[Record]:
    """Return what the script of the page draws curves from."""
    groups = [group for setting in settings for group in setting.groups]
    score = score_name([run for group in groups for run in group.runs])
    score = score[0].upper() + score[1:]
    return [
        {
            "name": chart.name,
            "title": chart.title.format(score),
            "note": chart.note,
            "unit": "%" if chart.percent else "",
            "scale": chart.scale,
            "lines": [line for group in groups for line in _lines(chart, group)],
        }
        for chart in CHARTS
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
    records = [run.steps if chart.of_steps else run.evaluations for run in runs]
    size = max((-(-len(of_run) // _MOST_POINTS) for of_run in records), default=1)
    by_step = [
        {record.get("step"): record for record in _thinned(of_run, chart.key, size)}
        for of_run in records
    ]
    line: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    for step in by_step[0] if by_step else ():
        if any(step not in of_run for of_run in by_step):
            continue
        here = [of_run[step] for of_run in by_step]
        keys = (chart.key, chart.low or chart.key, chart.high or chart.key)
        values, lows, highs = (_values(here, key) for key in keys)
        line["x"].append(_short(here[0]["epoch"]))
        scale = 100.0 if chart.percent else 1.0
        line["y"].append(_short(scale * sum(values) / len(values)) if values else None)
        line["low"].append(_short(scale * min(lows)) if lows else None)
        line["high"].append(_short(scale * max(highs)) if highs else None)
    alike = line["low"] == line["y"] == line["high"]
    return {"x": line["x"], "y": line["y"]} if alike else line


def _thinned(records: Sequence[Record], key: str, size: int) -> list[Record]:
    """Return one record for each `size` neighbors: the last of them, with their mean."""
    thinned = []
    for at in range(0, len(records), max(1, size)):
        members = records[at : at + max(1, size)]
        values = _values(members, key)
        thinned.append({**members[-1], key: sum(values) / len(values) if values else None})
    return thinned


def _values(records: Sequence[Record], key: str) -> list[float]:
    """Return the field of all records, or of none if one lacks it."""
    values = [number(field(record, key)) for record in records]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _short(value: float) -> float:
    return float(f"{value:.6g}")
