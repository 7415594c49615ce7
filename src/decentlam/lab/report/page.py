"""Puts the page together from its parts and the template, style and script beside this file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from decentlam.lab.report import curves, network, pictures, prose, repeat, table, timing
from decentlam.lab.report.groups import Setting, collect
from decentlam.lab.report.looks import DARK_PAPER, Look, looks
from decentlam.lab.report.runs import Run
from decentlam.lab.report.text import embedded, escape

_HERE = Path(__file__).parent


def build(runs: Sequence[Run]) -> str:
    """The whole page as text."""
    settings = collect(runs)
    look = looks(settings)
    script = _asset("curves.js") + _asset("tables.js")
    parts = {
        "title": escape(prose.title(runs)),
        "style": _asset("page.css").replace("DARK_PAPER", DARK_PAPER) + _colors(look),
        "paragraph": escape(prose.paragraph(runs, settings)),
        "key numbers": "".join(_number(*item) for item in prose.key_numbers(runs, settings)),
        "tables": table.tables(settings, look),
        "detections": pictures.section(settings, look),
        "oddities": _oddities(prose.oddities(runs)),
        "curves note": escape(_curves_note(settings)),
        "bars": timing.bars(settings, look),
        "networks": "".join(network.drawings(runs)),
        "repeat": repeat.section(runs, settings, look),
        "data": embedded(curves.data(settings, look)),
        "script": script,
        "script hash": _hash(script),
    }
    # One pass, so that nothing that was filled in is taken for a place to fill.
    return re.sub(r"\{\{([a-z ]+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """What the page's security policy lets run: this script, to the letter, and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _colors(look: dict[int, Look]) -> str:
    def rules(values: dict[int, str]) -> str:
        return ":root{" + "".join(f"--c{index}:{color};" for index, color in values.items()) + "}"

    light = rules({index: look.light for index, look in look.items()})
    dark = rules({index: look.dark for index, look in look.items()})
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
