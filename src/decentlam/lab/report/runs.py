"""Reads run directories as training left them, also after a crash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentlam.lab.values import Record, parse_json

SCORES = {"top1": "accuracy", "ap50": "AP50"}  # of classification and of detection
UNFINISHED = "unfinished"  # no end record: still running, or killed


@dataclass(frozen=True)
class Run:
    """One training run: what was asked for, what was measured, and what is odd about the files."""

    directory: Path
    info: Record  # run.json
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    end: Record | None
    notes: tuple[str, ...]

    @property
    def recipe(self) -> Record:
        recipe: Record = self.info["recipe"]
        return recipe

    @property
    def status(self) -> str:
        return UNFINISHED if self.end is None else str(self.end.get("status", UNFINISHED))

    @property
    def last_epoch(self) -> float:
        records = (*self.steps, *self.evaluations)
        return max((number(r.get("epoch")) or 0.0 for r in records), default=0.0)

    @property
    def timed(self) -> tuple[Record, ...]:
        """The step records that tell times: all but the first, which has the warm-up in it."""
        return self.steps[1:] or self.steps

    def total(self, key: str) -> float:
        """Return the sum of a field over the timed records."""
        return sum(number(record.get(key)) or 0.0 for record in self.timed)

    def last(self, key: str) -> float | None:
        """Return the field at the last evaluation."""
        return number(field(self.evaluations[-1], key)) if self.evaluations else None

    @property
    def score(self) -> str:
        """The score that tells the most of this kind of training: one of SCORES."""
        known = [name for name in SCORES if any(f"averaged_{name}" in r for r in self.evaluations)]
        return known[0] if known else next(iter(SCORES))


def field(record: Record, key: str) -> Any:
    """Return a field of the record; {} in its name stands for the score that the record has."""
    names = [key, *(key.format(score) for score in SCORES)]
    return next((record[name] for name in names if name in record), None)


def score_name(runs: Sequence[Run]) -> str:
    """Return the name of the score that the runs are judged by."""
    names = {SCORES[run.score] for run in runs if run.evaluations}
    return names.pop() if len(names) == 1 else "score" if names else SCORES["top1"]


def number(value: Any) -> float | None:
    """Return the value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def find(directories: Sequence[Path]) -> list[Path]:
    """Return the run directories among the given ones and under their `runs/`, each once."""
    if not directories:
        raise ValueError("a report needs at least one run directory; give what `train` wrote")
    found: dict[Path, Path] = {}
    for directory in directories:
        runs = [directory] if (directory / "run.json").is_file() else _runs_of_study(directory)
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_of_study(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}; a report needs a run directory")
    runs = sorted(path.parent for path in (directory / "runs").rglob("run.json"))
    if not runs:
        children = any(directory.glob("*/run.json"))
        raise ValueError(
            f"{directory} is not a run directory: it has neither run.json nor runs/*/run.json; "
            + (f"try {directory}/*" if children else "give a directory that `train` wrote")
        )
    return runs


def read(directory: Path) -> Run:
    """Read the run in a directory; lines that cannot be read are left out with a note."""
    info = _read_info(directory / "run.json")
    notes: list[str] = []
    steps: list[Record] = []
    evaluations: list[Record] = []
    end = None
    for record in _read_records(directory / "records.jsonl", notes):
        kind = record.get("kind")
        if kind == "end":
            end = record
            continue
        if kind in ("step", "evaluation") and number(record.get("epoch")) is not None:
            end = None  # a resumed run goes on after its end
            _append(steps if kind == "step" else evaluations, record)
    if end is None:
        notes.append("there is no end record: the run is still going, or was killed")
    return Run(directory, info, tuple(steps), tuple(evaluations), end, tuple(notes))


def _append(records: list[Record], record: Record) -> None:
    """Add the record; a resumed run does some steps again, and what it did last counts."""
    step = number(record.get("step"))
    while step is not None and records and (number(records[-1].get("step")) or 0.0) >= step:
        records.pop()
    records.append(record)


def _read_info(path: Path) -> Record:
    try:
        info = parse_json(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); it should be as `train` wrote it"
        ) from None
    recipe = info.get("recipe") if isinstance(info, dict) else None
    if not isinstance(recipe, dict) or "method" not in recipe:
        raise ValueError(f"{path} has no recipe with a method; it should be as `train` wrote it")
    return dict(info)


def _read_records(path: Path, notes: list[str]) -> Iterable[Record]:
    if not path.is_file():
        notes.append("there is no records.jsonl: nothing was measured")
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
        elif at == len(lines):
            notes.append("records.jsonl ends in the middle of a line, which was left out")
        else:
            notes.append(f"line {at} of records.jsonl is not a record and was left out")
