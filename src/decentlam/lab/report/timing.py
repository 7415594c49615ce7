"""Where the time of a step goes: a bar per group, cut into data, compute, wait and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from decentlam.lab.report.formatting import bytes_of, duration, escape, listed
from decentlam.lab.report.line_styles import LineStyle
from decentlam.lab.report.run_groups import Group, Setting
from decentlam.lab.report.runs import number
from decentlam.lab.report.table import name

PARTS = {
    "data": "data_seconds",
    "compute": "compute_seconds",
    "wait for other nodes": "wait_seconds",
    "other": None,  # what is left of the step
}


def split(group: Group) -> dict[str, float] | None:
    """Return seconds per step by part, over all records of the averaged runs."""
    records = [record for run in group.averaged for record in run.timed]
    if not records or not sum(run.total("step_seconds") for run in group.averaged):
        return None
    mean = {
        part: sum(run.total(key) for run in group.averaged) / len(records)
        for part, key in PARTS.items()
        if key is not None
    }
    whole = sum(run.total("step_seconds") for run in group.averaged) / len(records)
    return {**mean, "other": max(0.0, whole - sum(mean.values()))}


def bars(settings: Sequence[Setting], styles: dict[int, LineStyle]) -> str:
    """Return the bars of all settings on one scale, with a legend."""
    splits = {
        group.index: parts
        for setting in settings
        for group in setting.groups
        if (parts := split(group)) is not None
    }
    if not splits:
        return "<p>No step was timed.</p>"
    longest = max(sum(parts.values()) for parts in splits.values())
    legend = "".join(
        f'<li><span class="key part{at}"></span>{escape(part)}</li>'
        for at, part in enumerate(PARTS)
        if any(parts[part] > 1e-3 * longest for parts in splits.values())
    )
    blocks = []
    for setting in settings:
        rows = [
            _bar(group, styles, splits[group.index], longest)
            for group in setting.groups
            if group.index in splits
        ]
        head = f"<h3>{escape(setting.label)}</h3>" if setting.label and rows else ""
        blocks.append(f'{head}<div class="bars">{"".join(rows)}</div>')
    return f'<ul class="parts">{legend}</ul>{"".join(blocks)}'


def _bar(
    group: Group, styles: dict[int, LineStyle], parts: dict[str, float], longest: float
) -> str:
    whole = sum(parts.values())
    words = [f"{part} {duration(value)} ({value / whole:.0%})" for part, value in parts.items()]
    pieces = "".join(
        f'<span class="part{at}" style="width:{100 * value / longest:.3f}%" '
        f'title="{escape(words[at])}"></span>'
        for at, value in enumerate(parts.values())
        if value > 0
    )
    spoken = escape(f"{group.label}: {duration(whole)} per step, {listed(words)}")
    sent = _bytes_sent(group)
    more = f"<small>{bytes_of(sent)} sent</small>" if sent is not None else ""
    return (
        f'<div class="name">{name(group, styles)}</div>'
        f'<div class="bar" role="img" aria-label="{spoken}">{pieces}</div>'
        f'<div class="whole">{duration(whole)}{more}</div>'
    )


def _bytes_sent(group: Group) -> float | None:
    """Return the mean of what a node sends in a step."""
    sent = [number(record.get("bytes_sent")) for run in group.averaged for record in run.timed]
    known = [value for value in sent if value is not None]
    return sum(known) / len(known) if known else None
