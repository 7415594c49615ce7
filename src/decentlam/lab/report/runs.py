"""Reads run directories as training left them, also after a crash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentlam.lab.values import Record, parse_json, read_records

SCORES = {"top1": "accuracy", "ap50": "AP50"}  # of classification and of detection
UNFINISHED = "unfinished"  # no end record: still running, or killed


@dataclass(frozen=True)
class Run:
    """One training run: what was asked for, what was measured, and what is odd about the files.

    Records hold finite numbers and None. Evaluations have the same names whatever the score:
    averaged, nodes, nodes_min and nodes_max.
    """

    directory: Path
    info: Record  # run.json
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    status: str
    seconds: float | None
    score: str  # accuracy or AP50
    notes: tuple[str, ...]

    @property
    def recipe(self) -> Record:
        recipe: Record = self.info["recipe"]
        return recipe

    @property
    def ended(self) -> str:
        """Return how and where the run ended."""
        if self.status == "finished":
            return self.status
        last = max((r["step"] for r in (*self.steps, *self.evaluations)), default=0.0)
        return f"{self.status} at step {last:.0f}"

    def mean(self, key: str) -> float | None:
        """Return the mean over step records; the first has the warm-up in it, and is left out."""
        values = [r[key] for r in self.steps[1:] or self.steps if r.get(key) is not None]
        return sum(values) / len(values) if values else None

    def last(self, key: str) -> float | None:
        """Return the field at the last evaluation."""
        return self.evaluations[-1].get(key) if self.evaluations else None


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
    kept: dict[str, list[Record]] = {"step": [], "evaluation": []}
    status, seconds, score = UNFINISHED, None, "top1"
    file = directory / "records.jsonl"
    if not file.is_file():
        notes.append("there is no records.jsonl: nothing was measured")
    for record in read_records(file, notes):
        kind, step, epoch = record.get("kind"), number(record.get("step")), record.get("epoch")
        if kind == "end":
            status, seconds = str(record.get("status")), number(record.get("seconds"))
        elif kind in ("step", "evaluation") and step is not None and number(epoch) is not None:
            status = UNFINISHED  # a resumed run goes on after its end
            score = next((name for name in SCORES if f"averaged_{name}" in record), score)
            values = {key.replace(f"_{score}", ""): number(value) for key, value in record.items()}
            while kept[kind] and kept[kind][-1]["step"] >= step:
                kept[kind].pop()  # a resumed run did it again
            kept[kind].append(values)
    if status == UNFINISHED:
        notes.append("there is no end record: the run is still going, or was killed")
    steps, evaluations = (tuple(kept[kind]) for kind in ("step", "evaluation"))
    name = SCORES[score]
    return Run(directory, info, steps, evaluations, status, seconds, name, tuple(notes))


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
