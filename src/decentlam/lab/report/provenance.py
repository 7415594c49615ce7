"""How to repeat each run: its command, seed, versions, commit and machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decentlam.lab.report.formatting import counted, duration, escape, value_text
from decentlam.lab.report.line_styles import LineStyle
from decentlam.lab.report.run_groups import Group, Setting
from decentlam.lab.report.runs import Run, number
from decentlam.lab.report.table import name
from decentlam.lab.values import Record


def section(runs: Sequence[Run], settings: Sequence[Setting], styles: dict[int, LineStyle]) -> str:
    """Return each group of runs, and what all runs have in common."""
    groups = [group for setting in settings for group in setting.groups]
    common = _common([_environment(run) for run in runs])
    several = len(settings) > 1
    blocks = [
        _block(group, setting.label if several else "", styles, common, is_open=len(groups) == 1)
        for setting in settings
        for group in setting.groups
    ]
    recipe = _common([run.recipe for run in runs])
    values = {key.replace("_", " "): value_text(value) or "none" for key, value in recipe.items()}
    return (
        f"{''.join(blocks)}"
        '<div class="facts">'
        f"<div><h3>Machine and versions</h3>{_pairs(common)}</div>"
        f"<div><h3>Settings of all runs</h3>{_pairs(values)}</div></div>"
    )


def _block(
    group: Group, setting: str, styles: dict[int, LineStyle], common: dict[str, Any], is_open: bool
) -> str:
    where = f'<span class="where">{escape(setting)}</span>' if setting else ""
    runs = "".join(_run(run, common) for run in group.runs)
    return (
        f"<details{' open' if is_open else ''}><summary>{name(group, styles)}{where}"
        f'<span class="count">{counted(len(group.runs), "run")}</span></summary>{runs}</details>'
    )


def _run(run: Run, common: dict[str, Any]) -> str:
    words = [f"seed {value_text(run.recipe.get('seed', '?'))}", run.status]
    seconds = number(run.end.get("seconds")) if run.end else None
    words += [duration(seconds)] if seconds is not None else []
    words += [f"started {run.info['started']}"] if run.info.get("started") else []
    words += [f"in {run.directory.name}"]
    words += [f"{key} {value}" for key, value in _environment(run).items() if key not in common]
    command = run.info.get("command")
    code = (
        f'<div class="command"><pre tabindex="0"><code>{escape(command)}</code></pre>'
        '<button type="button" class="copy" hidden>Copy</button></div>'
        if command
        else "<p>run.json has no command.</p>"
    )
    return f'<div class="run"><p>{escape(", ".join(words))}</p>{code}</div>'


def _environment(run: Run) -> dict[str, str]:
    """Return versions and machine of a run, flat."""
    facts: dict[str, str] = {}
    for part in ("versions", "machine"):
        values: Record = run.info.get(part) or {}
        if isinstance(values, dict):
            facts |= {key.replace("_", " "): value_text(value) for key, value in values.items()}
    return facts


def _common(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: value for key, value in facts[0].items() if all(of.get(key) == value for of in facts)
    }


def _pairs(pairs: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>'
        for key, value in pairs.items()
    )
    return f'<table class="pairs"><tbody>{rows}</tbody></table>' if rows else "<p>None.</p>"
