"""The tables of results: a row per group, best values marked, and all settings side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decentlam.lab.report.formatting import (
    NOTHING,
    Spread,
    counted,
    escape,
    percent,
    percent_spread,
    quantity_spread,
    spread,
    value_text,
)
from decentlam.lab.report.line_styles import LineStyle
from decentlam.lab.report.run_groups import Group, Setting
from decentlam.lab.report.runs import Run, score_name


@dataclass(frozen=True)
class Column:
    head: str
    unit: str
    value: Callable[[Group], Spread | None]
    show: Callable[[Spread | None], str]
    best: Callable[..., Spread]  # max or min
    below: Callable[[Group], str] = lambda group: ""  # a second, smaller line


def _last(key: str) -> Callable[[Group], Spread | None]:
    return lambda group: spread([run.last(key) for run in group.averaged])


def images_per_second(group: Group) -> Spread | None:
    """Return all images over all seconds."""
    return spread([_mean_rate(run) for run in group.averaged])


def _mean_rate(run: Run) -> float | None:
    seconds = run.total("step_seconds")
    images = sum(
        (record.get("images_per_second") or 0.0) * (record.get("step_seconds") or 0.0)
        for record in run.timed
    )
    return images / seconds if seconds and images else None


def wait_share(group: Group) -> Spread | None:
    """Return the waiting share of the time of all steps; simulated nodes do not wait."""
    return spread([_wait_share(run) for run in group.averaged])


def _wait_share(run: Run) -> float | None:
    seconds = run.total("step_seconds")
    return (
        run.total("wait_seconds") / seconds if seconds and not run.info.get("simulated") else None
    )


def _worst_to_best(group: Group) -> str:
    low = [run.last("nodes_{}_min") for run in group.averaged]
    high = [run.last("nodes_{}_max") for run in group.averaged]
    known = [value for value in low + high if value is not None]
    if not known or len(known) < len(low + high):
        return ""
    worst, best = percent(min(known)), percent(max(known))
    return f"{worst} to {best}" if worst != best else ""


def _progress(group: Group) -> str:
    """Say which runs the means are of, where that is not all of them at their end."""
    if not group.averaged:
        return ""
    if not group.finished:
        epoch = min(run.last("epoch") or 0.0 for run in group.averaged)
        return f"at epoch {epoch:.3g} of {value_text(group.runs[0].recipe.get('epochs', '?'))}"
    if len(group.averaged) < len(group.runs):
        return f"{len(group.averaged)} of {counted(len(group.runs), 'run')}"
    return ""


def _one_digit(value: Spread | None) -> str:
    return percent_spread(value, digits=1)


COLUMNS = (
    Column("averaged model", "%", _last("averaged_{}"), percent_spread, max, _progress),
    Column("node mean", "%", _last("nodes_{}"), percent_spread, max, _worst_to_best),
    Column("consensus distance", "", _last("consensus_distance"), quantity_spread, min),
    Column("images", "per s", images_per_second, quantity_spread, max),
    Column("wait", "% of time", wait_share, _one_digit, min),
)

_NOTE = (
    "{} on the test data at the end of training, ± standard deviation between seeds. "
    "Averaged model: the parameters of all nodes averaged. Node mean: every node’s own model, from "
    "the worst node to the best below it. Consensus distance: the root mean square distance of the "
    "nodes from their average. Wait: the share of a step spent waiting for other nodes. Times "
    "leave out the first record, in which everything warms up. ★ is the best of its column among "
    "finished runs."
)


def tables(settings: Sequence[Setting], styles: dict[int, LineStyle]) -> str:
    parts = [_side_by_side(settings, styles)] if len(settings) > 1 else []
    parts += [_table(setting, styles) for setting in settings]
    score = _score(settings)
    meaning = {"AP50": "AP50 (average precision at an overlap of 1/2, as COCO measures it)"}
    note = _NOTE.format(meaning.get(score, score.capitalize()))
    return "".join(parts) + f'<p class="small">{note}</p>'


def _score(settings: Sequence[Setting]) -> str:
    return score_name(
        [run for setting in settings for group in setting.groups for run in group.runs]
    )


def swatch(style: LineStyle, group: Group) -> str:
    """Return a piece of the group's line as SVG."""
    lengths = " ".join(f"{part:g}" for part in style.dash)
    dash = f' stroke-dasharray="{lengths}"' if lengths else ""
    return (
        '<svg class="swatch" width="28" height="10" aria-hidden="true"><line x1="0" y1="5" x2="28" '
        f'y2="5" stroke="var(--c{group.index})" stroke-width="{style.width:g}"{dash}/></svg>'
    )


