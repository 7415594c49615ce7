"""Puts the page together from its parts and the template, style and script beside this file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from decentlam.lab.report import (
    curves,
    detections,
    provenance,
    summary,
    table,
    timing,
    topology_drawing,
)
from decentlam.lab.report.formatting import embedded, escape
from decentlam.lab.report.line_styles import DARK_PAPER, LineStyle, line_styles
from decentlam.lab.report.run_groups import Setting, collect
from decentlam.lab.report.runs import Run

_HERE = Path(__file__).parent


def build(runs: Sequence[Run]) -> str:
    """Return the whole page as text."""
    settings = collect(runs)
    styles = line_styles(settings)
    script = _asset("curves.js") + _asset("tables.js")
    parts = {
        "title": escape(summary.title(runs)),
        "style": _asset("page.css").replace("DARK_PAPER", DARK_PAPER) + _colors(styles),
        "paragraph": escape(summary.paragraph(runs, settings)),
        "key numbers": "".join(_number(*item) for item in summary.key_numbers(runs, settings)),
        "tables": table.tables(settings, styles),
        "detections": detections.section(settings, styles),
        "oddities": _oddities(summary.oddities(runs)),
        "curves note": escape(_curves_note(settings)),
        "bars": timing.bars(settings, styles),
        "networks": "".join(topology_drawing.html_figures(runs)),
        "repeat": provenance.section(runs, settings, styles),
        "data": embedded(curves.data(settings, styles)),
        "script": script,
        "script hash": _hash(script),
    }
    # One pass, so that nothing that was filled in is taken for a place to fill.
    return re.sub(r"\{\{([a-z ]+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash by which the page's security policy lets this script run, and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _colors(styles: dict[int, LineStyle]) -> str:
    def rules(values: dict[int, str]) -> str:
        return ":root{" + "".join(f"--c{index}:{color};" for index, color in values.items()) + "}"

    light = rules({index: style.light for index, style in styles.items()})
    dark = rules({index: style.dark for index, style in styles.items()})
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{{dark}}}"


def _number(what: str, value: str, more: str) -> str:
    small = f"<dd><small>{escape(more)}</small></dd>" if more else ""
    return f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd>{small}</div>"


def _oddities(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="odd" aria-label="Notes on the files">{items}</ul>' if notes else ""


def _curves_note(settings: Sequence[Setting]) -> str:
    groups = [group for setting in settings for group in setting.groups]
    notes = ["Point at a chart, or move along it with the arrow keys, to read its values."]
    if any(len(group.averaged) > 1 for group in groups):
        notes.append("Lines are means over seeds; bands reach from the lowest to the highest seed.")
    if any(run.status == "diverged" for group in groups for run in group.apart):
        notes.append("A run that diverged is drawn by itself, thin, up to its ×.")
    notes.append("A log scale leaves out what is below a ten-thousandth of its highest value.")
    return " ".join(notes)
