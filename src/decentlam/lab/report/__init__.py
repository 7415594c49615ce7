"""The report: one self-contained HTML page about one or more training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decentlam.lab.report.page import build
from decentlam.lab.report.runs import find, read


def write(directories: Sequence[Path], out: Path) -> Path:
    """Read the runs in `directories` and write the page to the file `out`.

    A directory is a run of `decentlam train`, or a study with runs under `runs/`. The page depends
    on the runs alone: the same runs give the same bytes.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a directory; give a file name, such as {out / 'report.html'}")
    text = build([read(directory) for directory in find(directories)])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out
