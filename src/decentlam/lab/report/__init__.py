"""The report: one self-contained HTML page about one or more training runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from decentlam.lab.report.content import content
from decentlam.lab.report.nodes import Nodes
from decentlam.lab.report.runs import find, read
from decentlam.lab.values import Record, plain

_HERE = Path(__file__).parent


def write(directories: Sequence[Path], out: Path) -> Path:
    """Read the runs in `directories` and write the page to the file `out`.

    A directory is a run of `decentlam train`, or a study with runs under `runs/`. The page depends
    on the runs alone: the same runs give the same bytes.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a directory; give a file name, such as {out / 'report.html'}")
    found = find(directories)
    processes = Nodes(found[0]).follow() if len(found) == 1 else []
    text = page(content([read(directory) for directory in found], processes))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def page(values: Record) -> str:
    """Return the whole page as text; its script draws the values."""
    style, script = ((_HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    data = json.dumps(plain(values), allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(str(values["title"])),
        "style": style,
        "script": script,
        "style hash": _hash(f"\n{style}\n"),
        "script hash": _hash(f"\n{script}\n"),
        # No character in it can end the element.
        "data": data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    }
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    # One pass, so that nothing that was filled in is taken for a place to fill.
    return re.sub(r"\{\{([a-z ]+)\}\}", lambda place: parts[place[1]], template)


def _hash(text: str) -> str:
    """Return the hash by which the page's security policy lets this text run, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