def name(group: Group, styles: dict[int, LineStyle]) -> str:
    detail = f"<small>{escape(group.detail)}</small>" if group.detail else ""
    return f"{swatch(styles[group.index], group)}<span>{escape(group.label)}{detail}</span>"


def _table(setting: Setting, styles: dict[int, LineStyle]) -> str:
    heads = "".join(f"<th scope='col'>{_head(c.head, c.unit)}</th>" for c in COLUMNS)
    best = [_best(column, setting.groups) for column in COLUMNS]
    rows = "".join(_row(group, styles, best) for group in setting.groups)
    what = f"<strong>{escape(setting.label)}</strong>" if setting.label else ""
    what += f" {escape(setting.detail)}" if setting.detail else ""
    caption = f"<caption>{what}</caption>" if what else ""
    region = escape(f"Results{', ' + setting.label if setting.label else ''}")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{region}">'
        f'<table class="results sortable">{caption}<thead><tr><th scope="col">method</th>'
        f'<th scope="col">runs</th>{heads}<th scope="col" class="status">status</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _head(words: str, unit: str) -> str:
    return escape(words) + (f"<br><small>{escape(unit)}</small>" if unit else "")


def _row(group: Group, styles: dict[int, LineStyle], best: Sequence[str | None]) -> str:
    seeds = ", ".join(value_text(run.recipe.get("seed", "?")) for run in group.runs)
    title = escape(f"seeds {seeds}" if len(group.runs) > 1 else f"seed {seeds}")
    cells = [
        f'<td data-value="{len(group.runs)}" title="{title}">{len(group.runs)}</td>',
        *(_cell(group, column, top) for column, top in zip(COLUMNS, best, strict=True)),
        f'<td class="status" data-value="{escape(group.status())}">{_status(group)}</td>',
    ]
    label = escape(f"{group.label} {group.detail}".strip())
    head = f'<th scope="row" data-value="{label}"><div>{name(group, styles)}</div></th>'
    return f'<tr data-group="{group.index}">{head}{"".join(cells)}</tr>'


def _status(group: Group) -> str:
    bad = any(run.status == "diverged" for run in group.runs)
    return f"<span{' class=bad' if bad else ''}>{escape(group.status())}</span>"


def _cell(group: Group, column: Column, best: str | None) -> str:
    value = column.value(group)
    shown = column.show(value)
    if not group.averaged and column is COLUMNS[0]:
        shown = "diverged"
    marked = best is not None and group.finished and shown == best
    words = f'<strong><span role="img" aria-label="best">★</span> {shown}</strong>'
    below = column.below(group)
    return (
        f'<td data-value="{"" if value is None else repr(value.mean)}">'
        f"{words if marked else shown}{f'<small>{escape(below)}</small>' if below else ''}</td>"
    )


def _best(column: Column, groups: Sequence[Group]) -> str | None:
    """Return the best value of the column as text, if there is a choice."""
    values = [
        (value, group) for group in groups if group.finished and (value := column.value(group))
    ]
    if len(values) < 2:
        return None
    top = column.best((value for value, _ in values), key=lambda value: value.mean)
    all_alike = len({column.show(value) for value, _ in values}) == 1
    return None if all_alike else column.show(top)


def _side_by_side(settings: Sequence[Setting], styles: dict[int, LineStyle]) -> str:
    """Return the scores of the averaged model: a row per method, a column per setting."""
    accuracy = COLUMNS[0]
    found = [{(g.method, g.detail): g for g in setting.groups} for setting in settings]
    best = [_best(accuracy, setting.groups) for setting in settings]
    heads = "".join(f'<th scope="col">{escape(setting.label)}</th>' for setting in settings)
    rows = []
    for key, first in {key: group for of in reversed(found) for key, group in of.items()}.items():
        cells = [
            _cell(groups[key], accuracy, top)
            if key in groups
            else f'<td data-value="">{NOTHING}</td>'
            for groups, top in zip(found, best, strict=True)
        ]
        label = escape(f"{first.label} {first.detail}".strip())
        head = f'<th scope="row" data-value="{label}"><div>{name(first, styles)}</div></th>'
        rows.append(f"<tr>{head}{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All settings side by side">'
        '<table class="results sortable"><caption><strong>Side by side</strong> '
        f"{_score(settings)} of the averaged model, %</caption>"
        f'<thead><tr><th scope="col">method</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
