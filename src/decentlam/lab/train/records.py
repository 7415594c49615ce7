"""The run directory: run.json, records.jsonl and TensorBoard events, as they happen."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from decentlam.lab import recipes
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.engine import Engine, traffic
from decentlam.lab.values import parse_json
from decentlam.lab.versions import versions

Record = dict[str, Any]

# The numbers of an evaluation that summaries show.
SCORES = {
    "classification": ("averaged_top1", "nodes_top1", "nodes_top1_min", "consensus_distance"),
    "detection": (
        *("averaged_ap50", "averaged_ap", "averaged_voc_ap50", "nodes_ap50", "nodes_ap"),
        *("nodes_voc_ap50", "nodes_ap50_min", "consensus_distance"),
    ),
}
RUN, RECORDS, CHECKPOINT, TENSORBOARD = "run.json", "records.jsonl", "checkpoint", "tensorboard"


@contextmanager
def claimed(directory: Path, recipe: Recipe, simulated: bool, resume: bool) -> Iterator[None]:
    """Checks the directory and keeps other runs out of it; a lock ends with its process."""
    if resume:
        check(directory, recipe, simulated, resume)  # before a directory is made
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be made: {error.strerror}; choose another with --out"
        ) from None
    lock = directory / ".lock"
    try:
        with open(lock, "a", encoding="utf-8") as file:
            _lock(file, directory)
            check(directory, recipe, simulated, resume)
            yield
    finally:
        if not (directory / RUN).exists():  # it came to nothing
            with suppress(OSError):
                lock.unlink()
                directory.rmdir()


def _lock(file: IO[str], directory: Path) -> None:
    try:
        import fcntl  # not on every platform
    except ImportError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise ValueError(
            f"another run is writing to {directory}; wait for its end, or choose another "
            "directory with --out"
        ) from None


def read_recipe(directory: Path) -> tuple[Recipe, bool]:
    """The recipe of the run that was started there, and whether its nodes were simulated."""
    file = directory / RUN
    if not file.is_file():
        raise ValueError(f"there is no run to resume in {directory}: it has no {RUN}")
    try:
        info = parse_json(file.read_bytes())
        recipe, simulated = recipes.from_json(info["recipe"]), info["simulated"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged or of another version: {type(error).__name__}: {error}; choose "
            "another directory with --out, or start anew"
        ) from error
    return recipe, bool(simulated)


def check(directory: Path, recipe: Recipe, simulated: bool, resume: bool) -> None:
    """Refuses to write over another run, or to resume one with another recipe."""
    if not resume:
        if (directory / RUN).exists() or (directory / RECORDS).exists():
            raise ValueError(
                f"{directory} holds a run already; continue it with --resume, or choose another "
                "directory with --out"
            )
        return
    before, was_simulated = read_recipe(directory)
    here, there = recipe.as_json(), before.as_json()
    differences = [f"{k} was {there[k]!r}, is {here[k]!r}" for k in here if here[k] != there[k]]
    if was_simulated != simulated:
        differences.append(f"it was {'' if was_simulated else 'not '}simulated")
    if differences:
        raise ValueError(
            f"the run in {directory} is another one: {'; '.join(differences)}. Resume it with "
            "--resume and --out alone, or start a new one elsewhere"
        )


def describe(
    recipe: Recipe, engine: Engine, simulated: bool, steps_per_epoch: int, directory: Path
) -> Record:
    """What run.json says."""
    double = recipe.precision == "float64"
    return {
        "recipe": recipe.as_json(),
        "versions": versions(),
        "command": recipes.command(
            recipe, *(["--simulate"] if simulated else []), "--out", str(directory)
        ),
        "simulated": simulated,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": engine.parameters,
        "steps": recipe.steps(steps_per_epoch),
        "steps_per_epoch": steps_per_epoch,
        **traffic(recipe, engine.parameters, 8 if double else 4),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
    }


class Records:
    """Writes one run's records; what a resumed run will write again is cut off first."""

    def __init__(self, directory: Path, info: Record, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed here

        from decentlam.lab.study import plain

        self._plain = plain
        directory.mkdir(parents=True, exist_ok=True)
        if step == 0:
            _replace(directory / RUN, json.dumps(plain(info), indent=2) + "\n")
        kept = [r for r in read(directory) if r["kind"] != "end" and r["step"] <= step]
        _replace(directory / RECORDS, "".join(json.dumps(record) + "\n" for record in kept))
        self.last_evaluation = next((r for r in reversed(kept) if r["kind"] == "evaluation"), None)
        self._file = open(directory / RECORDS, "a", encoding="utf-8")  # noqa: SIM115
        self._board = SummaryWriter(
            str(directory / TENSORBOARD), purge_step=step + 1 if step else None, flush_secs=10
        )

    def write(self, kind: str, step: int, **values: Any) -> Record:
        record: Record = self._plain({"kind": kind, "step": step, **values})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(f"{kind}/{name}", value, step)
        if kind == "evaluation":
            self.last_evaluation = record
        return record

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read(directory: Path) -> list[Record]:
    """The records, without a last line that was cut short."""
    if not (directory / RECORDS).exists():
        return []
    lines = (directory / RECORDS).read_text(encoding="utf-8").split("\n")
    return [parse_json(line) for line in lines[:-1] if line]


def finish(directory: Path, status: str, step: int, seconds: float) -> None:
    """Adds the last record of a run whose writer cannot do so any more."""
    record = {"kind": "end", "step": step, "status": status, "seconds": seconds}
    lines = [json.dumps(record) for record in (*read(directory), record)]
    _replace(directory / RECORDS, "".join(f"{line}\n" for line in lines))


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
